// The vocabulary of the launchers: what the device is told of an operator. What the operator means, and which limits
// it has, is described in ascend_onnx/operators.
#pragma once

#include "cann/objects.h"
#include "operators/tensor.h"
#include "ort/node.h"

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace operators {

inline constexpr std::string_view DOMAIN = "ai.ascend";

struct Input {
    std::string_view name;
    bool nz = false; // a matrix that the device wants in FRACTAL_NZ storage
};

struct Output {
    std::string_view name;
    int updates = -1; // the input that the device updates in place to make this output
};

// The aclTensors and aclIntArrays of one launch.
class Arguments {
  public:
    // Null for an absent tensor.
    aclTensor* nd(const Tensor& tensor);
    // A matrix in FRACTAL_NZ storage, seen as (rows, columns).
    aclTensor* nz(const Tensor& tensor);
    // One matrix a head, (heads, rows, columns) in ND, or in FRACTAL_NZ storage (heads, columns / w0, rows, w0).
    aclTensor* heads(const Tensor& tensor);
    // A tensor whose shape is the storage itself.
    aclTensor* with_format(const Tensor& tensor, aclFormat format);
    // A tensor without elements, for an argument that must not be null.
    aclTensor* empty(aclDataType type);
    aclIntArray* integers(std::span<const std::int64_t> values);

  private:
    aclTensor* create(const Tensor& tensor, const Shape& view, aclFormat format, const Shape& storage);

    static constexpr std::size_t MOST_TENSORS = 32;
    std::array<cann::TensorHandle, MOST_TENSORS> tensors_;
    std::size_t count_ = 0;
    cann::IntArrayHandle integers_;
};

// The first phase's results.
struct Plan {
    std::uint64_t workspace = 0;
    aclOpExecutor* executor = nullptr;
};

using Inputs = std::span<const Tensor>;
using Outputs = std::span<Tensor>;

// One node's operator with its attributes. Immutable, because threads share it.
class Launcher {
  public:
    virtual ~Launcher() = default;

    // Fills in type and shape of every output that the configuration has, and `present`.
    virtual void infer(Inputs inputs, Outputs outputs) const = 0;

    // Calls the first phase; the arguments must live until the second one was called. Absent tensors are not present.
    virtual Plan plan(Inputs inputs, Outputs outputs, Arguments& arguments) const = 0;
};

using LaunchFunction = aclnnStatus (*)(void*, std::uint64_t, aclOpExecutor*, aclrtStream);

struct Operator {
    std::string_view name;
    const char* aclnn;
    std::span<const Input> inputs;
    std::span<const Output> outputs;
    std::unique_ptr<Launcher> (*make)(const ort::Attributes& attributes);
    LaunchFunction cann::Functions::* launch; // null in a CANN without this operator
};

// Throws with the function's name unless the first phase succeeded.
void planned(aclnnStatus status, const char* aclnn);

std::span<const Operator* const> all_operators();

// Null for an operator that this provider does not know.
const Operator* find_operator(std::string_view name);

} // namespace operators
