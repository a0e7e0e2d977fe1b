#pragma once

#include "tests/support/test_config.h"

namespace kvferry {

// Whether what is under test can abort when a peer dies while it connects (fixed by UCX 1.22).
inline bool UcxDiesWithConnectingPeers() {
#ifdef KVFERRY_UCX_DIES_WITH_CONNECTING_PEERS
  return PathUnderTest() == TestPath::kUcx;
#else
  return false;
#endif
}

}  // namespace kvferry
