// A double is rounded once: never by way of float, where a sticky bit would be lost or a tie made.
#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

template <class T> void check_all_policies(oracle const& o, double x, mismatches& bad) {
    auto const place = o.find(x);
    for_each_policy<T>(
        [&](auto p) { bad.check(x, code_of<T>(p, x), o.encode(x, place, p.on_overflow, p.round), p.id); });
}

/// A double of every exponent in turn, with any mantissa: long ones, and ones that end in few or many zeros.
double sampled_double(uint32_t i) {
    uint64_t const hash = (i + uint64_t{1}) * 0x9e3779b97f4a7c15u;
    uint64_t const mantissa = (hash ^ (hash >> 29)) & (~uint64_t{0} << (hash % 53)) & 0xfffffffffffffu;
    uint64_t const exponent =
        i % 2 == 0 ? (i / 2) % 2048 : 1023 - 160 + (i / 2) % 320; // half of them near float's range
    return std::bit_cast<double>((hash & 0x8000000000000000u) | exponent << 52 | mantissa);
}

TEMPLATE_TEST_CASE("a double is rounded once at every code, midpoint and their neighbours", "", bf16, f16, e4m3, e5m2,
                   e4m3fnuz, e5m2fnuz, e2m1, half_without_infinity, short_bf16, float_bias) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    auto const& steps = o.steps();
    for (std::size_t c = 0; c + 1 < steps.size(); ++c) {
        double const middle = (steps[c] + steps[c + 1]) / 2;
        for (double const x : {steps[c], middle, steps[c + 1]}) {
            for (int k :
                 {-2, -1, 0, 1, 2, -(1 << 28), 1 << 28, 1 << 29}) { // the last three: half a float's place, a place
                check_all_policies<TestType>(o, nudged(x, k), bad);
                check_all_policies<TestType>(o, -nudged(x, k), bad);
            }
        }
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

TEMPLATE_TEST_CASE("a double is rounded once on a sample of all exponents", "", bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    for (uint32_t i = 0; i < 1u << 20; i += sample_step) check_all_policies<TestType>(o, sampled_double(i), bad);
    for (double const x : {0.0, -0.0, 0x1p-1074, -0x1p-1074, 0x1.fffffffffffffp1023, -0x1.fffffffffffffp1023, 0x1p-1022,
                           std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN(), std::bit_cast<double>(0xfff0000000000001u)}) {
        check_all_policies<TestType>(o, x, bad);
    }
    INFO(o.format().name << ": " << bad);
    CHECK(bad.count == 0);
}

/// The float that a double becomes, from the machine's own conversion to nearest and a step where another is wanted.
uint32_t expected_float(double x, overflow o, rounding r) {
    if (std::isnan(x)) return 0x7fffffffu;
    uint32_t const sign = std::signbit(x) ? 0x80000000u : 0u;
    if (std::isinf(x)) return sign | (o == overflow::saturate ? 0x7f7fffffu : 0x7f800000u);
    float const nearest = static_cast<float>(x);
    uint32_t magnitude = word_of(nearest) & 0x7fffffffu;
    double const rounded = std::fabs(static_cast<double>(nearest)), exact = std::fabs(x);
    bool const truncates = r == rounding::toward_zero || (r == rounding::upward && sign != 0);
    if (truncates && rounded > exact) --magnitude;
    if (r == rounding::upward && sign == 0 && rounded < exact) ++magnitude;
    if (magnitude == 0x7f800000u && o != overflow::to_nonfinite) --magnitude;
    return sign | magnitude;
}

TEST_CASE("a double becomes a float in every direction") {
    mismatches bad;
    auto const check = [&](double x) {
        for_each_policy<float>(
            [&](auto p) { bad.check(x, code_of<float>(p, x), expected_float(x, p.on_overflow, p.round), p.id); });
    };
    for (uint32_t i = 0; i < 1u << 20; i += sample_step) check(sampled_double(i));
    for (uint32_t const word : special_words) {
        for (int k = -2; k <= 2; ++k) {
            double const at = static_cast<double>(float_of(word));
            double const middle = (at + static_cast<double>(nudged(float_of(word), 1))) / 2;
            for (double const x : {at, middle}) {
                if (std::isfinite(x)) check(nudged(x, k)), check(-nudged(x, k));
            }
        }
    }
    double const half_past_max = 0x1.ffffffp127;
    for (int k = -2; k <= 2; ++k) check(nudged(half_past_max, k)), check(-nudged(half_past_max, k));
    INFO(bad);
    CHECK(bad.count == 0);
}

TEST_CASE("round_to_odd keeps floats and marks what is lost") {
    CHECK(word_of(round_to_odd(1.0)) == 0x3f800000u);
    CHECK(word_of(round_to_odd(1.0 + 0x1p-50)) == 0x3f800001u);
    CHECK(word_of(round_to_odd(-1.0 - 0x1p-23 - 0x1p-50)) == 0xbf800001u);
    CHECK(word_of(round_to_odd(0x1p-149)) == 0x00000001u);
    CHECK(word_of(round_to_odd(0x1p-148)) == 0x00000002u);
    CHECK(word_of(round_to_odd(0x1p-148 + 0x1p-190)) == 0x00000003u);
    CHECK(word_of(round_to_odd(0x1p-1074)) == 0x00000001u);
    CHECK(word_of(round_to_odd(1e300)) == 0x7f7fffffu);
    CHECK(word_of(round_to_odd(-0.0)) == 0x80000000u);
}

} // namespace
