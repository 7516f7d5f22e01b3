// How sums leave the registers: rounded once to C's format, with its one NaN.
#pragma once

#include <keel/backend/cpu/pack.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/format.hpp>

namespace keel::inline KEEL_ABI::detail {

template <class C, class F> KEEL_FN void store_encoded(C* p, F const& v) {
    if constexpr (std::is_same_v<C, float>)
        store(p, canonical(v));
    else
        store_words(&p->bits, encode_words<C>(v));
}
template <class C, class F> KEEL_FN void store_encoded_partial(C* p, F const& v, int64_t n) {
    if constexpr (std::is_same_v<C, float>)
        store_partial(p, canonical(v), n);
    else
        store_words_partial(&p->bits, encode_words<C>(v), n);
}
/// The first n of Vectors registers; n is above 0.
template <int Vectors, class C, class F> KEEL_FN void store_encoded_row(C* p, F const (&v)[std::size_t{Vectors}], int64_t n) {
    constexpr int w = F::width;
    if constexpr (Vectors <= 2 && std::is_same_v<C, bf16> && requires { F::machine::store_bf16(&p->bits, v[0].v, v[0].v, 1); })
        if (F::machine::store_bf16(&p->bits, v[0].v, Vectors == 2 ? v[Vectors - 1].v : F(0.0f).v, static_cast<int>(n))) return;
    repeat<Vectors>([&](auto i) {
        if (int64_t const left = n - i * w; left >= w) store_encoded(p + i * w, v[i]);
        else if (left > 0) store_encoded_partial(p + i * w, v[i], left);
    });
}

} // namespace keel::inline KEEL_ABI::detail
