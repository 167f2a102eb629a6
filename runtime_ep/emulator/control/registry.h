// The ledger: which objects of each kind are alive. A handle that is not in it is a misuse.
#pragma once

#include "control/misuse.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace ascend_emulator {

// The live objects of one kind, owned until they are removed; `kind` is their name in messages.
template<typename Object>
class Registry {
  public:
    explicit Registry(std::string_view kind) : kind_(kind) {}

    Object* add(std::unique_ptr<Object> object) {
        const std::lock_guard lock(mutex_);
        Object* handle = object.get();
        live_.emplace(handle, std::move(object));
        return handle;
    }

    // The object of a handle.
    Object& get(const void* handle, std::string_view function) const {
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(handle);
        if (found == live_.end()) {
            unknown(handle, function);
        }
        return *found->second;
    }

    bool contains(const void* handle) const {
        const std::lock_guard lock(mutex_);
        return live_.contains(handle);
    }

    std::unique_ptr<Object> remove(const void* handle, std::string_view function) {
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(handle);
        if (found == live_.end()) {
            unknown(handle, function);
        }
        std::unique_ptr<Object> object = std::move(found->second);
        live_.erase(found);
        return object;
    }

    template<typename Body>
    void for_each(Body body) const {
        const std::lock_guard lock(mutex_);
        for (const auto& [handle, object] : live_) {
            body(*object);
        }
    }

    std::int64_t size() const {
        const std::lock_guard lock(mutex_);
        return static_cast<std::int64_t>(live_.size());
    }

  private:
    [[noreturn]] void unknown(const void* handle, std::string_view function) const {
        misuse(text(
            function, " was given ", handle, ", which is no live ", kind_, ": it was released before, or never created"
        ));
    }

    const std::string_view kind_;
    mutable std::mutex mutex_;
    std::unordered_map<const void*, std::unique_ptr<Object>> live_;
};

} // namespace ascend_emulator
