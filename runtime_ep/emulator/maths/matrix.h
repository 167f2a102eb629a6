// Products of float32 matrices in row-major order, by OpenBLAS on the calling thread.
#pragma once

#include <cstdint>

namespace ascend_emulator {

// A matrix in memory: rows are `stride` elements apart.
struct Matrix {
    const float* data;
    std::int64_t stride;
};

enum class Right { AsIs, Transposed };

// product (m, n) = left (m, k) * right, which is (k, n), or (n, k) where it is to be transposed.
void multiply(
    std::int64_t m, std::int64_t n, std::int64_t k, Matrix left, Matrix right, Right form, float* product,
    std::int64_t product_stride
);

} // namespace ascend_emulator
