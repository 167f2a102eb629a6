// The objects behind aclTensor, aclIntArray and aclOpExecutor, and their ledgers.
#pragma once

#include "aclnn/shape.h"
#include "control/registry.h"
#include "device/memory.h"

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

struct aclTensor {
    ascend_emulator::Description description;
};

struct aclIntArray {
    std::vector<std::int64_t> values;
};

namespace ascend_emulator {

// A tensor as a kernel sees it: `data` can be followed, and is null if the tensor is absent or empty.
struct Operand {
    Description description;
    std::byte* data = nullptr;

    const Shape& shape() const { return description.shape; }
    aclDataType type() const { return description.type; }

    template<typename Element>
    Element* as() const {
        return reinterpret_cast<Element*>(data);
    }
};

// What an operator does once its stream gets to it. Operands come in the order of the arguments.
using Kernel = std::function<void(const std::vector<Operand>& operands)>;

// One tensor argument of an aclnn function.
struct Argument {
    enum class Role { Input, Output };

    std::string_view name;
    const aclTensor* tensor; // null where absent
    Role role = Role::Input;
};

} // namespace ascend_emulator

struct aclOpExecutor {
    std::string_view function;
    std::vector<ascend_emulator::Argument> arguments;
    std::uint64_t workspace_size = 0;
    ascend_emulator::Kernel kernel;
    bool repeatable = false;
};

namespace ascend_emulator {

Registry<aclTensor>& tensors();
Registry<aclIntArray>& int_arrays();
Registry<aclOpExecutor>& executors();

// What the first phase ends with: an executor for `kernel`, and the workspace that the second phase needs. `function`
// is the second phase.
void create_executor(
    std::string_view function, std::vector<Argument> arguments, std::uint64_t workspace, Kernel kernel,
    std::uint64_t* workspace_size, aclOpExecutor** executor
);

// The second phase `function`: puts the kernel of `executor` on `stream`.
void launch(
    std::string_view function, void* workspace, std::uint64_t workspace_size, aclOpExecutor* executor,
    aclrtStream stream
);

// What is left of a second phase that a fault replaced: a non-repeatable executor is freed.
void drop_executor(std::string_view function, aclOpExecutor* executor);

} // namespace ascend_emulator
