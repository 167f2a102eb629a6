// Every function of the ABI begins here: calls are counted, faults strike, and failures become a code with a message.
#pragma once

#include "acl_abi.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ascend_emulator {

// Thrown by the implementation of a function that fails as documented.
struct Failure {
    std::int32_t code;
    std::string sentence;
};

// One name that calls are counted and faults are injected under.
class EntryPoint {
  public:
    explicit EntryPoint(std::string_view name);

    std::string_view name() const { return name_; }

    // Counts a call; the code to fail with if a fault strikes.
    std::optional<std::int32_t> enter();

    void fail(std::uint64_t nth, std::int32_t code);
    void reset();
    std::uint64_t calls() const { return calls_.load(std::memory_order_relaxed); }

    static EntryPoint* find(std::string_view name);
    static std::vector<EntryPoint*> all();

  private:
    struct Fault {
        std::uint64_t call;
        std::int32_t code;
    };

    const std::string_view name_;
    std::atomic<std::uint64_t> calls_{0};
    std::atomic<bool> armed_{false};
    std::mutex mutex_;
    std::vector<Fault> faults_;
};

// A string that a template can be instantiated with.
template<std::size_t Size>
struct Name {
    char text[Size];
    consteval Name(const char (&literal)[Size]) { std::copy_n(literal, Size, text); }
    constexpr std::string_view view() const { return {text, Size - 1}; }
};

template<Name name>
inline EntryPoint entry_point{name.view()};

// The message that aclGetRecentErrMsg gives next on this thread.
void set_recent_error(std::string_view function, const Failure& failure);
void set_injected_error(std::string_view function, std::int32_t code);
const char* take_recent_error();

// Calls `body` as the function `name`. A fault that strikes replaces the call; `on_fault` does what a failed call has
// done all the same.
template<Name name, typename Body, typename OnFault>
std::int32_t guarded(Body&& body, OnFault&& on_fault) {
    if (const auto code = entry_point<name>.enter()) {
        on_fault();
        set_injected_error(name.view(), *code);
        return *code;
    }
    try {
        body();
        return ACL_SUCCESS;
    } catch (const Failure& failure) {
        set_recent_error(name.view(), failure);
        return failure.code;
    }
}

template<Name name, typename Body>
std::int32_t guarded(Body&& body) {
    return guarded<name>(std::forward<Body>(body), [] {});
}

// Like `guarded`, for a function that releases something: that happens even where a fault strikes, because nobody could
// release it again.
template<Name name, typename Body>
std::int32_t guarded_release(Body&& body) {
    return guarded<name>(body, body);
}

// Like `guarded`, for a function that returns a pointer and null on failure.
template<Name name, typename Body>
auto guarded_pointer(Body&& body) -> decltype(body()) {
    decltype(body()) result = nullptr;
    guarded<name>([&] { result = body(); });
    return result;
}

} // namespace ascend_emulator
