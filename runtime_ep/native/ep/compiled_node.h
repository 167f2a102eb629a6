// A claimed node, ready to be launched: its operator, its weights on the device, and where its tensors come from.
#pragma once

#include "ep/stream.h"
#include "ep/weights.h"
#include "operators/operator.h"
#include "ort/abi.h"

#include <memory>
#include <string>
#include <vector>

namespace ep {

class CompiledNode final : public ort::OrtNodeComputeInfo {
  public:
    // `graph` holds the node as the model has it. `fused` is what the runtime made of it: only the inputs that are
    // present, distinct and not constant, and only the outputs that somebody reads, so that positions differ.
    CompiledNode(const ort::NodeFacts& node, const ort::NodeFacts& fused, Weights& weights);

  private:
    struct Source {
        int fused = -1; // input of the fused node
        std::shared_ptr<const Weight> weight;
    };

    struct Launch;

    void launch(ort::OrtKernelContext* context) const;
    operators::Tensor read_input(ort::OrtKernelContext* context, std::size_t index) const;
    void allocate_outputs(ort::OrtKernelContext* context, Launch& launch) const;
    void use_scratch(Stream& stream, Launch& launch) const;
    void update_in_place(Stream& stream, Launch& launch) const;
    void run_phases(Stream& stream, Launch& launch) const;
    std::string given(const Launch& launch) const;

    static ort::OrtStatus*
    create_state(ort::OrtNodeComputeInfo* self, ort::OrtNodeComputeContext* context, void** state) noexcept;
    static ort::OrtStatus* compute(ort::OrtNodeComputeInfo* self, void* state, ort::OrtKernelContext* context) noexcept;
    static void release_state(ort::OrtNodeComputeInfo* self, void* state) noexcept;

    const operators::Operator& operator_;
    std::string description_; // "SparseFlashAttention node 'attention'"
    std::unique_ptr<operators::Launcher> launcher_;
    std::vector<Source> inputs_;
    std::vector<int> outputs_; // output of the fused node, -1 if nobody reads it
};

// "SparseFlashAttention node 'attention'"
std::string describe(const ort::NodeFacts& node);

} // namespace ep
