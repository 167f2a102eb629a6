#include "ort/runtime.h"

#include <algorithm>
#include <cstdlib>

namespace ort {

Runtime runtime;

namespace {

constexpr std::uint32_t OLDEST_VERSION = 24;

// "1.32.0" is version 32 of the API.
std::uint32_t minor_version(const char* text) {
    const std::string version = text == nullptr ? "" : text;
    const auto dot = version.find('.');
    return dot == std::string::npos ? 0 : static_cast<std::uint32_t>(std::atoi(version.c_str() + dot + 1));
}

} // namespace

void attach(const OrtApiBase& base) {
    const std::uint32_t version = std::min(API_VERSION, minor_version(base.GetVersionString()));
    // Asking for a version that the runtime lacks makes it print a line, so only those are asked for that it has.
    const OrtApi* api = version < OLDEST_VERSION ? nullptr : base.GetApi(version);
    if (api == nullptr) {
        // Without a table there is nothing to make a status with: the oldest one has the functions for that.
        api = base.GetApi(std::max(version, 1U));
        runtime = {api, nullptr, version};
        throw Failure(
            ORT_NOT_IMPLEMENTED,
            "onnxruntime 1." + std::to_string(OLDEST_VERSION) + " or newer is needed, got " + base.GetVersionString()
        );
    }
    runtime = {api, api->GetEpApi(), version};
}

void check(OrtStatus* status) {
    if (status == nullptr) {
        return;
    }
    const Failure failure(api().GetErrorCode(status), api().GetErrorMessage(status));
    api().ReleaseStatus(status);
    throw failure;
}

OrtStatus* failed(OrtErrorCode code, const char* sentence) noexcept {
    return api().CreateStatus(code, sentence);
}

} // namespace ort
