// CANN as it is found at run time: its libraries are opened with dlopen, its functions are looked up by name.
#pragma once

#include "cann/acl_abi.h"

#include <string>
#include <vector>

namespace cann {

// Pointers to the functions of CANN, under their own names.
struct Functions {
#define REQUIRED(name) decltype(&::name) name = nullptr;
#define OPERATOR(name)                                                                                                 \
    decltype(&::name##GetWorkspaceSize) name##GetWorkspaceSize = nullptr;                                              \
    decltype(&::name) name = nullptr;
#include "cann/functions.inc"
#undef REQUIRED
#undef OPERATOR
};

// What loading found.
struct Report {
    bool usable = false;
    std::string reason;                 // one sentence: why it is not usable
    std::vector<std::string> opened;    // libraries
    std::vector<std::string> not_found; // libraries that were looked for and did not open
    std::vector<std::string> missing;   // functions
    std::string soc;
    std::string product; // "a2", "a3" or "950"; empty for a product without these operators
    int devices = 0;
};

// Opens CANN and initialises it. `where` is a library that holds everything (an emulator), a folder such as
// ASCEND_HOME_PATH, or empty: then ASCEND_HOME_PATH and the loader's own search path are tried. The libraries stay open
// until the process ends, because device memory may be freed as late as that.
const Report& load(const std::string& where);

const Report& report();

// Valid once `load` said `usable`.
const Functions& functions();

} // namespace cann
