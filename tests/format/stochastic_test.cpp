// Stochastic rounding: between the two neighbours only, and up exactly as often as the part cut off says.
//
// The result never falls when the noise grows, so a search over the 2^32 noise words finds the first that rounds up,
// and with it the probability as an exact number. No sampling, and no tolerance but the one that the header states.
#include <random>

#include "support/catch.hpp"

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

template <class T, overflow O = overflow::saturate, class X> uint32_t rounded(X x, uint32_t noise) {
    return to_word(encode<T, O, rounding::stochastic>(x, noise));
}

/// The share of noise words that give something else than noise 0 does.
template <class T, overflow O = overflow::saturate, class X> double probability(X x) {
    uint32_t const cut = rounded<T, O>(x, 0);
    if (rounded<T, O>(x, 0xffffffffu) == cut) return 0;
    uint32_t stays = 0, moves = 0xffffffffu;
    while (moves - stays > 1) {
        uint32_t const middle = stays + (moves - stays) / 2;
        (rounded<T, O>(x, middle) == cut ? stays : moves) = middle;
    }
    return (0x1p32 - static_cast<double>(moves)) * 0x1p-32;
}

/// Floats of the format's range and below, both signs.
template <class T> float sampled_input(std::mt19937_64& engine) {
    using traits = format_traits<T>;
    int const lowest = traits::min_exponent - traits::mantissa_bits - 4;
    int const exponents = traits::max_exponent - (lowest < -126 ? -126 : lowest) + 1;
    uint64_t const random = engine();
    int const exponent = traits::max_exponent - static_cast<int>(random % static_cast<uint64_t>(exponents));
    uint32_t const fraction = static_cast<uint32_t>(random >> 40) & 0x7fffffu;
    return float_of((static_cast<uint32_t>(random >> 32) & 0x80000000u) | static_cast<uint32_t>(exponent + 127) << 23 |
                    fraction);
}

TEMPLATE_TEST_CASE("the probability is the part cut off", "", bf16, f16, e4m3, e5m2, e4m3fnuz, e5m2fnuz, e2m1,
                   short_bf16, float_bias) {
    oracle const o(layout_of<TestType>);
    std::mt19937_64 engine(1);
    int wrong_cut = 0, wrong_step = 0, wrong_probability = 0;
    for (int i = 0; i < 4000; ++i) {
        float const x = sampled_input<TestType>(engine);
        auto const place = o.find(static_cast<double>(x));
        if (place.past_end || place.low == o.format().max_code) continue;
        uint32_t const cut = o.encode(static_cast<double>(x), overflow::saturate, rounding::toward_zero);
        wrong_cut += rounded<TestType>(x, 0) != cut ? 1 : 0;

        double const low = o.steps()[place.low], high = o.steps()[place.low + 1];
        double const part = (place.magnitude - low) / (high - low); // exact: both have few bits
        double const p = probability<TestType>(x);
        bool const is_subnormal = place.magnitude < static_cast<double>(format_traits<TestType>::min_normal());
        double const shortfall = is_subnormal ? std::ldexp(1.0, format_traits<TestType>::mantissa_bits - 30) : 0x1p-60;
        wrong_probability += p <= part && part - p < shortfall ? 0 : 1;
        if (p > 0) {
            uint32_t const sign = x < 0 ? o.sign_code() : 0;
            wrong_step += rounded<TestType>(x, 0xffffffffu) != (sign | (place.low + 1)) ? 1 : 0;
        }
    }
    INFO(o.format().name);
    CHECK(wrong_cut == 0);
    CHECK(wrong_step == 0);
    CHECK(wrong_probability == 0);
}

TEMPLATE_TEST_CASE("noise moves no value that has a code, and zero stays zero", "", bf16, f16, e4m3, e5m2, e4m3fnuz,
                   e5m2fnuz, e2m1, float) {
    for (uint32_t const noise : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        for (uint32_t code = 0; code <= (sizeof(TestType) < 4 ? format_traits<TestType>::max_code : 0x1000u); ++code) {
            float const x = decode(from_word<TestType>(code));
            if (rounded<TestType>(x, noise) != code) FAIL("code " << code << " moved by noise " << noise);
        }
    }
    CHECK(rounded<TestType>(0.0f, 0xffffffffu) == 0u);
}

