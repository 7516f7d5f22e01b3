// The mathematics of a compensated update, one chunk of a tensor at a time.
#pragma once

#include <keel/core/math.hpp>
#include <keel/core/view.hpp>
#include <keel/format/format.hpp>
#include <keel/format/bf16.hpp>
#include <keel/guard/step_gate_rows.hpp>

namespace keel {

/// Weights of 16 bits with what their rounding took away. Caller-owned. Save and restore both.
template <class Weight = bf16> struct kahan_weights {
    view<Weight, 1> weight = {};       ///< what the model multiplies with
    view<Weight, 1> compensation = {}; ///< zero at first
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Elements of a chunk; no result depends on it.
inline constexpr int64_t kahan_chunk = 8192;

/// A compensated sum, in the format of the weights.
template <class F> struct compensated {
    bits_of<F> weight_code;
    F compensation; ///< not rounded yet
};
template <class Weight, class F> KEEL_FN compensated<F> compensated_sum(F const& before, F const& rest_before, F const& update) {
    F const y = update + rest_before, s = before + y;
    auto const code = encode_words<Weight>(s);
    F const after = decode_words<Weight, F>(code);
    F const rest = (s - after) + lost_in_sum(before, y);
    return {code, select(is_non_finite(after), F(0.0f), rest)};
}

/// y = d + c; w + y = s + lost, exactly; w' = round(s); c' = round((s - w') + lost), where s - w' is exact.
template <class Weight, class Update> struct kahan_row {
    Update const* update;
    Weight *weight, *compensation;
    int64_t count;
    step_gate const* gate;

    template <class G> KEEL_FN void operator()(G const& g, int64_t chunk) const {
        using F = typename G::value;
        if (gate->apply == 0) return;
        int64_t const first = chunk * kahan_chunk, n = count - first < kahan_chunk ? count - first : kahan_chunk;
        Update const* const d = update + first;
        Weight *const w = weight + first, *const c = compensation + first;
        g.each(n, [&](auto at) {
            auto const sum = compensated_sum<Weight>(F(g.load(w, at)), F(g.load(c, at)), F(g.load(d, at)));
            g.store_code(w, at, sum.weight_code);
            g.store(c, at, sum.compensation);
        });
    }
};

} // namespace keel::inline KEEL_ABI
