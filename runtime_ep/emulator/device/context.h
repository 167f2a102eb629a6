// What must have happened before a call: aclInit in the process, aclrtSetDevice on the thread.
#pragma once

#include <cstdint>

namespace ascend_emulator {

void initialise();
void finalise();

// Fails with 100001 before aclInit.
void require_initialised();

// Fails with 107002 on a thread that has not set a device.
void require_device();

void set_device(std::int32_t device);
void reset_device(std::int32_t device);
std::int32_t current_device();

} // namespace ascend_emulator
