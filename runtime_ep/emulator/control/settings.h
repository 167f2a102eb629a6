// What the environment says about the emulated device.
#pragma once

#include <cstdint>
#include <string>

namespace ascend_emulator {

enum class Product { A2, A3, Ascend950 };

struct Settings {
    Product product = Product::A2;
    bool relax_hidden = false;
    bool relax_head_dim = false;
    bool relax_rank = false;
    std::int32_t devices = 1;
    std::uint32_t delay_us = 0;
    bool noop = false;

    // The settings of the environment; an unknown value is a misuse.
    static Settings from_environment();
};

// The settings in force: those of the last aclInit, or the environment's before the first one.
const Settings& settings();
void reload_settings();

const char* soc_name(Product product);
const char* product_name(Product product);

// The value of an environment variable as a number, or `fallback` where it is unset or empty.
std::uint64_t environment_number(const char* name, std::uint64_t fallback);

} // namespace ascend_emulator
