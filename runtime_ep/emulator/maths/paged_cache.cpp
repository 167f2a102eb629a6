#include "maths/paged_cache.h"

#include "control/entry_point.h"
#include "control/misuse.h"
#include "maths/weight.h"

#include <cstring>

namespace ascend_emulator {

PagedCache::PagedCache(const Operand& cache, Layout layout, std::int64_t block_size, std::int64_t width)
    : data_(cache.data),
      type_(cache.type()),
      layout_(layout),
      blocks_(cache.shape()[0]),
      block_size_(block_size),
      width_(width),
      block_stride_(cache.description.strides[0]) {}

void PagedCache::write(std::int64_t slot, const std::byte* row, std::string_view name) const {
    if (slot < 0 || data_ == nullptr) {
        return;
    }
    if (slot >= blocks_ * block_size_) {
        const auto sentence =
            text(name, " must be below the ", blocks_ * block_size_, " slots of the cache, got ", slot);
        throw Failure{ACL_ERROR_RT_AICORE_EXCEPTION, sentence};
    }
    const auto size = std::int64_t(element_size(type_));
    std::byte* block = data_ + slot / block_size_ * block_stride_ * size;
    const std::int64_t place = slot % block_size_;
    if (layout_ == Layout::Rows) {
        std::memcpy(block + place * width_ * size, row, std::size_t(width_ * size));
        return;
    }
    const std::int64_t line = fractal_width(type_) * size;
    for (std::int64_t offset = 0; offset < width_ * size; offset += line) {
        std::memcpy(block + offset * block_size_ + place * line, row + offset, std::size_t(line));
    }
}

} // namespace ascend_emulator
