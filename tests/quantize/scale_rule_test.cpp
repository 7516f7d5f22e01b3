// Every scale rule against its published formula, on a sample of all magnitudes and around every place where a rule turns.
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel;

namespace {

/// Finite magnitudes: one in 4096 of all, and three to each side of every power of two and of the codes' maxima times it.
std::vector<uint32_t> magnitudes() {
    std::vector<uint32_t> words = {0, 1, 2};
    for (uint32_t i = 0; i < infinity_bits >> 12; ++i) words.push_back((i << 12) | ((i * 2654435761u) >> 20));
    for (uint32_t exponent = 0; exponent < 255; ++exponent)
        for (uint32_t mantissa : {0u, 0x600000u, 0x400000u, 0x780000u, 0x3504f3u, 0x1e3779u, 0x0c0000u, 0x7fffffu})
            for (uint32_t near = 0; near < 7; ++near) {
                uint32_t const word = (exponent << 23) + mantissa + near - 3;
                if (word < infinity_bits) words.push_back(word);
            }
    return words;
}

template <class Rule, class Code, class Scale, class X = float> block_scale<float> scale_of(uint32_t amax) {
    return Rule::template of<X, Code, float>(Scale{}, amax);
}

/// check(amax, scale, multiplier) in double for every magnitude; counts the failures.
template <class Rule, class Code, class Scale, class X = float, class Check> void check_rule(char const* name, Check check) {
    int64_t wrong = 0;
    float first = 0;
    for (uint32_t const word : magnitudes()) {
        auto const s = scale_of<Rule, Code, Scale, X>(word);
        if (check(as_float(word), s.scale, s.multiplier)) continue;
        if (wrong++ == 0) first = as_float(word);
    }
    INFO(name << ": first wrong for " << first);
    CHECK(wrong == 0);
}

template <class Code> double code_max() { return static_cast<double>((format_traits<Code>::max)()); }
/// floor(log2 x) of a positive x.
int binade(double x) { return std::ilogb(x); }
template <class Scale> int least() { return std::is_same_v<Scale, e8m0_scale> ? -127 : -126; }

/// A rule of powers of two: 2^max(exponent(amax), least), and the reciprocal as multiplier.
template <class Rule, class Code, class Scale, class Exponent> void check_power(char const* name, Exponent exponent) {
    check_rule<Rule, Code, Scale>(name, [&](float amax, float scale, float multiplier) {
        int const e = amax == 0 ? least<Scale>() : std::max(exponent(static_cast<double>(amax)), least<Scale>());
        return static_cast<double>(scale) == std::ldexp(1.0, e) && static_cast<double>(multiplier) == std::ldexp(1.0, -e);
    });
}

template <class Code, class Scale> void check_powers() {
    int const top = binade(code_max<Code>());
    check_power<scale_rules::round_up, Code, Scale>("round_up", [](double amax) {
        int const e = binade(amax / code_max<Code>());
        return amax > std::ldexp(code_max<Code>(), e) ? e + 1 : e;
    });
    check_power<scale_rules::ocp_floor, Code, Scale>("ocp_floor", [&](double amax) { return binade(amax) - top; });
    check_power<scale_rules::ocp_even, Code, Scale>("ocp_even", [&](double amax) {
        if (amax < 0x1p-126) return least<Scale>(); // below every scale
        int const e = binade(amax), digits = format_traits<Code>::mantissa_bits;
        double const rounded = std::ldexp(std::nearbyint(std::ldexp(amax, digits - e)), e - digits);
        return binade(rounded) - top;
    });
    check_power<scale_rules::nearest, Code, Scale>("nearest", [](double amax) {
        double const ratio = amax / code_max<Code>();
        int const e = binade(ratio);
        double const rest = amax / std::ldexp(code_max<Code>(), e);
        return rest * rest >= 2 ? e + 1 : e;
    });
}

} // namespace

