// Elementary functions: errors in ulps against double precision, special values, and order.
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <keel/core/math.hpp>

#include "core/every_lane.hpp"
#include "support/catch.hpp"
#include "support/environment.hpp"

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float largest = std::numeric_limits<float>::max();
constexpr float smallest = std::numeric_limits<float>::denorm_min();
constexpr float pi = 0x1.921fb6p+1f;

/// The distance between floats around a real number.
double ulp(double exact) {
    int exponent = 0;
    std::frexp(exact, &exponent);
    return std::ldexp(1.0, (exponent < -125 ? -125 : exponent) - 24);
}

struct range {
    float from, to;
};

/// Whether y is an acceptable result where the exact value has no ulp: NaN, or beyond the floats.
bool special_matches(float y, double exact) {
    if (std::isnan(exact)) return keel::bits(y) == keel::nan_bits;
    if (std::isinf(exact)) return keel::bits(y) == keel::bits(static_cast<float>(exact));
    return std::fabs(exact) > 0x1.ffffffp+127 && std::isinf(y) && std::signbit(y) == std::signbit(exact);
}

/// Calls visit(x) for a sample of all floats in `domain`, and for every float near each of `edges`. The long form takes
/// every float whose magnitude is in `dense`.
template <class Visit>
void for_floats(range domain, range dense, std::initializer_list<float> edges, Visit const& visit) {
    auto const inside = [&](float x) { return std::isnan(x) || (domain.from <= x && x <= domain.to); };
    uint64_t const step = keel_test::exhaustive() ? 31 : 1021;
    for (uint64_t u = 0; u <= 0xffffffffu; u += step) {
        float const x = keel::as_float(static_cast<uint32_t>(u));
        if (inside(x)) visit(x);
    }
    for (float const edge : edges)
        for (uint32_t k = 0; k < 4001; ++k) {
            float const x = keel::as_float(keel::bits(edge) - 2000 + k);
            if (inside(x)) visit(x);
        }
    if (!keel_test::exhaustive()) return;
    for (uint32_t u = keel::bits(dense.from); u <= keel::bits(dense.to); ++u)
        for (uint32_t const sign : {0u, keel::sign_bit})
            if (float const x = keel::as_float(u | sign); inside(x)) visit(x);
}

/// The largest error over `domain` in ulps, or in units of `least` where an ulp is smaller; infinite where a special value is wrong.
template <class F, class G> double worst_error(range domain, range dense, F const& f, G const& exact,
                                               std::initializer_list<float> edges = {}, double least = 0) {
    double worst = 0;
    float at = 0;
    for_floats(domain, dense, edges, [&](float x) {
        float const y = f(x);
        double const wanted = exact(static_cast<double>(x));
        double error = 0;
        if (!std::isfinite(y) || !std::isfinite(wanted))
            error = special_matches(y, wanted) ? 0.0 : HUGE_VAL;
        else
            error = std::fabs(static_cast<double>(y) - wanted) / std::fmax(ulp(wanted), least);
        if (error > worst) {
            worst = error;
            at = x;
        }
    });
    UNSCOPED_INFO("largest error " << worst << " ulp at x = " << at);
    return worst;
}

constexpr range everything = {-infinity, infinity};
constexpr range bent = {0x1p-26f, 130.0f}; // where the exponentials are neither constant nor a straight line

double sigmoid_exact(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
double softplus_exact(double x) { return (x > 0 ? x : 0) + std::log1p(std::exp(-std::fabs(x))); }
double silu_exact(double x) { return std::isinf(x) ? (x > 0 ? x : -0.0) : x * sigmoid_exact(x); }
double silu_derivative_exact(double x) {
    return std::isinf(x) ? (x > 0 ? 1.0 : 0.0) : sigmoid_exact(x) * (1 + x * sigmoid_exact(-x));
}

/// Turns a function with two results into one of them.
template <int which> float sincos_part(float x) {
    float s, c;
    keel::sincos(x, s, c);
    return which == 0 ? s : c;
}
template <int which> float turns_part(float x) {
    float s, c;
    keel::sincos_turns(x, s, c);
    return which == 0 ? s : c;
}
/// sin(2 pi x), with x reduced exactly first.
double sine_of_turns(double x) {
    if (!std::isfinite(x)) return std::nan("");
    double const quarters = std::rint(4 * x);
    double const angle = 2 * 3.14159265358979323846 * (x - quarters / 4);
    switch (static_cast<int64_t>(std::fmod(quarters, 4.0)) & 3) {
    case 0:
        return std::sin(angle);
    case 1:
        return std::cos(angle);
    case 2:
        return -std::sin(angle);
    default:
        return -std::cos(angle);
    }
}

} // namespace

// Every bound is the one that the docstring states: measured over all floats, and rounded up.

