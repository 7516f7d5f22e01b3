// Numbers that an optimiser keeps from step to step: in fp32, in 16 bits, or in 8-bit codes with a scale for each block of a row.
//
//     float                    as computed
//     bf16, f16                rounded by chance: up or down in proportion, so that the mean over steps is what fp32 would hold
//     row_blocks<e4m3>, ...    block_scaled<Code, Scale, 1, Columns>: scale = amax / code_max by scale_rules::round_up over the block's new
//                              values, codes rounded by chance
//
// Rounding by chance is what lets a slow average live in few bits: an average that moves by 1 - beta of the way would never leave its code
// under nearest rounding. It costs noise. With codes a share q apart (bf16 2^-8 to 2^-7; e4m3 1/16 to 1/8; e5m2 1/8 to 1/4) an average under
// beta walks about its value with a standard deviation of q / sqrt(6 (1 - beta^2)), about: of a momentum (beta 0.95) in e4m3 12 %, in bf16 0.7 %; of
// a second moment in e5m2 with beta 0.95 25 %, with 0.999 170 %, which is no use: keep such a one in bf16 (5 %) or fp32. Below a
// block's amax * min_subnormal / code_max (e4m3 2^-17.8, e5m2 2^-31.8) an element goes to the nearer of 0 and that: by chance a momentum would
// now and then be many times its size, which a second moment with finer scales turns into a step of hundreds of learning rates.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/random.hpp>
#include <keel/core/validate.hpp>
#include <keel/format/format.hpp>
#include <keel/quantize/scale_rule.hpp>

namespace keel {

/// How a kind of state is given to a call: a view of a format's elements, or codes with scales, [rows, columns], rows being all leading
/// dimensions together.
template <class S, int Rank> struct state_view_of {
    using type = view<S, Rank>;
};
template <class Code, class Scale, int Rows, int Columns, class Layout, int Rank>
struct state_view_of<block_scaled<Code, Scale, Rows, Columns, Layout>, Rank> {
    static_assert(Rows == 1 && Columns != whole && Columns > 1, "keel: state is scaled by blocks of 1 x Columns");
    static_assert(std::is_same_v<Layout, strided_scales>, "keel: the scales of state lie in rows");
    using type = block_scaled<Code, Scale, Rows, Columns, Layout>;
};
template <class S, int Rank> using state_view = typename state_view_of<S, Rank>::type;
/// Stored in blocks: an element's code cannot be made before its whole block is known.
template <class S> inline constexpr bool is_block_state = false;
template <class Code, class Scale, int Rows, int Columns, class Layout>
inline constexpr bool is_block_state<block_scaled<Code, Scale, Rows, Columns, Layout>> = true;
/// Elements of a block; 0 of other state.
template <class S> inline constexpr int state_block = 0;
template <class Code, class Scale, int Rows, int Columns, class Layout>
inline constexpr int state_block<block_scaled<Code, Scale, Rows, Columns, Layout>> = Columns;
/// Rounded by chance.
template <class S> inline constexpr bool draws_numbers = !std::is_same_v<S, float>;

} // namespace keel

