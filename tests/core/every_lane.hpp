// Every lane type that this translation unit can use, as a list to run a test over.
#pragma once

#include <string>

#include <keel/backend/cpu/pack_multiply.hpp>
#include <keel/backend/simt.hpp>
#include <keel/core/lanes.hpp>

namespace keel_test {

template <class F> inline constexpr std::size_t lanes_of = static_cast<std::size_t>(keel::lane_traits<F>::width);

KEEL_FN void read_lanes(float& x, float const* p) { x = *p; }
KEEL_FN void write_lanes(float* p, float x) { *p = x; }
KEEL_FN void read_lanes(uint32_t& x, uint32_t const* p) { x = *p; }
KEEL_FN void write_lanes(uint32_t* p, uint32_t x) { *p = x; }
template <class A> KEEL_FN void read_lanes(keel::pack<A>& x, float const* p) { x = keel::load<keel::pack<A>>(p); }
template <class A> KEEL_FN void write_lanes(float* p, keel::pack<A> const& x) { keel::store(p, x); }
template <class A> KEEL_FN void read_lanes(keel::bits_pack<A>& x, uint32_t const* p) {
    x = keel::load_words<keel::bits_pack<A>>(p);
}
template <class A> KEEL_FN void write_lanes(uint32_t* p, keel::bits_pack<A> const& x) { keel::store_words(p, x); }
template <class V, int W> KEEL_FN void read_lanes(keel::lockstep_of<V, W>& x, V const* p) {
    for (int l = 0; l < W; ++l) x.lane[l] = p[l];
}
template <class V, int W> KEEL_FN void write_lanes(V* p, keel::lockstep_of<V, W> const& x) {
    for (int l = 0; l < W; ++l) p[l] = x.lane[l];
}
template <class V, int K, class T> KEEL_FN void read_lanes(keel::slots<V, K>& x, T const* p) {
    constexpr int each = static_cast<int>(sizeof(V) / sizeof(T));
    for (int k = 0; k < K; ++k) read_lanes(x.s[k], p + k * each);
}
template <class V, int K, class T> KEEL_FN void write_lanes(T* p, keel::slots<V, K> const& x) {
    constexpr int each = static_cast<int>(sizeof(V) / sizeof(T));
    for (int k = 0; k < K; ++k) write_lanes(p + k * each, x.s[k]);
}

/// body.template operator()<F>(name) for every lane type F beside float.
template <class Body> void for_every_lane_type(Body const& body) {
    [[maybe_unused]] auto const pack_of = [&]<class A>(A) {
        if constexpr (keel::arch_usable<A>) {
            body.template operator()<keel::pack<A>>(std::string("pack<") + A::name() + ">");
        }
    };
    body.template operator()<keel::slots<float, 4>>("slots<float, 4>");
    body.template operator()<keel::slots<keel::pack<keel::native_arch>, 2>>("slots of two packs");
#if !defined(KEEL_NATIVE_ONLY) // the sanitizers look at memory, not at every architecture's arithmetic
    body.template operator()<keel::lockstep<32>>("lockstep<32>");
    pack_of(keel::arch::scalar{});
    pack_of(keel::arch::sse2{});
    pack_of(keel::arch::sse4{});
    pack_of(keel::arch::avx2{});
    pack_of(keel::arch::avx512{});
    pack_of(keel::arch::neon{});
#endif
}

} // namespace keel_test
