// Numbers as text and back, independent of the locale.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace tiny_lm {

/// The whole text as a number of type T; nothing if any of it is something else or it does not fit.
template <class T> std::optional<T> parse_number(std::string_view text) {
    T value{};
    auto const [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

/// The shortest text that reads back as the same number: "0.1", "1500", "nan", "inf", "-inf".
template <class T> std::string shortest(T value) {
    char text[64];
    auto const result = std::to_chars(text, text + sizeof text, value);
    return std::string(text, result.ptr);
}
inline std::string shortest(double value) {
    if (std::isnan(value)) return "nan"; // to_chars would show the sign of a NaN
    char text[64];
    auto const result = std::to_chars(text, text + sizeof text, value);
    return std::string(text, result.ptr);
}

/// The value with a fixed number of decimals: fixed(2.64325, 3) is "2.643".
inline std::string fixed(double value, int decimals) {
    if (!std::isfinite(value)) return shortest(value);
    char text[384]; // the largest double has 309 digits before the point
    auto const result = std::to_chars(text, text + sizeof text, value, std::chars_format::fixed, decimals);
    return std::string(text, result.ptr);
}

/// About three significant digits in at most seven characters: "0", "0.0812", "18.4", "1053", "2.1e-3", "3.4e5".
inline std::string compact(double value) {
    double const size = std::fabs(value);
    if (!std::isfinite(value)) return shortest(value);
    if (size == 0.0) return "0";
    if (size >= 0.01 && size < 9999.5)
        return fixed(value, size < 0.1 ? 4 : size < 1 ? 3 : size < 10 ? 2 : size < 100 ? 1 : 0);
    char text[64];
    auto const result = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific, 1);
    std::string out(text, result.ptr); // "2.1e-03", "3.4e+05"
    auto const mark = out.find('e');
    std::string exponent = out.substr(mark + 1);
    std::string const sign = exponent[0] == '-' ? "-" : "";
    exponent.erase(0, 1);
    while (exponent.size() > 1 && exponent[0] == '0') exponent.erase(0, 1);
    return out.substr(0, mark + 1) + sign + exponent;
}

/// A rate or a count with its metric prefix: "870", "21.4k", "1.23M", "182G".
inline std::string metric(double value) {
    constexpr char const* prefixes[] = {"", "k", "M", "G", "T", "P"};
    if (!std::isfinite(value)) return shortest(value);
    int step = 0;
    while (std::fabs(value) >= 999.5 && step < 5) value /= 1000, ++step;
    double const size = std::fabs(value);
    int const decimals = step == 0 || size >= 99.95 ? 0 : size < 9.995 ? 2 : 1;
    return fixed(value, decimals) + prefixes[step];
}

/// A length of time as m:ss or h:mm:ss; "-" where it is not known.
inline std::string duration(double seconds) {
    if (!(seconds >= 0.0) || seconds > 3.6e9) return "-";
    auto const total = static_cast<std::int64_t>(seconds + 0.5);
    auto const two = [](std::int64_t part) { return std::string(part < 10, '0') + shortest(part); };
    std::string const minutes_seconds = two(total / 60 % 60) + ":" + two(total % 60);
    if (total >= 3600) return shortest(total / 3600) + ":" + minutes_seconds;
    return minutes_seconds[0] == '0' ? minutes_seconds.substr(1) : minutes_seconds;
}

} // namespace tiny_lm