TEST_CASE("exp is within 0.9 ulp, subnormal results included") {
    CHECK(worst_error(
              everything, bent, [](float x) { return keel::exp(x); }, [](double x) { return std::exp(x); },
              {88.72284f, -87.33655f, -103.27893f, -103.97208f, 0.34657359f, -0.34657359f, 104.0f, -104.0f}) <= 0.9);
}

TEST_CASE("log is within 1 ulp, subnormal arguments included") {
    CHECK(worst_error(
              {0.0f, infinity}, {0.25f, 4.0f}, [](float x) { return keel::log(x); },
              [](double x) { return std::log(x); }, {1.0f, 4 / 3.0f, 2 / 3.0f, 0x1p-126f, 0x1p-149f * 2000}) <= 1.0);
}

TEST_CASE("log1p is within 1.1 ulp") {
    CHECK(worst_error(
              everything, {0x1p-26f, 4.0f}, [](float x) { return keel::log1p(x); },
              [](double x) { return std::log1p(x); },
              {-1.0f, 1 / 3.0f, 5 / 3.0f, -1 / 3.0f, 0x1p+127f, 0.334544f}) <= 1.1);
}

TEST_CASE("sigmoid is within 2.5 ulp on both sides") {
    CHECK(worst_error(everything, bent, [](float x) { return keel::sigmoid(x); }, sigmoid_exact,
                      {0.34657359f, -87.33655f, -103.27893f, -103.97208f, 128.0f, -128.0f}) <= 2.5);
    CHECK(worst_error(
              everything, bent, [](float x) { return keel::one_minus_sigmoid(x); },
              [](double x) { return sigmoid_exact(-x); }, {87.33655f, 103.97208f}) <= 2.5);
}

TEST_CASE("softplus and log_sigmoid are within 2.2 ulp") {
    CHECK(worst_error(everything, bent, [](float x) { return keel::softplus(x); }, softplus_exact,
                      {-1.0986123f, 1.0986123f, -103.97208f}) <= 2.2);
    CHECK(worst_error(
              everything, bent, [](float x) { return keel::log_sigmoid(x); },
              [](double x) { return -softplus_exact(-x); }, {-1.0986123f, 1.0986123f, 103.97208f}) <= 2.2);
}

TEST_CASE("tanh is within 2.6 ulp") {
    CHECK(worst_error(
              everything, bent, [](float x) { return keel::tanh(x); }, [](double x) { return std::tanh(x); },
              {0.17328679f, 9.010913f, 16.0f}) <= 2.6);
}

TEST_CASE("silu is within 3.4 ulp, tiny results included") {
    CHECK(worst_error(everything, bent, [](float x) { return keel::silu(x); }, silu_exact,
                      {-1.2784645f, -5.93889f, -92.0f, -108.0f, -128.0f}) <= 3.4);
}

TEST_CASE("silu_derivative is within 3.1 ulp where it does not cancel, and within 2^-22 where it crosses zero") {
    auto const f = [](float x) { return keel::silu_derivative(x); };
    CHECK(worst_error({-0.5f, infinity}, bent, f, silu_derivative_exact) <= 3.1);
    CHECK(worst_error({-infinity, -2.0f}, bent, f, silu_derivative_exact, {-128.0f, -108.0f}) <= 6.0);
    double worst = 0;
    for_floats({-2.0f, -0.5f}, {0.5f, 2.0f}, {-1.2784645f}, [&](float x) {
        if (!std::isnan(x))
            worst =
                std::fmax(worst, std::fabs(static_cast<double>(f(x)) - silu_derivative_exact(static_cast<double>(x))));
    });
    CHECK(worst <= 0x1p-22);
}

TEST_CASE("sincos is within 1 ulp up to 2^24 radians, or 2^-47 beside a multiple of pi/2") {
    range const domain = {-keel::sincos_limit, keel::sincos_limit};
    auto const edges = {pi / 4, pi / 2, pi, 2 * pi, 1e5f, 0x1p+24f};
    CHECK(worst_error(
              domain, {0x1p-13f, 8.0f}, sincos_part<0>, [](double x) { return std::sin(x); }, edges, 0x1p-47) <= 1.0);
    CHECK(worst_error(
              domain, {0x1p-13f, 8.0f}, sincos_part<1>, [](double x) { return std::cos(x); }, edges, 0x1p-47) <= 1.0);
    double worst = 0; // the floats nearest to multiples of pi/2, where the reduced angle is all that is left
    for (int64_t k = 1; k < 10680000; k += keel_test::exhaustive() ? 1 : 37)
        for (uint32_t near = 0; near < 5; ++near) {
            float const x = keel::as_float(
                keel::bits(static_cast<float>(static_cast<double>(k) * 1.57079632679489661923)) + near - 2);
            if (x > keel::sincos_limit) continue;
            auto const error = [&](float y, double wanted) {
                return std::fabs(static_cast<double>(y) - wanted) / std::fmax(ulp(wanted), 0x1p-47);
            };
            worst = std::fmax(worst, error(sincos_part<0>(x), std::sin(static_cast<double>(x))));
            worst = std::fmax(worst, error(sincos_part<1>(x), std::cos(static_cast<double>(x))));
        }
    CHECK(worst <= 1.0);
}

