#pragma once

#include "tests/support/test_config.h"

namespace kvferry {

inline constexpr char kUcxDies[] =
    "this UCX can abort when a peer dies while it connects (fixed by 1.22)";
// Whether that is under test.
inline bool UcxDiesWithConnectingPeers() {
#ifdef KVFERRY_UCX_DIES_WITH_CONNECTING_PEERS
  return PathUnderTest() == TestPath::kUcx;
#else
  return false;
#endif
}

}  // namespace kvferry
