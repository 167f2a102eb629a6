// Weights in the storage that an operator documents, read as float32 columns of the (k, n) matrix.
#pragma once

#include "aclnn/handles.h"
#include "maths/matrix.h"

#include <cstdint>

namespace ascend_emulator {

// The columns of a row of a fractal: 32 bytes.
inline std::int64_t fractal_width(aclDataType type) {
    return 32 / std::int64_t(element_size(type));
}

class Weight {
  public:
    enum class Storage {
        FractalsOfKN, // (n / w0, k / 16, 16, w0): FRACTAL_NZ of the matrix (k, n)
        FractalsOfNK, // (k / w0, n / 16, 16, w0): FRACTAL_NZ of its transpose (n, k)
        RowsOfKN,
        RowsOfNK,
    };

    Weight(const std::byte* data, aclDataType type, Storage storage, std::int64_t k, std::int64_t n)
        : data_(data),
          type_(type),
          storage_(storage),
          k_(k),
          n_(n) {}

    std::int64_t k() const { return k_; }
    std::int64_t n() const { return n_; }
    bool int8() const { return type_ == ACL_INT8; }

    // Which way round `columns` writes: (k, count), or (count, k) to be multiplied transposed.
    Right form() const;
    // The columns from `first` on, `count` of them, `panel` having room for k * count numbers.
    void columns(std::int64_t first, std::int64_t count, float* panel) const;

  private:
    const std::byte* data_;
    aclDataType type_;
    Storage storage_;
    std::int64_t k_;
    std::int64_t n_;
};

// product (rows, n) = x (rows, k) * weight, accumulated in float32.
void project(const float* x, std::int64_t rows, const Weight& weight, float* product);

// The same with integers of [-128, 127] on both sides: the exact sums, which float32 alone would not hold.
void project_exactly(const float* x, std::int64_t rows, const Weight& weight, std::int32_t* product);

} // namespace ascend_emulator
