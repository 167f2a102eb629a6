// A cache of rows in blocks: slot s is row s % BlockSize of block s / BlockSize.
#pragma once

#include "aclnn/handles.h"

#include <cstdint>

namespace ascend_emulator {

class PagedCache {
  public:
    enum class Layout {
        Rows,     // a block is (BlockSize, width)
        Fractals, // a block is (width / c0, BlockSize, c0), with c0 elements in 32 bytes
    };

    PagedCache(const Operand& cache, Layout layout, std::int64_t block_size, std::int64_t width);

    aclDataType type() const { return type_; }

    // Writes `row`, already of the cache's type; a negative slot means "do not", and an empty cache keeps nothing.
    // Throws the exception of the device for a slot behind the last one; `name` is that of the slots.
    void write(std::int64_t slot, const std::byte* row, std::string_view name) const;

  private:
    std::byte* data_;
    aclDataType type_;
    Layout layout_;
    std::int64_t blocks_;
    std::int64_t block_size_;
    std::int64_t width_;
    std::int64_t block_stride_;
};

} // namespace ascend_emulator