namespace keel::inline KEEL_ABI {

/// v into element `at`: in fp32 as it is, in fewer bits up or down by chance. Finite values stay finite, others do not.
template <class T, class G, class P, class At>
KEEL_FN void store_by_chance(G const& g, P p, At at, typename G::value const& v, typename G::words const& noise) {
    if constexpr (std::is_same_v<T, float>) g.store(p, at, v);
    else g.store_code(p, at, encode_words<T, overflow::saturate_finite, rounding::stochastic>(v, noise));
}

/// A row of state of kind S, as kernels see it. `step`: from an element to the next.
template <class S> struct state_row {
    S* p;
    int64_t step = 1;

    template <class G, class At> KEEL_FN typename G::value load(G const& g, At at) const {
        return step == 1 ? g.load(p, at) : g.load(strided<S>{p, step}, at);
    }
    template <class G, class At>
    KEEL_FN void store(G const& g, At at, typename G::value const& v, typename G::words const& noise) const {
        if (step == 1) store_by_chance<S>(g, p, at, v, noise);
        else store_by_chance<S>(g, strided<S>{p, step}, at, v, noise);
    }
};
template <class Code, class Scale, int Rows, int Columns, class Layout> struct state_row<block_scaled<Code, Scale, Rows, Columns, Layout>> {
    Code* codes;
    typename Scale::storage* scales;
    int64_t scale_step = 1;

    template <class G, class At> KEEL_FN typename G::value load(G const& g, At at) const {
        return mul(g.load(codes, at), g.load(repeated<typename Scale::storage const, Columns>{scales, scale_step}, at));
    }
    /// The n elements of the row become next(at), which may still read them; noise(at) are their random words. `positive`: what is above 0
    /// stays above it, as what is divided by has to.
    template <class G, class Next, class Noise>
    KEEL_FN void store_blocks(G const& g, int64_t n, bool positive, Next const& next, Noise const& noise) const {
        using U = typename G::words;
        g.template blocks<Columns>(n, [&](auto const& b) {
            U top(0u);
            b.each([&](auto at) { top = umax(top, g.inside(at, finite_magnitude(next(at)))); });
            auto const s = scale_of(b, top);
            auto const multiplier = b.spread(s.multiplier);
            b.each([&](auto at) { store_code(g, at, next(at), multiplier, positive, noise(at)); });
            g.sync(); // the old scale has been read by all lanes
            put(b, s.scale);
        });
    }

    template <class Block, class U> KEEL_FN auto scale_of(Block const& b, U const& largest) const {
        return scale_rules::round_up::of<float, Code, typename Block::lane>(Scale{}, b.max_bits(largest));
    }
    template <class G, class At>
    KEEL_FN void store_code(G const& g, At at, typename G::value const& v, typename G::value const& multiplier, bool positive,
                            typename G::words const& noise) const {
        using U = typename G::words;
        auto const scaled = v * multiplier;
        // Below the smallest code chance would make of an element many times its size: to nearest there.
        U const word = select(gt(U(bits(format_traits<Code>::min_subnormal())), magnitude(scaled)), U(0x80000000u), noise);
        U code = encode_words<Code, overflow::saturate_finite, rounding::stochastic>(scaled, word);
        if (positive) code = select(both(eq(code, U(0u)), gt(bits(v), U(0u))), U(1u), code);
        g.store_code(codes, at, code);
    }
    template <class Block, class F> KEEL_FN void put(Block const& b, F const& scale) const {
        put_scale<Scale>(b, strided<typename Scale::storage>{scales, scale_step}, scale);
    }
};

/// Two numbers an element, a mean and a positive one.
template <class F> struct moments_of {
    F mean, squares;
};
/// store_blocks of two rows with blocks of one size, which share a block of random words an element: the first takes word 0, the second, which
/// is positive, word 1. Random numbers are most of the time.
template <class M, class V, class G, class Next, class Numbers>
KEEL_FN void store_block_pair(G const& g, int64_t n, state_row<M> const& mean, state_row<V> const& squares, Next const& next, Numbers const& numbers) {
    static_assert(M::block_columns == V::block_columns);
    using U = typename G::words;
    g.template blocks<M::block_columns>(n, [&](auto const& b) {
        U top(0u), top_squares(0u);
        b.each([&](auto at) {
            auto const x = next(at);
            top = umax(top, g.inside(at, finite_magnitude(x.mean)));
            top_squares = umax(top_squares, g.inside(at, finite_magnitude(x.squares)));
        });
        auto const s = mean.scale_of(b, top);
        auto const t = squares.scale_of(b, top_squares);
        auto const multiplier = b.spread(s.multiplier), squares_multiplier = b.spread(t.multiplier);
        b.each([&](auto at) {
            auto const x = next(at);
            auto const noise = numbers(at);
            mean.store_code(g, at, x.mean, multiplier, false, noise.word[0]);
            squares.store_code(g, at, x.squares, squares_multiplier, true, noise.word[1]);
        });
        g.sync(); // the old scales have been read by all lanes
        mean.put(b, s.scale);
        squares.put(b, t.scale);
    });
}

/// Row `row` of a state of any shape that has rows; Adjacent where its elements are known to be.
template <bool Adjacent, class S> KEEL_FN state_row<S> state_row_of(view<S, 2> const& v, int64_t row) {
    return {v.at(row), Adjacent ? 1 : v.stride[1]};
}
template <bool, class Code, class Scale, int Columns>
KEEL_FN state_row<block_scaled<Code, Scale, 1, Columns>> state_row_of(block_scaled<Code, Scale, 1, Columns> const& q, int64_t row) {
    return {q.codes.at(row), q.scales.at(row), q.scales.stride[1]};
}
/// Elements [first, ...) of a state that is one run; first is a multiple of the block.
template <class S> KEEL_FN state_row<S> state_run_of(view<S, 1> const& v, int64_t first) { return {v.data + first, 1}; }
template <class Code, class Scale, int Columns>
KEEL_FN state_row<block_scaled<Code, Scale, 1, Columns>> state_run_of(block_scaled<Code, Scale, 1, Columns> const& q, int64_t first) {
    return {q.codes.data + first, q.scales.data + first / Columns * q.scales.stride[1], q.scales.stride[1]};
}

/// That a run of state fits: `count` adjacent elements, and a scale a block. Names as the caller spells them.
template <class S> KEEL_HOST void check_state_run(validation& check, char const* name, char const*, view<S, 1> const& v, int64_t count) {
    check.shape(name, v, count).unit_stride(name, v).distinct(name, v);
}
template <class Code, class Scale, int Columns>
KEEL_HOST void check_state_run(validation& check, char const* name, char const* scales_name, block_scaled<Code, Scale, 1, Columns> const& q, int64_t count) {
    check_state_rows(check, name, scales_name, q, 1, count);
}
/// The same of rows of blocks.
template <class Code, class Scale, int Columns>
KEEL_HOST void check_state_rows(validation& check, char const* name, char const* scales_name, block_scaled<Code, Scale, 1, Columns> const& q,
                                int64_t row_count, int64_t count) {
    check.shape(name, q.codes, row_count, count).unit_stride(name, q.codes).distinct(name, q.codes);
    check.shape(scales_name, q.scales, row_count, q.scale_columns(count)).distinct(scales_name, q.scales);
    check.disjoint(scales_name, q.scales, q.codes);
}
/// That a state shares memory with none of the others, each a view or a block-scaled state.
template <class A, int Rank, class... Views>
KEEL_HOST void check_apart(validation& check, char const* name, view<A, Rank> const& v, Views const&... others) {
    auto const apart = [&](auto const& other) {
        if constexpr (requires { other.codes; }) check.disjoint(name, v, other.codes, other.scales);
        else check.disjoint(name, v, other);
    };
    (apart(others), ...);
}
template <class Code, class Scale, int Columns, class... Views>
KEEL_HOST void check_apart(validation& check, char const* name, block_scaled<Code, Scale, 1, Columns> const& q, Views const&... others) {
    check_apart(check, name, q.codes, others...);
    check_apart(check, name, q.scales, others...);
}

} // namespace keel::inline KEEL_ABI
