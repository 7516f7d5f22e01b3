// pairs.hpp on SIMD registers: neighbours of 16 bits are the halves of a word. (AVX-512 does more: pairs_avx512.hpp.)
#pragma once

#include <keel/backend/cpu/pairs_avx512.hpp>
#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/pairs.hpp>

namespace keel::inline KEEL_ABI {

template <class A, class T>
    requires(A::width > 1 && A::width < 16 && sizeof(T) == 2)
KEEL_FN neighbours<pack<A>> load_pair(cpu_row_group<A> const& g, T const* p, at_full at, int64_t n) {
    if (2 * (at.i + A::width) > n) return load_pair<cpu_row_group<A>, T, at_full>(g, p, at, n); // the last one is alone
    prefetch_read(p + 2 * at.i);
    auto const words = load_bytes<bits_pack<A>>(p + 2 * at.i);
    return {decode_words<T, pack<A>>(words), decode_words<T, pack<A>>(shr<16>(words))};
}

} // namespace keel::inline KEEL_ABI
