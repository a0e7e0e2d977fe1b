// Messages as the first release of protocol version 1 encoded them: they must parse for as long as
// that version is spoken. KVFERRY_WRITE_CORPUS=<folder> writes the files anew, for a new version.

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "tests/transport/sample_messages.h"
#include "transport/control/codec.h"

namespace kvferry {
namespace {

TEST(CodecCorpus, OldMessagesKeepTheirMeaning) {
  if (const char* folder = std::getenv("KVFERRY_WRITE_CORPUS")) {
    for (const auto& [name, message] : SampleMessages()) {
      std::ofstream(std::filesystem::path(folder) / (name + ".bin"), std::ios::binary)
          << EncodeMessage(message);
    }
  }
  size_t files = 0;
  for (const auto& [name, message] : SampleMessages()) {
    std::ifstream file(std::filesystem::path(KVFERRY_CORPUS_DIR) / (name + ".bin"),
                       std::ios::binary);
    ASSERT_TRUE(file.is_open()) << name;
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    const absl::StatusOr<Message> decoded = DecodeMessage(std::as_bytes(std::span(bytes)));
    ASSERT_TRUE(IsOk(decoded)) << name;
    EXPECT_EQ(Describe(*decoded), Describe(message));
    ++files;
  }
  const std::filesystem::directory_iterator folder(KVFERRY_CORPUS_DIR);
  EXPECT_EQ(std::distance(begin(folder), end(folder)), static_cast<ptrdiff_t>(files))
      << "a file of the corpus is not checked";
}

}  // namespace
}  // namespace kvferry
