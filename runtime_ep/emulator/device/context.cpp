#include "device/context.h"

#include "control/entry_point.h"
#include "control/misuse.h"
#include "control/settings.h"

#include <atomic>

namespace ascend_emulator {
namespace {

constexpr std::int32_t none = -1;

std::atomic<bool> initialised{false};
thread_local std::int32_t device_of_thread = none;

void require_valid(std::int32_t device) {
    if (device < 0 || device >= settings().devices) {
        const auto sentence = text("deviceId must be from 0 to ", settings().devices - 1, ", got ", device);
        throw Failure{ACL_ERROR_RT_INVALID_DEVICEID, sentence};
    }
}

} // namespace

void initialise() {
    if (initialised.exchange(true)) {
        throw Failure{ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before"};
    }
    reload_settings();
}

void finalise() {
    require_initialised();
    initialised.store(false);
}

void require_initialised() {
    if (!initialised.load()) {
        throw Failure{ACL_ERROR_UNINITIALIZE, "aclInit must be called first"};
    }
}

void require_device() {
    require_initialised();
    if (device_of_thread == none) {
        throw Failure{ACL_ERROR_RT_CONTEXT_NULL, "aclrtSetDevice must be called on this thread first"};
    }
}

void set_device(std::int32_t device) {
    require_initialised();
    require_valid(device);
    device_of_thread = device;
}

void reset_device(std::int32_t device) {
    require_valid(device);
    if (device_of_thread == device) {
        device_of_thread = none;
    }
}

std::int32_t current_device() {
    require_device();
    return device_of_thread;
}

} // namespace ascend_emulator
