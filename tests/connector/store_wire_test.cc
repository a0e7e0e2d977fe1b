// Lists of keys and of codes as calls of a store carry them.

#include "connector/store/store_wire.h"

#include <gtest/gtest.h>

#include "tests/support/status.h"

namespace kvferry {
namespace {

TEST(StoreWire, KeysAndCodes) {
  const std::vector<std::string_view> keys = {"a", std::string_view("\0\xff", 2), "key"};
  const std::string packed = Must(PackKeys(keys));
  const std::vector<std::string> unpacked = Must(UnpackKeys(packed));
  EXPECT_EQ(std::vector<std::string_view>(unpacked.begin(), unpacked.end()), keys);
  for (size_t cut = 1; cut < packed.size(); ++cut) {
    const auto some = UnpackKeys(packed.substr(0, cut));
    const bool is_whole = cut == 3 || cut == 7;  // Behind a key.
    EXPECT_TRUE(is_whole ? some.ok() : absl::StrContains(some.status().message(), "ends inside a"))
        << cut;
  }
  EXPECT_TRUE(Fails(UnpackKeys(std::string_view("\0\0", 2)), absl::StatusCode::kInvalidArgument));
  std::vector<std::string_view> many(kMaxKeysPerCall, "k");
  EXPECT_TRUE(IsOk(UnpackKeys(Must(PackKeys(many)))));
  many.emplace_back("k");
  EXPECT_TRUE(
      Fails(UnpackKeys(Must(PackKeys(many))), absl::StatusCode::kInvalidArgument, "than 4096"));
  EXPECT_TRUE(Fails(PackKeys(std::vector<std::string_view>{std::string_view()}),
                    absl::StatusCode::kInvalidArgument));
  const std::vector<absl::Status> statuses = {absl::OkStatus(), absl::NotFoundError("x")};
  const auto codes = Must(UnpackCodes(PackCodes(statuses), 2));
  EXPECT_TRUE(codes[0].ok());
  EXPECT_TRUE(Fails(codes[1], absl::StatusCode::kNotFound, "NOT_FOUND", "no such entry"));
  EXPECT_TRUE(Fails(UnpackCodes("\x01", 2), absl::StatusCode::kInternal, "1 of 2"));
  EXPECT_TRUE(Fails(UnpackCodes("\x7f", 1), absl::StatusCode::kInternal, "no meaning, 127"));
}

}  // namespace
}  // namespace kvferry
