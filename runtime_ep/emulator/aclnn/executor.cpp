#include "aclnn/handles.h"
#include "control/entry_point.h"
#include "control/misuse.h"
#include "control/settings.h"
#include "device/context.h"
#include "device/stream.h"

#include <cstring>
#include <memory>
#include <optional>

namespace ascend_emulator {
namespace {

// Counts kernels, and makes them fail on the device.
constexpr Name kernel_name = "kernel";

// Fills the workspace before a kernel runs, so that nobody can keep anything there.
constexpr int workspace_filling = 0x5A;

aclOpExecutor& executor_of(std::string_view function, const aclOpExecutor* executor) {
    if (!executors().contains(executor)) {
        misuse(text(
            function, " was given ", executor,
            ", which is no live executor: a second phase freed it (set it repeatable to launch twice), or it was"
            " destroyed"
        ));
    }
    return executors().get(executor, function);
}

// A kernel with all that it reads and writes on lease.
class Launch final : public Task {
  public:
    Launch(const aclOpExecutor& executor, void* workspace, std::optional<std::int32_t> fault)
        : function_(executor.function),
          kernel_(executor.kernel),
          fault_(fault),
          workspace_size_(executor.workspace_size) {
        DeviceMemory& memory = DeviceMemory::instance();
        operands_.reserve(executor.arguments.size());
        leases_.reserve(executor.arguments.size() + 1);
        for (const Argument& argument : executor.arguments) {
            Operand& operand = operands_.emplace_back();
            if (argument.tensor == nullptr) {
                continue;
            }
            operand.description = description_of(argument);
            leases_.push_back(memory.lease(operand.description.first(), operand.description.bytes(), argument.name));
            operand.data = leases_.back().data();
        }
        leases_.push_back(memory.lease(workspace, workspace_size_, "the workspace"));
    }

    void run() override {
        if (fault_) {
            throw Failure{*fault_, text("A fault was injected into a kernel of ", function_, ", code ", *fault_, ".")};
        }
        if (settings().noop) {
            return;
        }
        if (workspace_size_ > 0) {
            std::memset(leases_.back().data(), workspace_filling, workspace_size_);
        }
        kernel_(operands_);
    }

  private:
    Description description_of(const Argument& argument) const {
        if (!tensors().contains(argument.tensor)) {
            misuse(text(function_, " needs the tensor ", argument.name, ", which was destroyed after the first phase"));
        }
        return argument.tensor->description;
    }

    std::string_view function_;
    Kernel kernel_;
    std::optional<std::int32_t> fault_;
    std::uint64_t workspace_size_;
    std::vector<Operand> operands_;
    std::vector<Lease> leases_;
};

} // namespace

Registry<aclOpExecutor>& executors() {
    static auto& registry = *new Registry<aclOpExecutor>("executor");
    return registry;
}

void create_executor(
    std::string_view function, std::vector<Argument> arguments, std::uint64_t workspace, Kernel kernel,
    std::uint64_t* workspace_size, aclOpExecutor** executor
) {
    auto made = std::make_unique<aclOpExecutor>();
    made->function = function;
    made->arguments = std::move(arguments);
    made->workspace_size = workspace;
    made->kernel = std::move(kernel);
    *workspace_size = workspace;
    *executor = executors().add(std::move(made));
}

void launch(
    std::string_view function, void* workspace, std::uint64_t workspace_size, aclOpExecutor* executor,
    aclrtStream stream
) {
    require_device();
    if (executor == nullptr) {
        throw Failure{ACLNN_ERR_PARAM_NULLPTR, "executor must not be null"};
    }
    aclOpExecutor& found = executor_of(function, executor);
    if (found.function != function) {
        misuse(text(function, " was given an executor of ", found.function));
    }
    // Freed whatever becomes of the launch, unless it is repeatable.
    std::unique_ptr<aclOpExecutor> freed;
    if (!found.repeatable) {
        freed = executors().remove(executor, function);
    }
    if (workspace_size < found.workspace_size) {
        throw Failure{
            ACLNN_ERR_PARAM_INVALID,
            text("workspaceSize must be at least ", found.workspace_size, ", got ", workspace_size)
        };
    }
    if (stream == nullptr) {
        throw Failure{ACLNN_ERR_PARAM_NULLPTR, "stream must not be null"};
    }
    const auto fault = entry_point<kernel_name>.enter();
    streams().get(stream, function).enqueue(std::make_unique<Launch>(found, workspace, fault));
}

void drop_executor(std::string_view function, aclOpExecutor* executor) {
    if (executor != nullptr && !executor_of(function, executor).repeatable) {
        executors().remove(executor, function);
    }
}

} // namespace ascend_emulator

