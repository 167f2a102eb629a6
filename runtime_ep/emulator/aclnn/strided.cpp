#include "aclnn/strided.h"

#include <cstring>

namespace ascend_emulator {
namespace {

// Calls `body` with the byte offset of every element, in the order of the shape.
template<typename Body>
void for_each_element(const Description& description, Body body) {
    const auto size = std::int64_t(element_size(description.type));
    const Shape& shape = description.shape;
    Shape index = shape;
    for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
        index[axis] = 0;
    }
    for (std::int64_t count = shape.elements(), element = 0; element < count; ++element) {
        std::int64_t offset = 0;
        for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
            offset += index[axis] * description.strides[axis];
        }
        body(element * size, offset * size);
        for (std::size_t axis = shape.rank(); axis-- > 0 && ++index[axis] == shape[axis];) {
            index[axis] = 0;
        }
    }
}

std::size_t contiguous_bytes(const Description& description) {
    return std::size_t(description.shape.elements()) * element_size(description.type);
}

} // namespace

ContiguousInput::ContiguousInput(const Operand& operand) : data_(operand.data) {
    if (operand.data == nullptr || operand.description.contiguous()) {
        return;
    }
    const std::size_t size = element_size(operand.type());
    copy_.resize(contiguous_bytes(operand.description));
    for_each_element(operand.description, [&](std::int64_t packed, std::int64_t strided) {
        std::memcpy(copy_.data() + packed, operand.data + strided, size);
    });
    data_ = copy_.data();
}

ContiguousOutput::ContiguousOutput(const Operand& operand) : operand_(operand) {
    if (operand.data != nullptr && !operand.description.contiguous()) {
        copy_.resize(contiguous_bytes(operand.description));
    }
}

void ContiguousOutput::store() const {
    if (copy_.empty()) {
        return;
    }
    const std::size_t size = element_size(operand_.type());
    for_each_element(operand_.description, [&](std::int64_t packed, std::int64_t strided) {
        std::memcpy(operand_.data + strided, copy_.data() + packed, size);
    });
}

} // namespace ascend_emulator
