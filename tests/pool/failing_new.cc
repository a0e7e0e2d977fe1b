#include "tests/pool/failing_new.h"

#include <cstddef>
#include <cstdlib>

namespace {

thread_local int left = -1;  // Allocations until the one that fails; below 0: none does.

}  // namespace

// Of all of the test's program.
void* operator new(size_t bytes) {
  if (left >= 0 && left-- == 0) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace kvferry {

FailingNew::FailingNew(int number) { left = number; }
FailingNew::~FailingNew() { left = -1; }

}  // namespace kvferry
