#include "cann/error.h"

#include "cann/library.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string_view>
#include <utility>

namespace cann {
namespace {

constexpr std::array<std::pair<std::int32_t, const char*>, 19> MEANINGS{{
    {ACL_ERROR_INVALID_PARAM, "invalid argument"},
    {ACL_ERROR_UNINITIALIZE, "not initialised"},
    {ACL_ERROR_RT_PARAM_INVALID, "invalid argument of the runtime"},
    {ACL_ERROR_RT_INVALID_DEVICEID, "no such device"},
    {ACL_ERROR_RT_CONTEXT_NULL, "no device is set on this thread"},
    {ACL_ERROR_RT_MEMORY_ALLOCATION, "no device memory left"},
    {ACL_ERROR_RT_AICORE_EXCEPTION, "a kernel failed on the device"},
    {ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "the device did not answer in time"},
    {ACLNN_ERR_PARAM_NULLPTR, "ACLNN_ERR_PARAM_NULLPTR, a required argument is null"},
    {ACLNN_ERR_PARAM_INVALID, "ACLNN_ERR_PARAM_INVALID, a type or shape is not supported"},
    {ACLNN_ERR_RUNTIME_ERROR, "ACLNN_ERR_RUNTIME_ERROR, the runtime failed inside"},
    {ACLNN_ERR_INNER, "ACLNN_ERR_INNER"},
    {ACLNN_ERR_INNER_INFERSHAPE_ERROR, "ACLNN_ERR_INNER_INFERSHAPE_ERROR, shapes do not fit each other"},
    {ACLNN_ERR_INNER_TILING_ERROR, "ACLNN_ERR_INNER_TILING_ERROR, a size or attribute is out of bounds"},
    {ACLNN_ERR_INNER_FIND_KERNEL_ERROR, "ACLNN_ERR_INNER_FIND_KERNEL_ERROR"},
    {ACLNN_ERR_INNER_CREATE_EXECUTOR, "ACLNN_ERR_INNER_CREATE_EXECUTOR"},
    {ACLNN_ERR_INNER_NULLPTR, "ACLNN_ERR_INNER_NULLPTR"},
    {ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND, "ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND"},
    {ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND, "ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND"},
}};

constexpr std::string_view BLANKS = " \t\r";

std::string_view without_leading_blanks(std::string_view line) {
    const auto start = line.find_first_not_of(BLANKS);
    return start == std::string_view::npos ? std::string_view() : line.substr(start);
}

// "EZ9999: [PID: 4711] 2025-11-29-10:11:12.000 headNum is wrong" without what stands before the words.
std::string_view without_prefix(std::string_view line) {
    line = without_leading_blanks(line);
    constexpr std::size_t LONGEST_CODE = 7;
    const auto colon = line.find(':');
    const bool has_code = line.starts_with('E') && colon <= LONGEST_CODE && line.find(' ') > colon;
    if (has_code && std::any_of(line.begin(), line.begin() + colon, [](char c) { return c >= '0' && c <= '9'; })) {
        line = without_leading_blanks(line.substr(colon + 1));
    }
    if (line.starts_with("[PID") && line.find(']') != std::string_view::npos) {
        line = without_leading_blanks(line.substr(line.find(']') + 1));
        if (line.starts_with("20") && line.find(' ') != std::string_view::npos) {
            line = without_leading_blanks(line.substr(line.find(' '))); // the time
        }
    }
    return line;
}

// Without the places in CANN's source at the end, "[FUNC:Check][FILE:tiling.cpp][LINE:17]", and without a full stop.
std::string_view without_places(std::string_view line) {
    for (const std::string_view place : {"[FUNC:", "[FILE:", "[LINE:", "[THREAD:"}) {
        line = line.substr(0, line.find(place));
    }
    const auto end = line.find_last_not_of(" \t\r.");
    return end == std::string_view::npos ? std::string_view() : line.substr(0, end + 1);
}

bool is_heading(std::string_view line) {
    for (const std::string_view heading : {"Inner Error", "TraceBack", "Traceback", "Solution:", "Possible Cause:"}) {
        if (line.starts_with(heading)) {
            return true;
        }
    }
    return false;
}

std::string recent_message() {
    const char* message = functions().aclGetRecentErrMsg == nullptr ? nullptr : functions().aclGetRecentErrMsg();
    return message == nullptr ? "" : message;
}

std::string failure_of(const std::string& function, std::int32_t code) {
    std::string text = function + " returned " + std::to_string(code);
    if (const std::string words = meaning(code); !words.empty()) {
        text += " (" + words + ")";
    }
    if (const std::string line = telling_line(recent_message()); !line.empty()) {
        text += ": " + line;
    }
    return text;
}

} // namespace

Error::Error(std::int32_t code, const std::string& failure)
    : std::runtime_error(failure + "; " + advice(code)),
      code_(code),
      failure_(failure) {}

Error::Error(const std::string& function, std::int32_t code) : Error(code, failure_of(function, code)) {}

Error::Error(const Error& cause, const std::string& context, const std::string& details)
    : Error(cause.code_, context + cause.failure_ + details) {}

std::string advice(std::int32_t code) {
    switch (code) {
    case ACLNN_ERR_PARAM_NULLPTR:
    case ACLNN_ERR_PARAM_INVALID:
    case ACLNN_ERR_INNER_INFERSHAPE_ERROR:
    case ACLNN_ERR_INNER_TILING_ERROR:
        // A node that is refused here was claimed because the model does not state the sizes in question.
        return "`ascend-onnx schema` lists the limits of the device; in a model with fixed sizes `ascend-onnx check` "
               "finds such a node and it runs on the CPU";
    case ACLNN_ERR_INNER_FIND_KERNEL_ERROR:
    case ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND:
        return "install the CANN kernels package of this product";
    case ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND:
        return "source CANN's set_env.sh, which sets ASCEND_OPP_PATH";
    case ACL_ERROR_RT_MEMORY_ALLOCATION:
        return "free device memory, or use smaller caches or batches";
    case ACL_ERROR_RT_INVALID_DEVICEID:
        return "`ascend-onnx doctor` lists the devices";
    default:
        return "CANN's log in ~/ascend/log says more";
    }
}

std::string meaning(std::int32_t code) {
    for (const auto& [known, words] : MEANINGS) {
        if (known == code) {
            return words;
        }
    }
    return "";
}

std::string telling_line(const std::string& message) {
    std::istringstream lines(message);
    for (std::string line; std::getline(lines, line);) {
        const std::string_view told = without_places(without_prefix(line));
        if (!told.empty() && !is_heading(told)) {
            return std::string(told);
        }
    }
    return "";
}

} // namespace cann
