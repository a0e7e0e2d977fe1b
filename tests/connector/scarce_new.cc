#include "tests/connector/scarce_new.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

using Of = kvferry::ScarceNew::Of;

std::atomic<size_t> scarce_bytes = 0;  // No allocation has so few.
std::atomic<Of> of = Of::kThisThread;
thread_local bool is_this_thread = false;

bool IsScarce(size_t bytes) {
  return bytes != 0 && bytes == scarce_bytes && is_this_thread == (of == Of::kThisThread);
}

}  // namespace

// Of all of the test's program.
void* operator new(size_t bytes) {
  void* const memory = IsScarce(bytes) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// A sanitizer's would not know of it.
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace kvferry {

ScarceNew::ScarceNew(Of threads, size_t bytes) {
  is_this_thread = true;
  of = threads;
  scarce_bytes = bytes;
}
ScarceNew::~ScarceNew() {
  scarce_bytes = 0;
  is_this_thread = false;
}

}  // namespace kvferry
