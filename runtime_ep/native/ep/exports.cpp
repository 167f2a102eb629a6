#include "ep/exports.h"

#include "cann/library.h"
#include "ep/factory.h"
#include "ep/json.h"
#include "operators/operator.h"

#include <mutex>
#include <string>

namespace {

struct Settings {
    std::string cann;
    bool device_only = false;
    bool searched = false;
};

std::mutex settings_mutex;

Settings& settings() {
    static auto& settings = *new Settings;
    return settings;
}

void search() {
    cann::load(settings().cann);
    settings().searched = true;
}

std::string strings(const std::vector<std::string>& texts) {
    std::vector<std::string> quoted;
    for (const std::string& text : texts) {
        quoted.push_back(ep::json::quoted(text));
    }
    return ep::json::listed(quoted);
}

std::string report_text() {
    const cann::Report& found = cann::report();
    std::vector<std::string> lacking;
    for (const operators::Operator* known : operators::all_operators()) {
        if (cann::functions().*(known->launch) == nullptr) {
            lacking.emplace_back(known->name);
        }
    }
    using ep::json::quoted;
    return ep::json::listed(
        {
            std::string("\"usable\": ") + (found.usable ? "true" : "false"),
            "\"reason\": " + quoted(found.reason),
            "\"opened\": " + strings(found.opened),
            "\"not_found\": " + strings(found.not_found),
            "\"missing_functions\": " + strings(found.missing),
            "\"missing_operators\": " + strings(lacking),
            "\"soc\": " + quoted(found.soc),
            "\"product\": " + quoted(found.product),
            "\"devices\": " + std::to_string(found.devices),
        },
        '{', '}'
    );
}

} // namespace

ort::OrtStatus* CreateEpFactories(
    const char*, const ort::OrtApiBase* base, const ort::OrtLogger*, ort::OrtEpFactory** factories, std::size_t most,
    std::size_t* count
) {
    *count = 0;
    return ort::guarded([&] {
        ort::attach(*base);
        if (most < 1) {
            throw ort::Failure(ort::ORT_INVALID_ARGUMENT, "the runtime has no room for the factory");
        }
        const std::lock_guard lock(settings_mutex);
        search();
        factories[0] = new ep::Factory(settings().device_only);
        *count = 1;
    });
}

ort::OrtStatus* ReleaseEpFactory(ort::OrtEpFactory* factory) {
    delete static_cast<ep::Factory*>(factory);
    return nullptr;
}

void ascend_ep_configure(const char* cann, bool device_only) {
    const std::lock_guard lock(settings_mutex);
    settings() = {cann == nullptr ? "" : cann, device_only, false};
}

const char* ascend_ep_report() {
    static auto& text = *new std::string;
    const std::lock_guard lock(settings_mutex);
    if (!settings().searched) {
        search();
    }
    text = report_text();
    return text.c_str();
}
