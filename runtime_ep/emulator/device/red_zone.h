// Room between allocations that AddressSanitizer lets nobody touch; nothing in a build without it.
#pragma once

#include <cstddef>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace ascend_emulator {

#ifdef __SANITIZE_ADDRESS__

inline constexpr std::size_t red_zone = 512;
inline void mark_usable(const std::byte* data, std::size_t size) {
    ASAN_UNPOISON_MEMORY_REGION(data, size);
}
inline void mark_unusable(const std::byte* data, std::size_t size) {
    ASAN_POISON_MEMORY_REGION(data, size);
}

#else

inline constexpr std::size_t red_zone = 0;
inline void mark_usable(const std::byte*, std::size_t) {}
inline void mark_unusable(const std::byte*, std::size_t) {}

#endif

} // namespace ascend_emulator
