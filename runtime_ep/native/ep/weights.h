// The constants of claimed nodes: uploaded when the session is created, once each, matrices in the device's order.
#pragma once

#include "ep/stream.h"
#include "operators/operator.h"
#include "ort/node.h"

#include <map>
#include <memory>
#include <string>

namespace ep {

struct Weight {
    operators::Tensor tensor;
    cann::DeviceMemory memory;
};

class Weights {
  public:
    explicit Weights(Device& device) : device_(device) {}

    // The constant `value` for that input of an operator. Nodes that share it share the upload.
    std::shared_ptr<const Weight> upload(const ort::ValueFacts& value, const operators::Input& input);

  private:
    Device& device_;
    std::map<std::string, std::weak_ptr<const Weight>> uploaded_;
};

// Whether a tensor must be packed for `input`, because it is given as a plain matrix.
bool needs_packing(const operators::Input& input, const operators::Tensor& tensor);

// Packs a matrix that is on the device, by way of the host, to `packed`, and makes `tensor` the packed one. This waits
// for the stream: only for matrices that no graph could make constant.
void pack_on_stream(Stream& stream, operators::Tensor& tensor, void* packed);

} // namespace ep
