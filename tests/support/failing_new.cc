#include "tests/support/failing_new.h"

#include <atomic>
#include <cstdlib>

namespace {

using Of = kvferry::ScarceNew::Of;

thread_local int left = 0;  // 1: they fail; 0: none does; else one less are granted until they do.
std::atomic<size_t> scarce_bytes = 0;  // No allocation has so few.
std::atomic<Of> of = Of::kThisThread;
thread_local bool is_this_thread = false;

bool Fails(size_t bytes) {
  if (left == 1) return true;
  if (left > 1) --left;
  return bytes != 0 && bytes == scarce_bytes && is_this_thread == (of == Of::kThisThread);
}

}  // namespace

// Of all of the test's program.
void* operator new(size_t bytes) {
  void* const memory = Fails(bytes) ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
// The sanitizers' would not know of it.
void* operator new[](size_t bytes) { return operator new(bytes); }
void* operator new(size_t bytes, const std::nothrow_t& /*tag*/) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new[](size_t bytes, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, tag);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace kvferry {

FailingNew::FailingNew(int number) { left = number + 1; }
FailingNew::~FailingNew() { left = 0; }

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
