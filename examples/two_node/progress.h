#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "base/clock.h"

namespace kvferry::examples {

// One line on stderr that says how far things are: rewritten in place on a terminal, written anew
// once a second elsewhere.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine() { Clear(); }
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  // Shown unless the last one was shown too recently.
  void Show(absl::string_view text);
  // Wipes it off a terminal, before something else is printed.
  void Clear();

 private:
  const bool terminal_;
  size_t width_ = 0;
  Deadline next_{};
};

}  // namespace kvferry::examples
