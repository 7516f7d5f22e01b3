// Blocks as the vectors write them, and what keel makes of them.
#pragma once

#include <type_traits>

#include <keel/quantize/quantize.hpp>

#include "support/catch.hpp"
#include "support/data.hpp"
#include "vectors/table.hpp"

namespace keel_test {

template <class T> guarded_matrix<T> matrix_from_hex(std::string const& text) {
    auto const words = words_from_hex(text, 2 * sizeof(T));
    guarded_matrix<T> x(1, static_cast<int64_t>(words.size()));
    for (int64_t j = 0; j < x.columns(); ++j)
        x.set(0, j, keel::from_word<T>(static_cast<uint32_t>(words[static_cast<std::size_t>(j)])));
    return x;
}
template <class T> std::string hex_of(guarded_matrix<T> const& x) {
    std::string text;
    for (int64_t j = 0; j < x.columns(); ++j) text += hex(keel::to_word(x.get(0, j)), 2 * sizeof(T));
    return text;
}

/// Blocks as the vectors have them: 1x128, and 1x32 under e8m0 scales.
template <class Scale> inline constexpr int block_of = std::is_same_v<Scale, keel::e8m0_scale> ? 32 : 128;

template <class Code, class Scale> struct owned_row {
    using blocks = keel::block_scaled<Code, Scale, 1, block_of<Scale>>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    explicit owned_row(int64_t n) : codes(1, n), scales(1, blocks::scale_columns(n)) {}
    blocks view() { return {codes.view(), scales.view()}; }
};

/// One row of a file: what the elements should become.
struct question {
    std::string input, scales, codes;
};

/// Zeros behind the elements change nothing, but make the last block a whole one, for which a backend may have a way of its own.
template <keel::overflow O, class Rule, class X, class Code, class Scale, class B>
void check_quantise(B const& be, question const& q, keel::non_finite_policy policy) {
    std::size_t const digits = 2 * sizeof(X), block = std::size_t{block_of<Scale>} * digits;
    for (std::size_t const padding : {std::size_t{0}, (block - q.input.size() % block) % block}) {
        INFO(padding / digits << " zeros behind");
        auto x = matrix_from_hex<X>(q.input + std::string(padding, '0'));
        owned_row<Code, Scale> out(x.columns());
        keel::quantize<O, Rule>(be, x.view(), out.view(), {.policy = policy}).or_throw();
        CHECK(hex_of(out.scales) == q.scales);
        CHECK(hex_of(out.codes).substr(0, q.codes.size()) == q.codes);
        CHECK((out.codes.untouched() && out.scales.untouched()));
    }
}

template <class Fn> bool with_code(std::string const& name, Fn fn) {
    if (name == "e4m3") return fn(keel::e4m3{}), true;
    if (name == "e5m2") return fn(keel::e5m2{}), true;
    return false;
}
template <class Fn> bool with_scale(std::string const& name, Fn fn) {
    if (name == "fp32") return fn(keel::fp32_scale{}), true;
    if (name == "power_of_two") return fn(keel::power_of_two_scale{}), true;
    if (name == "e8m0") return fn(keel::e8m0_scale{}), true;
    return false;
}
/// fn(std::integral_constant<overflow, O>{}) for the overflow policies that a cell speaks of: how many there were.
template <class Fn> int with_overflows(std::string const& cell, Fn fn) {
    int asked = 0;
    auto const ask = [&]<keel::overflow O>(std::integral_constant<keel::overflow, O> policy, char const* name) {
        if (cell != "any" && cell != name) return;
        INFO("as " << name);
        ++asked;
        fn(policy);
    };
    ask(std::integral_constant<keel::overflow, keel::overflow::saturate>{}, "saturate");
    ask(std::integral_constant<keel::overflow, keel::overflow::saturate_finite>{}, "saturate_finite");
    ask(std::integral_constant<keel::overflow, keel::overflow::to_nonfinite>{}, "to_nonfinite");
    return asked;
}

} // namespace keel_test
