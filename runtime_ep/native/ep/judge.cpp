#include "ep/judge.h"

#include "ep/json.h"
#include "operators/operator.h"

#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>

namespace {

std::atomic<ascend_ep_judge> installed{nullptr};

} // namespace

void ascend_ep_set_judge(ascend_ep_judge judge) {
    installed.store(judge);
}

namespace ep {
namespace {

std::string described(const std::optional<ort::ValueFacts>& value) {
    if (!value) {
        return "null";
    }
    std::string shape = "null";
    if (value->has_shape) {
        std::vector<std::string> dims;
        for (std::size_t axis = 0; axis < value->dims.size(); ++axis) {
            const std::string& symbol = value->symbols[axis];
            dims.push_back(
                value->dims[axis] >= 0 ? std::to_string(value->dims[axis])
                : symbol.empty()       ? "null"
                                       : json::quoted(symbol)
            );
        }
        shape = json::listed(dims);
    }
    return "{\"type\": " + std::to_string(static_cast<int>(value->type)) + ", \"shape\": " + shape + "}";
}

struct AttributeText {
    std::string operator()(std::int64_t value) const { return std::to_string(value); }
    std::string operator()(float value) const {
        std::array<char, 32> text{};
        std::snprintf(text.data(), text.size(), "%.17g", static_cast<double>(value));
        return std::isfinite(value) ? text.data() : "null";
    }
    std::string operator()(const std::string& value) const { return json::quoted(value); }
    std::string operator()(const std::vector<std::int64_t>& values) const {
        std::vector<std::string> parts;
        for (const std::int64_t value : values) {
            parts.push_back(std::to_string(value));
        }
        return json::listed(parts);
    }
};

std::string described(const ort::NodeFacts& node, const std::string& product) {
    std::vector<std::string> inputs;
    for (const auto& input : node.inputs) {
        inputs.push_back(described(input));
    }
    std::vector<std::string> outputs;
    for (const auto& output : node.outputs) {
        outputs.emplace_back(output ? "true" : "false");
    }
    std::vector<std::string> attributes;
    for (const auto& [name, value] : node.attributes.all()) {
        attributes.push_back(json::quoted(name) + ": " + std::visit(AttributeText{}, value));
    }
    return json::listed(
        {"\"operator\": " + json::quoted(node.op_type), "\"node\": " + json::quoted(node.name),
         "\"product\": " + json::quoted(product), "\"inputs\": " + json::listed(inputs),
         "\"outputs\": " + json::listed(outputs), "\"attributes\": " + json::listed(attributes, '{', '}')},
        '{', '}'
    );
}

} // namespace

std::optional<std::string> reason_to_decline(const ort::NodeFacts& node, const std::string& product) {
    const operators::Operator* known = operators::find_operator(node.op_type);
    if (known == nullptr) {
        return "this provider has no operator " + node.op_type;
    }
    if (node.inputs.size() > known->inputs.size() || node.outputs.size() > known->outputs.size()) {
        return "it has more inputs or outputs than " + node.op_type + " has";
    }
    if (cann::functions().*(known->launch) == nullptr) {
        return std::string("this version of CANN has no ") + known->aclnn;
    }
    const ascend_ep_judge judge = installed.load();
    if (judge == nullptr) {
        return std::nullopt;
    }
    std::array<char, 1024> reason{};
    if (judge(described(node, product).c_str(), reason.data(), reason.size()) == 0) {
        return std::nullopt;
    }
    reason.back() = '\0';
    return std::string(reason.data());
}

} // namespace ep
