#include "aclnn/shape.h"

#include "control/misuse.h"

#include <algorithm>

namespace ascend_emulator {

Shape::Shape(std::initializer_list<std::int64_t> dims) : Shape(dims.begin(), dims.size()) {}

Shape::Shape(const std::int64_t* dims, std::uint64_t rank) : rank_(rank) {
    if (rank > max_rank) {
        misuse(text("a tensor may have at most ", max_rank, " dimensions, got ", rank));
    }
    if (rank > 0) {
        std::copy_n(dims, rank, dims_.begin());
    }
}

std::int64_t Shape::elements() const {
    std::int64_t count = 1;
    for (const std::int64_t dim : *this) {
        count *= dim;
    }
    return count;
}

Shape Shape::strides() const {
    Shape strides = *this;
    std::int64_t stride = 1;
    for (std::size_t axis = rank_; axis-- > 0;) {
        strides[axis] = stride;
        stride *= dims_[axis];
    }
    return strides;
}

bool Shape::operator==(const Shape& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
}

std::string Shape::to_string() const {
    std::string joined;
    for (const std::int64_t dim : *this) {
        joined += joined.empty() ? text(dim) : text(", ", dim);
    }
    return "[" + joined + "]";
}

std::size_t element_size(aclDataType type) {
    switch (type) {
    case ACL_INT8:
    case ACL_UINT8:
    case ACL_BOOL:
    case ACL_HIFLOAT8:
    case ACL_FLOAT8_E5M2:
    case ACL_FLOAT8_E4M3FN:
    case ACL_FLOAT8_E8M0:
        return 1;
    case ACL_FLOAT16:
    case ACL_BF16:
    case ACL_INT16:
    case ACL_UINT16:
        return 2;
    case ACL_FLOAT:
    case ACL_INT32:
    case ACL_UINT32:
    case ACL_COMPLEX32:
        return 4;
    case ACL_INT64:
    case ACL_UINT64:
    case ACL_DOUBLE:
    case ACL_COMPLEX64:
        return 8;
    case ACL_COMPLEX128:
        return 16;
    default:
        return 0;
    }
}

const char* type_name(aclDataType type) {
    switch (type) {
    case ACL_FLOAT:
        return "FLOAT";
    case ACL_FLOAT16:
        return "FLOAT16";
    case ACL_BF16:
        return "BFLOAT16";
    case ACL_INT8:
        return "INT8";
    case ACL_INT32:
        return "INT32";
    case ACL_INT64:
        return "INT64";
    case ACL_UINT8:
        return "UINT8";
    case ACL_BOOL:
        return "BOOL";
    case ACL_DOUBLE:
        return "DOUBLE";
    case ACL_FLOAT8_E5M2:
        return "FLOAT8_E5M2";
    case ACL_FLOAT8_E4M3FN:
        return "FLOAT8_E4M3FN";
    case ACL_FLOAT8_E8M0:
        return "FLOAT8_E8M0";
    default:
        return "a type without a name here";
    }
}

// Strides along dimensions of size 1 say nothing.
bool Description::contiguous() const {
    const Shape expected = shape.strides();
    for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
        if (shape[axis] != 1 && strides[axis] != expected[axis]) {
            return shape.elements() == 0;
        }
    }
    return true;
}

std::size_t Description::bytes() const {
    if (shape.elements() == 0) {
        return 0;
    }
    if (format != ACL_FORMAT_ND) {
        return std::size_t(storage.elements()) * element_size(type);
    }
    std::int64_t last = 0;
    for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
        last += (shape[axis] - 1) * strides[axis];
    }
    return std::size_t(last + 1) * element_size(type);
}

} // namespace ascend_emulator
