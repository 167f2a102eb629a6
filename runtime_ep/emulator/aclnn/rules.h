// The argument rules that all operators have, each with the code that CANN documents for it.
#pragma once

#include "aclnn/handles.h"
#include "control/entry_point.h"
#include "control/settings.h"

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ascend_emulator {

// The tensor arguments of a first phase, in the order of the function; an operator numbers them with an enumeration.
class Arguments {
  public:
    // A handle that is no live tensor is a misuse of `function`.
    Arguments(std::string_view function, std::vector<Argument> arguments);

    bool given(std::size_t index) const { return arguments_[index].tensor != nullptr; }
    // Given and with elements; where operators want a tensor in any case, one of shape (0) stands for none.
    bool filled(std::size_t index) const { return given(index) && (*this)[index].shape.elements() > 0; }
    const Description& operator[](std::size_t index) const { return arguments_[index].tensor->description; }
    std::string_view name(std::size_t index) const { return arguments_[index].name; }
    std::size_t size() const { return arguments_.size(); }

    // A code of its own where the operator documents one.
    void require_given(std::initializer_list<std::size_t> indices) const;
    void require_type(std::size_t index, std::initializer_list<aclDataType> types) const;
    void require_rank(std::size_t index, std::size_t rank, std::int32_t code = ACLNN_ERR_PARAM_INVALID) const;
    void require_shape(std::size_t index, const Shape& shape, std::int32_t code = ACLNN_ERR_PARAM_INVALID) const;
    void require_filled(std::size_t index, std::int32_t code = ACLNN_ERR_PARAM_INVALID) const;
    void require_contiguous(std::size_t index) const;
    void require_format(std::size_t index, std::initializer_list<aclFormat> formats) const;
    // Every given tensor is contiguous and in the format ND, except those listed.
    void require_plain(std::initializer_list<std::size_t> except = {}) const;

    std::vector<Argument> take() && { return std::move(arguments_); }

  private:
    std::vector<Argument> arguments_;
};

[[noreturn]] void fail(std::int32_t code, const std::string& sentence);

inline void require(bool holds, std::int32_t code, const std::string& sentence) {
    if (!holds) {
        fail(code, sentence);
    }
}

// Fails with 561112 on a product that the operator was not made for.
void require_product(std::string_view op, std::initializer_list<Product> products);

void require_results(const std::uint64_t* workspace_size, aclOpExecutor* const* executor);

// "1, 2 or 3"
std::string listed(std::initializer_list<std::int64_t> values);

// Fails unless `value` is one of `values`.
void require_one_of(
    std::string_view name, std::int64_t value, std::initializer_list<std::int64_t> values, std::int32_t code
);

} // namespace ascend_emulator
