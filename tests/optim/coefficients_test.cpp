// The coefficient sets do in their storage type what their certificate says, and the unsafe ones do not pass for safe.
#include <algorithm>
#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/coefficients.hpp>
#include <support/catch.hpp>

using keel::bf16;
using keel::f16;

namespace {

template <class Set, class T> constexpr bool compiles = requires { keel::coefficients<Set, T>(); };
template <class Set, class T> constexpr bool compiles_unsafe = requires { keel::unsafe_coefficients<Set, T>(); };

// What may be used without saying "unsafe", by type.
template <class Set, bool In_float, bool In_f16, bool In_bf16>
constexpr bool certified_in = compiles<Set, float> == In_float && compiles<Set, f16> == In_f16 && compiles<Set, bf16> == In_bf16;
static_assert(certified_in<keel::keller, true, true, true> && certified_in<keel::you_jiacheng, true, true, true>);
static_assert(certified_in<keel::polar_express, true, true, true> && certified_in<keel::polar_express_1_05, true, true, true>);
static_assert(certified_in<keel::polar_express_2_percent, true, true, true> && certified_in<keel::turbo_aol, true, true, true>);
static_assert(certified_in<keel::deepseek_v4, true, true, true>);
static_assert(certified_in<keel::classic_cubic, true, true, true> && certified_in<keel::classic_quintic, true, true, true>);
static_assert(certified_in<keel::cubic_relaxed, true, true, false>);
static_assert(certified_in<keel::polar_express_raw, false, false, false> && certified_in<keel::cans, false, false, false>);
static_assert(certified_in<keel::turbo_aol_early, false, false, false>);
static_assert(compiles_unsafe<keel::cans, bf16> && compiles_unsafe<keel::turbo_aol_early, float>);

// Step counts are certified one by one: repeating Polar Express' converging step is fine, cycling Keller Jordan's is as well.
static_assert(keel::certified_set<keel::polar_express, bf16, 12> && keel::certified_set<keel::keller, bf16, 9>);
static_assert(keel::certificate<keel::polar_express, float, 12>.upper < 1.001);
static_assert(!keel::certificate<keel::turbo_aol_early, float>.positive);
static_assert(keel::certificate<keel::cans, float>.positive && keel::certificate<keel::cans, float>.upper > 6);

// The value cannot be put together around a step of one's own.
static_assert(!std::is_constructible_v<keel::newton_schulz_coefficients<float>, keel::newton_schulz_step const*, int>);
static_assert(!std::is_aggregate_v<keel::newton_schulz_coefficients<float>>);
template <class T> constexpr bool braces = requires(keel::newton_schulz_step q) { T{&q, 1}; };
template <class T> constexpr bool all_braces = requires(keel::newton_schulz_step q) { T{&q, 1, "", "", keel::map_bounds{}}; };
static_assert(!braces<keel::newton_schulz_coefficients<float>> && !all_braces<keel::newton_schulz_coefficients<float>>);
static_assert(std::is_trivially_copyable_v<keel::newton_schulz_coefficients<float>>);

struct of_ones_own {
    static constexpr char const *name = "of_ones_own", *source = "this test";
    static constexpr keel::newton_schulz_term listed[] = {{2.0, -1.5, 0.5}};
    static constexpr int default_steps = 3;
    static constexpr keel::longer_run more = keel::longer_run::cycle;
};
static_assert(compiles<of_ones_own, bf16>);

// a + B falls to 0.013 where B is -3.99: enough in exact arithmetic and in f16, not beside bf16's rounding of B, which is up to 0.0156.
struct near_cancellation {
    static constexpr char const *name = "near_cancellation", *source = "this test";
    static constexpr keel::newton_schulz_term listed[] = {{4.0, -8.93, 5.0}};
    static constexpr int default_steps = 1;
    static constexpr keel::longer_run more = keel::longer_run::cycle;
};
static_assert(keel::bounds_of(keel::unrolled<near_cancellation, 1>.step, 1, 0.0).positive);
static_assert(keel::certificate<near_cancellation, f16, 1>.positive && !keel::certificate<near_cancellation, bf16, 1>.positive);

struct range {
    double low = 1e300, high = -1e300;
};
/// The composed map in double over a fine logarithmic grid of [from, 1].
template <class T> range image(keel::newton_schulz_coefficients<T> const& set, double from, double to = 1.0) {
    range r;
    for (int i = 0; i <= 20000; ++i) {
        double s = to * std::pow(from / to, i / 20000.0);
        for (int t = 0; t < set.count; ++t) {
            auto const a = static_cast<double>(set.step[t].a), b = static_cast<double>(set.step[t].b), c = static_cast<double>(set.step[t].c);
            s = a * s + b * std::pow(s, 3) + c * std::pow(s, 5);
        }
        r.low = std::min(r.low, s);
        r.high = std::max(r.high, s);
    }
    return r;
}

} // namespace

