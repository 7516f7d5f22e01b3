// The scale format: powers of two from 2^-127 to 2^127, in each direction, past both ends, and for bad input.
#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

template <class X> void check_all_policies(X x, mismatches& bad) {
    for_each_policy<e8m0>([&](auto p) {
        double const exact = static_cast<double>(x);
        bad.check(exact, code_of<e8m0>(p, x), scale_code(exact, p.on_overflow, p.round), p.id);
    });
}

TEST_CASE("e8m0: every power, its neighbours and midpoints") {
    mismatches bad;
    for (int n = -149; n <= 127; ++n) {
        for (float const x : {power_of_two(n), 1.5f * power_of_two(n)}) {
            for (int k = -2; k <= 2; ++k) {
                check_all_policies(nudged(x, k), bad);
                check_all_policies(-nudged(x, k), bad);
                check_all_policies(nudged(static_cast<double>(x), k), bad);
            }
        }
    }
    INFO(bad);
    CHECK(bad.count == 0);
}

TEST_CASE("e8m0: a sample of all floats and doubles") {
    mismatches bad;
    for (uint32_t const word : special_words) {
        check_all_policies(float_of(word), bad);
        check_all_policies(float_of(word | 0x80000000u), bad);
    }
    for (uint32_t i = 0; i < 1u << 22; i += sample_step) check_all_policies(float_of(sampled_word(i)), bad);
    for (uint64_t i = 0; i < 1u << 18; ++i) {
        check_all_policies(std::bit_cast<double>(i << 46 | (i * 0x9e3779b97f4a7c15u) >> 18), bad);
    }
    INFO(bad);
    CHECK(bad.count == 0);
}

TEST_CASE("e8m0: every code") {
    for (uint32_t code = 0; code < 0xff; ++code) {
        float const x = decode(from_word<e8m0>(code));
        CHECK(static_cast<double>(x) == std::ldexp(1.0, static_cast<int>(code) - 127));
        CHECK(to_word(encode<e8m0, overflow::to_nonfinite, rounding::upward>(x)) == code);
        CHECK(to_word(encode<e8m0, overflow::to_nonfinite, rounding::toward_zero>(x)) == code);
        CHECK(to_word(encode<e8m0, overflow::to_nonfinite>(x)) == code);
    }
    CHECK(std::isnan(decode(e8m0{0xff})));
}

TEST_CASE("e8m0: a negative scale is a fault that stays visible, a negative zero is none") {
    CHECK(encode<e8m0, overflow::saturate, rounding::upward>(-2.0f).bits == 0xff);
    CHECK(encode<e8m0, overflow::saturate, rounding::upward>(-1e-45f).bits == 0xff);
    CHECK(encode<e8m0, overflow::saturate, rounding::upward>(-0.0f).bits == 0x00);
    CHECK(encode<e8m0, overflow::saturate, rounding::upward>(-0.0).bits == 0x00);
}

} // namespace
