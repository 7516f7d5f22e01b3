// Every rounding boundary of every format, and a sample of all floats, under every overflow and rounding policy.
// (tests/sweep takes all floats.)
#include <vector>

#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

template <class T> void check_all_policies(oracle const& o, float x, mismatches& bad) {
    double const exact = static_cast<double>(x);
    auto const place = o.find(exact);
    for_each_policy<T>(
        [&](auto p) { bad.check(exact, code_of<T>(p, x), o.encode(exact, place, p.on_overflow, p.round), p.id); });
    if constexpr (format_traits<T>::bias != 127) { // the short cut for values that stay in the range
        uint32_t const code = o.encode(exact, place, overflow::saturate, rounding::nearest_even);
        bool const in_range = std::isfinite(x) && std::fabs(exact) <= static_cast<double>((format_traits<T>::max)());
        if (in_range) bad.check(exact, encode_bounded_words<T>(x), code, -2);
    }
}

#define KEEL_TEST_FORMATS                                                                                              \
    bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1, e3m2, half_without_infinity, short_bf16, float_bias

TEMPLATE_TEST_CASE("encode is right at every code, midpoint and their neighbours", "", KEEL_TEST_FORMATS) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    auto const& steps = o.steps();
    for (std::size_t c = 0; c + 1 < steps.size(); ++c) {
        double const middle = (steps[c] + steps[c + 1]) / 2;
        for (double const x : {steps[c], middle, steps[c + 1]}) {
            if (x >= 0x1p128) continue; // past the largest float
            for (int k = -2; k <= 2; ++k) {
                float const near = nudged(static_cast<float>(x), k);
                check_all_policies<TestType>(o, near, bad);
                check_all_policies<TestType>(o, -near, bad);
            }
        }
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEMPLATE_TEST_CASE("encode is right for zeros, subnormals, the ends of the range, Inf and NaN", "", KEEL_TEST_FORMATS) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    for (uint32_t const word : special_words) {
        check_all_policies<TestType>(o, float_of(word), bad);
        check_all_policies<TestType>(o, float_of(word | 0x80000000u), bad);
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEMPLATE_TEST_CASE("encode is right on a sample of all floats", "", bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    for (uint32_t stratum = 0; stratum < 1u << 22; stratum += sample_step) {
        check_all_policies<TestType>(o, float_of(sampled_word(stratum)), bad);
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEST_CASE("float keeps every value, and has one NaN") {
    mismatches bad;
    for (uint32_t stratum = 0; stratum < 1u << 20; stratum += sample_step) {
        uint32_t const word = sampled_word(stratum << 2);
        float const x = float_of(word);
        for_each_policy<float>([&](auto p) {
            uint32_t const wanted = std::isnan(x)                                          ? 0x7fffffffu
                                    : std::isinf(x) && p.on_overflow == overflow::saturate ? word - 1
                                                                                           : word;
            bad.check(static_cast<double>(x), code_of<float>(p, x), wanted, p.id);
        });
    }
    for (uint32_t const word : {0x7f800000u, 0xff800000u}) {
        CHECK(to_word(encode<float>(float_of(word))) == word);
        CHECK(to_word(encode<float, overflow::saturate_finite>(float_of(word))) == word);
        CHECK(to_word(encode<float, overflow::saturate>(float_of(word))) == word - 1);
    }
    INFO(bad);
    CHECK(bad.count == 0);
    CHECK(to_word(encode<float>(float_of(0xff800001u))) == 0x7fffffffu);
    CHECK(word_of(decode(1.5f)) == word_of(1.5f));
}

TEST_CASE("a store without a policy behaves as IEEE hardware") {
    CHECK(encode<bf16>(float_of(0x7f7f7fffu)).bits == 0x7f7f);
    CHECK(encode<bf16>(float_of(0x7f7f8000u)).bits == 0x7f80); // so FLT_MAX becomes Inf
    CHECK(encode<f16>(65519.996f).bits == 0x7bff);
    CHECK(encode<f16>(65520.0f).bits == 0x7c00);
    CHECK(encode<bf16>(float_of(0xff8abcdeu)).bits == 0x7fff);
}

// A large value past FP8's range, by policy: which of them hides an Inf is the caller's choice.
TEST_CASE("overflow policies of FP8") {
    float const infinity = float_of(0x7f800000u);
    CHECK(encode<e4m3, overflow::saturate>(infinity).bits == 0x7e);
    CHECK(encode<e4m3, overflow::saturate>(-infinity).bits == 0xfe);
    CHECK(encode<e4m3, overflow::saturate_finite>(infinity).bits == 0x7f);
    CHECK(encode<e4m3, overflow::saturate_finite>(-1000.0f).bits == 0xfe);
    CHECK(encode<e4m3, overflow::to_nonfinite>(-1000.0f).bits == 0x7f);
    CHECK(encode<e5m2, overflow::saturate>(infinity).bits == 0x7b);
    CHECK(encode<e5m2, overflow::saturate_finite>(-infinity).bits == 0xfc);
    CHECK(encode<e5m2, overflow::saturate_finite>(1e9f).bits == 0x7b);
    CHECK(encode<e5m2, overflow::to_nonfinite>(-1e9f).bits == 0xfc);
    for (float const nan : {float_of(0x7fc00000u), float_of(0xffffffffu), float_of(0x7f800001u)}) {
        CHECK(encode<e4m3, overflow::saturate>(nan).bits == 0x7f);
        CHECK(encode<e5m2, overflow::saturate>(nan).bits == 0x7f);
        CHECK(encode<f16, overflow::saturate>(nan).bits == 0x7fff);
    }
    // the boundaries: 464 is a tie that stays, 61440 a tie that goes
    CHECK(encode<e4m3, overflow::to_nonfinite>(464.0f).bits == 0x7e);
    CHECK(encode<e4m3, overflow::to_nonfinite>(nudged(464.0f, 1)).bits == 0x7f);
    CHECK(encode<e5m2, overflow::to_nonfinite>(nudged(61440.0f, -1)).bits == 0x7b);
    CHECK(encode<e5m2, overflow::to_nonfinite>(61440.0f).bits == 0x7c);
    // directed rounding
    CHECK(encode<e4m3, overflow::to_nonfinite, rounding::toward_zero>(1e9f).bits == 0x7e);
    CHECK(encode<e5m2, overflow::to_nonfinite, rounding::upward>(57345.0f).bits == 0x7c);
    CHECK(encode<e5m2, overflow::to_nonfinite, rounding::upward>(-1e9f).bits == 0xfb);
    CHECK(encode<e5m2, overflow::to_nonfinite, rounding::upward>(1e-30f).bits == 0x01);
    CHECK(encode<e5m2, overflow::to_nonfinite, rounding::upward>(-1e-30f).bits == 0x80);
}

} // namespace
