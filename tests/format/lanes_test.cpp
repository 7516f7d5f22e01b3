// The same algorithm on lanes: slots and every pack that this build may use give the scalar's codes and values.
// (tests/sweep has packs convert every float.)
#include <cstring>
#include <vector>

#include "support/catch.hpp"

#include <keel/backend/cpu/pack.hpp>

#include "oracle.hpp"

namespace {

using namespace keel;
using namespace keel_test;

using words = std::vector<uint32_t>;
template <class F> constexpr std::size_t width_of = static_cast<std::size_t>(lane_traits<F>::width);

/// Lanes and what they hold, by bytes.
template <class Lanes, class Element> Lanes from_memory(Element const* p) {
    Lanes v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class Lanes, class Element> void to_memory(Element* p, Lanes const& v) { std::memcpy(p, &v, sizeof v); }

struct inputs {
    std::vector<float> x;
    words noise;
    explicit inputs(uint32_t n) : x(n), noise(n) {
        for (uint32_t i = 0; i < n; ++i) {
            uint32_t const h = i * 2654435761u;
            uint32_t const near = (h & 0x80ffffffu) | ((100u + (h >> 8) % 56u) << 23); // FP8's range and around it
            uint32_t const special = special_words[h % std::size(special_words)] | (i << 31);
            x[i] = float_of(i % 3 == 0 ? h : i % 3 == 1 ? near : special);
            noise[i] = (h ^ (h >> 15)) * 2246822519u;
        }
    }
};
inputs const& the_inputs() {
    static inputs const in(3 * 1 << 12); // a multiple of every width
    return in;
}

template <class T, class F, class P> __attribute__((noinline)) words codes_of(P, inputs const& in) {
    static_assert(sizeof(F) == sizeof(float) * width_of<F>);
    words out(in.x.size());
    for (std::size_t i = 0; i < out.size(); i += width_of<F>) {
        F const x = from_memory<F>(&in.x[i]);
        if constexpr (P::round == rounding::stochastic) {
            to_memory(&out[i], encode_words<T, P::on_overflow, P::round>(x, from_memory<bits_of<F>>(&in.noise[i])));
        } else {
            to_memory(&out[i], encode_words<T, P::on_overflow, P::round>(x));
        }
    }
    return out;
}

template <class T, class F> __attribute__((noinline)) words values_of(words const& codes) {
    words out(codes.size());
    for (std::size_t i = 0; i < out.size(); i += width_of<F>) {
        to_memory(&out[i], decode_words<T, F>(from_memory<bits_of<F>>(&codes[i])));
    }
    return out;
}

template <class T> words some_codes() {
    words codes(sizeof(T) == 1 ? 256 : 65536);
    for (uint32_t i = 0; i < codes.size(); ++i) codes[i] = sizeof(T) < 4 ? i : i * 65537u;
    return codes;
}

void compare(words const& got, words const& wanted, int policy_id, mismatches& bad) {
    for (std::size_t i = 0; i < got.size(); ++i) bad.check(static_cast<double>(i), got[i], wanted[i], policy_id);
}

/// All formats and policies where the lanes are the build's own, else those that between them use every operation.
template <class T, class F, bool All> void check_format(mismatches& bad) {
    inputs const& in = the_inputs();
    auto const check = [&](auto p) { compare(codes_of<T, F>(p, in), codes_of<T, float>(p, in), p.id, bad); };
    if constexpr (All) {
        for_each_policy<T>(check);
    } else if constexpr (format_traits<T>::has_nan) {
        check(policy<overflow::saturate_finite, rounding::nearest_even>{});
        check(policy<overflow::to_nonfinite, rounding::upward>{});
    }
    check(policy<overflow::saturate, rounding::stochastic>{});
    words const codes = some_codes<T>();
    compare(values_of<T, F>(codes), values_of<T, float>(codes), -1, bad);
}

template <class F, bool All> void check_lanes(char const* name) {
    mismatches bad;
    auto const check = [&]<class T>(T) { check_format<T, F, All>(bad); };
    check(bf16{}), check(f16{}), check(e4m3{}), check(e8m0{});
    if constexpr (All) check(float{}), check(e5m2{}), check(e4m3fnuz{}), check(e5m2fnuz{}), check(e2m1{});
    INFO(name << ": " << bad);
    CHECK(bad.count == 0);
}

template <class A> void check_pack() {
    if constexpr (arch_usable<A>) {
        check_lanes<pack<A>, std::is_same_v<A, native_arch>>(A::name());
    } else {
        WARN("skipped: " << A::name() << " is not enabled in this build");
    }
}

TEST_CASE("slots of floats give the scalar's codes and values") {
    check_lanes<slots<float, 4>, false>("slots<float, 4>");
}

TEST_CASE("packs give the scalar's codes and values") {
    check_pack<arch::scalar>();
#if defined(__x86_64__)
    check_pack<arch::sse2>();
    check_pack<arch::sse4>();
    check_pack<arch::avx2>();
    check_pack<arch::avx512>();
    check_pack<arch::avx512bf16>();
#elif defined(__aarch64__)
    check_pack<arch::neon>();
#endif
}

TEST_CASE("slots of packs give the scalar's codes and values") {
    check_lanes<slots<pack<native_arch>, 2>, false>("slots<pack, 2>");
}

} // namespace
