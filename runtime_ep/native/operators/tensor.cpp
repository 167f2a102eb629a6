#include "operators/tensor.h"

#include <algorithm>

namespace operators {
namespace {

struct Type {
    aclDataType acl;
    ort::ONNXTensorElementDataType onnx;
    std::size_t size;
    const char* name;
};

constexpr std::array<Type, 10> TYPES{{
    {ACL_FLOAT, ort::ONNX_FLOAT, 4, "float32"},
    {ACL_FLOAT16, ort::ONNX_FLOAT16, 2, "float16"},
    {ACL_BF16, ort::ONNX_BFLOAT16, 2, "bfloat16"},
    {ACL_INT8, ort::ONNX_INT8, 1, "int8"},
    {ACL_INT32, ort::ONNX_INT32, 4, "int32"},
    {ACL_INT64, ort::ONNX_INT64, 8, "int64"},
    {ACL_FLOAT8_E5M2, ort::ONNX_FLOAT8E5M2, 1, "float8e5m2"},
    {ACL_FLOAT8_E4M3FN, ort::ONNX_FLOAT8E4M3FN, 1, "float8e4m3fn"},
    {ACL_FLOAT8_E8M0, ort::ONNX_FLOAT8E8M0, 1, "float8e8m0"},
    {ACL_UINT8, ort::ONNX_UINT8, 1, "uint8"},
}};

const Type* find(aclDataType type) {
    const auto* found = std::find_if(TYPES.begin(), TYPES.end(), [&](const Type& t) { return t.acl == type; });
    return found == TYPES.end() ? nullptr : found;
}

} // namespace

std::int64_t Shape::elements() const {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank_; ++axis) {
        count *= dims_[static_cast<std::size_t>(axis)];
    }
    return count;
}

bool Shape::operator==(const Shape& other) const {
    return rank_ == other.rank_ && std::equal(dims_.begin(), dims_.begin() + rank_, other.dims_.begin());
}

std::size_t Tensor::bytes() const {
    return static_cast<std::size_t>(shape.elements()) * size_of(type);
}

std::size_t size_of(aclDataType type) {
    const Type* found = find(type);
    return found == nullptr ? 0 : found->size;
}

const char* name_of(aclDataType type) {
    const Type* found = find(type);
    return found == nullptr ? "unknown" : found->name;
}

aclDataType acl_type(ort::ONNXTensorElementDataType type) {
    const auto* found = std::find_if(TYPES.begin(), TYPES.end(), [&](const Type& t) { return t.onnx == type; });
    return found == TYPES.end() ? ACL_DT_UNDEFINED : found->acl;
}

ort::ONNXTensorElementDataType onnx_type(aclDataType type) {
    const Type* found = find(type);
    return found == nullptr ? ort::ONNX_UNDEFINED : found->onnx;
}

std::string describe(aclDataType type, const Shape& shape) {
    std::string text = std::string(name_of(type)) + " [";
    for (int axis = 0; axis < shape.rank(); ++axis) {
        text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
    }
    return text + "]";
}

} // namespace operators
