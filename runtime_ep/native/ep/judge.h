// Which nodes the provider claims, and why not the others.
//
// The limits of the operators are written down once, in ascend_onnx/operators; `ascend_onnx.check` applies them. The
// provider does not repeat them: it describes each node to a judge that the Python side installs, and claims what the
// judge accepts. A process without Python has no judge. There every node that this CANN has an operator for is claimed,
// and the device itself refuses what it cannot do, when the node runs.
#pragma once

#include "ort/node.h"

#include <cstddef>
#include <optional>
#include <string>

extern "C" {

// Judges a call, described in JSON: operator, node, product, inputs, outputs and attributes in the order of the
// signature. Returns 0 to accept it; anything else declines it, for the reason written to `reason`.
using ascend_ep_judge = int (*)(const char* call, char* reason, std::size_t capacity);

// Installs the judge, or with null takes it away. Of the library as a whole.
__attribute__((visibility("default"))) void ascend_ep_set_judge(ascend_ep_judge judge);
}

namespace ep {

// The reason why a node of the domain is declined on a product, empty if it is claimed.
std::optional<std::string> reason_to_decline(const ort::NodeFacts& node, const std::string& product);

} // namespace ep
