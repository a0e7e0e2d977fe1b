#pragma once

// KVFERRY_SANITIZED: AddressSanitizer or ThreadSanitizer has replaced malloc.

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVFERRY_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVFERRY_SANITIZED 1
#endif
#endif