using namespace ascend_emulator;

namespace {

void set_address(aclTensor* tensor, void* address) {
    if (tensor == nullptr) {
        throw Failure{ACLNN_ERR_PARAM_NULLPTR, "tensor must not be null"};
    }
    tensors().get(tensor, "aclSetTensorAddr").description.address = address;
}

// Sets the address of the tensor at `index` among the arguments that `counts` accepts.
template<typename Counts>
void set_argument_address(
    std::string_view function, aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* address,
    Counts counts
) {
    if (executor == nullptr) {
        throw Failure{ACLNN_ERR_PARAM_NULLPTR, "executor must not be null"};
    }
    std::size_t position = 0;
    for (const Argument& argument : executor_of(function, executor).arguments) {
        if (!counts(argument.role) || position++ != index) {
            continue;
        }
        if (argument.tensor != tensor) {
            const auto sentence = text("the tensor at index ", index, " is ", argument.name, ", not the one given");
            throw Failure{ACLNN_ERR_PARAM_INVALID, sentence};
        }
        set_address(tensor, address);
        return;
    }
    throw Failure{ACLNN_ERR_PARAM_INVALID, text("index must be below ", position, ", got ", index)};
}

} // namespace

aclnnStatus aclSetAclOpExecutorRepeatable(aclOpExecutor* executor) {
    return guarded<"aclSetAclOpExecutorRepeatable">([&] {
        if (executor == nullptr) {
            throw Failure{ACLNN_ERR_PARAM_NULLPTR, "executor must not be null"};
        }
        executor_of("aclSetAclOpExecutorRepeatable", executor).repeatable = true;
    });
}

aclnnStatus aclDestroyAclOpExecutor(aclOpExecutor* executor) {
    return guarded_release<"aclDestroyAclOpExecutor">([&] {
        if (executor == nullptr) {
            throw Failure{ACLNN_ERR_PARAM_NULLPTR, "executor must not be null"};
        }
        executor_of("aclDestroyAclOpExecutor", executor);
        executors().remove(executor, "aclDestroyAclOpExecutor");
    });
}

aclnnStatus aclSetInputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress) {
    return guarded<"aclSetInputTensorAddr">([&] {
        const auto is_input = [](Argument::Role role) {
            return role == Argument::Role::Input;
        };
        set_argument_address("aclSetInputTensorAddr", executor, index, tensor, deviceAddress, is_input);
    });
}

aclnnStatus aclSetOutputTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress) {
    return guarded<"aclSetOutputTensorAddr">([&] {
        const auto is_output = [](Argument::Role role) {
            return role == Argument::Role::Output;
        };
        set_argument_address("aclSetOutputTensorAddr", executor, index, tensor, deviceAddress, is_output);
    });
}

aclnnStatus aclSetTensorAddr(aclOpExecutor* executor, std::size_t index, aclTensor* tensor, void* deviceAddress) {
    return guarded<"aclSetTensorAddr">([&] {
        const auto any = [](Argument::Role) {
            return true;
        };
        set_argument_address("aclSetTensorAddr", executor, index, tensor, deviceAddress, any);
    });
}

aclnnStatus aclSetRawTensorAddr(aclTensor* tensor, void* deviceAddress) {
    return guarded<"aclSetRawTensorAddr">([&] { set_address(tensor, deviceAddress); });
}
