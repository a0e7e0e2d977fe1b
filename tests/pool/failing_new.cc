#include "tests/pool/failing_new.h"

#include <cstddef>
#include <cstdlib>

namespace {

thread_local int left = 0;  // Allocations until one has failed; 0: none does.

}  // namespace

// Of all of the test's program.
void* operator new(size_t bytes) {
  const bool fails = left == 1;
  if (left > 0) --left;
  if (fails) throw std::bad_alloc();
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

namespace kvferry {

FailingNew::FailingNew(int number) { left = number + 1; }
FailingNew::~FailingNew() { left = 0; }

}  // namespace kvferry
