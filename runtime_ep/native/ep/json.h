// Writing JSON, as far as descriptions and reports need it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ep::json {

inline std::string quoted(std::string_view text) {
    static constexpr char HEX[] = "0123456789abcdef";
    std::string result = "\"";
    for (const char character : text) {
        const auto code = static_cast<unsigned char>(character);
        if (character == '"' || character == '\\') {
            result += '\\';
            result += character;
        } else if (code < 0x20) {
            result += "\\u00";
            result += HEX[code >> 4U];
            result += HEX[code & 15U];
        } else {
            result += character;
        }
    }
    return result + '"';
}

// `parts` between `open` and `close`, with commas.
inline std::string listed(const std::vector<std::string>& parts, char open = '[', char close = ']') {
    std::string result(1, open);
    for (const std::string& part : parts) {
        result += (result.size() == 1 ? "" : ", ") + part;
    }
    return result + close;
}

} // namespace ep::json
