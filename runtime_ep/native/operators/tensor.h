// Tensors as the launchers see them: device memory with a type and a shape.
#pragma once

#include "cann/acl_abi.h"
#include "ort/abi.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace operators {

class Shape {
  public:
    static constexpr int MAX_RANK = 8;

    Shape() = default;
    Shape(std::initializer_list<std::int64_t> dims) {
        for (const std::int64_t dim : dims) {
            push(dim);
        }
    }

    void push(std::int64_t dim) { dims_[static_cast<std::size_t>(rank_++)] = dim; }
    // Makes room for `rank` dimensions, to be written through `data`.
    std::int64_t* resize(int rank) {
        rank_ = rank;
        return dims_.data();
    }

    int rank() const { return rank_; }
    const std::int64_t* data() const { return dims_.data(); }
    // The dimension at `axis`, counted from the end if negative; 0 beyond the rank, which the device then rejects.
    std::int64_t operator[](int axis) const {
        const int index = axis < 0 ? axis + rank_ : axis;
        return index < 0 || index >= rank_ ? 0 : dims_[static_cast<std::size_t>(index)];
    }
    std::int64_t elements() const;
    bool operator==(const Shape& other) const;

  private:
    std::array<std::int64_t, MAX_RANK> dims_{};
    int rank_ = 0;
};

struct Tensor {
    bool present = false;
    void* data = nullptr;
    aclDataType type = ACL_DT_UNDEFINED;
    Shape shape;
    bool packed = false; // in FRACTAL_NZ storage, whatever `shape` says

    std::size_t bytes() const;
};

std::size_t size_of(aclDataType type);
const char* name_of(aclDataType type);

// ACL_DT_UNDEFINED for a type that no operator of the domain has.
aclDataType acl_type(ort::ONNXTensorElementDataType type);
ort::ONNXTensorElementDataType onnx_type(aclDataType type);

// "bfloat16 [1, 128, 512]"
std::string describe(aclDataType type, const Shape& shape);

} // namespace operators
