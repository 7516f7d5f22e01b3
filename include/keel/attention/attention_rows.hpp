// The mathematics of gated attention that is not a matrix product: softmax over a tile of keys, the gate, and the gradient of
// both. One row is one query of one head.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/math.hpp>
#include <keel/core/view.hpp>

namespace keel::inline KEEL_ABI {

inline constexpr uint32_t minus_infinity_word = ~(infinity_bits | sign_bit); ///< ordered_word(-Inf)

// --- a tile ------------------------------------------------------------------------------------------------------------

/// The queries of a tile: `queries` of them from `query` on (counted from the document's start) of each of `heads` heads,
/// stacked head by head.
struct query_rows {
    int64_t document;       ///< first token of the document
    int64_t query, queries; ///< in the document
    int64_t head, heads;

    KEEL_FN int64_t rows() const { return queries * heads; }
    KEEL_FN int64_t query_of(int64_t row) const { return query + row % queries; }
    KEEL_FN int64_t token_of(int64_t row) const { return document + query_of(row); }
    KEEL_FN int64_t head_of(int64_t row) const { return head + row / queries; }
};

/// Keys [first, first + count) of the document.
struct key_columns {
    int64_t first, count;
    /// How many of them a query sees: those up to itself.
    KEEL_FN int64_t seen_by(int64_t query) const { return query + 1 - first < count ? query + 1 - first : count; }
};

/// What a query knows of its softmax after some tiles: e^(s - shift) are summed in `sum`.
struct softmax_state {
    uint32_t top; ///< ordered_word() of the largest score
    float shift;  ///< that score; 0 while all are -Inf
    float sum;
    float first;    ///< score of the document's first key
    float weighted; ///< sum of e^(s - shift) (s - shift), for the entropy
};

/// Copies the stacked queries' rows, and notes their largest magnitude.
template <class T> struct stack_row {
    query_rows block;
    view<T const, 3> from;
    T* to;
    uint32_t* largest;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        T const* const in = from.at(block.token_of(row), block.head_of(row));
        T* const out = to + row * from.extent[2];
        typename G::words top(0u);
        g.each(from.extent[2], [&](auto at) {
            auto const v = g.load(in, at);
            top = umax(top, magnitude(v));
            g.store(out, at, v);
        });
        *largest = umax(*largest, g.max_bits(top));
    }
};

/// +0 into every element.
template <class T> struct zero_gradient_row {
    view<T, 3> to;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        T* const out = to.at(row / to.extent[1], row % to.extent[1]);
        g.each(to.extent[2], [&](auto at) { g.store(out, at, typename G::value(0.0f)); });
    }
};

template <class T> struct score_largest_row {
    view<T const, 2> x;
    uint32_t* largest;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        typename G::words top(0u);
        g.each(x.extent[1], [&](auto at) { top = umax(top, magnitude(g.load(x.at(row), at))); });
        *largest = umax(*largest, g.max_bits(top));
    }
};

// --- forward -----------------------------------------------------------------------------------------------------------

