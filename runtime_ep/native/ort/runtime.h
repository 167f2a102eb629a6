// The runtime that loaded the library: its tables, and its statuses as exceptions.
#pragma once

#include "ort/api_tables.h"

#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace ort {

struct Runtime {
    const OrtApi* api = nullptr;
    const OrtEpApi* ep = nullptr;
    std::uint32_t version = 0; // goes into every `ort_version_supported`
};

// Set once, when the library is registered.
extern Runtime runtime;

inline const OrtApi& api() {
    return *runtime.api;
}
inline const OrtEpApi& ep_api() {
    return *runtime.ep;
}

// Takes the newest tables that both sides know. Throws Failure for a runtime older than 1.24.
void attach(const OrtApiBase& base);

// A failure that the runtime reported, or that it is to be told of.
class Failure : public std::runtime_error {
  public:
    Failure(OrtErrorCode code, const std::string& sentence) : std::runtime_error(sentence), code_(code) {}
    OrtErrorCode code() const { return code_; }

  private:
    OrtErrorCode code_;
};

// Throws the failure that `status` holds, and releases it.
void check(OrtStatus* status);

OrtStatus* failed(OrtErrorCode code, const char* sentence) noexcept;

// Runs a callback of the runtime. No exception may cross into the runtime, and ORT_EP_FAIL is never among the codes:
// on it Python would move the session to the CPU without a word.
template<typename Body>
OrtStatus* guarded(Body&& body) noexcept {
    try {
        std::forward<Body>(body)();
        return nullptr;
    } catch (const Failure& failure) {
        return failed(failure.code(), failure.what());
    } catch (const std::bad_alloc&) {
        return failed(ORT_FAIL, "the host has no memory left");
    } catch (const std::exception& error) {
        return failed(ORT_FAIL, error.what());
    }
}

// The pairs of an OrtKeyValuePairs that this side owns.
class KeyValuePairs {
  public:
    KeyValuePairs() { api().CreateKeyValuePairs(&pairs_); }
    explicit KeyValuePairs(OrtKeyValuePairs* owned) : pairs_(owned) {}
    KeyValuePairs(const KeyValuePairs&) = delete;
    KeyValuePairs& operator=(const KeyValuePairs&) = delete;
    ~KeyValuePairs() { api().ReleaseKeyValuePairs(pairs_); }

    void add(const std::string& key, const std::string& value) {
        api().AddKeyValuePair(pairs_, key.c_str(), value.c_str());
    }
    const OrtKeyValuePairs* get() const { return pairs_; }

  private:
    OrtKeyValuePairs* pairs_ = nullptr;
};

} // namespace ort
