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

/// The integers around the middle of two neighbouring values, low of code `code` and high of the next, and beside the two.
template <class T> void check_integers(uint32_t code, uint32_t sign, double low, double high, mismatches& bad) {
    auto const check = [&](int64_t x, uint32_t nearest, uint32_t inward) { // inward: the smaller magnitude, if x lies between two
        bad.check(static_cast<double>(x), to_word(encode<T, overflow::to_nonfinite>(x)), nearest, 0);
        bad.check(static_cast<double>(-x), to_word(encode<T, overflow::to_nonfinite>(-x)), nearest | sign, 1);
        bad.check(static_cast<double>(x), to_word(encode<T, overflow::saturate, rounding::toward_zero>(x)), inward, 2);
        bad.check(static_cast<double>(-x), to_word(encode<T, overflow::saturate, rounding::upward>(-x)), inward | sign, 3);
    };
    int64_t const first = static_cast<int64_t>(low), middle = static_cast<int64_t>((low + high) / 2), last = static_cast<int64_t>(high);
    check(first, code, code), check(first + 1, code, code), check(middle - 1, code, code);
    check(middle, code + code % 2, code); // a tie
    check(middle + 1, code + 1, code), check(last - 1, code + 1, code);
    bad.check(low, to_word(encode<T, overflow::saturate, rounding::upward>(first + 1)), code + 1, 4);
}

TEMPLATE_TEST_CASE("an integer is rounded once, of 64 bits too", "", bf16, f16, e4m3, e5m2) {
    oracle const o(layout_of<TestType>);
    mismatches bad;
    int64_t pairs = 0;
    for (uint32_t c = 0; c < o.format().max_code && o.steps()[c + 1] < 0x1p63; ++c) {
        if (o.steps()[c + 1] - o.steps()[c] < 4) continue; // so that all six are different integers
        check_integers<TestType>(c, o.sign_code(), o.steps()[c], o.steps()[c + 1], bad);
        ++pairs;
    }
    INFO(o.format().name << ": " << bad);
    CHECK((bad.count == 0 && pairs >= 10));
}

TEST_CASE("an integer becomes a float") {
    mismatches bad;
    for (uint32_t exponent = 25; exponent < 63; ++exponent)
        for (uint32_t const mantissa : {0u, 1u, 0x2aaaaau, 0x555555u, 0x7ffffeu}) {
            uint32_t const code = (exponent + 127) << 23 | mantissa;
            check_integers<float>(code, 0x80000000u, static_cast<double>(from_word<float>(code)), static_cast<double>(from_word<float>(code + 1)), bad);
        }
    INFO(bad);
    CHECK(bad.count == 0);
}

template <class T, class N> concept takes = requires(N x) { encode<T>(x); };
static_assert(takes<bf16, char> && takes<bf16, unsigned> && takes<float, int64_t> && !takes<bf16, bool>);
static_assert(to_word(encode<bf16>(1)) == 0x3f80 && to_word(encode<bf16>(0u)) == 0 && to_word(encode<f16>(-3)) == 0xc200);
static_assert(to_word(encode<bf16>(int64_t{16973823})) == 0x4b81); // ml_dtypes#401
static_assert(to_word(encode<bf16>(std::numeric_limits<int64_t>::min())) == 0xdf00);
static_assert(to_word(encode<float>(std::numeric_limits<uint64_t>::max())) == 0x5f800000u);
static_assert(to_word(encode<float, overflow::to_nonfinite, rounding::toward_zero>(std::numeric_limits<uint64_t>::max())) == 0x5f7fffffu);
static_assert(to_word(encode<e4m3, overflow::saturate>(1000)) == 0x7e && to_word(encode<e8m0, overflow::saturate>(3)) == 0x81);

} // namespace
