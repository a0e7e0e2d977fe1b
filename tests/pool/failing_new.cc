#include "tests/pool/failing_new.h"

#include <cstddef>
#include <cstdlib>

namespace {

thread_local int left = 0;  // 1: they fail; 0: none does; else one less are granted until they do.

}  // namespace

// Of all of the test's program.
void* operator new(size_t bytes) {
  if (left == 1) throw std::bad_alloc();
  if (left > 1) --left;
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
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

FailingNew::FailingNew(int number) { left = number + 1; }
FailingNew::~FailingNew() { left = 0; }

}  // namespace kvferry
