#include "ort/node.h"

namespace ort {

template<typename Value>
const Value* Attributes::find(std::string_view name) const {
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : std::get_if<Value>(&found->second);
}

std::int64_t Attributes::integer(std::string_view name, std::int64_t fallback) const {
    const auto* value = find<std::int64_t>(name);
    return value == nullptr ? fallback : *value;
}

float Attributes::real(std::string_view name, float fallback) const {
    const auto* value = find<float>(name);
    return value == nullptr ? fallback : *value;
}

std::string Attributes::string(std::string_view name, std::string_view fallback) const {
    const auto* value = find<std::string>(name);
    return value == nullptr ? std::string(fallback) : *value;
}

std::vector<std::int64_t> Attributes::integers(std::string_view name) const {
    const auto* value = find<std::vector<std::int64_t>>(name);
    return value == nullptr ? std::vector<std::int64_t>{} : *value;
}

std::vector<const OrtNode*> nodes_of(const OrtGraph* graph) {
    std::size_t count = 0;
    check(api().Graph_GetNumNodes(graph, &count));
    std::vector<const OrtNode*> nodes(count);
    check(api().Graph_GetNodes(graph, nodes.data(), count));
    return nodes;
}

std::string domain_of(const OrtNode* node) {
    const char* domain = nullptr;
    check(api().Node_GetDomain(node, &domain));
    return domain == nullptr ? "" : domain;
}

namespace {

ValueFacts read_value(const OrtValueInfo* info) {
    ValueFacts facts;
    facts.info = info;
    const char* name = nullptr;
    check(api().GetValueInfoName(info, &name));
    facts.name = name == nullptr ? "" : name;

    const OrtTypeInfo* type = nullptr;
    check(api().GetValueInfoTypeInfo(info, &type));
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    if (type != nullptr) {
        check(api().CastTypeInfoToTensorInfo(type, &tensor));
    }
    if (tensor == nullptr) {
        return facts;
    }
    check(api().GetTensorElementType(tensor, &facts.type));
    facts.has_shape = api().TensorTypeAndShape_HasShape(tensor);
    std::size_t rank = 0;
    check(api().GetDimensionsCount(tensor, &rank));
    facts.dims.resize(rank);
    check(api().GetDimensions(tensor, facts.dims.data(), rank));
    std::vector<const char*> symbols(rank, nullptr);
    check(api().GetSymbolicDimensions(tensor, symbols.data(), rank));
    for (const char* symbol : symbols) {
        facts.symbols.emplace_back(symbol == nullptr ? "" : symbol);
    }
    return facts;
}

std::vector<std::optional<ValueFacts>> read_values(const std::vector<const OrtValueInfo*>& infos) {
    std::vector<std::optional<ValueFacts>> values;
    for (const OrtValueInfo* info : infos) {
        std::optional<ValueFacts> facts = info == nullptr ? std::nullopt : std::optional(read_value(info));
        values.push_back(facts && facts->name.empty() ? std::nullopt : std::move(facts));
    }
    while (!values.empty() && !values.back()) {
        values.pop_back();
    }
    return values;
}

Attributes read_attributes(const OrtNode* node) {
    std::size_t count = 0;
    check(api().Node_GetNumAttributes(node, &count));
    std::vector<const OrtOpAttr*> given(count);
    check(api().Node_GetAttributes(node, given.data(), count));
    Attributes attributes;
    for (const OrtOpAttr* attribute : given) {
        const char* name = nullptr;
        check(api().OpAttr_GetName(attribute, &name));
        if (auto value = read_attribute(attribute)) {
            attributes.set(name, *std::move(value));
        }
    }
    return attributes;
}

} // namespace

std::optional<AttributeValue> read_attribute(const OrtOpAttr* attribute) {
    OrtOpAttrType type = ORT_ATTRIBUTE_UNDEFINED;
    check(api().OpAttr_GetType(attribute, &type));
    std::size_t size = 0;
    switch (type) {
    case ORT_ATTRIBUTE_INT: {
        std::int64_t value = 0;
        check(api().ReadOpAttr(attribute, type, &value, sizeof value, &size));
        return value;
    }
    case ORT_ATTRIBUTE_FLOAT: {
        float value = 0;
        check(api().ReadOpAttr(attribute, type, &value, sizeof value, &size));
        return value;
    }
    case ORT_ATTRIBUTE_INTS:
    case ORT_ATTRIBUTE_STRING: {
        // Without room the call fails and says how much is needed.
        if (OrtStatus* status = api().ReadOpAttr(attribute, type, nullptr, 0, &size)) {
            api().ReleaseStatus(status);
        }
        if (type == ORT_ATTRIBUTE_STRING) {
            std::string text(size, '\0');
            if (size > 0) {
                check(api().ReadOpAttr(attribute, type, text.data(), size, &size));
            }
            return text;
        }
        std::vector<std::int64_t> values(size / sizeof(std::int64_t));
        if (!values.empty()) {
            check(api().ReadOpAttr(attribute, type, values.data(), size, &size));
        }
        return values;
    }
    default:
        return std::nullopt;
    }
}

NodeFacts read_node(const OrtNode* node) {
    NodeFacts facts;
    const char* text = nullptr;
    check(api().Node_GetName(node, &text));
    facts.name = text == nullptr ? "" : text;
    check(api().Node_GetOperatorType(node, &text));
    facts.op_type = text == nullptr ? "" : text;
    facts.domain = domain_of(node);

    std::size_t count = 0;
    check(api().Node_GetNumInputs(node, &count));
    std::vector<const OrtValueInfo*> values(count);
    check(api().Node_GetInputs(node, values.data(), count));
    facts.inputs = read_values(values);
    check(api().Node_GetNumOutputs(node, &count));
    values.assign(count, nullptr);
    check(api().Node_GetOutputs(node, values.data(), count));
    facts.outputs = read_values(values);
    facts.attributes = read_attributes(node);
    return facts;
}

} // namespace ort
