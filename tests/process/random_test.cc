// Processes of one host that do whatever they can, and are stopped and killed meanwhile.

#include "tests/process/old_ucx.h"
#include "tests/support/random_lookups.h"
#include "tests/support/random_peers.h"
#include "tests/support/random_stores.h"

namespace kvferry {
namespace {

template <typename Base>
class OnOneHost : public Base {
 protected:
  void SetUp() override {
    if (UcxDiesWithConnectingPeers()) GTEST_SKIP() << kUcxDies;
  }
};

using RandomPeersOnOneHost = OnOneHost<RandomPeers>;
TEST_F(RandomPeersOnOneHost, ThatStopAndDie) { RunAtRandom(); }

using RandomPeersOfOtherPagesOnOneHost = OnOneHost<RandomPeersOfOtherPages>;
TEST_F(RandomPeersOfOtherPagesOnOneHost, ThatStopAndDie) { RunAtRandom(); }

using RandomLookupsOnOneHost = OnOneHost<RandomLookups>;
TEST_F(RandomLookupsOnOneHost, ThatStopAndDie) { RunAtRandom(); }

using RandomStoresOnOneHost = OnOneHost<RandomStores>;
TEST_F(RandomStoresOnOneHost, ThatStopAndDie) { RunAtRandom(); }

}  // namespace
}  // namespace kvferry
