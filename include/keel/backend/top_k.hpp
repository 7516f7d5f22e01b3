// The k first elements of a row: what a router selects. The loop here is the definition; the CPU has a quicker way to the same indices
// (cpu/top_k.hpp).
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>

namespace keel::inline KEEL_ABI {

/// One element after the other: each the first of those that come after the last one.
template <class G, class Keys, class I> KEEL_FN void top_k_in_turn(G const& g, int64_t n, int64_t k, Keys const& keys, I* first) {
    using U = typename G::words;
    arg_max_keys<uint32_t> last{0xffffffffu, 0xffffffffu};
    int64_t last_index = 0;
    for (int64_t j = 0; j < k; ++j) {
        int64_t const index = g.arg_max(n, [&](auto at) {
            auto const own = keys.of(g, at);
            auto const later = gt(g.position(at), U(static_cast<uint32_t>(last_index)));
            auto const after = either(gt(U(last.secondary), own.secondary), both(eq(U(last.secondary), own.secondary), later));
            auto const left = either(gt(U(last.primary), own.primary), both(eq(U(last.primary), own.primary), after));
            return arg_max_keys<U>{select(left, own.primary, U(0u)), select(left, own.secondary, U(0u))};
        });
        last = keys.of_element(index);
        last_index = index;
        if (g.leader()) first[j] = static_cast<I>(index);
    }
}

/// first[0] ... first[k - 1] = the indices of the k <= n first of a row's n elements, by falling primary word, then falling secondary word,
/// then rising index. All words are above 0. keys.of(g, at) gives the elements' arg_max_keys, keys.of_element(i) one element's;
/// keys.one_word says that the two words of an element are the same. `scratch` is n words of the group's own.
template <class G, class Keys, class I>
KEEL_FN void top_k(G const& g, int64_t n, int64_t k, Keys const& keys, I* first, uint32_t* /*scratch*/) {
    top_k_in_turn(g, n, k, keys, first);
}

} // namespace keel::inline KEEL_ABI
