#include "aclnn/handles.h"
#include "control/entry_point.h"

#include <memory>

namespace ascend_emulator {

Registry<aclTensor>& tensors() {
    static auto& registry = *new Registry<aclTensor>("tensor");
    return registry;
}

Registry<aclIntArray>& int_arrays() {
    static auto& registry = *new Registry<aclIntArray>("int array");
    return registry;
}

namespace {

void require_sizes(const std::int64_t* dims, std::uint64_t rank, std::string_view name) {
    if (dims == nullptr && rank > 0) {
        throw Failure{ACLNN_ERR_PARAM_NULLPTR, text(name, " must not be null")};
    }
    for (std::uint64_t axis = 0; axis < rank; ++axis) {
        if (dims[axis] < 0) {
            throw Failure{ACLNN_ERR_PARAM_INVALID, text(name, " must not be negative, got ", dims[axis])};
        }
    }
}

} // namespace
} // namespace ascend_emulator

using namespace ascend_emulator;

std::size_t aclDataTypeSize(aclDataType dataType) {
    return element_size(dataType);
}

aclTensor* aclCreateTensor(
    const std::int64_t* viewDims, std::uint64_t viewDimsNum, aclDataType dataType, const std::int64_t* strides,
    std::int64_t offset, aclFormat format, const std::int64_t* storageDims, std::uint64_t storageDimsNum,
    void* deviceAddress
) {
    return guarded_pointer<"aclCreateTensor">([&] {
        require_sizes(viewDims, viewDimsNum, "viewDims");
        require_sizes(storageDims, storageDimsNum, "storageDims");
        if (element_size(dataType) == 0) {
            throw Failure{ACLNN_ERR_PARAM_INVALID, text("dataType must be known, got ", static_cast<int>(dataType))};
        }
        const Shape shape(viewDims, viewDimsNum);
        auto tensor = std::make_unique<aclTensor>();
        tensor->description = {
            .type = dataType,
            .format = format,
            .shape = shape,
            .strides = strides == nullptr ? shape.strides() : Shape(strides, viewDimsNum),
            .storage = Shape(storageDims, storageDimsNum),
            .offset = offset,
            .address = deviceAddress,
        };
        return tensors().add(std::move(tensor));
    });
}

aclnnStatus aclDestroyTensor(const aclTensor* tensor) {
    return guarded_release<"aclDestroyTensor">([&] {
        if (tensor != nullptr) {
            tensors().remove(tensor, "aclDestroyTensor");
        }
    });
}

aclIntArray* aclCreateIntArray(const std::int64_t* values, std::uint64_t size) {
    return guarded_pointer<"aclCreateIntArray">([&] {
        if (values == nullptr && size > 0) {
            throw Failure{ACLNN_ERR_PARAM_NULLPTR, "value must not be null"};
        }
        auto array = std::make_unique<aclIntArray>();
        array->values.assign(values, values + size);
        return int_arrays().add(std::move(array));
    });
}

aclnnStatus aclDestroyIntArray(const aclIntArray* array) {
    return guarded_release<"aclDestroyIntArray">([&] {
        if (array != nullptr) {
            int_arrays().remove(array, "aclDestroyIntArray");
        }
    });
}
