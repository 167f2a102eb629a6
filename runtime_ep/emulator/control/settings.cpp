#include "control/settings.h"

#include "control/misuse.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <vector>

namespace ascend_emulator {
namespace {

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

Product parse_product(std::string_view name) {
    if (name.empty() || name == "a2") {
        return Product::A2;
    }
    if (name == "a3") {
        return Product::A3;
    }
    if (name == "950") {
        return Product::Ascend950;
    }
    misuse(text("ASCEND_EMULATOR_PRODUCT must be a2, a3 or 950, got ", name));
}

void parse_relaxed(const std::string& names, Settings& settings) {
    std::istringstream stream(names);
    for (std::string name; std::getline(stream, name, ',');) {
        if (name == "hidden") {
            settings.relax_hidden = true;
        } else if (name == "head_dim") {
            settings.relax_head_dim = true;
        } else if (name == "rank") {
            settings.relax_rank = true;
        } else {
            misuse(text("ASCEND_EMULATOR_RELAX takes hidden, head_dim and rank, got ", name));
        }
    }
}

// Settings are replaced, never changed or freed, because kernels may be reading the old ones.
std::atomic<const Settings*> current{nullptr};

} // namespace

Settings Settings::from_environment() {
    Settings settings;
    settings.product = parse_product(environment("ASCEND_EMULATOR_PRODUCT"));
    parse_relaxed(environment("ASCEND_EMULATOR_RELAX"), settings);
    settings.devices = static_cast<std::int32_t>(environment_number("ASCEND_EMULATOR_DEVICES", 1));
    settings.delay_us = static_cast<std::uint32_t>(environment_number("ASCEND_EMULATOR_DELAY_US", 0));
    settings.noop = environment_number("ASCEND_EMULATOR_NOOP", 0) != 0;
    return settings;
}

const Settings& settings() {
    const Settings* found = current.load(std::memory_order_acquire);
    if (found == nullptr) {
        reload_settings();
        found = current.load(std::memory_order_acquire);
    }
    return *found;
}

void reload_settings() {
    static std::mutex mutex;
    static auto& all = *new std::vector<std::unique_ptr<const Settings>>;
    const std::lock_guard lock(mutex);
    all.push_back(std::make_unique<const Settings>(Settings::from_environment()));
    current.store(all.back().get(), std::memory_order_release);
}

const char* soc_name(Product product) {
    switch (product) {
    case Product::A2:
        return "Ascend910B1";
    case Product::A3:
        return "Ascend910_9391";
    case Product::Ascend950:
        return "Ascend950PR_9589";
    }
    return "";
}

const char* product_name(Product product) {
    switch (product) {
    case Product::A2:
        return "a2";
    case Product::A3:
        return "a3";
    case Product::Ascend950:
        return "950";
    }
    return "";
}

std::uint64_t environment_number(const char* name, std::uint64_t fallback) {
    const std::string value = environment(name);
    if (value.empty()) {
        return fallback;
    }
    char* end = nullptr;
    const std::uint64_t number = std::strtoull(value.c_str(), &end, 10);
    if (*end != '\0') {
        misuse(text(name, " must be a number, got ", value));
    }
    return number;
}

} // namespace ascend_emulator