TEST_CASE("powers of two: up, OCP's floor, torchao's even, and nearest") { // onnxruntime #32122: exact powers doubled
    check_powers<e4m3, e8m0_scale>();
    check_powers<e4m3, power_of_two_scale>();
    check_powers<e5m2, e8m0_scale>();
    check_powers<e5m2, power_of_two_scale>();
}

TEST_CASE("fp32 scales: two divisions, from a floor that keeps both normal") {
    check_rule<scale_rules::round_up, e4m3, fp32_scale>("round_up", [](float amax, float scale, float multiplier) {
        float const top = std::max(amax, 448.0f * 0x1p-126f);
        return scale == top / 448.0f && multiplier == 448.0f / top && std::isnormal(scale) && std::isnormal(multiplier);
    });
}

TEST_CASE("DeepGEMM: amax at least 1e-4, the multiplier is the reciprocal of the rounded scale") {
    check_rule<scale_rules::deep_gemm, e4m3, fp32_scale>("fp32", [](float amax, float scale, float multiplier) {
        float const wanted = std::max(amax, 1e-4f) / 448.0f;
        return scale == wanted && multiplier == 1.0f / wanted;
    });
    auto const power = [](float amax, float scale, float multiplier) {
        double const sf = static_cast<double>(std::max(amax, 1e-4f) / 448.0f);
        int const e = binade(sf) + (std::ldexp(1.0, binade(sf)) < sf ? 1 : 0);
        return static_cast<double>(scale) == std::ldexp(1.0, e) && static_cast<double>(multiplier) == std::ldexp(1.0, -e);
    };
    check_rule<scale_rules::deep_gemm, e4m3, e8m0_scale>("e8m0", power);
    check_rule<scale_rules::deep_gemm, e4m3, power_of_two_scale>("power of two", power);
    CHECK(scale_of<scale_rules::deep_gemm, e4m3, fp32_scale>(0).scale == 1e-4f / 448.0f);
}

TEST_CASE("TransformerEngine: the multiplier first; zero blocks and overflowing quotients have their own rule") {
    auto const check = [](float input_max) {
        return [input_max](float amax, float scale, float multiplier) {
            float wanted = amax == 0 ? 1.0f : 448.0f / amax;
            if (std::isinf(wanted)) wanted = input_max; // a finite quotient stays, however large beside the input format
            return multiplier == wanted && scale == 1.0f / wanted;
        };
    };
    check_rule<scale_rules::transformer_engine, e4m3, fp32_scale>("float", check((format_traits<float>::max)()));
    check_rule<scale_rules::transformer_engine, e4m3, fp32_scale, bf16>("bf16", check((format_traits<bf16>::max)()));
    check_rule<scale_rules::transformer_engine, e4m3, fp32_scale, f16>("f16", check((format_traits<f16>::max)()));
    check_rule<scale_rules::transformer_engine, e5m2, power_of_two_scale>("power of two", [](float amax, float scale, float multiplier) {
        float const quotient = amax == 0 ? 1.0f : std::min(57344.0f / amax, (format_traits<float>::max)());
        double const wanted = std::ldexp(1.0, binade(static_cast<double>(quotient)));
        return static_cast<double>(multiplier) == wanted && static_cast<double>(scale) == 1 / wanted;
    });
    // f16 input of ordinary size: the block's largest element uses the codes' whole range.
    CHECK(scale_of<scale_rules::transformer_engine, e4m3, fp32_scale, f16>(bits(0.001f)).multiplier == 448.0f / 0.001f);
    // TransformerEngine #786: amax 1e-37 has a finite multiplier.
    CHECK(scale_of<scale_rules::transformer_engine, e4m3, fp32_scale>(bits(1e-37f)).multiplier == (format_traits<float>::max)());
}

