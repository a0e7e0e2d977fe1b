#include "tests/pool_cuda/emulated/allocation.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace kvferry::emulated {
namespace {

constexpr size_t kAlignment = 256;  // Of what cudaMalloc() gives.
constexpr std::byte kUnset{0xcd}, kBeside{0xb5};

std::string FileName(uint64_t id, int device, uint64_t bytes) {
  return absl::StrCat("kvferry-emulated-", id, "-", device, "-", bytes);
}

// Invalid when that process has it no longer, or a handle is not as it was given.
UniqueFd OpenFile(const SharedAllocation& shared) {
  const std::string path = absl::StrCat("/proc/", shared.process, "/fd/", shared.file);
  UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  // Both numbers may be another's by now.
  const std::string opened = absl::StrCat("/proc/self/fd/", file.get());
  const std::string name = FileName(shared.id, shared.device, shared.bytes);
  std::array<char, 200> target{};
  if (readlink(opened.c_str(), target.data(), target.size() - 1) < 0 ||
      target.data() != absl::StrCat("/memfd:", name, " (deleted)")) {
    return UniqueFd();
  }
  return file;
}

}  // namespace

void Fault(const std::string& what) {
  std::fprintf(stderr, "emulated device: %s\n", what.c_str());
  std::abort();
}

std::unique_ptr<Allocation> Allocation::Create(int device, size_t bytes, bool can_be_shared) {
  std::unique_ptr<Allocation> made = Reserve(device, bytes);
  if (made == nullptr || mprotect(made->memory_, made->usable_, PROT_READ | PROT_WRITE) != 0) {
    return nullptr;
  }
  std::fill_n(made->memory_, made->usable_, kBeside);
  std::fill_n(made->memory_ + made->begin_, bytes, kUnset);
  made->can_be_shared_ = can_be_shared;
  return made;
}

std::unique_ptr<Allocation> Allocation::Open(const SharedAllocation& shared, int reader) {
  const UniqueFd file = OpenFile(shared);
  if (!file.valid()) return nullptr;
  std::unique_ptr<Allocation> opened = Reserve(shared.device, shared.bytes);
  if (opened == nullptr || mmap(opened->memory_, opened->usable_, PROT_READ, MAP_SHARED | MAP_FIXED,
                                file.get(), 0) == MAP_FAILED) {
    return nullptr;
  }
  opened->reader_ = reader;
  opened->id_ = shared.id;
  opened->is_imported_ = true;
  return opened;
}

Allocation::~Allocation() {
  munmap(addresses_, usable_ + guard_);
  munmap(memory_, usable_ + guard_);
}

std::optional<SharedAllocation> Allocation::Share() {
  if (!can_be_shared_ || (!file_.valid() && !MoveToFile())) return std::nullopt;
  return SharedAllocation{
      SharedAllocation::kMagic, getpid(), file_.get(), device_, id_, bytes_,
  };
}

void Allocation::CheckWhatIsBeside() const {
  const auto untouched = [](const std::byte* from, const std::byte* to) {
    return std::all_of(from, to, [](std::byte byte) { return byte == kBeside; });
  };
  if (untouched(memory_, memory_ + begin_) &&
      untouched(memory_ + begin_ + bytes_, memory_ + usable_)) {
    return;
  }
  Fault(absl::StrCat("something was written beside an allocation of ", bytes_, " bytes"));
}

Allocation::Allocation(int device, std::byte* addresses, std::byte* memory, size_t usable,
                       size_t guard, size_t bytes)
    : device_(device),
      reader_(device),
      addresses_(addresses),
      memory_(memory),
      usable_(usable),
      guard_(guard),
      bytes_(bytes),
      begin_(usable - RoundUp(bytes, kAlignment)) {}

std::unique_ptr<Allocation> Allocation::Reserve(int device, size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t usable = RoundUp(bytes, page);
  const auto map = [&] {
    return static_cast<std::byte*>(mmap(nullptr, usable + page, PROT_NONE,
                                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  std::unique_ptr<Allocation> made(new Allocation(device, map(), map(), usable, page, bytes));
  if (made->addresses_ == MAP_FAILED || made->memory_ == MAP_FAILED) return nullptr;
  return made;
}

bool Allocation::MoveToFile() {
  std::random_device random;
  const uint64_t id = uint64_t{random()} << 32 | random();
  UniqueFd file(memfd_create(FileName(id, device_, bytes_).c_str(), MFD_CLOEXEC));
  if (!file.valid() || ftruncate(file.get(), static_cast<off_t>(usable_)) != 0) return false;
  void* const copy = mmap(nullptr, usable_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (copy == MAP_FAILED) return false;
  std::memcpy(copy, memory_, usable_);
  if (mremap(copy, usable_, usable_, MREMAP_MAYMOVE | MREMAP_FIXED, memory_) == MAP_FAILED) {
    munmap(copy, usable_);
    return false;
  }
  file_ = std::move(file);
  id_ = id;
  return true;
}

}  // namespace kvferry::emulated
