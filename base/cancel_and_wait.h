#pragma once

#include <new>

namespace kvferry {

// Ends what is under way, a fetch, push or lookup, for a caller that cannot wait for it himself:
// none of its pages is read or written when this returns, which the cancel brings about shortly, or
// else its own deadline. Needs no memory.
template <typename Handle>
void CancelAndWait(Handle& handle) {
  try {
    handle.Cancel();
  } catch (const std::bad_alloc&) {
    return handle.WaitUntilDone();  // It ends by itself.
  }
  handle.WaitUntilDone();
}

}  // namespace kvferry