TEST_CASE("sincos_turns is within 1 ulp") {
    range const domain = {-0x1p+20f, 0x1p+20f};
    auto const edges = {0.125f, 0.25f, 0.5f, 0.75f, 1.0f};
    CHECK(worst_error(domain, {0x1p-13f, 1.0f}, turns_part<0>, sine_of_turns, edges) <= 1.0);
    CHECK(worst_error(
              domain, {0x1p-13f, 1.0f}, turns_part<1>, [](double x) { return sine_of_turns(x + 0.25); }, edges) <= 1.0);
}

TEST_CASE("sincos_product takes the sine of the exact product, for every position of a rotary embedding") {
    std::mt19937 engine(7);
    double worst = 0;
    for (int i = 0; i < 400000; ++i) {
        auto const position = static_cast<float>(engine() >> 8);
        auto const frequency = static_cast<float>(std::pow(10.0, -static_cast<double>(engine() % 80000) / 10000.0));
        double const angle = static_cast<double>(position) * static_cast<double>(frequency); // 48 bits: exact
        float s, c;
        keel::sincos_product(i % 2 == 0 ? position : -position, frequency, s, c);
        double const sine = i % 2 == 0 ? std::sin(angle) : -std::sin(angle);
        worst = std::fmax(worst, std::fabs(static_cast<double>(s) - sine) / ulp(sine));
        worst = std::fmax(worst, std::fabs(static_cast<double>(c) - std::cos(angle)) / ulp(std::cos(angle)));
    }
    CHECK(worst <= 1.0);
}

TEST_CASE("special values of the elementary functions") {
    auto const same = [](float a, float b) { return keel::bits(a) == keel::bits(b); };
    float const nan = keel::as_float(keel::nan_bits);

    SECTION("every NaN becomes the one that keel stores") {
        for (uint32_t const word : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
            float const x = keel::as_float(word);
            float s, c;
            for (float const y :
                 {keel::exp(x), keel::log(x), keel::log1p(x), keel::sigmoid(x), keel::one_minus_sigmoid(x),
                  keel::softplus(x), keel::log_sigmoid(x), keel::tanh(x), keel::silu(x), keel::silu_derivative(x)})
                CHECK(same(y, nan));
            keel::sincos(x, s, c);
            CHECK((same(s, nan) && same(c, nan)));
            keel::sincos_turns(x, s, c);
            CHECK((same(s, nan) && same(c, nan)));
            keel::sincos_product(1.0f, x, s, c);
            CHECK((same(s, nan) && same(c, nan)));
        }
    }
    SECTION("limits") {
        CHECK(same(keel::exp(infinity), infinity));
        CHECK(same(keel::exp(largest), infinity));
        CHECK(same(keel::exp(-infinity), 0.0f));
        CHECK(same(keel::exp(-largest), 0.0f));
        CHECK(same(keel::log(0.0f), -infinity));
        CHECK(same(keel::log(-0.0f), -infinity));
        CHECK(same(keel::log(infinity), infinity));
        CHECK(same(keel::log(-infinity), nan));
        CHECK(same(keel::log(-1.0f), nan));
        CHECK(same(keel::log(-smallest), nan));
        CHECK(same(keel::log1p(-1.0f), -infinity));
        CHECK(same(keel::log1p(-1.0000001f), nan));
        CHECK(same(keel::log1p(-infinity), nan));
        CHECK(same(keel::log1p(infinity), infinity));
        CHECK(same(keel::sigmoid(infinity), 1.0f));
        CHECK(same(keel::sigmoid(-infinity), 0.0f));
        CHECK(same(keel::sigmoid(0.0f), 0.5f));
        CHECK(same(keel::softplus(infinity), infinity));
        CHECK(same(keel::softplus(-infinity), 0.0f));
        CHECK(same(keel::log_sigmoid(infinity), -0.0f));
        CHECK(same(keel::log_sigmoid(-infinity), -infinity));
        CHECK(same(keel::tanh(infinity), 1.0f));
        CHECK(same(keel::tanh(-infinity), -1.0f));
        CHECK(same(keel::silu(infinity), infinity));
        CHECK(same(keel::silu(largest), largest));
        CHECK(same(keel::silu(-infinity), -0.0f));
        CHECK(same(keel::silu(-largest), -0.0f));
        CHECK(same(keel::silu_derivative(infinity), 1.0f));
        CHECK(same(keel::silu_derivative(-infinity), -0.0f));
        CHECK(same(keel::silu_derivative(largest), 1.0f));
        CHECK(same(keel::silu_derivative(-largest), -0.0f));
    }
    SECTION("signed zeros and subnormals") {
        CHECK(same(keel::exp(-0.0f), 1.0f));
        CHECK(same(keel::exp(smallest), 1.0f));
        CHECK(same(keel::exp(-103.972084f), 0.0f));    // 2^-150 less a little: below half of the smallest
        CHECK(same(keel::exp(-103.97207f), smallest)); // and above it
        CHECK(same(keel::exp(-103.0f), keel::as_float(1u)));
        CHECK(same(keel::sigmoid(-103.0f), keel::as_float(1u)));
        CHECK(same(keel::log(1.0f), 0.0f));
        for (float const x : {0.0f, smallest, 3 * smallest, 0x1.fffffcp-127f, 0x1p-126f})
            for (float const y : {x, -x}) {
                float s, c;
                keel::sincos(y, s, c);
                CHECK((same(s, y) && same(c, 1.0f)));
                CHECK(same(keel::log1p(y), y));
                CHECK(same(keel::tanh(y), y));
            }
        CHECK(same(keel::silu(0.0f), 0.0f));
        CHECK(same(keel::silu(-0.0f), -0.0f));
    }
    SECTION("exact where the mathematics is") {
        for (float const turns : {0.0f, 1.0f, 5.0f, 1000.0f, -3.0f}) {
            float s, c;
            keel::sincos_turns(turns, s, c);
            CHECK((s == 0.0f && c == 1.0f));
            keel::sincos_turns(turns + 0.25f, s, c);
            CHECK((s == 1.0f && c == 0.0f));
            keel::sincos_turns(turns + 0.5f, s, c);
            CHECK((s == 0.0f && c == -1.0f));
            keel::sincos_turns(turns + 0.75f, s, c);
            CHECK((s == -1.0f && c == 0.0f));
        }
        for (float const beyond : {0x1.000002p+24f, -0x1p+30f, largest, infinity}) {
            float s, c;
            keel::sincos(beyond, s, c);
            CHECK((same(s, nan) && same(c, nan)));
        }
    }
}

