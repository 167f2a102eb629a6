#include "operators/operator.h"

#include "cann/fractal_nz.h"

#include <stdexcept>
#include <string>

namespace operators {

extern const Operator MLA_PROLOG_V2_WEIGHT_NZ;
extern const Operator MLA_PREPROCESS;
extern const Operator SPARSE_FLASH_ATTENTION;
extern const Operator MOE_INIT_ROUTING_V3;
extern const Operator RING_ATTENTION_UPDATE_V2;

namespace {

constexpr std::array<const Operator*, 5> OPERATORS{
    &MLA_PROLOG_V2_WEIGHT_NZ, &MLA_PREPROCESS, &SPARSE_FLASH_ATTENTION, &MOE_INIT_ROUTING_V3, &RING_ATTENTION_UPDATE_V2,
};

} // namespace

std::span<const Operator* const> all_operators() {
    return OPERATORS;
}

const Operator* find_operator(std::string_view name) {
    for (const Operator* known : OPERATORS) {
        if (known->name == name) {
            return known;
        }
    }
    return nullptr;
}

void planned(aclnnStatus status, const char* aclnn) {
    if (status != ACL_SUCCESS) {
        throw cann::Error(std::string(aclnn) + "GetWorkspaceSize", status);
    }
}

aclTensor* Arguments::create(const Tensor& tensor, const Shape& view, aclFormat format, const Shape& storage) {
    if (count_ == MOST_TENSORS) {
        throw std::logic_error("an operator has more tensors than Arguments holds");
    }
    aclTensor* created = cann::functions().aclCreateTensor(
        view.data(), static_cast<std::uint64_t>(view.rank()), tensor.type, nullptr, 0, format, storage.data(),
        static_cast<std::uint64_t>(storage.rank()), tensor.data
    );
    if (created == nullptr) {
        throw cann::Error("aclCreateTensor", ACLNN_ERR_INNER_NULLPTR);
    }
    tensors_[count_++] = cann::TensorHandle(created);
    return created;
}

aclTensor* Arguments::nd(const Tensor& tensor) {
    return with_format(tensor, ACL_FORMAT_ND);
}

aclTensor* Arguments::with_format(const Tensor& tensor, aclFormat format) {
    return tensor.present ? create(tensor, tensor.shape, format, tensor.shape) : nullptr;
}

aclTensor* Arguments::nz(const Tensor& tensor) {
    if (!tensor.present) {
        return nullptr;
    }
    const Shape& shape = tensor.shape;
    const std::int64_t width = cann::fractal_width(size_of(tensor.type));
    std::int64_t rows = shape[0];
    std::int64_t columns = shape[1];
    if (!tensor.packed) { // the storage itself was given: (columns / w0, rows / 16, 16, w0) or (columns / w0, rows, w0)
        rows = shape.rank() == 4 ? shape[1] * shape[2] : shape[1];
        columns = shape[0] * shape[-1];
    }
    const Shape storage{columns / width, rows / cann::FRACTAL_ROWS, cann::FRACTAL_ROWS, width};
    return create(tensor, {rows, columns}, ACL_FORMAT_FRACTAL_NZ, storage);
}

aclTensor* Arguments::heads(const Tensor& tensor) {
    if (!tensor.present || tensor.shape.rank() != 4) {
        return nd(tensor);
    }
    const Shape& storage = tensor.shape;
    return create(tensor, {storage[0], storage[2], storage[1] * storage[3]}, ACL_FORMAT_FRACTAL_NZ, storage);
}

aclTensor* Arguments::empty(aclDataType type) {
    Tensor nothing;
    nothing.type = type;
    const Shape shape{0};
    return create(nothing, shape, ACL_FORMAT_ND, shape);
}

aclIntArray* Arguments::integers(std::span<const std::int64_t> values) {
    aclIntArray* created = cann::functions().aclCreateIntArray(values.data(), values.size());
    if (created == nullptr) {
        throw cann::Error("aclCreateIntArray", ACLNN_ERR_INNER_NULLPTR);
    }
    integers_ = cann::IntArrayHandle(created);
    return created;
}

} // namespace operators
