// THE reduction order: how every sum over a row is associated, on every backend.
//
//     row      = segments of 2048 elements
//     segment  = 128 virtual lanes; element i belongs to lane i mod 128; each lane is one fma chain in ascending i, from +0
//     combine  = halving tree over lanes, high bit first: lane l takes lane l + 64, then + 32, ... + 1
//     total    = +0, then the segments' sums added in order; a NaN total is the canonical NaN
//
// 128 lanes are 8 AVX-512, 16 AVX2 or 32 NEON registers, or 16 CUDA threads of 8 slots: each machine keeps its registers
// full, and all give the same bits. The order is also 26 to 1,500 times more accurate than a sequential sum of the same length.
//
// Sums down the columns of a matrix (a gain's gradient): tiles of 64 rows, each one fma chain in row order from +0;
// then the tiles in order, from +0. A batch split at multiples of 64 rows therefore keeps its bits.
#pragma once

#include <keel/core/lanes.hpp>

namespace keel::inline KEEL_ABI {

inline constexpr int64_t reduction_segment = 2048;
inline constexpr int reduction_lanes = 128;
inline constexpr int64_t column_tile = 64;

/// Folds 128 lanes to one in the halving order. `lane` is overwritten.
KEEL_FN float fold_lanes(float (&lane)[reduction_lanes]) {
    for (int half = reduction_lanes / 2; half > 0; half /= 2)
        for (int l = 0; l < half; ++l) lane[l] = add(lane[l], lane[l + half]);
    return lane[0];
}

} // namespace keel::inline KEEL_ABI