TEST_CASE("increasing functions never step back by more than their last place") {
    // Not monotone to the last bit, because neighbours may round differently on the way; the sigmoid divides as well.
    struct row {
        char const* name;
        float (*f)(float);
        int64_t ulps;
    };
    row const rows[] = {{"exp", [](float x) { return keel::exp(x); }, 1},
                        {"tanh", [](float x) { return keel::tanh(x); }, 1},
                        {"softplus", [](float x) { return keel::softplus(x); }, 1},
                        {"sigmoid", [](float x) { return keel::sigmoid(x); }, 2},
                        {"log1p", [](float x) { return keel::log1p(x); }, 1}};
    for (auto const& r : rows) {
        int64_t worst = 0;
        for (float const center :
             {0.03125f, 0.33333334f, 0.34657359f, 0.5f, 1.0f, 1.0397208f, 2.0f, 10.0f, 30.0f, 87.0f})
            for (float const sign : {1.0f, -1.0f}) {
                float x = sign * center;
                if (r.name == std::string("log1p") && x <= -1.0f) continue;
                float previous = r.f(x);
                for (int k = 0; k < 20000; ++k) {
                    x = std::nextafterf(x, infinity);
                    float const y = r.f(x);
                    if (y < previous)
                        worst = std::max(worst, std::abs(int64_t{keel::bits(y)} - int64_t{keel::bits(previous)}));
                    previous = y;
                }
            }
        INFO(r.name);
        CHECK(worst <= r.ulps);
    }
}

TEST_CASE("a sum and what rounding took from it are the exact sum") {
    uint32_t state = 3;
    auto const draw = [&] { // magnitudes from 2^-20 to 2^7, so that double holds the exact sum
        state = state * 1664525u + 1013904223u;
        uint32_t const exponent = 107u + (state >> 8) % 28u;
        state = state * 1664525u + 1013904223u;
        return keel::as_float((state & 0x80000000u) | exponent << 23 | (state >> 8 & 0x7fffffu));
    };
    for (int i = 0; i < 20000; ++i) {
        float const a = draw(), b = draw();
        double const exact = static_cast<double>(a) + static_cast<double>(b);
        REQUIRE(static_cast<double>(keel::add(a, b)) + static_cast<double>(keel::lost_in_sum(a, b)) == exact);
    }
    for (float const x : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN()}) {
        CHECK(keel::bits(keel::lost_in_sum(x, 1.0f)) == 0u);
        CHECK(keel::bits(keel::lost_in_sum(1.0f, x)) == 0u);
    }
    CHECK(keel::bits(keel::lost_in_sum(3e38f, 3e38f)) == 0u);
}
