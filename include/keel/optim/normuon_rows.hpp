// NorMuon: rows of the orthogonal direction brought to one size by their running mean square, the whole to the norm that it had.
#pragma once

#include <keel/core/lanes.hpp>
#include <keel/optim/muon_plan.hpp>
#include <keel/optim/newton_schulz_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Below this a mean square counts as this (NorMuon's code): a row that is all but zero stays so.
inline constexpr float least_second_moment = 1e-10f;

/// s = sum of O^2 over a row of the logical matrix / columns;  v = fma(beta2, v, (1 - beta2) s).
template <class T> struct second_moment_row {
    view<T const, 2> direction; ///< of the logical matrix, its rows in any direction of memory; absent: zeros
    int64_t width;
    float beta2, one_minus_beta2;
    view<float, 1> moment;
    row_map map;
    float* mean; ///< of each row

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        float s = 0.0f;
        if (!direction.absent()) {
            s = g.sum(width, [&](F const& acc, auto at) {
                F const v = load_at(g, direction, row, at);
                return fma(v, v, acc);
            });
            s = div(s, static_cast<float>(width));
        }
        if (!g.leader()) return;
        float& v = moment(map(row));
        v = fma(beta2, v, mul(one_minus_beta2, s));
        mean[row] = s;
    }
};

/// factor = sqrt(sum of s / sum of (s / v)) / sqrt(v), rows in order, in double, rounded once.
struct row_factor_row {
    view<float const, 1> moment;
    row_map map;
    float const* mean;
    int64_t count;
    float* factor;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        double before = 0.0, after = 0.0;
        for (int64_t i = 0; i < count; ++i) {
            before += static_cast<double>(mean[i]);
            after += static_cast<double>(mean[i]) / floored(i);
        }
        double const gain = after > 0.0 ? before / after : 1.0;
        for (int64_t i = 0; i < count; ++i) factor[i] = static_cast<float>(__builtin_sqrt(gain / floored(i)));
    }

private:
    KEEL_FN double floored(int64_t i) const {
        float const v = moment(map(i));
        return static_cast<double>(v > least_second_moment ? v : least_second_moment);
    }
};

} // namespace keel::inline KEEL_ABI