TEST_CASE("published sets have the published quality on [1e-2, 1]") {
    // Figures measured independently from the sources' own lists; three digits.
    auto const check = [](auto const& set, double low, double high) {
        INFO(set.name);
        range const r = image(set, 1e-2);
        CHECK(r.low == Approx(low).margin(6e-4));
        CHECK(r.high == Approx(high).margin(6e-4));
    };
    check(keel::coefficients<keel::keller>(), .682, 1.134);
    check(keel::coefficients<keel::you_jiacheng>(), .978, 1.032);
    check(keel::coefficients<keel::polar_express_1_05>(), .846, 1.124);
    check(keel::coefficients<keel::polar_express_2_percent>(), .859, 1.141);
    check(keel::unsafe_coefficients<keel::cans>(), .884, 1.120);
    check(keel::unsafe_coefficients<keel::turbo_aol_early>(), -1.084, 1.084);
    check(keel::coefficients<keel::turbo_aol>(), .941, 1.050);
    check(keel::coefficients<keel::deepseek_v4>(), 1.000, 1.001);
    check(keel::coefficients<keel::cubic_relaxed>(), .774, 1.300);
    check(keel::coefficients<keel::classic_cubic, float, 5>(), .076, 1.0);
    check(keel::coefficients<keel::classic_quintic, float, 5>(), .228, 1.0);
    // With the fifth step undivided the range would be .876 ... 1.124; the paper's code divides all but the eighth.
    check(keel::coefficients<keel::polar_express>(), .870, 1.124);
}

TEST_CASE("every certificate is what a fine grid finds, in every type") {
    auto const check = [](auto set, auto type) {
        using Set = decltype(set);
        using T = decltype(type);
        double const margin = keel::rounding_margin<T>;
        auto const& steps = keel::unrolled<Set, Set::default_steps>;
        double high = 1 + margin;
        bool positive = true;
        for (auto const& p : steps.step) {
            auto const a = static_cast<double>(p.a), b = static_cast<double>(p.b), c = static_cast<double>(p.c);
            double least = 1e300, most = 0, stored = 0;
            for (int i = 0; i <= 4000; ++i) {
                double const s = high * i / 4000, even = b * s * s + c * std::pow(s, 4);
                least = std::min(least, a + even), most = std::max(most, s * (a + even)), stored = std::max(stored, std::abs(even));
            }
            positive = positive && least > 0.5 * margin * stored;
            high = std::min(most * (1 + margin), 1e3);
        }
        INFO(Set::name << " " << margin << ": " << positive << " " << high);
        keel::map_bounds const found = keel::certificate<Set, T>;
        CHECK(found.positive == positive);
        CHECK(found.safe() == (positive && high <= keel::largest_certified));
        if (found.safe()) CHECK(found.upper == Approx(high).epsilon(1e-5)); // the grid misses a maximum by (1 / 8000)^2 of its curvature
    };
    auto const in_every_type = [&](auto... sets) { (check(sets, 0.0f), ...), (check(sets, f16{}), ...), (check(sets, bf16{}), ...); };
    in_every_type(keel::keller{}, keel::you_jiacheng{}, keel::polar_express{}, keel::polar_express_1_05{}, keel::polar_express_raw{},
                  keel::polar_express_2_percent{}, keel::cans{}, keel::turbo_aol{}, keel::turbo_aol_early{}, keel::deepseek_v4{},
                  keel::cubic_relaxed{}, keel::classic_cubic{}, keel::classic_quintic{}, of_ones_own{}, near_cancellation{});
}

TEST_CASE("no point of the certified interval leaves its bounds") {
    auto const check = [](auto const& set, double margin) {
        INFO(set.name << " " << margin);
        range const r = image(set, 1e-6, 1 + margin);
        CHECK(r.low > 0);
        CHECK(r.high <= set.bounds.upper);
        CHECK(set.bounds.upper <= r.high * std::pow(1 + margin, 3 * set.count) * 1.16); // the bound is not idle either
    };
    check(keel::coefficients<keel::keller, bf16>(), keel::rounding_margin<bf16>);
    check(keel::coefficients<keel::polar_express, bf16>(), keel::rounding_margin<bf16>);
    check(keel::coefficients<keel::polar_express>(), keel::rounding_margin<float>);
    check(keel::coefficients<keel::you_jiacheng, f16>(), keel::rounding_margin<f16>);
    check(keel::coefficients<keel::turbo_aol, bf16>(), keel::rounding_margin<bf16>);
    check(keel::coefficients<keel::cubic_relaxed, f16>(), keel::rounding_margin<f16>);
    check(keel::coefficients<keel::deepseek_v4, bf16>(), keel::rounding_margin<bf16>);
}

TEST_CASE("longer runs follow the set's rule") {
    auto const cycled = keel::coefficients<keel::you_jiacheng, float, 7>();
    CHECK(cycled.step[5].a == cycled.step[0].a);
    CHECK(cycled.step[6].b == cycled.step[1].b);
    auto const repeated = keel::coefficients<keel::polar_express, float, 10>();
    CHECK(repeated.step[9].a == 1.875f);
    CHECK(repeated.step[7].c == 0.375f);
    CHECK(repeated.step[0].a == static_cast<float>(8.28721201814563 / 1.01));
}
