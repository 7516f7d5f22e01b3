// Any bytes as text that a terminal, a line of a message and a JSON file can take, and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tiny_lm {

/// Length of the well-formed UTF-8 character at the front of the text, 0 if there is none.
inline std::size_t character_length(std::string_view text) {
    auto const byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
    if (text.empty()) return 0;
    std::uint8_t const lead = byte(0);
    std::size_t const length = lead < 0x80   ? 1
                               : lead < 0xc2 ? 0
                               : lead < 0xe0 ? 2
                               : lead < 0xf0 ? 3
                               : lead < 0xf5 ? 4
                                             : 0;
    if (length == 0 || length > text.size()) return 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((byte(i) & 0xc0) != 0x80) return 0;
    bool const overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
    bool const outside = (lead == 0xed && byte(1) > 0x9f) || (lead == 0xf4 && byte(1) > 0x8f);
    return overlong || outside ? 0 : length;
}

/// The same, 0 also for a control code: the length of what can be shown as it is.
inline std::size_t printable_length(std::string_view text) {
    std::size_t const length = character_length(text);
    if (length == 0) return 0;
    auto const lead = static_cast<std::uint8_t>(text[0]);
    bool const control = lead < 0x20 || lead == 0x7f || (lead == 0xc2 && static_cast<std::uint8_t>(text[1]) < 0xa0);
    return control ? 0 : length;
}

/// A byte as \xNN.
inline std::string hexadecimal_escape(char c) {
    constexpr char const* digits = "0123456789abcdef";
    auto const byte = static_cast<std::uint8_t>(c);
    return {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
}

/// The text on one line of well-formed UTF-8: a backslash before quotes and backslashes, \xNN for what cannot be shown.
inline std::string escaped(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        std::size_t const length = printable_length(text);
        if (text[0] == '"' || text[0] == '\\') out += '\\';
        if (length == 0) out += hexadecimal_escape(text[0]);
        else out += text.substr(0, length);
        text.remove_prefix(length == 0 ? 1 : length);
    }
    return out;
}

/// The text that `escaped` was given. A backslash that it would not have written stays.
inline std::string unescaped(std::string_view text) {
    auto const digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
    std::string out;
    while (!text.empty()) {
        std::size_t taken = 1;
        char c = text[0];
        if (c == '\\' && text.size() > 1 && (text[1] == '\\' || text[1] == '"')) {
            c = text[1], taken = 2;
        } else if (c == '\\' && text.size() > 3 && text[1] == 'x' && digit(text[2]) >= 0 && digit(text[3]) >= 0) {
            c = static_cast<char>(digit(text[2]) << 4 | digit(text[3])), taken = 4;
        }
        out += c;
        text.remove_prefix(taken);
    }
    return out;
}

} // namespace tiny_lm
