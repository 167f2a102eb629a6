#include "cann/fractal_nz.h"

#include <cstring>

namespace cann {

void pack_nz(const void* matrix, void* packed, std::int64_t rows, std::int64_t columns, std::size_t element_size) {
    const auto* source = static_cast<const std::byte*>(matrix);
    auto* target = static_cast<std::byte*>(packed);
    const std::int64_t row_bytes = columns * static_cast<std::int64_t>(element_size);
    // The fractals of one column lie behind each other row by row, so that every line is one copy of 32 bytes.
    for (std::int64_t line = 0; line < row_bytes / FRACTAL_BYTES; ++line) {
        const std::byte* from = source + line * FRACTAL_BYTES;
        for (std::int64_t row = 0; row < rows; ++row, target += FRACTAL_BYTES) {
            std::memcpy(target, from + row * row_bytes, FRACTAL_BYTES);
        }
    }
}

} // namespace cann
