#include "cann/library.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include <dlfcn.h>

namespace cann {
namespace {

namespace fs = std::filesystem;

// Never destroyed: see `load`.
Functions& table() {
    static auto* functions = new Functions;
    return *functions;
}

Report& found() {
    static auto* report = new Report;
    return *report;
}

std::string environment(const char* name) {
    const char* value = std::getenv(name);
    return value == nullptr ? "" : value;
}

// Opened libraries, in the order in which functions are looked up.
class Libraries {
  public:
    explicit Libraries(Report& report) : report_(report) {}

    void open(const std::string& name) {
        if (void* handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL)) {
            handles_.push_back(handle);
            report_.opened.push_back(name);
        } else {
            const char* why = dlerror();
            report_.not_found.push_back(why == nullptr ? name : why);
        }
    }

    template<typename Function>
    bool find(const char* name, Function& function) const {
        for (void* handle : handles_) {
            if (void* symbol = dlsym(handle, name)) {
                function = reinterpret_cast<Function>(symbol);
                return true;
            }
        }
        return false;
    }

  private:
    Report& report_;
    std::vector<void*> handles_;
};

// The libraries of a folder that hold aclnn operators, split ones first, because an undivided libopapi may be a stub.
std::vector<std::string> operator_libraries(const fs::path& folder) {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : fs::directory_iterator(folder, ignored)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("libopapi_") && name.ends_with(".so") && name != "libopapi_transformer.so") {
            names.push_back(name);
        }
    }
    std::sort(names.begin(), names.end());
    names.insert(names.begin(), "libopapi_transformer.so");
    names.emplace_back("libopapi.so");
    return names;
}

void open_folder(Libraries& libraries, const std::string& home) {
    const fs::path folder = home.empty() ? fs::path() : fs::path(home) / "lib64";
    std::vector<std::string> names = operator_libraries(folder);
    names.insert(names.end(), {"libnnopbase.so", "libascendcl.so"});
    for (const std::string& name : names) {
        const fs::path file = folder / name;
        libraries.open(!folder.empty() && fs::exists(file) ? file.string() : name);
    }
}

// "Ascend910B3" is an A2, "Ascend910_9382" an A3, "Ascend950PR_9589" a 950.
std::string product_of(const std::string& soc) {
    if (soc.starts_with("Ascend910B")) {
        return "a2";
    }
    if (soc.starts_with("Ascend910_93")) {
        return "a3";
    }
    return soc.starts_with("Ascend950") ? "950" : "";
}

std::string why_unusable(Report& report, Functions& functions) {
    if (!report.missing.empty()) {
        return report.opened.empty() ? "no library of CANN was found; set ASCEND_HOME_PATH or source its set_env.sh"
                                     : "CANN lacks the function " + report.missing.front();
    }
    // Somebody else in the process, torch_npu for example, may have initialised it before.
    if (const aclError code = functions.aclInit(nullptr); code != ACL_SUCCESS && code != ACL_ERROR_REPEAT_INITIALIZE) {
        return "aclInit failed with " + std::to_string(code) + "; is the driver installed and the device visible?";
    }
    std::uint32_t count = 0;
    if (const aclError code = functions.aclrtGetDeviceCount(&count); code != ACL_SUCCESS) {
        return "aclrtGetDeviceCount failed with " + std::to_string(code);
    }
    report.devices = static_cast<int>(count);
    const char* soc = functions.aclrtGetSocName();
    report.soc = soc == nullptr ? "" : soc;
    report.product = product_of(report.soc);
    if (count == 0) {
        return "CANN sees no device";
    }
    return report.product.empty() ? "the product " + report.soc + " has none of these operators" : "";
}

} // namespace

const Report& load(const std::string& where) {
    Report report;
    Functions functions;
    Libraries libraries(report);
    if (!where.empty() && !fs::is_directory(where)) {
        libraries.open(where);
    } else {
        open_folder(libraries, where.empty() ? environment("ASCEND_HOME_PATH") : where);
    }
#define REQUIRED(name)                                                                                                 \
    if (!libraries.find(#name, functions.name)) {                                                                      \
        report.missing.push_back(#name);                                                                               \
    }
#define OPERATOR(name)                                                                                                 \
    libraries.find(#name "GetWorkspaceSize", functions.name##GetWorkspaceSize);                                        \
    libraries.find(#name, functions.name);
#include "cann/functions.inc"
#undef REQUIRED
#undef OPERATOR
    report.reason = why_unusable(report, functions);
    report.usable = report.reason.empty();
    table() = functions;
    found() = report;
    return found();
}

const Report& report() {
    return found();
}

const Functions& functions() {
    return table();
}

} // namespace cann