TEST_CASE("a NaN or Inf that reaches a rule makes the scale and the multiplier NaN") {
    auto const check = []<class Rule, class Scale>(Rule, Scale) {
        for (uint32_t const word : {infinity_bits, nan_bits, 0x7f800001u}) {
            auto const s = scale_of<Rule, e4m3, Scale>(word);
            CHECK(std::isnan(s.scale));
            CHECK(std::isnan(s.multiplier));
        }
    };
    check(scale_rules::round_up{}, fp32_scale{}), check(scale_rules::round_up{}, e8m0_scale{});
    check(scale_rules::ocp_floor{}, e8m0_scale{}), check(scale_rules::ocp_even{}, e8m0_scale{});
    check(scale_rules::nearest{}, power_of_two_scale{}), check(scale_rules::deep_gemm{}, fp32_scale{});
    check(scale_rules::deep_gemm{}, e8m0_scale{}), check(scale_rules::transformer_engine{}, fp32_scale{});
    check(scale_rules::transformer_engine{}, power_of_two_scale{});
}

namespace {
/// As the head of scale_rule.hpp shows it.
struct floor_1e12 {
    static constexpr bool bounded = true;
    template <class X, class Code, class F> KEEL_FN static block_scale<F> of(fp32_scale, bits_of<F> const& amax) {
        using U = bits_of<F>;
        F const top = as_float(select(gt(amax, U(infinity_bits - 1)), U(nan_bits), umax(amax, U(bits(1e-12f)))));
        F const scale = div(top, F((format_traits<Code>::max)()));
        return {scale, div(F(1.0f), scale)};
    }
};
} // namespace

TEST_CASE("a rule of one's own passes as keel's do") {
    float const x[4] = {1e-20f, -7.0f, 3.0f, std::numeric_limits<float>::infinity()};
    auto const X = rows(x, 2, 2);
    keel_test::for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        e4m3 codes[4] = {};
        float scales[2] = {};
        row_blocks<> const q{rows(codes, 2, 2), rows(scales, 2, 1)};
        quantize<overflow::saturate, floor_1e12>(be, slice(X, 0, 1), slice(q, 0, 1)).or_throw();
        quantize<overflow::saturate, floor_1e12>(be, slice(X, 1, 1), slice(q, 1, 1), {non_finite_policy::poison}).or_throw();
        CHECK((scales[0] == 7.0f / 448 && codes[0].bits == 0 && codes[1].bits == 0xfe));
        CHECK((std::isnan(scales[1]) && codes[2].bits == 0x7f && codes[3].bits == 0x7f));
        float const tiny[2] = {1e-30f, 0.0f};
        quantize<overflow::saturate, floor_1e12>(be, rows(tiny, 1, 2), slice(q, 0, 1)).or_throw();
        CHECK((scales[0] == 1e-12f / 448 && codes[0].bits == 0));
    });
}

TEST_CASE("a rule that rounds down saturates the block's largest elements, and the report says so") {
    // microxcaling #4: 960 and 957 become 896 under the floor rule and 960 when rounded up. mlx #4353: 29.3 % at most.
    std::vector<float> x(32, 1.0f);
    x[3] = 960.0f, x[7] = -957.0f;
    keel_test::for_each_backend([&](std::string const& name, auto const& be) {
        CAPTURE(name);
        keel_test::guarded_matrix<e4m3> codes(1, 32);
        keel_test::guarded_matrix<e8m0> scales(1, 1);
        mx_blocks<e4m3> const q{codes.view(), scales.view()};
        report seen;
        quantize<overflow::saturate, scale_rules::ocp_floor>(be, rows(x.data(), 1, 32), q, {}, &seen).or_throw();
        CHECK(codes.at(0, 3) * scales.at(0, 0) == 896.0);
        CHECK(codes.at(0, 7) * scales.at(0, 0) == -896.0);
        CHECK(seen.saturated == 2);
        report none;
        quantize<overflow::saturate>(be, rows(x.data(), 1, 32), q, {}, &none).or_throw();
        CHECK(codes.at(0, 3) * scales.at(0, 0) == 960.0);
        CHECK(none.saturated == 0);
        quantize<overflow::to_nonfinite, scale_rules::ocp_floor>(be, rows(x.data(), 1, 32), q).or_throw();
        CHECK(std::isnan(codes.at(0, 3)));
    });
}
