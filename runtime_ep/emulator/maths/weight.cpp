#include "maths/weight.h"

#include "control/misuse.h"
#include "maths/convert.h"
#include "maths/parallel.h"

#include <algorithm>
#include <vector>

namespace ascend_emulator {
namespace {

// Columns that one thread multiplies at a time; a whole number of fractals.
constexpr std::int64_t panel_width = 64;

// How many products of two int8 numbers float32 adds exactly: 2^24 / 2^14.
constexpr std::int64_t exact_terms = 1024;

struct FromInt8 {
    using Stored = std::int8_t;
    static constexpr std::int64_t width = 32;
    static float convert(Stored value) { return float(value); }
};
struct FromBfloat16 {
    using Stored = std::uint16_t;
    static constexpr std::int64_t width = 16;
    static float convert(Stored value) { return from_bfloat16(value); }
};
struct FromFloat16 {
    using Stored = std::uint16_t;
    static constexpr std::int64_t width = 16;
    static float convert(Stored value) { return from_float16(value); }
};

// Lines of constant width, which the compiler turns into vectors.
template<typename Element>
void copy_line(const typename Element::Stored* source, float* target) {
    for (std::int64_t i = 0; i < Element::width; ++i) {
        target[i] = Element::convert(source[i]);
    }
}

// Fractals of (k, n): each block of w0 columns is a matrix (k, w0).
template<typename Element>
void columns_of_kn(const std::byte* data, std::int64_t k, std::int64_t first, std::int64_t count, float* panel) {
    const auto* stored = reinterpret_cast<const typename Element::Stored*>(data);
    for (std::int64_t column = first; column < first + count; column += Element::width) {
        const auto* block = stored + column * k;
        for (std::int64_t row = 0; row < k; ++row) {
            copy_line<Element>(block + row * Element::width, panel + row * count + (column - first));
        }
    }
}

// Fractals of (n, k): each block of w0 rows of (k, n) is a matrix (n, w0).
template<typename Element>
void columns_of_nk(
    const std::byte* data, std::int64_t k, std::int64_t n, std::int64_t first, std::int64_t count, float* panel
) {
    const auto* stored = reinterpret_cast<const typename Element::Stored*>(data);
    for (std::int64_t row = 0; row < k; row += Element::width) {
        const auto* block = stored + row * n;
        for (std::int64_t column = first; column < first + count; ++column) {
            copy_line<Element>(block + column * Element::width, panel + (column - first) * k + row);
        }
    }
}

template<typename Element>
void fractal_columns(
    const std::byte* data, Weight::Storage storage, std::int64_t k, std::int64_t n, std::int64_t first,
    std::int64_t count, float* panel
) {
    if (storage == Weight::Storage::FractalsOfKN) {
        columns_of_kn<Element>(data, k, first, count, panel);
    } else {
        columns_of_nk<Element>(data, k, n, first, count, panel);
    }
}

// Calls `body(first, count, panel)` for panels of columns, each of which is read once.
template<typename Body>
void for_each_panel(const Weight& weight, Body body) {
    parallel_for(weight.n(), panel_width, [&](std::int64_t first, std::int64_t last) {
        std::vector<float> panel(std::size_t(weight.k() * (last - first)));
        weight.columns(first, last - first, panel.data());
        body(first, last - first, panel.data());
    });
}

} // namespace

Right Weight::form() const {
    const bool transposed = storage_ == Storage::FractalsOfNK || storage_ == Storage::RowsOfNK;
    return transposed ? Right::Transposed : Right::AsIs;
}

void Weight::columns(std::int64_t first, std::int64_t count, float* panel) const {
    const auto size = std::int64_t(element_size(type_));
    if (storage_ == Storage::RowsOfKN) {
        for (std::int64_t row = 0; row < k_; ++row) {
            widen(data_ + (row * n_ + first) * size, type_, count, panel + row * count);
        }
    } else if (storage_ == Storage::RowsOfNK) {
        widen(data_ + first * k_ * size, type_, count * k_, panel);
    } else if (type_ == ACL_INT8) {
        fractal_columns<FromInt8>(data_, storage_, k_, n_, first, count, panel);
    } else if (type_ == ACL_BF16) {
        fractal_columns<FromBfloat16>(data_, storage_, k_, n_, first, count, panel);
    } else if (type_ == ACL_FLOAT16) {
        fractal_columns<FromFloat16>(data_, storage_, k_, n_, first, count, panel);
    } else {
        misuse(text("no weight of the type ", type_name(type_)));
    }
}

void project(const float* x, std::int64_t rows, const Weight& weight, float* product) {
    const std::int64_t k = weight.k();
    for_each_panel(weight, [&](std::int64_t first, std::int64_t count, const float* panel) {
        const std::int64_t stride = weight.form() == Right::Transposed ? k : count;
        multiply(rows, count, k, {x, k}, {panel, stride}, weight.form(), product + first, weight.n());
    });
}

void project_exactly(const float* x, std::int64_t rows, const Weight& weight, std::int32_t* product) {
    const std::int64_t k = weight.k();
    const bool transposed = weight.form() == Right::Transposed;
    for_each_panel(weight, [&](std::int64_t first, std::int64_t count, const float* panel) {
        std::vector<float> partial(std::size_t(rows * count));
        for (std::int64_t row = 0; row < rows; ++row) {
            std::fill_n(product + row * weight.n() + first, count, 0);
        }
        for (std::int64_t begin = 0; begin < k; begin += exact_terms) {
            const std::int64_t terms = std::min(exact_terms, k - begin);
            const Matrix right{transposed ? panel + begin : panel + begin * count, transposed ? k : count};
            multiply(rows, count, terms, {x + begin, k}, right, weight.form(), partial.data(), count);
            for (std::int64_t row = 0; row < rows; ++row) {
                std::int32_t* sums = product + row * weight.n() + first;
                for (std::int64_t column = 0; column < count; ++column) {
                    sums[column] += std::int32_t(partial[std::size_t(row * count + column)]);
                }
            }
        }
    });
}

} // namespace ascend_emulator
