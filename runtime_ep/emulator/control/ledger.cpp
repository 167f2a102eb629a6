// The ledger that tests read.
#include "aclnn/handles.h"
#include "ascend_emulator.h"
#include "control/misuse.h"
#include "device/host_memory.h"
#include "device/memory.h"
#include "device/stream.h"

#include <string_view>

using namespace ascend_emulator;

std::int64_t ascend_emulator_live(const char* kind) {
    const std::string_view name = kind == nullptr ? "(null)" : kind;
    if (name == "allocations") {
        return DeviceMemory::instance().live_allocations();
    }
    if (name == "device_bytes") {
        return DeviceMemory::instance().live_bytes();
    }
    if (name == "host_allocations") {
        return HostMemory::instance().live();
    }
    if (name == "tensors") {
        return tensors().size();
    }
    if (name == "int_arrays") {
        return int_arrays().size();
    }
    if (name == "executors") {
        return executors().size();
    }
    if (name == "streams") {
        return streams().size();
    }
    if (name == "events") {
        return events().size();
    }
    misuse(text("the ledger knows no kind called ", name));
}