TEMPLATE_TEST_CASE("finite values stay finite unless to_nonfinite is asked for", "", bf16, f16, e4m3, e5m2, e4m3fnuz,
                   e5m2fnuz) {
    using traits = format_traits<TestType>;
    double const max = static_cast<double>(traits::max());
    double const place = max - static_cast<double>(decode(from_word<TestType>(traits::max_code - 1)));
    float const half_past = static_cast<float>(max + place / 2);
    for (float const x : {half_past, float_of(0x7f7fffffu)}) {
        for (uint32_t const noise : {0u, 0x80000000u, 0xffffffffu}) {
            CHECK(rounded<TestType, overflow::saturate>(x, noise) == traits::max_code);
            CHECK(rounded<TestType, overflow::saturate_finite>(x, noise) == traits::max_code);
            CHECK(rounded<TestType, overflow::saturate_finite>(-x, noise) == (traits::max_code | traits::sign_code));
        }
    }
    CHECK(probability<TestType, overflow::to_nonfinite>(half_past) == 0.5);
    CHECK(rounded<TestType, overflow::to_nonfinite>(half_past, 0xffffffffu) == traits::nonfinite_code);
    for (uint32_t const noise : {0u, 0xffffffffu}) {
        float const infinity = float_of(0x7f800000u), nan = float_of(0xff812345u);
        CHECK(rounded<TestType, overflow::saturate>(infinity, noise) == traits::max_code);
        CHECK(rounded<TestType, overflow::saturate_finite>(infinity, noise) == traits::nonfinite_code);
        CHECK(rounded<TestType, overflow::to_nonfinite>(infinity, noise) == traits::nonfinite_code);
        CHECK(rounded<TestType, overflow::saturate>(nan, noise) == traits::nan_code);
        CHECK(rounded<TestType, overflow::to_nonfinite>(nan, noise) == traits::nan_code);
    }
}

TEST_CASE("doubles: exact probability for float, that of 24 digits for the others") {
    std::mt19937_64 engine(2);
    int wrong = 0;
    for (int i = 0; i < 4000; ++i) {
        double const x = (1 + static_cast<double>(engine() >> 11) * 0x1p-53) * ((i & 1) != 0 ? 1.0 : -1.0);
        double const cut = static_cast<double>(float_of(rounded<float>(x, 0)));
        double const part = (x - cut) / (x < 0 ? -0x1p-23 : 0x1p-23);
        wrong += probability<float>(x) == part ? 0 : 1;
        double const coarse = static_cast<double>(decode(from_word<bf16>(rounded<bf16>(x, 0))));
        double const coarse_part = (x - coarse) / (x < 0 ? -0x1p-7 : 0x1p-7);
        wrong += std::fabs(probability<bf16>(x) - coarse_part) <= 0x1p-16 ? 0 : 1; // one place of the 24 digits
    }
    CHECK(wrong == 0);
    double const tiny = 0.75 * 0x1p-149;
    CHECK(probability<float>(tiny) == 0.75);
    CHECK(probability<float, overflow::to_nonfinite>(0x1.ffffffp127) == 0.5); // half a place past FLT_MAX
    CHECK(probability<float, overflow::saturate>(0x1.ffffffp127) == 0.0);
}

TEST_CASE("e8m0: the larger power with probability x / 2^n - 1") {
    CHECK(probability<e8m0>(1.25f) == 0.25);
    CHECK(probability<e8m0>(float_of(0x3f800001u)) == 0x1p-23);
    CHECK(probability<e8m0>(1.75f * 0x1p-100f) == 0.75);
    CHECK(probability<e8m0>(float_of(0x00500000u)) == 0.25); // 1.25 * 2^-127
    CHECK(probability<e8m0>(float_of(0x00400000u)) == 0.0);
    CHECK(probability<e8m0>(float_of(0x00300000u)) == 0.0);
    CHECK(probability<e8m0>(1.5f * 0x1p127f) == 0.0);
    CHECK(probability<e8m0, overflow::to_nonfinite>(1.5f * 0x1p127f) == 0.5);
}

// The same seen from outside: with random noise the mean of many roundings is the value itself.
TEMPLATE_TEST_CASE("the mean of n roundings is unbiased", "", bf16, f16, e4m3, e5m2) {
    std::mt19937_64 engine(3);
    int const n = 1 << 16;
    for (float const x : {1.03f, -3.3f, 0.0101f, 200.7f, 0x1.5p-9f}) {
        double sum = 0;
        for (int i = 0; i < n; ++i) {
            sum += static_cast<double>(
                decode(from_word<TestType>(rounded<TestType>(x, static_cast<uint32_t>(engine() >> 32)))));
        }
        double const step =
            std::fabs(static_cast<double>(decode(from_word<TestType>(rounded<TestType>(x, 0xffffffffu)))) -
                      static_cast<double>(decode(from_word<TestType>(rounded<TestType>(x, 0)))));
        double const p = probability<TestType>(x);
        double const deviation =
            step * std::sqrt(p * (1 - p) / n); // of the mean of n draws; five of them is 1 in 2 million
        CHECK(std::fabs(sum / n - static_cast<double>(x)) <= 5 * deviation + 1e-12);
    }
}

} // namespace
