// What needs neither ONNX Runtime nor a device: packing, shapes, messages. Each test names what it expected.
#include "cann/error.h"
#include "cann/fractal_nz.h"
#include "cann/library.h"
#include "ep/json.h"
#include "operators/tensor.h"

#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

namespace {

int failures = 0;
int passed = 0;

void expect(bool holds, const char* what) {
    if (holds) {
        ++passed;
    } else {
        ++failures;
        std::printf("failed: %s\n", what);
    }
}

void expect_equal(const std::string& got, const std::string& expected) {
    expect(got == expected, ("expected '" + expected + "', got '" + got + "'").c_str());
}

// Element (row, column) of a packed matrix, by the formula of the specification.
template<typename Element>
Element packed_at(const std::vector<Element>& packed, std::int64_t rows, std::int64_t row, std::int64_t column) {
    const std::int64_t width = cann::fractal_width(sizeof(Element));
    const std::int64_t fractal = column / width * (rows / 16) + row / 16;
    return packed[static_cast<std::size_t>(fractal * 16 * width + row % 16 * width + column % width)];
}

template<typename Element>
void test_packing(std::int64_t rows, std::int64_t columns) {
    std::vector<Element> matrix(static_cast<std::size_t>(rows * columns));
    std::iota(matrix.begin(), matrix.end(), Element{});
    std::vector<Element> packed(matrix.size());
    cann::pack_nz(matrix.data(), packed.data(), rows, columns, sizeof(Element));
    bool same = true;
    for (std::int64_t row = 0; row < rows; ++row) {
        for (std::int64_t column = 0; column < columns; ++column) {
            const Element expected = matrix[static_cast<std::size_t>(row * columns + column)];
            same = same && packed_at(packed, rows, row, column) == expected;
        }
    }
    expect(same, "a packed matrix has every element where the specification says");
}

void test_whole_fractals() {
    expect(cann::has_whole_fractals(16, 32, 1) && cann::has_whole_fractals(32, 16, 2), "whole fractals are accepted");
    expect(!cann::has_whole_fractals(16, 16, 1) && !cann::has_whole_fractals(8, 16, 2), "parts of fractals are not");
}

void test_telling_line() {
    expect_equal(
        cann::telling_line(
            "EZ9999: Inner Error!\n"
            "EZ9999: [PID: 4711] 2025-11-29-10:11:12.000.000 headNum must be at most 128, got 130[FUNC:Check]"
            "[FILE:tiling.cpp][LINE:17]\n        TraceBack (most recent call last):\n"
        ),
        "headNum must be at most 128, got 130"
    );
    expect_equal(cann::telling_line("the shape of query is wrong."), "the shape of query is wrong");
    expect_equal(cann::telling_line(""), "");
}

void test_messages() {
    expect(cann::meaning(561002).find("TILING") != std::string::npos, "561002 is known by its name");
    expect(cann::meaning(123).empty(), "an unknown code has no meaning");
    expect(cann::advice(561107).find("set_env.sh") != std::string::npos, "a missing path is answered with set_env.sh");
}

void test_shapes() {
    const operators::Shape shape{2, 3, 4};
    expect(shape.elements() == 24 && shape[-1] == 4 && shape[0] == 2, "dimensions count from both ends");
    expect(shape[3] == 0 && shape[-4] == 0, "beyond the rank there is 0");
    expect(operators::Shape{}.elements() == 1, "a scalar has one element");
    expect_equal(operators::describe(ACL_BF16, shape), "bfloat16 [2, 3, 4]");
    expect(operators::acl_type(operators::onnx_type(ACL_FLOAT8_E8M0)) == ACL_FLOAT8_E8M0, "types go there and back");
}

void test_json() {
    expect_equal(ep::json::quoted("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    expect_equal(ep::json::listed({"1", "2"}), "[1, 2]");
}

void test_cann_that_is_not_there() {
    const cann::Report& report = cann::load("/nowhere/libnothing.so");
    expect(!report.usable && report.opened.empty() && !report.missing.empty(), "a missing library is reported");
    expect(report.reason.find("no library of CANN") == 0, "and in a sentence");
}

} // namespace

int main() {
    test_packing<std::uint16_t>(32, 48);
    test_packing<std::uint8_t>(48, 64);
    test_packing<float>(16, 8);
    test_whole_fractals();
    test_telling_line();
    test_messages();
    test_shapes();
    test_json();
    test_cann_that_is_not_there();
    std::printf("%d passed, %d failed\n", passed, failures);
    return failures == 0 ? 0 : 1;
}
