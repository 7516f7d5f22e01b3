// top_k on a CPU thread: a bound from below for the k-th word first, then an order among the few elements that reach it.
//
// Each lane's largest word is some element's, so the k-th largest of the lanes' is no larger than the k-th largest of all. About one and
// a half times k elements reach it where the row is random; where more than most_candidates do (rows of equal words), the elements are
// found in turn.
#pragma once

#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/top_k.hpp>

namespace keel::inline KEEL_ABI {

namespace detail {

inline constexpr int64_t most_candidates = 64;

/// The words of n elements to `words`, and the k-th largest of the largest of Lanes lanes; k <= Lanes and k <= n.
template <int Lanes, class A, class Keys>
KEEL_FN uint32_t bound_of_top(cpu_row_group<A> const& g, int64_t n, int64_t k, Keys const& keys, uint32_t* words) {
    using U = bits_pack<A>;
    constexpr int64_t width = A::width, registers = Lanes / width;
    U top[std::size_t{registers}];
    for (int64_t r = 0; r < registers; ++r) top[r] = U(0u);
    auto const take = [&](int64_t r, auto at) {
        U const own = keys.of(g, at).primary;
        if constexpr (std::is_same_v<decltype(at), at_full>) store_words(words + at.i, own);
        else store_words_partial(words + at.i, own, at.count);
        top[r] = umax(top[r], g.inside(at, own));
    };
    int64_t i = 0;
    for (; i + Lanes <= n; i += Lanes)
        for (int64_t r = 0; r < registers; ++r) take(r, at_full{i + r * width});
    for (int64_t r = 0; r < registers && i + r * width < n; ++r) {
        int64_t const left = n - i - r * width;
        if (left >= width) take(r, at_full{i + r * width});
        else if constexpr (width > 1) take(r, at_tail{i + r * width, left});
    }

    alignas(64) uint32_t line[std::size_t{Lanes}];
    U ahead[std::size_t{registers}]; // how many lanes are larger
    for (int64_t r = 0; r < registers; ++r) store_words(&line[r * width], top[r]), ahead[r] = U(0u);
    for (int lane = 0; lane < Lanes; ++lane)
        for (int64_t r = 0; r < registers; ++r) ahead[r] = ahead[r] + select(gt(U(line[lane]), top[r]), U(1u), U(0u));
    U inverse(0u); // of the least lane that has fewer than k ahead
    for (int64_t r = 0; r < registers; ++r)
        inverse = umax(inverse, select(gt(U(static_cast<uint32_t>(k)), ahead[r]), top[r] ^ U(0xffffffffu), U(0u)));
    return ~max_word(inverse);
}

/// The elements whose words reach the bound, by rising index: their places and words, of which there is room for a register more than
/// most_candidates. How many there are, or more than most_candidates.
template <class A> KEEL_FN int64_t find_candidates(uint32_t const* words, int64_t n, uint32_t bound, uint32_t* place, uint32_t* found) {
    int64_t count = 0;
    using M = machine<A>;
    if constexpr (requires(typename M::u const& x, typename M::m const& c) { M::store_chosen(place, x, c); }) {
        using U = bits_pack<A>;
        for (int64_t i = 0; i < n && count <= most_candidates; i += A::width) {
            U const own = n - i < A::width ? load_words_partial<U>(words + i, n - i) : load_words<U>(words + i); // +0 past the end
            auto const reaches = gt(own, U(bound - 1));
            M::store_chosen(found + count, own.v, reaches.v);
            count += M::store_chosen(place + count, (iota<U>() + U(static_cast<uint32_t>(i))).v, reaches.v);
        }
        return count;
    }
    for (int64_t i = 0; i < n; ++i) {
        int64_t const at = count < most_candidates ? count : most_candidates;
        place[at] = static_cast<uint32_t>(i), found[at] = words[i];
        count += words[i] >= bound ? 1 : 0;
    }
    return count;
}

/// Elements by rising index, in order: rank[i] of them come before element i. Whether some words are equal.
template <class A> KEEL_FN bool rank_candidates(uint32_t const* words, int64_t n, uint32_t* rank) {
    using U = bits_pack<A>;
    constexpr int64_t width = A::width;
    U same(0u);
    for (int64_t i = 0; i < n; i += width) {
        U const own = load_words<U>(words + i), position = iota<U>() + U(static_cast<uint32_t>(i));
        U before(0u), equal(0u);
        for (int64_t j = 0; j < n; ++j) {
            U const other(words[j]);
            auto const tie = eq(other, own);
            before = before + select(either(gt(other, own), both(tie, gt(position, U(static_cast<uint32_t>(j))))), U(1u), U(0u));
            equal = equal + select(tie, U(1u), U(0u));
        }
        store_words(rank + i, before);
        same = umax(same, equal);
    }
    return max_word(same) > 1;
}

} // namespace detail

template <class A, class Keys, class I>
KEEL_FN void top_k(cpu_row_group<A> const& g, int64_t n, int64_t k, Keys const& keys, I* first, uint32_t* scratch) {
    constexpr int64_t most = detail::most_candidates;
    if (k > 16) return top_k_in_turn(g, n, k, keys, first);
    uint32_t const bound = k > 8 ? detail::bound_of_top<32>(g, n, k, keys, scratch) : detail::bound_of_top<16>(g, n, k, keys, scratch);

    constexpr int64_t room = most + A::width;
    alignas(64) uint32_t place[std::size_t{room}], words[std::size_t{room}] = {}, rank[std::size_t{room}];
    int64_t const count = detail::find_candidates<A>(scratch, n, bound, &place[0], &words[0]);
    if (count > most) return top_k_in_turn(g, n, k, keys, first);
    if (detail::rank_candidates<A>(&words[0], count, &rank[0]) && !keys.one_word)
        for (int64_t i = 0; i < count; ++i) { // equal words: the secondary ones tell
            auto const own = keys.of_element(place[i]);
            rank[i] = 0;
            for (int64_t j = 0; j < count; ++j) {
                auto const other = keys.of_element(place[j]);
                bool const before = other.primary != own.primary ? other.primary > own.primary
                                    : other.secondary != own.secondary ? other.secondary > own.secondary : j < i;
                rank[i] += before ? 1u : 0u;
            }
        }
    for (int64_t i = 0; i < count; ++i)
        if (rank[i] < k) first[rank[i]] = static_cast<I>(place[i]);
}

} // namespace keel::inline KEEL_ABI
