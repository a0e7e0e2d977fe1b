#pragma once

// The memory of one allocation on an emulated device.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "base/unique_fd.h"

namespace kvferry::emulated {

// Ends the process: what a GPU might let pass.
[[noreturn]] void Fault(const std::string& what);

inline size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// What a cudaIpcMemHandle_t holds: where a process has the file with an allocation's memory.
struct SharedAllocation {
  static constexpr uint32_t kMagic = 0x6b766679;

  uint32_t magic;
  int32_t process, file;
  int32_t device;
  uint64_t id;
  uint64_t bytes;
};
static_assert(sizeof(SharedAllocation) <= sizeof(cudaIpcMemHandle_t));
static_assert(std::has_unique_object_representations_v<SharedAllocation>);

// Addresses of a device's, which nobody can touch, and its memory for them elsewhere: as much
// before it as makes up whole pages, and behind it up to the last page but one, the last being out
// of bounds.
class Allocation {
 public:
  // nullptr when the system refuses the memory.
  static std::unique_ptr<Allocation> Create(int device, size_t bytes, bool can_be_shared);
  // Another process's memory, for one device. nullptr when it is there no longer.
  static std::unique_ptr<Allocation> Open(const SharedAllocation& shared, int reader);
  ~Allocation();
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;

  int device() const { return device_; }
  int reader() const { return reader_; }  // The device whose kernels reach it.
  bool is_imported() const { return is_imported_; }
  uint64_t id() const { return id_; }
  size_t bytes() const { return bytes_; }
  std::byte* address() const { return addresses_ + begin_; }
  // Where the device has what lies at an address of this.
  std::byte* Of(const std::byte* address) const { return memory_ + (address - addresses_); }

  // Nothing when this is not to be shared, or the system refuses it. As few are shared, and
  // processes may have few files, the memory lies in one only from here on.
  std::optional<SharedAllocation> Share();

  // A fault where something is.
  void CheckWhatIsBeside() const;

 private:
  Allocation(int device, std::byte* addresses, std::byte* memory, size_t usable, size_t guard,
             size_t bytes);

  // All of it out of bounds. nullptr when the system refuses the addresses.
  static std::unique_ptr<Allocation> Reserve(int device, size_t bytes);

  // Its place stays the same, as work that waits has pointers into it.
  bool MoveToFile();

  const int device_;
  int reader_;
  bool can_be_shared_ = false, is_imported_ = false;
  UniqueFd file_;    // Of what is shared.
  uint64_t id_ = 0;  // The file's, also of what is imported.
  std::byte *const addresses_, *const memory_;
  const size_t usable_, guard_;  // Bytes of each; guard_ behind usable_.
  const size_t bytes_, begin_;   // What was asked for, and where in usable_ it lies.
};

}  // namespace kvferry::emulated
