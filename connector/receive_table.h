#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "connector/attached_node.h"
#include "connector/recent_map.h"
#include "transport/calls.h"
#include "transport/fetch_handle.h"
#include "transport/node.h"

namespace kvferry {

// Names of the function by which a prefill side pushes (docs/wire_protocol.md, Functions).
namespace push_call {
inline constexpr char kPush[] = "push";
inline constexpr char kReceive[] = "receive";
inline constexpr char kLease[] = "lease";
inline constexpr char kPages[] = "pages";
inline constexpr char kTokens[] = "tokens";
inline constexpr char kPage[] = "page";
}  // namespace push_call

// The pages that a decode side has registered for others to push to.
//
//   a receive is   waiting --push--> taken --its fetch ends--> ended
//                     |                                          ^
//                     '--------- deadline, Cancel, close --------'
//
// Each is a fetch of the node from the start, one that waits to hear whose lease it is of
// (Node::FetchRequest::await_id): the receiver has its deadline, its end and its safety. A push is
// answered when the fetch has ended, and an ended receive takes none any more. Thread-safe.
class ReceiveTable : public CallHandler {
 public:
  // `page_size`: tokens in a page of the receiver's pool.
  explicit ReceiveTable(int64_t page_size) : page_size_(page_size) {}

  // The node that calls this. Once, right after its start: it may be calling already.
  void Attach(Node* node) { node_.Attach(node); }

  struct Added {
    uint64_t receive_id = 0;
    std::shared_ptr<FetchHandle> handle;
  };
  // Registers a receive of a request of `num_pages` pages and `num_tokens` tokens (0: not said).
  // `fetch` says which of the pages go where, and until when. Errors are those of Node::Fetch.
  absl::StatusOr<Added> Add(Node::FetchRequest fetch, int64_t num_pages, int64_t num_tokens);

  // Receives that nobody has pushed to yet.
  int64_t num_waiting() const;

  // CallHandler.
  void OnCall(const CallKey& call, const std::string& function, const Fields& args,
              Deadline deadline) override;
  void OnCallDropped(const CallKey& call) override;

 private:
  struct Receive {
    int64_t num_pages = 0;
    int64_t num_tokens = 0;
    std::shared_ptr<FetchHandle> handle;
    std::optional<CallKey> push;  // That has taken it.
  };

  Node& node() { return node_.get(); }
  // OK: the push is answered when the receive has ended.
  absl::Status Push(const CallKey& call, const Fields& args);
  // What a push says of its pages: their number, tokens in all of them (0: not said) and in a full
  // one.
  struct Pushed {
    int64_t num_pages = 0;
    int64_t num_tokens = 0;
    int64_t page_size = 0;
  };
  absl::Status CheckPush(uint64_t receive_id, const Pushed& pushed) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckCounts(const Receive& receive, const Pushed& pushed) const;
  // Its handle is done.
  void OnEnded(uint64_t receive_id);

  const int64_t page_size_;
  AttachedNode node_;

  mutable Mutex mutex_;
  // Not ended. Abseil's maps are broken by a growth for which there is no memory.
  std::unordered_map<uint64_t, Receive> receives_ ABSL_GUARDED_BY(mutex_);
  std::map<CallKey, uint64_t> pushes_ ABSL_GUARDED_BY(mutex_);  // Of those taken.
  RecentMap<absl::StatusCode> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace kvferry
