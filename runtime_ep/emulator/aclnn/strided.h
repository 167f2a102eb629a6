// Tensors that are not contiguous, for the operators that take them: kernels work on contiguous copies.
#pragma once

#include "aclnn/handles.h"

#include <cstddef>
#include <vector>

namespace ascend_emulator {

// The elements of an input in the order of its shape: its own memory if it is contiguous, else a copy.
class ContiguousInput {
  public:
    explicit ContiguousInput(const Operand& operand);
    const std::byte* data() const { return data_; }

    template<typename Element>
    const Element* as() const {
        return reinterpret_cast<const Element*>(data_);
    }

  private:
    std::vector<std::byte> copy_;
    const std::byte* data_;
};

// Where a kernel writes an output in the order of its shape; `store` brings it to where the strides say.
class ContiguousOutput {
  public:
    explicit ContiguousOutput(const Operand& operand);
    std::byte* data() { return copy_.empty() ? operand_.data : copy_.data(); }
    void store() const;

    template<typename Element>
    Element* as() {
        return reinterpret_cast<Element*>(data());
    }

  private:
    Operand operand_;
    std::vector<std::byte> copy_;
};

} // namespace ascend_emulator
