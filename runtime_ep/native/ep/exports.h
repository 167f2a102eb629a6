// What the library exports: the two functions that ONNX Runtime looks for, and those that the Python side calls.
#pragma once

#include "ort/abi.h"

#include <cstddef>

#define ASCEND_EP_EXPORT __attribute__((visibility("default")))

extern "C" {

ASCEND_EP_EXPORT ort::OrtStatus* CreateEpFactories(
    const char* registration_name, const ort::OrtApiBase* base, const ort::OrtLogger* logger,
    ort::OrtEpFactory** factories, std::size_t most, std::size_t* count
);
ASCEND_EP_EXPORT ort::OrtStatus* ReleaseEpFactory(ort::OrtEpFactory* factory);

// Settings of the next registration. `cann` is a library, a folder or empty, as `cann::load` takes it.
ASCEND_EP_EXPORT void ascend_ep_configure(const char* cann, bool device_only);

// What the last search for CANN found, as JSON; searches for it if there was no registration yet. Valid until the next
// call.
ASCEND_EP_EXPORT const char* ascend_ep_report();
}
