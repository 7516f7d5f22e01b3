// top_k of several rows at once, a row a lane: what a group may offer beside top_k. The same indices, quicker where it exists.
#pragma once

#include <keel/config.hpp>

namespace keel::inline KEEL_ABI {

/// What a group with more than one row at hand uses; here: nothing, rows go one by one (top_k.hpp). cpu/top_rows.hpp has AVX-512's.
template <class G> struct top_rows {
    static constexpr bool exists = false;
};

} // namespace keel::inline KEEL_ABI
