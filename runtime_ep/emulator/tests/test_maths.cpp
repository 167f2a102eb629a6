// Conversions, quantisation, exact products and the sharing of work.
#include "check.h"
#include "maths/convert.h"
#include "maths/parallel.h"
#include "maths/quantise.h"
#include "maths/rows.h"
#include "maths/weight.h"

#include <atomic>
#include <cmath>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

using namespace ascend_emulator;

namespace {

// Every number of a 16-bit type survives the way to float32 and back.
template<typename From, typename To>
void check_round_trip(From from, To to) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = from(static_cast<std::uint16_t>(bits));
        if (std::isnan(value)) {
            CHECK(std::isnan(from(to(value))));
        } else {
            CHECK(to(value) == bits);
        }
    }
}

// A number between two neighbours goes to the nearer one, and from the middle to the even one.
template<typename From, typename To>
void check_rounding(From from, To to, std::uint32_t infinity) {
    for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
        const double low = from(static_cast<std::uint16_t>(bits));
        const double high = from(static_cast<std::uint16_t>(bits + 1));
        const auto middle = static_cast<float>((low + high) / 2);
        CHECK(to(middle) == (bits % 2 == 0 ? bits : bits + 1));
        CHECK(to(std::nextafter(middle, 0.0f)) == bits);
        CHECK(to(std::nextafter(middle, INFINITY)) == bits + 1);
    }
    CHECK(to(INFINITY) == infinity);
}

void check_conversions() {
    check_round_trip(from_bfloat16, to_bfloat16);
    check_round_trip(from_float16, to_float16);
    check_rounding(from_bfloat16, to_bfloat16, 0x7F80);
    check_rounding(from_float16, to_float16, 0x7C00);
    CHECK(to_float16(65520.0f) == 0x7C00 && to_float16(65519.0f) == 0x7BFF);
}

void check_float8() {
    CHECK(to_float8(0.0f, float8_e4m3fn) == 0x00 && to_float8(-0.0f, float8_e4m3fn) == 0x80);
    CHECK(to_float8(1.0f, float8_e4m3fn) == 0x38 && to_float8(1.0f, float8_e5m2) == 0x3C);
    CHECK(to_float8(1000.0f, float8_e4m3fn) == 0x7E && to_float8(-1e9f, float8_e5m2) == 0xFB);
    CHECK(to_float8(0x1p-9f, float8_e4m3fn) == 0x01 && to_float8(0x1p-10f, float8_e4m3fn) == 0x00);
    CHECK(to_float8(1.0625f, float8_e4m3fn) == 0x38 && to_float8(1.1875f, float8_e4m3fn) == 0x3A);
    CHECK(to_float8(1.96875f, float8_e4m3fn) == 0x40);
}

void check_int8() {
    CHECK(to_int8(0.5f) == 0 && to_int8(1.5f) == 2 && to_int8(-2.5f) == -2);
    CHECK(to_int8(200.0f) == 127 && to_int8(-INFINITY) == -128 && to_int8(NAN) == 0);
    std::vector<float> row(37, 0.0f);
    std::vector<std::int8_t> integers(37, 1);
    CHECK(quantise_row(row.data(), 37, integers.data()) == 0.0f && integers[36] == 0);
    row[36] = -254.0f;
    row[3] = 127.0f;
    CHECK(quantise_row(row.data(), 37, integers.data()) == 2.0f && integers[36] == -127 && integers[3] == 64);
}

// Sums that float32 does not hold, in every storage of a weight.
void check_exact_products() {
    constexpr std::int64_t rows = 3;
    constexpr std::int64_t k = 2048 + 32;
    constexpr std::int64_t n = 96;
    std::mt19937 random(7);
    const auto extreme = [&] {
        return std::int8_t(random() % 4 == 0 ? random() : random() % 8 == 0 ? -128 : 127);
    };
    std::vector<std::int8_t> weight(k * n);
    std::vector<float> x(rows * k);
    for (auto& value : weight) {
        value = extreme();
    }
    for (auto& value : x) {
        value = extreme();
    }
    const auto index_of = [](Weight::Storage storage, std::int64_t row, std::int64_t column) {
        switch (storage) {
        case Weight::Storage::FractalsOfKN:
            return (column / 32 * k + row) * 32 + column % 32;
        case Weight::Storage::FractalsOfNK:
            return (row / 32 * n + column) * 32 + row % 32;
        case Weight::Storage::RowsOfKN:
            return row * n + column;
        case Weight::Storage::RowsOfNK:
            return column * k + row;
        }
        return std::int64_t{-1};
    };
    for (const auto storage :
         {Weight::Storage::FractalsOfKN, Weight::Storage::FractalsOfNK, Weight::Storage::RowsOfKN,
          Weight::Storage::RowsOfNK}) {
        std::vector<std::int32_t> product(rows * n);
        const auto* bytes = reinterpret_cast<const std::byte*>(weight.data());
        project_exactly(x.data(), rows, Weight(bytes, ACL_INT8, storage, k, n), product.data());
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t column = 0; column < n; ++column) {
                std::int64_t sum = 0;
                for (std::int64_t i = 0; i < k; ++i) {
                    sum +=
                        std::int64_t(x[std::size_t(row * k + i)]) * weight[std::size_t(index_of(storage, i, column))];
                }
                CHECK(product[std::size_t(row * n + column)] == sum);
            }
        }
    }
}

void check_rotation() {
    const std::vector<float> interleaved = {1, 10, 2, 20, 3, 30};
    std::vector<float> halves(6);
    deinterleave(interleaved.data(), 6, halves.data());
    CHECK((halves == std::vector<float>{1, 2, 3, 10, 20, 30}));
    const std::vector<float> cos = {1, 0, 0, 2, 0, 0};
    const std::vector<float> sin = {0, 1, 0, 0, 0, 3};
    std::vector<float> rotated(6);
    rotate(halves.data(), 6, cos.data(), sin.data(), rotated.data());
    CHECK((rotated == std::vector<float>{1, -20, 0, 20, 0, 9}));
}

void check_parallel_loops() {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([] {
            for (int round = 0; round < 50; ++round) {
                std::vector<int> seen(101, 0);
                parallel_for(101, 8, [&](std::int64_t first, std::int64_t last) {
                    for (std::int64_t i = first; i < last; ++i) {
                        ++seen[std::size_t(i)];
                    }
                });
                for (const int times : seen) {
                    CHECK(times == 1);
                }
            }
        });
    }
    for (auto& thread : threads) {
        thread.join();
    }
    bool thrown = false;
    try {
        parallel_for(100, 1, [](std::int64_t first, std::int64_t) {
            if (first % 10 == 3) {
                throw std::runtime_error("a piece failed");
            }
        });
    } catch (const std::runtime_error&) {
        thrown = true;
    }
    CHECK(thrown);
}

} // namespace

int main() {
    check_conversions();
    check_float8();
    check_int8();
    check_exact_products();
    check_rotation();
    check_parallel_loops();
}