/// Scores to probabilities e^(s - shift), in place of the scores where both are floats; masked keys become +0. The row's output so
/// far, sum and weighted sum are brought to the new shift.
template <class T> struct softmax_tile_row {
    query_rows block;
    key_columns keys;
    float* scores;
    T* probabilities;
    int64_t pitch;
    float* output;
    int64_t head_dim;
    softmax_state* states;
    bool wants_entropy;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const seen = keys.seen_by(block.query_of(row));
        float const* const s = scores + row * pitch;
        T* const p = probabilities + row * pitch;
        softmax_state& state = states[row];
        bool const starts = keys.first == 0;
        if (starts) state = {minus_infinity_word, 0.0f, 0.0f, s[0], 0.0f};

        typename G::words largest(0u);
        g.each(seen, [&](auto at) { largest = umax(largest, g.inside(at, ordered_word(g.load(s, at)))); });
        uint32_t const top = umax(state.top, g.max_bits(largest));
        float const shift = top == minus_infinity_word ? 0.0f : from_ordered_word(top);
        float const kept = starts ? 0.0f : exp(from_ordered_word(state.top) - shift);

        if (wants_entropy) {
            float const here = g.sum(seen, [&](F const& acc, auto at) {
                F const x = g.load(s, at) - F(shift), e = g.inside(at, exp(x));
                return fma(e, select(eq(bits(e), bits_of<F>(0u)), F(0.0f), x), acc);
            });
            // Beside a shift far enough above, the sums so far are nothing, and their distance may be beyond all floats.
            float const before = kept == 0.0f ? 0.0f : fma(state.shift - shift, state.sum, state.weighted);
            state.weighted = fma(kept, before, here);
        }
        float const sum = g.sum(seen, [&](F const& acc, auto at) {
            F const e = exp(F(g.load(s, at) - F(shift)));
            g.store(p, at, e);
            return acc + g.inside(at, e);
        });
        g.each(keys.count - seen, [&](auto at) { g.store(p + seen, at, F(0.0f)); });

        if (!starts && bits(kept) != bits(1.0f)) {
            float* const o = output + row * head_dim;
            g.each(head_dim, [&](auto at) { g.store(o, at, g.load(static_cast<float const*>(o), at) * F(kept)); });
        }
        state.sum = fma(state.sum, kept, sum);
        state.top = top;
        state.shift = shift;
    }
};

/// Numbers of one query that become a head's telemetry; [heads, tokens] each, or null.
struct attention_marks {
    float* max_logit = nullptr;
    float* first_token = nullptr;
    float* entropy = nullptr;
};

/// y = (o / sum) * sigmoid(z), and the row's log-sum-exp.
template <class T> struct attention_output_row {
    query_rows block;
    float const* output;
    softmax_state const* states;
    view<T const, 3> gate;
    view<T, 3> y;
    view<float, 2> lse, lse_rest;
    attention_marks marks;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const token = block.token_of(row), head = block.head_of(row), n = y.extent[2];
        softmax_state const& state = states[row];
        F const inverse(div(1.0f, state.sum));
        float const* const o = output + row * n;
        T* const out = y.at(token, head);
        // A masked product may leave -0 where an unmasked one has +0: adding +0 makes them one.
        auto const attended = [&](auto at) { return (g.load(o, at) + F(0.0f)) * inverse; };
        if (gate.absent()) {
            g.each(n, [&](auto at) { g.store(out, at, attended(at)); });
        } else if (gate.extent[2] == 1) {
            F const open(sigmoid(load_one(gate.at(token, head))));
            g.each(n, [&](auto at) { g.store(out, at, attended(at) * open); });
        } else {
            g.each(n, [&](auto at) { g.store(out, at, attended(at) * sigmoid(g.load(gate.at(token, head), at))); });
        }
        if (!g.leader()) return;
        float const log_sum = log(state.sum);
        if (!lse.absent()) lse(token, head) = canonical(add(state.shift, log_sum));
        if (!lse_rest.absent()) lse_rest(token, head) = lost_in_sum(state.shift, log_sum);
        int64_t const mark = head * y.extent[0] + token;
        if (marks.max_logit != nullptr) marks.max_logit[mark] = from_ordered_word(state.top);
        if (marks.first_token != nullptr)
            marks.first_token[mark] = canonical(div(exp(state.first - state.shift), state.sum));
        if (marks.entropy != nullptr) marks.entropy[mark] = canonical(log_sum - div(state.weighted, state.sum));
    }

    KEEL_FN static float load_one(T const* p) {
        if constexpr (std::is_same_v<T, float>)
            return *p;
        else
            return decode(*p);
    }
};

/// A head's telemetry from its queries' marks: the largest logit, and sums in THE reduction order.
struct attention_telemetry_row {
    attention_marks marks;
    int64_t tokens;
    view<float, 1> max_logit, first_token, entropy;

