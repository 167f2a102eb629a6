// FRACTAL_NZ, the storage order that the device wants matrices in: fractals of 16 rows by 32 bytes, column of fractals
// after column of fractals.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cann {

inline constexpr std::int64_t FRACTAL_ROWS = 16;
inline constexpr std::int64_t FRACTAL_BYTES = 32;

// Elements in a line of a fractal: 16 of 2 bytes, 32 of 1.
constexpr std::int64_t fractal_width(std::size_t element_size) {
    return FRACTAL_BYTES / static_cast<std::int64_t>(element_size);
}

// Whether a matrix consists of whole fractals, which packing needs.
constexpr bool has_whole_fractals(std::int64_t rows, std::int64_t columns, std::size_t element_size) {
    return rows % FRACTAL_ROWS == 0 && columns % fractal_width(element_size) == 0;
}

// Writes the matrix (rows, columns) to `packed` as (columns / w0, rows / 16, 16, w0). Both hold the same bytes.
void pack_nz(const void* matrix, void* packed, std::int64_t rows, std::int64_t columns, std::size_t element_size);

} // namespace cann
