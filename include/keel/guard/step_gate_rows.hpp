// The mathematics of the step gate: what one chunk of a gradient contributes, and how chunks and tensors combine.
#pragma once

#include <keel/core/lanes.hpp>

namespace keel {

/// One decision for the whole model, in the backend's memory: every optimiser, counter and balance update obeys it, so a step
/// happens everywhere or nowhere. A default-constructed gate is closed.
struct step_gate {
    int32_t apply = 0;             ///< 1: the step happens; 0: it is skipped and every byte of state stays as it was
    float clip = 0.0f;             ///< what every gradient element is multiplied by; exactly 1 where nothing is clipped
    double pre_clip_norm = 0.0;    ///< L2 norm over all gradients before clipping; Inf or NaN where an element is
    int64_t nan = 0;               ///< NaN elements
    int64_t inf = 0;               ///< infinite elements
    int64_t first_non_finite = -1; ///< the first tensor in the list that holds one; -1 for none

    KEEL_FN constexpr int64_t non_finite() const { return nan + inf; }
    KEEL_FN constexpr double post_clip_norm() const { return pre_clip_norm * static_cast<double>(clip); }
};

/// A gate that lets every step through unclipped: for optimisers used without a guard.
KEEL_FN constexpr step_gate open_gate() { return {.apply = 1, .clip = 1.0f}; }

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Elements of a tensor that are summed together. Part of the result's definition: changing it changes bits.
inline constexpr int64_t gate_chunk = 8192;

struct gradient_chunk {
    float squares;     ///< sum of (g * scale)^2, scale = 2^-exponent of the largest element
    uint32_t largest;  ///< magnitude word
    uint32_t nan, inf; ///< counts
};
struct gradient_total {
    double squares;
    int64_t nan, inf;
};

/// 2^-e for a largest magnitude of about 2^e, as a normal float: scaled, the largest element lies in [1, 4), or in
/// [2^-23, 1) where it is subnormal.
KEEL_FN float gate_scale(uint32_t largest) {
    uint32_t const exponent = umin(umax(largest >> 23, 1u), 253u);
    return as_float((254 - exponent) << 23);
}

/// One chunk: its largest element, then the squares scaled by it, or the counts if something is not finite.
template <class T> struct gradient_chunk_row {
    T const* data;
    int64_t count;
    gradient_chunk* chunks;

    template <class G> KEEL_FN void operator()(G const& g, int64_t chunk) const {
        using F = typename G::value;
        using U = typename G::words;
        T const* const p = data + chunk * gate_chunk;
        int64_t const left = count - chunk * gate_chunk, n = left < gate_chunk ? left : gate_chunk;
        U top(0u);
        g.each(n, [&](auto at) { top = umax(top, magnitude(g.load(p, at))); });
        gradient_chunk out{0.0f, g.max_bits(top), 0, 0};
        if (out.largest < infinity_bits) {
            float const scale = gate_scale(out.largest);
            out.squares = g.sum(n, [&](F const& acc, auto at) {
                F const v = g.load(p, at) * F(scale);
                return fma(v, v, acc);
            });
        } else {
            U nan(0u), bad(0u);
            g.each(n, [&](auto at) {
                F const v = g.load(p, at);
                nan = nan + select(is_nan(v), U(1u), U(0u));
                bad = bad + select(is_non_finite(v), U(1u), U(0u));
            });
            out.nan = static_cast<uint32_t>(g.total(nan));
            out.inf = static_cast<uint32_t>(g.total(bad)) - out.nan;
        }
        if (g.leader()) chunks[chunk] = out;
    }
};

/// One tensor: its chunks in order, in double. Any sum of squares of floats is far inside double's range.
struct gradient_tensor_row {
    gradient_chunk const* chunks;
    int64_t chunk_count;
    gradient_total* total;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        gradient_total sum{0.0, 0, 0};
        for (int64_t c = 0; c < chunk_count; ++c) {
            double const scale = static_cast<double>(gate_scale(chunks[c].largest));
            sum.squares += static_cast<double>(chunks[c].squares) / (scale * scale); // exact: a power of two
            sum.nan += chunks[c].nan;
            sum.inf += chunks[c].inf;
        }
        *total = sum;
    }
};

/// The model: tensors in order, in double; then the decision.
struct gate_row {
    gradient_total const* totals;
    int64_t tensor_count;
    float max_norm;
    step_gate* gate;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (!g.leader()) return;
        step_gate out;
        double squares = 0.0;
        for (int64_t t = 0; t < tensor_count; ++t) {
            squares += totals[t].squares;
            out.nan += totals[t].nan;
            out.inf += totals[t].inf;
            if (out.first_non_finite < 0 && totals[t].nan + totals[t].inf > 0) out.first_non_finite = t;
        }
        if (out.non_finite() > 0) {
            out.pre_clip_norm = static_cast<double>(as_float(out.nan > 0 ? nan_bits : infinity_bits));
        } else {
            double const limit = static_cast<double>(max_norm);
            out.pre_clip_norm = __builtin_sqrt(squares);
            double const factor = out.pre_clip_norm <= limit ? 1.0 : limit / out.pre_clip_norm;
            // Below 2^-126 a float has few bits left, or none: a step of zeros would pass for a clipped one.
            out.apply = factor >= 0x1p-126 ? 1 : 0;
            out.clip = out.apply != 0 ? static_cast<float>(factor) : 0.0f;
        }
        *gate = out;
    }
};

} // namespace keel::inline KEEL_ABI