    template <class G> KEEL_FN void operator()(G const& g, int64_t head) const {
        using F = typename G::value;
        if (!max_logit.absent()) {
            typename G::words top(0u);
            g.each(tokens, [&](auto at) {
                top = umax(top, g.inside(at, ordered_word(g.load(marks.max_logit + head * tokens, at))));
            });
            uint32_t const largest = umax(g.max_bits(top), minus_infinity_word);
            if (g.leader()) max_logit(head) = from_ordered_word(largest);
        }
        auto const total = [&](float const* from, view<float, 1> to) {
            if (to.absent()) return;
            float const sum =
                g.sum(tokens, [&](F const& acc, auto at) { return acc + g.load(from + head * tokens, at); });
            if (g.leader()) to(head) = sum;
        };
        total(marks.first_token, first_token);
        total(marks.entropy, entropy);
    }
};

// --- backward ----------------------------------------------------------------------------------------------------------

/// Through the gate: D = sum(dy * y), do = dy * G, and the gate's gradient dy * y * (1 - G), of a head its sum. A row is one
/// head of one token.
template <class T> struct attention_gate_backward_row {
    view<T const, 3> dy, y, gate;
    T* inner;         ///< do, dense [tokens, heads, head_dim]; null without a gate, where do = dy
    float* products;  ///< D, [tokens, heads]
    view<T, 3> dgate; ///< absent: not computed

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const heads = y.extent[1], n = y.extent[2], token = row / heads, head = row % heads;
        T const *const upper = dy.at(token, head), *const out = y.at(token, head);
        float const d = g.sum(n, [&](F const& acc, auto at) { return fma(g.load(upper, at), g.load(out, at), acc); });
        if (g.leader()) products[row] = d;
        if (gate.absent()) return;
        T const* const z = gate.at(token, head);
        if (gate.extent[2] == 1) {
            float const logit = attention_output_row<T>::load_one(z);
            F const open(sigmoid(logit));
            g.each(n, [&](auto at) { g.store(inner + row * n, at, g.load(upper, at) * open); });
            if (!dgate.absent())
                g.each(1, [&](auto at) { g.store(dgate.at(token, head), at, F(mul(d, one_minus_sigmoid(logit)))); });
        } else {
            g.each(n, [&](auto at) {
                F const logit = g.load(z, at), u = g.load(upper, at);
                g.store(inner + row * n, at, u * sigmoid(logit));
                if (!dgate.absent())
                    g.store(dgate.at(token, head), at, (u * g.load(out, at)) * one_minus_sigmoid(logit));
            });
        }
    }
};

/// p = e^((s - lse) - lse_rest) and ds = p * (dp - D), each over what it came from where that is float; masked keys become +0.
template <class T> struct attention_backward_tile_row {
    query_rows block;
    key_columns keys;
    float* scores;
    float* score_gradients; ///< dp
    T* probabilities;
    T* slopes; ///< ds
    int64_t pitch;
    view<float const, 2> lse, lse_rest;
    float const* products;
    int64_t heads; ///< of the whole call: products is [tokens, heads]

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const seen = keys.seen_by(block.query_of(row)), token = block.token_of(row), head = block.head_of(row);
        float const *const s = scores + row * pitch, *const dp = score_gradients + row * pitch;
        T *const p = probabilities + row * pitch, *const ds = slopes + row * pitch;
        F const shift(lse(token, head)), rest(lse_rest.absent() ? 0.0f : lse_rest(token, head)), d(products[token * heads + head]);
        g.each(seen, [&](auto at) {
            F const e = exp(F(g.load(s, at) - shift - rest));
            F const slope = e * (g.load(dp, at) - d);
            g.store(p, at, e);
            g.store(ds, at, slope);
        });
        g.each(keys.count - seen, [&](auto at) {
            g.store(p + seen, at, F(0.0f));
            g.store(ds + seen, at, F(0.0f));
        });
    }
};

/// The rounded gradients of stacked rows from their fp32 sums; +0 is added for the reason given in attention_output_row.
template <class T> struct unstack_row {
    query_rows block;
    float const* from;
    view<T, 3> to;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        int64_t const n = to.extent[2];
        g.each(n, [&](auto at) {
            g.store(to.at(block.token_of(row), block.head_of(row)), at, g.load(from + row * n, at) + F(0.0f));
        });
    }
};

} // namespace keel::inline KEEL_ABI
