// Dimensions, and the description that a tensor handle stands for.
#pragma once

#include "acl_abi.h"

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace ascend_emulator {

// Up to eight numbers: the dimensions or strides of a tensor, outermost first.
class Shape {
  public:
    static constexpr std::size_t max_rank = 8;

    Shape() = default;
    Shape(std::initializer_list<std::int64_t> dims);
    // Ranks above `max_rank` are a misuse.
    Shape(const std::int64_t* dims, std::uint64_t rank);

    std::size_t rank() const { return rank_; }
    std::int64_t operator[](std::size_t axis) const { return dims_[axis]; }
    std::int64_t& operator[](std::size_t axis) { return dims_[axis]; }
    std::int64_t back(std::size_t from_end = 1) const { return dims_[rank_ - from_end]; }
    const std::int64_t* begin() const { return dims_.data(); }
    const std::int64_t* end() const { return dims_.data() + rank_; }

    std::int64_t elements() const;
    // The strides of a contiguous tensor of these dimensions.
    Shape strides() const;
    // The first `count` dimensions.
    Shape head(std::size_t count) const { return Shape(dims_.data(), count); }

    bool operator==(const Shape& other) const;
    std::string to_string() const;

  private:
    std::array<std::int64_t, max_rank> dims_{};
    std::size_t rank_ = 0;
};

std::size_t element_size(aclDataType type);
const char* type_name(aclDataType type);

// What an aclTensor says of itself.
struct Description {
    aclDataType type = ACL_DT_UNDEFINED;
    aclFormat format = ACL_FORMAT_ND;
    Shape shape;
    Shape strides;
    Shape storage;
    std::int64_t offset = 0;
    void* address = nullptr;

    bool contiguous() const;
    // Where the first element lies.
    std::byte* first() const { return static_cast<std::byte*>(address) + offset * std::int64_t(element_size(type)); }
    // How many bytes from the first element on belong to it.
    std::size_t bytes() const;
};

} // namespace ascend_emulator
