// Processes of one host that do whatever they can, and are stopped and killed meanwhile.

#include "tests/support/random_lookups.h"
#include "tests/support/random_peers.h"

namespace kvferry {
namespace {

TEST_F(RandomPeers, OnOneHost) { Run(); }

TEST_F(RandomLookups, OnOneHost) { Run(); }

}  // namespace
}  // namespace kvferry
