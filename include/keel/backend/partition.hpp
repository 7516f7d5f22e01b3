// Stable partition of indices by key: a counting sort that keeps the order of equal keys. A service of host backends.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/view.hpp>

namespace keel::inline KEEL_ABI {

/// offsets[b] .. offsets[b + 1] bounds the positions of bin b in `order`; within a bin, `order` lists the indices i with key(i) = b
/// in ascending order. Indices whose key is negative are left out.
/// key(i) gives the bin of i in [0, bins) or a negative number; offsets has bins + 1 elements, order at least as many as there
/// are kept indices. Two passes over the keys; the result does not depend on threads.
template <class Key> void stable_partition(int64_t n, int64_t bins, Key const& key, int64_t* offsets, int64_t* order) {
    for (int64_t b = 0; b <= bins; ++b) offsets[b] = 0;
    for (int64_t i = 0; i < n; ++i)
        if (int64_t const b = key(i); b >= 0) ++offsets[b + 1];
    for (int64_t b = 0; b < bins; ++b) offsets[b + 1] += offsets[b];
    // Fill each bin from its start, using offsets[b] as its cursor; afterwards it stands at the next bin's start.
    for (int64_t i = 0; i < n; ++i)
        if (int64_t const b = key(i); b >= 0) order[offsets[b]++] = i;
    for (int64_t b = bins; b > 0; --b) offsets[b] = offsets[b - 1];
    offsets[0] = 0;
}

} // namespace keel::inline KEEL_ABI
