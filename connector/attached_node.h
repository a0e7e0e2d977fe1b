#pragma once

#include <cstdint>

#include "base/clock.h"
#include "transport/command_queue.h"
#include "transport/node.h"

namespace kvferry {

// The node whose calls are handled, for a handler that is made before it. Thread-safe.
class AttachedNode {
 public:
  // Once, right after the node's start: it may be calling already.
  void Attach(Node* node) {
    node_ = node;
    attached_.Open();
  }
  Node& get() {
    attached_.Wait(DeadlineInMs(kAttachMs));
    return *node_;
  }

 private:
  // Between the start of a node's thread and Attach() lie a few instructions.
  static constexpr int64_t kAttachMs = 60000;

  Latch attached_;
  Node* node_ = nullptr;  // Constant after attached_.
};

}  // namespace kvferry
