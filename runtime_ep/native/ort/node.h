// What the graph says of one node: its tensors and attributes, by position and name.
#pragma once

#include "ort/runtime.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace ort {

using AttributeValue = std::variant<std::int64_t, float, std::string, std::vector<std::int64_t>>;

// The attributes of a node, defaults not filled in.
class Attributes {
  public:
    std::int64_t integer(std::string_view name, std::int64_t fallback) const;
    float real(std::string_view name, float fallback) const;
    std::string string(std::string_view name, std::string_view fallback) const;
    std::vector<std::int64_t> integers(std::string_view name) const;

    void set(std::string name, AttributeValue value) { values_.insert_or_assign(std::move(name), std::move(value)); }
    const std::map<std::string, AttributeValue, std::less<>>& all() const { return values_; }

  private:
    template<typename Value>
    const Value* find(std::string_view name) const;

    std::map<std::string, AttributeValue, std::less<>> values_;
};

// One value of the graph. Dimensions that are not numbers are -1, and have a name if the graph gives them one.
struct ValueFacts {
    std::string name;
    const OrtValueInfo* info = nullptr;
    ONNXTensorElementDataType type = ONNX_UNDEFINED;
    bool has_shape = false;
    std::vector<std::int64_t> dims;
    std::vector<std::string> symbols;
};

// One node. Absent inputs and outputs are empty.
struct NodeFacts {
    std::string name;
    std::string op_type;
    std::string domain;
    std::vector<std::optional<ValueFacts>> inputs;
    std::vector<std::optional<ValueFacts>> outputs;
    Attributes attributes;
};

std::vector<const OrtNode*> nodes_of(const OrtGraph* graph);
std::string domain_of(const OrtNode* node);
NodeFacts read_node(const OrtNode* node);

// The attribute as a value, empty for a kind that no operator of the domain has.
std::optional<AttributeValue> read_attribute(const OrtOpAttr* attribute);

} // namespace ort
