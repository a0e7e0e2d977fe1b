#include "tests/pool/block_quant_suite.h"

namespace kvferry {
namespace {

INSTANTIATE_TEST_SUITE_P(Memories, BlockQuants, testing::Values(HostBackend(), GuardedBackend()),
                         BackendName());

}  // namespace
}  // namespace kvferry
