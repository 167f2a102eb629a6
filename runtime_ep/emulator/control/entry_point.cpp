#include "control/entry_point.h"

#include "ascend_emulator.h"
#include "control/misuse.h"

#include <cstdlib>
#include <ctime>
#include <sstream>

#include <unistd.h>

namespace ascend_emulator {
namespace {

// Entry points live in several files, whose variables are made in no particular order.
std::vector<EntryPoint*>& registered() {
    static auto& entries = *new std::vector<EntryPoint*>;
    return entries;
}

// The faults of ASCEND_EMULATOR_FAIL for `name`, FUNCTION:NTH:CODE separated by commas.
void arm_from_environment(EntryPoint& entry) {
    const char* faults = std::getenv("ASCEND_EMULATOR_FAIL");
    std::istringstream stream(faults == nullptr ? "" : faults);
    for (std::string fault; std::getline(stream, fault, ',');) {
        const auto first = fault.find(':');
        const auto second = fault.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            misuse(text("ASCEND_EMULATOR_FAIL takes FUNCTION:NTH:CODE separated by commas, got ", fault));
        }
        if (fault.compare(0, first, entry.name()) == 0) {
            entry.fail(std::strtoull(fault.c_str() + first + 1, nullptr, 10), std::atoi(fault.c_str() + second + 1));
        }
    }
}

thread_local std::string recent_error;
thread_local bool has_recent_error = false;

std::string timestamp() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    localtime_r(&now, &parts);
    char buffer[32];
    std::strftime(buffer, sizeof buffer, "%Y-%m-%d-%H:%M:%S", &parts);
    return buffer;
}

// What CANN writes looks like this: a heading that says nothing, the sentence, and the way back through the callers.
std::string report(std::string_view function, std::string_view module, std::string_view sentence) {
    std::string lines = text(module, ": Inner Error!\n", module, ": [PID: ", getpid(), "] ", timestamp(), " ");
    lines += text(sentence, "[FUNC:", function, "][FILE:ascend_emulator.cpp][LINE:1]\n");
    return lines + text("        TraceBack (most recent call last):\n       ", function, " failed.\n");
}

} // namespace

EntryPoint::EntryPoint(std::string_view name) : name_(name) {
    registered().push_back(this);
    arm_from_environment(*this);
}

std::optional<std::int32_t> EntryPoint::enter() {
    const std::uint64_t call = calls_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (!armed_.load(std::memory_order_acquire)) {
        return std::nullopt;
    }
    const std::lock_guard lock(mutex_);
    const auto fault = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& f) { return f.call == call; });
    return fault == faults_.end() ? std::nullopt : std::optional(fault->code);
}

void EntryPoint::fail(std::uint64_t nth, std::int32_t code) {
    const std::lock_guard lock(mutex_);
    faults_.push_back({calls() + nth, code});
    armed_.store(true, std::memory_order_release);
}

void EntryPoint::reset() {
    const std::lock_guard lock(mutex_);
    faults_.clear();
    armed_.store(false, std::memory_order_release);
    calls_.store(0, std::memory_order_relaxed);
}

EntryPoint* EntryPoint::find(std::string_view name) {
    for (EntryPoint* entry : registered()) {
        if (entry->name() == name) {
            return entry;
        }
    }
    return nullptr;
}

std::vector<EntryPoint*> EntryPoint::all() {
    std::vector<EntryPoint*> entries = registered();
    std::sort(entries.begin(), entries.end(), [](auto* a, auto* b) { return a->name() < b->name(); });
    return entries;
}

void set_recent_error(std::string_view function, const Failure& failure) {
    const bool argument = failure.code == ACLNN_ERR_PARAM_NULLPTR || failure.code == ACLNN_ERR_PARAM_INVALID;
    recent_error = report(function, argument ? "EZ1001" : "EZ9999", failure.sentence);
    has_recent_error = true;
}

void set_injected_error(std::string_view function, std::int32_t code) {
    set_recent_error(function, {code, text("A fault was injected into ", function, ", code ", code, ".")});
}

const char* take_recent_error() {
    if (!has_recent_error) {
        return nullptr;
    }
    // The text must outlive this call, so it moves to where the next one finds nothing.
    thread_local std::string given;
    given = std::move(recent_error);
    has_recent_error = false;
    return given.c_str();
}

namespace {

EntryPoint& known(const char* function) {
    EntryPoint* entry = function == nullptr ? nullptr : EntryPoint::find(function);
    if (entry == nullptr) {
        misuse(text("there is no function called ", function == nullptr ? "(null)" : function));
    }
    return *entry;
}

} // namespace
} // namespace ascend_emulator

using namespace ascend_emulator;

void ascend_emulator_fail(const char* function, std::uint64_t nth, std::int32_t code) {
    known(function).fail(nth, code);
}

void ascend_emulator_reset_faults() {
    for (EntryPoint* entry : EntryPoint::all()) {
        entry->reset();
    }
}

std::uint64_t ascend_emulator_calls(const char* function) {
    return known(function).calls();
}

const char* ascend_emulator_function(std::uint64_t index) {
    const auto entries = EntryPoint::all();
    return index < entries.size() ? entries[index]->name().data() : nullptr;
}
