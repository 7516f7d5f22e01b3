// Conversions do not look at the floating-point environment: the same codes and values under every rounding mode, with
// subnormals flushed on input and on output, from scalars and from packs.
#include <cfenv>
#include <cstring>
#include <vector>

#include "support/catch.hpp"

#include <keel/backend/cpu/pack.hpp>

#include "oracle.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace keel;
using namespace keel_test;

/// Sets a rounding mode and flushing for its lifetime.
class environment {
public:
    environment(int rounding_mode, bool flush) {
        std::fegetenv(&before_);
        std::fesetround(rounding_mode);
#if defined(__x86_64__)
        if (flush) _mm_setcsr(_mm_getcsr() | 0x8040u); // FTZ and DAZ
#elif defined(__aarch64__)
        if (flush) {
            uint64_t control;
            __asm__ volatile("mrs %0, fpcr" : "=r"(control));
            __asm__ volatile("msr fpcr, %0" : : "r"(control | (uint64_t{1} << 24)));
        }
#else
        static_cast<void>(flush);
#endif
    }
    environment(environment const&) = delete;
    environment& operator=(environment const&) = delete;
    ~environment() { std::fesetenv(&before_); }

private:
    std::fenv_t before_;
};

struct sample {
    std::vector<float> floats;
    std::vector<double> doubles;
    std::vector<uint32_t> codes;
    sample() {
        for (uint32_t i = 0; i < 1u << 14; ++i) {
            uint32_t const h = i * 2654435761u;
            uint32_t const word = i % 4 == 0   ? h & 0x80ffffffu // float's subnormals
                                  : i % 4 == 1 ? (h & 0x80ffffffu) | (100u + h / 256 % 30u) << 23
                                  : i % 4 == 2 ? special_words[h % std::size(special_words)]
                                               : h;
            floats.push_back(float_of(word));
            uint64_t const wide = (i + uint64_t{1}) * 0x9e3779b97f4a7c15u;
            uint64_t const exponent = i % 2 == 0 ? 0 : 863 + i / 2 % 320; // double's subnormals, float's range
            doubles.push_back(std::bit_cast<double>((wide & 0x800fffffffffffffu) | (exponent << 52)));
            codes.push_back(i * 4);
        }
    }
};

constexpr std::size_t width = static_cast<std::size_t>(native_arch::width);
using lanes = pack<native_arch>;
using words = std::vector<uint32_t>;

template <class T, class P> __attribute__((noinline)) void append_codes(P p, sample const& in, words& out) {
    for (float const x : in.floats) out.push_back(code_of<T>(p, x));
    for (double const x : in.doubles) out.push_back(code_of<T>(p, x));
    for (std::size_t i = 0; i < in.floats.size(); i += width) {
        lanes x;
        std::memcpy(&x, &in.floats[i], sizeof x);
        auto const u = encode_words<T, P::on_overflow, P::round>(x);
        out.resize(out.size() + width);
        std::memcpy(&out[out.size() - width], &u, sizeof u);
    }
}

template <class T> __attribute__((noinline)) void append_stochastic_codes(sample const& in, words& out) {
    for (float const x : in.floats) {
        out.push_back(to_word(encode<T, overflow::saturate, rounding::stochastic>(x, word_of(x) * 77777u)));
    }
    for (double const x : in.doubles) {
        out.push_back(to_word(encode<T, overflow::saturate, rounding::stochastic>(x, 0x12345678u)));
    }
}

template <class T> __attribute__((noinline)) void append_values(sample const& in, words& out) {
    for (uint32_t const code : in.codes) out.push_back(word_of(decode(from_word<T>(code))));
    for (std::size_t i = 0; i < in.codes.size(); i += width) {
        bits_of<lanes> u;
        std::memcpy(&u, &in.codes[i], sizeof u);
        lanes const x = decode_words<T, lanes>(u);
        out.resize(out.size() + width);
        std::memcpy(&out[out.size() - width], &x, sizeof x);
    }
}

/// Everything that a format converts, as words.
template <class T> void convert(sample const& in, words& out) {
    out.clear();
    for_each_policy<T>([&](auto p) { append_codes<T>(p, in, out); });
    append_stochastic_codes<T>(in, out);
    append_values<T>(in, out);
}

TEMPLATE_TEST_CASE("the environment changes no code and no value", "", float, bf16, f16, e4m3, e5m2, e8m0, e4m3fnuz, e5m2fnuz,
                   e2m1, float_bias) {
    sample const in;
    words wanted, got;
    // by way of a pointer, so that nothing is computed before the environment stands
    void (*const volatile run)(sample const&, words&) = convert<TestType>;
    run(in, wanted);
    for (int const mode : {FE_TONEAREST, FE_TOWARDZERO, FE_UPWARD, FE_DOWNWARD}) {
        for (bool const flush : {false, true}) {
            {
                environment const changed(mode, flush);
                run(in, got);
            }
            REQUIRE(got.size() == wanted.size());
            mismatches bad;
            for (std::size_t i = 0; i < wanted.size(); ++i) bad.check(static_cast<double>(i), got[i], wanted[i]);
            INFO("rounding mode " << mode << ", flushing " << flush << ": " << bad);
            CHECK(bad.count == 0);
        }
    }
}

TEST_CASE("the environments of this test do change arithmetic") {
    float const volatile one = 1, third = 3, tiny = float_of(0x00000007u);
    float volatile normal_quotient = 0, flushed = 0, upward_quotient = 0;
    normal_quotient = one / third;
    {
        environment const changed(FE_UPWARD, true);
        upward_quotient = one / -third;
        flushed = tiny * one;
    }
    CHECK(-upward_quotient < normal_quotient);
#if defined(__x86_64__) || defined(__aarch64__)
    CHECK(word_of(flushed) == 0u);
#endif
}

} // namespace
