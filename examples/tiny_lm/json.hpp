// JSON, as little as the headers of safetensors files and the lines of a log need: a reader that survives anything,
// and the quoting of strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "escape.hpp"
#include "numbers.hpp"

namespace tiny_lm {

/// What is wrong with a JSON text, and at which byte.
struct json_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A JSON value. Whole numbers that fit are int64, all others double; an object keeps its members in order and has no
/// name twice.
struct json {
    using array = std::vector<json>;
    using object = std::vector<std::pair<std::string, json>>;
    std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, array, object> value = nullptr;

    /// This value as a T, or null if it is something else.
    template <class T> T const* as() const { return std::get_if<T>(&value); }
    /// The member of that name, or null if this is no object or has none.
    json const* find(std::string_view name) const {
        if (auto const* const members = as<object>())
            for (auto const& [key, member] : *members)
                if (key == name) return &member;
        return nullptr;
    }
};

/// Reads one JSON text (RFC 8259), surrounding white space allowed; json_error for anything else.
class json_reader {
public:
    static json read(std::string_view text) {
        json_reader reader(text);
        json value = reader.value(0);
        reader.skip_space();
        if (!reader.rest_.empty()) reader.fail("something after the end");
        return value;
    }

private:
    static constexpr int deepest = 64; // nested arrays and objects; a call each

    explicit json_reader(std::string_view text) : text_(text), rest_(text) {}

    [[noreturn]] void fail(char const* what) const {
        throw json_error(std::string(what) + " at byte " + shortest(text_.size() - rest_.size()));
    }
    void skip_space() {
        while (!rest_.empty() && std::string_view(" \t\n\r").find(rest_[0]) != std::string_view::npos)
            rest_.remove_prefix(1);
    }
    bool accept(std::string_view token) {
        if (!rest_.starts_with(token)) return false;
        rest_.remove_prefix(token.size());
        return true;
    }
    bool accept_after_space(std::string_view token) {
        skip_space();
        return accept(token);
    }

    json value(int depth) {
        if (depth > deepest) fail("too deep a nesting");
        skip_space();
        if (accept("{")) return {object(depth)};
        if (accept("[")) return {array(depth)};
        if (accept("\"")) return {string()};
        if (accept("true")) return {true};
        if (accept("false")) return {false};
        if (accept("null")) return {nullptr};
        return number();
    }

    json::object object(int depth) {
        json::object members;
        if (accept_after_space("}")) return members;
        do {
            if (!accept_after_space("\"")) fail("no name of a member");
            std::string name = string();
            for (auto const& member : members)
                if (member.first == name) fail("a name for the second time");
            if (!accept_after_space(":")) fail("no colon");
            json member = value(depth + 1);
            members.emplace_back(std::move(name), std::move(member));
        } while (accept_after_space(","));
        if (!accept_after_space("}")) fail("an object without end");
        return members;
    }

    json::array array(int depth) {
        json::array elements;
        if (accept_after_space("]")) return elements;
        do elements.push_back(value(depth + 1));
        while (accept_after_space(","));
        if (!accept_after_space("]")) fail("an array without end");
        return elements;
    }

    json number() {
        std::size_t at = 0;
        auto const digits = [&] {
            std::size_t const start = at;
            while (at < rest_.size() && rest_[at] >= '0' && rest_[at] <= '9') ++at;
            return at > start;
        };
        auto const next_is = [&](std::string_view any) { return at < rest_.size() && any.find(rest_[at]) != any.npos; };
        if (next_is("-")) ++at;
        bool const leading_zero = next_is("0");
        std::size_t const first = at;
        if (!digits() || (leading_zero && at > first + 1)) fail("no value");
        bool whole = true;
        if (next_is(".")) {
            whole = false;
            ++at;
            if (!digits()) fail("no digits after a point");
        }
        if (next_is("eE")) {
            whole = false;
            ++at;
            if (next_is("+-")) ++at;
            if (!digits()) fail("no digits of an exponent");
        }
        std::string_view const text = rest_.substr(0, at);
        auto const as_whole = whole ? parse_number<std::int64_t>(text) : std::nullopt;
        auto const as_real = parse_number<double>(text);
        if (!as_whole && !as_real) fail("a number beyond double");
        rest_.remove_prefix(at);
        return as_whole ? json{*as_whole} : json{*as_real};
    }

    std::string string() {
        std::string out;
        for (;;) {
            if (rest_.empty()) fail("a string without end");
            char const c = rest_[0];
            if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
            rest_.remove_prefix(1);
            if (c == '"') return out;
            if (c == '\\')
                escape(out);
            else
                out += c;
        }
    }

    void escape(std::string& out) {
        constexpr std::string_view letters = "\"\\/bfnrt", meanings = "\"\\/\b\f\n\r\t";
        if (rest_.empty()) fail("a string without end");
        auto const which = letters.find(rest_[0]);
        if (which != letters.npos) {
            out += meanings[which];
            rest_.remove_prefix(1);
            return;
        }
        if (!accept("u")) fail("an unknown escape");
        std::uint32_t code = four_digits();
        if (code >= 0xd800 && code < 0xdc00) { // the first half of a pair
            if (!accept("\\u")) fail("half a surrogate pair");
            std::uint32_t const low = four_digits();
            if (low < 0xdc00 || low > 0xdfff) fail("half a surrogate pair");
            code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
        } else if (code >= 0xdc00 && code < 0xe000) {
            fail("half a surrogate pair");
        }
        append_utf8(out, code);
    }

    std::uint32_t four_digits() {
        std::uint32_t code = 0;
        if (rest_.size() < 4) fail("a string without end");
        auto const [end, error] = std::from_chars(rest_.data(), rest_.data() + 4, code, 16);
        if (error != std::errc{} || end != rest_.data() + 4) fail("no four hexadecimal digits");
        rest_.remove_prefix(4);
        return code;
    }

    static void append_utf8(std::string& out, std::uint32_t code) {
        auto const put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
        if (code < 0x80) return put(code);
        if (code < 0x800) {
            put(0xc0 | code >> 6);
        } else {
            if (code < 0x10000) {
                put(0xe0 | code >> 12);
            } else {
                put(0xf0 | code >> 18);
                put(0x80 | (code >> 12 & 0x3f));
            }
            put(0x80 | (code >> 6 & 0x3f));
        }
        put(0x80 | (code & 0x3f));
    }

    std::string_view text_, rest_;
};

/// The text as a JSON string, quotes included. A byte that is no UTF-8 becomes U+FFFD: JSON has no way to say it, and
/// other readers refuse the whole file. Who wants such bytes back escapes them first.
inline std::string json_string(std::string_view text) {
    std::string out = "\"";
    while (!text.empty()) {
        char const c = text[0];
        auto const byte = static_cast<unsigned char>(c);
        std::size_t const length = character_length(text);
        if (c == '"' || c == '\\')
            out += {'\\', c};
        else if (byte < 0x20)
            out += {'\\', 'u', '0', '0', "01"[byte >> 4], "0123456789abcdef"[byte & 15]};
        else if (length == 0)
            out += "\xef\xbf\xbd";
        else
            out += text.substr(0, length);
        text.remove_prefix(length == 0 ? 1 : length);
    }
    return out + '"';
}

} // namespace tiny_lm
