// acl runtime: initialisation, devices, streams and events.
#include "acl_abi.h"
#include "control/entry_point.h"
#include "control/misuse.h"
#include "control/settings.h"
#include "device/context.h"
#include "device/memory.h"
#include "device/stream.h"

#include <memory>

using namespace ascend_emulator;

namespace {

template<typename Pointer>
void require_pointer(Pointer* pointer, std::string_view name) {
    if (pointer == nullptr) {
        throw Failure{ACL_ERROR_INVALID_PARAM, text(name, " must not be null")};
    }
}

void create_stream(aclrtStream* stream) {
    require_pointer(stream, "stream");
    require_device();
    *stream = streams().add(std::make_unique<Stream>());
}

void create_event(aclrtEvent* event) {
    require_pointer(event, "event");
    require_device();
    *event = events().add(std::make_unique<Event>());
}

} // namespace

aclError aclInit(const char*) {
    return guarded<"aclInit">([] { initialise(); });
}

aclError aclFinalize() {
    return guarded_release<"aclFinalize">([] { finalise(); });
}

const char* aclGetRecentErrMsg() {
    return take_recent_error();
}

aclError aclrtGetDeviceCount(std::uint32_t* count) {
    return guarded<"aclrtGetDeviceCount">([&] {
        require_pointer(count, "count");
        require_initialised();
        *count = static_cast<std::uint32_t>(settings().devices);
    });
}

aclError aclrtSetDevice(std::int32_t deviceId) {
    return guarded<"aclrtSetDevice">([&] { set_device(deviceId); });
}

aclError aclrtGetDevice(std::int32_t* deviceId) {
    return guarded<"aclrtGetDevice">([&] {
        require_pointer(deviceId, "deviceId");
        *deviceId = current_device();
    });
}

aclError aclrtResetDevice(std::int32_t deviceId) {
    return guarded_release<"aclrtResetDevice">([&] { reset_device(deviceId); });
}

aclError aclrtSynchronizeDevice() {
    return guarded<"aclrtSynchronizeDevice">([] {
        require_device();
        streams().for_each([](Stream& stream) { stream.synchronise(); });
    });
}

const char* aclrtGetSocName() {
    return guarded_pointer<"aclrtGetSocName">([] { return soc_name(settings().product); });
}

aclError aclrtCreateStream(aclrtStream* stream) {
    return guarded<"aclrtCreateStream">([&] { create_stream(stream); });
}

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, std::uint32_t, std::uint32_t) {
    return guarded<"aclrtCreateStreamWithConfig">([&] { create_stream(stream); });
}

aclError aclrtDestroyStream(aclrtStream stream) {
    return guarded_release<"aclrtDestroyStream">([&] {
        require_pointer(stream, "stream");
        streams().remove(stream, "aclrtDestroyStream");
    });
}

aclError aclrtSynchronizeStream(aclrtStream stream) {
    return guarded<"aclrtSynchronizeStream">([&] {
        require_pointer(stream, "stream");
        streams().get(stream, "aclrtSynchronizeStream").synchronise();
    });
}

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, std::int32_t milliseconds) {
    return guarded<"aclrtSynchronizeStreamWithTimeout">([&] {
        require_pointer(stream, "stream");
        Stream& found = streams().get(stream, "aclrtSynchronizeStreamWithTimeout");
        if (milliseconds < 0) {
            found.synchronise();
        } else if (!found.synchronise(std::chrono::milliseconds(milliseconds))) {
            const auto sentence = text("the stream was not done after ", milliseconds, " ms");
            throw Failure{ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, sentence};
        }
    });
}

aclError aclrtCreateEvent(aclrtEvent* event) {
    return guarded<"aclrtCreateEvent">([&] { create_event(event); });
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, std::uint32_t) {
    return guarded<"aclrtCreateEventWithFlag">([&] { create_event(event); });
}

aclError aclrtDestroyEvent(aclrtEvent event) {
    return guarded_release<"aclrtDestroyEvent">([&] {
        require_pointer(event, "event");
        events().remove(event, "aclrtDestroyEvent");
    });
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
    return guarded<"aclrtRecordEvent">([&] {
        require_pointer(event, "event");
        require_pointer(stream, "stream");
        events().get(event, "aclrtRecordEvent").record(streams().get(stream, "aclrtRecordEvent"));
    });
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
    return guarded<"aclrtStreamWaitEvent">([&] {
        require_pointer(event, "event");
        require_pointer(stream, "stream");
        events().get(event, "aclrtStreamWaitEvent").block(streams().get(stream, "aclrtStreamWaitEvent"));
    });
}

aclError aclrtSynchronizeEvent(aclrtEvent event) {
    return guarded<"aclrtSynchronizeEvent">([&] {
        require_pointer(event, "event");
        events().get(event, "aclrtSynchronizeEvent").synchronise();
    });
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
    return guarded<"aclrtQueryEventStatus">([&] {
        require_pointer(event, "event");
        require_pointer(status, "status");
        const bool complete = events().get(event, "aclrtQueryEventStatus").complete();
        *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    });
}
