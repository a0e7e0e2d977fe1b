#include "transport/ucx/direct_address.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/messages.h"

namespace kvferry {
namespace {

constexpr uint32_t kVersion = 1;
constexpr uint32_t kMaxMemories = 1024;
constexpr uint32_t kMaxKeyBytes = 4096;
constexpr uint64_t kMaxMemoryBytes = uint64_t{1} << 45;

struct Head {
  uint32_t version = kVersion;
  uint32_t num_memories = 0;
  uint32_t worker_bytes = 0;
  uint32_t zero = 0;
};
struct Row {
  uint64_t address = 0;
  uint64_t bytes = 0;
  uint32_t key_bytes = 0;
  uint32_t zero = 0;
};
static_assert(sizeof(Head) == 16 && sizeof(Row) == 24);

template <typename T>
void Append(const T& value, std::string* out) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Takes what it is asked for from the front, or fails for good.
class Cutter {
 public:
  explicit Cutter(const std::string& bytes) : bytes_(bytes) {}

  template <typename T>
  T Take() {
    T value{};
    if (Has(sizeof(value))) std::memcpy(&value, bytes_.data() + at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  std::string Take(uint32_t size) {
    std::string part = Has(size) ? bytes_.substr(at_, size) : "";
    at_ += size;
    return part;
  }
  bool whole() const { return at_ == bytes_.size(); }

 private:
  bool Has(size_t size) const { return at_ <= bytes_.size() && size <= bytes_.size() - at_; }

  const std::string& bytes_;
  size_t at_ = 0;
};

absl::Status Malformed(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("a direct address ", what));
}

}  // namespace

std::string DirectAddress::Encode() const {
  std::string out;
  Append(Head{.num_memories = static_cast<uint32_t>(memories.size()),
              .worker_bytes = static_cast<uint32_t>(worker.size())},
         &out);
  for (const Memory& memory : memories) {
    Append(Row{memory.address, memory.bytes, static_cast<uint32_t>(memory.key.size())}, &out);
  }
  out += worker;
  for (const Memory& memory : memories) out += memory.key;
  return out;
}

absl::StatusOr<DirectAddress> DirectAddress::Decode(const std::string& bytes) {
  Cutter cutter(bytes);
  const Head head = cutter.Take<Head>();
  if (head.version != kVersion) return Malformed(absl::StrCat("of version ", head.version));
  if (head.num_memories < 2 || head.num_memories > kMaxMemories ||
      head.worker_bytes > kMaxWorkerAddressBytes) {
    return Malformed(absl::StrCat("of ", head.num_memories, " memories and a worker's of ",
                                  head.worker_bytes, " bytes"));
  }
  std::vector<Row> rows(head.num_memories);
  for (Row& row : rows) {
    row = cutter.Take<Row>();
    if (row.bytes == 0 || row.bytes > kMaxMemoryBytes || row.key_bytes > kMaxKeyBytes ||
        row.address > UINT64_MAX - row.bytes) {
      return Malformed(absl::StrCat("with ", row.bytes, " bytes and a key of ", row.key_bytes));
    }
  }
  DirectAddress address;
  address.worker = cutter.Take(head.worker_bytes);
  for (const Row& row : rows) {
    address.memories.push_back({row.address, row.bytes, cutter.Take(row.key_bytes)});
  }
  if (!cutter.whole())
    return Malformed(absl::StrCat("of ", bytes.size(), " bytes, not its length"));
  return address;
}

}  // namespace kvferry
