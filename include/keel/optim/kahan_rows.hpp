// The mathematics of a compensated update, one chunk of a tensor at a time.
#pragma once

#include <keel/core/math.hpp>
#include <keel/format/format.hpp>
#include <keel/guard/step_gate_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Elements of a chunk; no result depends on it.
inline constexpr int64_t kahan_chunk = 8192;

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
            F const before = g.load(w, at), y = g.load(d, at) + g.load(c, at), s = before + y;
            auto const code = encode_words<Weight>(s);
            F const after = decode_words<Weight, F>(code);
            F const rest = (s - after) + lost_in_sum(before, y);
            g.store_code(w, at, code);
            g.store(c, at, select(is_non_finite(after), F(0.0f), rest));
        });
    }
};

} // namespace keel::inline KEEL_ABI
