#include "aclnn/rules.h"

#include "control/misuse.h"

#include <algorithm>

namespace ascend_emulator {

void fail(std::int32_t code, const std::string& sentence) {
    throw Failure{code, sentence};
}

Arguments::Arguments(std::string_view function, std::vector<Argument> arguments) : arguments_(std::move(arguments)) {
    for (const Argument& argument : arguments_) {
        if (argument.tensor != nullptr && !tensors().contains(argument.tensor)) {
            misuse(text(function, " was given a ", argument.name, " that is no live tensor: ", argument.tensor));
        }
    }
}

void Arguments::require_given(std::initializer_list<std::size_t> indices) const {
    for (const std::size_t index : indices) {
        if (!given(index)) {
            fail(ACLNN_ERR_PARAM_NULLPTR, text(name(index), " must be given, got a null pointer"));
        }
    }
}

void Arguments::require_type(std::size_t index, std::initializer_list<aclDataType> types) const {
    if (!given(index) || std::find(types.begin(), types.end(), (*this)[index].type) != types.end()) {
        return;
    }
    std::string expected;
    for (const aclDataType type : types) {
        expected += text(expected.empty() ? "" : ", ", type_name(type));
    }
    const auto* got = type_name((*this)[index].type);
    fail(ACLNN_ERR_PARAM_INVALID, text(name(index), " must have a type out of [", expected, "], got ", got));
}

void Arguments::require_rank(std::size_t index, std::size_t rank, std::int32_t code) const {
    if (given(index) && (*this)[index].shape.rank() != rank) {
        fail(code, text(name(index), " must have ", rank, " dimensions, got ", (*this)[index].shape.to_string()));
    }
}

void Arguments::require_shape(std::size_t index, const Shape& shape, std::int32_t code) const {
    if (given(index) && (*this)[index].shape != shape) {
        const auto got = (*this)[index].shape.to_string();
        fail(code, text(name(index), " must have the shape ", shape.to_string(), ", got ", got));
    }
}

void Arguments::require_filled(std::size_t index, std::int32_t code) const {
    if (given(index) && !filled(index)) {
        fail(code, text(name(index), " must not be empty, got ", (*this)[index].shape.to_string()));
    }
}

void Arguments::require_contiguous(std::size_t index) const {
    if (given(index) && !(*this)[index].contiguous()) {
        const auto strides = (*this)[index].strides.to_string();
        fail(ACLNN_ERR_PARAM_INVALID, text(name(index), " must be contiguous, got the strides ", strides));
    }
}

void Arguments::require_format(std::size_t index, std::initializer_list<aclFormat> formats) const {
    if (!given(index) || std::find(formats.begin(), formats.end(), (*this)[index].format) != formats.end()) {
        return;
    }
    const int got = (*this)[index].format;
    const auto* expected = *formats.begin() == ACL_FORMAT_FRACTAL_NZ ? "FRACTAL_NZ (29)" : "ND (2)";
    fail(ACLNN_ERR_PARAM_INVALID, text(name(index), " must have the format ", expected, ", got ", got));
}

void Arguments::require_plain(std::initializer_list<std::size_t> except) const {
    for (std::size_t index = 0; index < size(); ++index) {
        if (std::find(except.begin(), except.end(), index) == except.end()) {
            require_format(index, {ACL_FORMAT_ND});
            require_contiguous(index);
        }
    }
}

void require_product(std::string_view op, std::initializer_list<Product> products) {
    const Product product = settings().product;
    if (std::find(products.begin(), products.end(), product) == products.end()) {
        const auto sentence = text("there is no kernel package of ", op, " for the product ", product_name(product));
        fail(ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND, sentence);
    }
}

void require_results(const std::uint64_t* workspace_size, aclOpExecutor* const* executor) {
    require(workspace_size != nullptr, ACLNN_ERR_PARAM_NULLPTR, "workspaceSize must be given, got a null pointer");
    require(executor != nullptr, ACLNN_ERR_PARAM_NULLPTR, "executor must be given, got a null pointer");
}

std::string listed(std::initializer_list<std::int64_t> values) {
    std::string joined;
    for (const std::int64_t* value = values.begin(); value != values.end(); ++value) {
        joined += text(value == values.begin() ? "" : value + 1 == values.end() ? " or " : ", ", *value);
    }
    return joined;
}

void require_one_of(
    std::string_view name, std::int64_t value, std::initializer_list<std::int64_t> values, std::int32_t code
) {
    if (std::find(values.begin(), values.end(), value) == values.end()) {
        fail(code, text(name, " must be ", listed(values), ", got ", value));
    }
}

} // namespace ascend_emulator
