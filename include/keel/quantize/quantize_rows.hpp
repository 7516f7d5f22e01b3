// The kernels of block quantisation: one walk over a strip of blocks, whatever their shape and the order in which elements lie.
#pragma once

#include <keel/backend/scaled_codes.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/random.hpp>
#include <keel/core/report.hpp>
#include <keel/quantize/scale_rule.hpp>

namespace keel {

/// What became of one block's elements. Its scale says the rest.
struct block_events {
    uint32_t saturated, flushed, non_finite; ///< as in report
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A block one column wide, with the members of a row group's block: each lane is a block of its own.
template <class G, class At> struct column_block {
    using lane = typename G::value;
    using lane_words = typename G::words;
    G const& g;
    At at;
    int64_t n;

    template <class Body> KEEL_FN void each(Body body) const { body(at); }
    KEEL_FN lane_words max_bits(lane_words const& u) const { return u; }
    KEEL_FN lane_words total(lane_words const& u) const { return u; }
    template <auto... Policy, class P> KEEL_FN void put(P p, lane const& v) const { g.template store<Policy...>(p, at, v); }
    template <class P> KEEL_FN void put_word(P p, lane_words const& u) const { g.store_code(p, at, u); }
    template <class P> KEEL_FN lane get(P p) const { return g.load(p, at); }
    template <class T> KEEL_FN lane get(strided<T> p) const { return p.step == 1 ? g.load(p.data, at) : g.load(p, at); }
    KEEL_FN mask_of<lane> valid() const { return gt(lane_words(static_cast<uint32_t>(n)), g.position(at)); }
    KEEL_FN static lane spread(lane const& v) { return v; }
};

/// No group has more lanes.
inline constexpr int64_t most_lanes = 64;

/// body(b) over the blocks of Columns elements along a row.
template <int Columns, class G, class Body> KEEL_FN void each_block(G const& g, int64_t n, Body body) {
    if constexpr (Columns == 1)
        g.each(n, [&](auto at) { body(column_block<G, decltype(at)>{g, at, n}); });
    else
        g.template blocks<Columns>(n, body);
}

/// Whether n magnitudes, those of a line of blocks, are all finite.
template <class G> KEEL_FN bool all_finite(G const& g, float const* line, int64_t n) {
    typename G::words largest(0u);
    g.each(n, [&](auto at) { largest = umax(largest, g.inside(at, magnitude(g.load(line, at)))); });
    return g.max_bits(largest) < infinity_bits;
}
/// The largest magnitudes of n blocks, in a line that one thread or each lane owns, become their multipliers; their scales go to `scales`.
template <class X, class Blocks, class Rule, class G, class P, class Tally>
KEEL_FN void make_scales(G const& g, float* line, int64_t n, P scales, Tally& tally) {
    using F = typename G::value;
    g.each(n, [&](auto at) {
        column_block<G, decltype(at)> const b{g, at, n};
        block_scale<F> const s =
            Rule::template of<X, typename Blocks::code, F>(typename Blocks::scale_kind{}, magnitude(g.load(static_cast<float const*>(line), at)));
        put_scale<typename Blocks::scale_kind>(b, scales, s.scale);
        tally.add_scale(b, s.scale);
        g.store(line, at, s.multiplier);
    });
}

/// How scaled elements become codes: to nearest.
struct to_nearest {
    static constexpr bool is_nearest = true;
    template <class Code, overflow Overflow, class G, class At>
    KEEL_FN typename G::words code(G const&, int64_t, At, typename G::value const& scaled) const {
        return encode_words<Code, Overflow>(scaled);
    }
};
/// Up or down by chance, by the number of the element in the tensor: first + row * pitch + column.
struct to_random {
    static constexpr bool is_nearest = false;
    random_key key;
    uint64_t first, pitch;
    template <class Code, overflow Overflow, class G, class At>
    KEEL_FN typename G::words code(G const& g, int64_t row, At at, typename G::value const& scaled) const {
        return encode_words<Code, Overflow, rounding::stochastic>(
            scaled, random_word(key, first + static_cast<uint64_t>(row) * pitch, g.position(at)));
    }
};

/// One code's rounding boundary past its largest value: magnitudes above it overflow under nearest even.
template <class Code> inline constexpr uint32_t overflow_boundary = format_traits<Code>::max_float_bits +
                                                                    (1u << (22 - format_traits<Code>::mantissa_bits)) -
                                                                    (format_traits<Code>::max_code & 1u);

/// What the events of one strip add up to, lane by lane. Elements are counted in the group's words, scales in W.
template <class G, class W> struct quantize_tally {
    using U = typename G::words;
    static constexpr int64_t room = int64_t{1} << 31;
    U saturated, flushed, non_finite;
    W scale_min, scale_max;
    int64_t held = 0; ///< at least the elements that the words have counted
    KEEL_FN quantize_tally() : saturated(0u), flushed(0u), non_finite(0u), scale_min(0xffffffffu), scale_max(0u) {}

    /// Before at most 2^32 - 1 elements more are counted: the report takes what the words could not hold besides.
    KEEL_FN void make_room(G const& g, report* r, int64_t elements) {
        held += elements;
        if (held <= room) return;
        if (r != nullptr) give(g, *r, 0);
        *this = quantize_tally();
        held = elements;
    }

    template <class Code, class F> KEEL_FN void add_elements(F const& x, F const& scaled, U const& code) {
        U const m = magnitude(x), s = magnitude(scaled), one(1u), none(0u);
        auto const past = both(gt(s, U(overflow_boundary<Code>)),
                               gt(U(infinity_bits + 1), s)); // a poisoned element is NaN, not large
        saturated = saturated + select(both(gt(U(infinity_bits), m), past), one, none);
        flushed = flushed + flushed_to_zero<Code>(m, code);
        non_finite = non_finite + select(gt(m, U(infinity_bits - 1)), one, none);
    }
    KEEL_FN void add_elements(quantize_tally const& of) {
        saturated = saturated + of.saturated;
        flushed = flushed + of.flushed;
        non_finite = non_finite + of.non_finite;
    }
    template <class Block, class F> KEEL_FN void add_scale(Block const& b, F const& scale) {
        auto const counted = both(b.valid(), gt(W(infinity_bits), magnitude(scale)));
        scale_min = umin(scale_min, select(counted, bits(scale), W(0xffffffffu)));
        scale_max = umax(scale_max, select(counted, bits(scale), W(0u)));
    }
    /// To the report, with the number of elements that were looked at.
    KEEL_FN void give(G const& g, report& r, int64_t elements) const {
        int64_t const s = g.total(saturated), f = g.total(flushed), b = g.total(non_finite);
        uint32_t const low = ~g.max_bits(scale_min ^ W(0xffffffffu)), high = g.max_bits(scale_max);
        if (!g.leader()) return;
        add_shared(r.elements, elements);
        add_shared(r.saturated, s);
        add_shared(r.flushed, f);
        add_shared(r.non_finite, b);
        min_shared(r.scale_min_bits, low);
        max_shared(r.scale_max_bits, high);
    }
};

/// A row of block_events, one of its counters: saturated, flushed or non_finite.
struct event_row {
    strided<block_events> of;
    int counter;
    KEEL_FN uint32_t* element(int64_t i) const {
        block_events* const e = of.element(i);
        return counter == 0 ? &e->saturated : counter == 1 ? &e->flushed : &e->non_finite;
    }
};
template <class Block, class Tally> KEEL_FN void put_events(Block const& b, strided<block_events> row, Tally const& tally) {
    b.put_word(event_row{row, 0}, b.total(tally.saturated));
    b.put_word(event_row{row, 1}, b.total(tally.flushed));
    b.put_word(event_row{row, 2}, b.total(tally.non_finite));
}

/// x * multiplier; where saturate_finite has to tell an x that is too large for the multiplier from Inf, at most the largest float.
template <overflow Overflow, class F> KEEL_FN F scaled_by(F const& x, F const& multiplier) {
    using U = bits_of<F>;
    F const scaled = x * multiplier;
    if constexpr (Overflow == overflow::saturate_finite) {
        auto const overflown = both(eq(magnitude(scaled), U(infinity_bits)), gt(U(infinity_bits), magnitude(x)));
        return select(overflown, as_float((bits(scaled) & U(~magnitude_mask)) | U(infinity_bits - 1)), scaled);
    } else {
        return scaled;
    }
}

/// code = encode(x * multiplier) for rows [first, last) of a block, and what happened to them, counted whether asked for or not: it costs
/// a few instructions a register, and half the kernels to compile; `in_range` says that its elements are finite and stay within the
/// codes' range, for the short encoding.
template <class Code, overflow Overflow, class G, class Block, class From, class To, class Rounding, class Tally>
KEEL_FN void encode_block(G const& g, Block const& b, From const& from, To const& to, int64_t first, int64_t last,
                          typename G::value const& multiplier, bool in_range, Rounding const& rounding, Tally& tally) {
    if constexpr (Rounding::is_nearest)
        if (in_range) return encode_scaled_rows<Code>(g, b, from, to, first, last, multiplier, tally.flushed);
    for (int64_t row = first; row < last; ++row)
        b.each([&](auto at) {
            auto const v = g.load(from(row), at), scaled = scaled_by<Overflow>(v, multiplier);
            auto const code = rounding.template code<Code, Overflow>(g, row, at, scaled);
            g.store_code(to(row), at, code);
            tally.template add_elements<Code>(v, scaled, code);
        });
}

/// One strip: the blocks over rows [strip * Rows, ...). Each block is read twice, the second time from cache: once for its largest
/// magnitude, once to encode. A block without NaN and Inf stays within the codes' range by its own scale, so the short encoding does.
/// From and To are adjacent_rows or spread_rows.
template <class From, class To, class Blocks, overflow Overflow, class Rule, class Rounding = to_nearest> struct quantize_strip {
    static constexpr int block_rows = Blocks::block_rows, block_columns = Blocks::block_columns;
    using scale_kind = typename Blocks::scale_kind;
    From x;
    To codes;
    typename Blocks::scale_matrix scales;
    int64_t row_count, column_count;
    non_finite_policy policy;
    keel::report* report;
    view<block_events, 2> events = {};
    Rounding rounding = {};

    /// A scale a block: in a column of blocks each lane is one.
    template <class G> using scale_words =
        typename std::conditional_t<block_columns == 1, std::type_identity<typename G::words>,
                                    std::type_identity<typename G::template block_lane_words<block_columns>>>::type;
    template <class G> using tally_of = quantize_tally<G, scale_words<G>>;

    template <class G> KEEL_FN void operator()(G const& g, int64_t strip) const {
        int64_t const first = strip * block_rows, last = block_rows == 1 || first + block_rows < row_count ? first + block_rows : row_count;
        tally_of<G> tally;
        each_block<block_columns>(g, column_count, [&](auto const& b) { block(g, b, strip, first, last, tally); });
        if (report != nullptr) tally.give(g, *report, (last - first) * column_count);
    }

    /// Block b of a strip, over rows [first, last).
    template <class G, class Block, class Tally>
    KEEL_FN void block(G const& g, Block const& b, int64_t strip, int64_t first, int64_t last, Tally& tally) const {
        using F = typename Block::lane;
        using words = typename G::words;
        using code = std::remove_const_t<typename Blocks::code>;
        words top(0u);
        for (int64_t row = first; row < last; ++row) top = umax(top, largest_magnitude(g, b, x(row)));
        auto amax = b.max_bits(top);
        bool const finite = !g.any(gt(amax, bits_of<F>(infinity_bits - 1)));
        if (!finite && policy == non_finite_policy::isolate) {
            top = words(0u);
            for (int64_t row = first; row < last; ++row)
                b.each([&](auto at) { top = umax(top, finite_magnitude(g.load(x(row), at))); });
            amax = b.max_bits(top);
        }
        block_scale<F> const s = Rule::template of<typename From::value, code, F>(scale_kind{}, amax);
        put_scale<scale_kind>(b, row_of(scales, strip), s.scale);
        tally.add_scale(b, s.scale);
        auto const multiplier = b.spread(s.multiplier);
        bool const in_range = Rule::bounded && finite;
        int64_t const width = block_columns == 1 ? most_lanes : block_columns < column_count ? block_columns : column_count;
        if (!events.absent()) { // blocks of less than 2^32 elements
            tally_of<G> own;
            encode_block<code, Overflow>(g, b, x, codes, first, last, multiplier, false, rounding, own);
            put_events(b, row_of(events, strip), own);
            tally.make_room(g, report, (last - first) * width);
            tally.add_elements(own);
            return;
        }
        constexpr bool is_small = block_rows <= (1 << 30) / (block_columns == 1 ? most_lanes : block_columns);
        int64_t const together = is_small ? block_rows : 1 + (1 << 30) / (width + 1); // rows whose events fit into words
        for (int64_t row = first; row < last; row += together) {
            int64_t const end = last - row < together ? last : row + together;
            tally.make_room(g, report, (end - row) * width);
            encode_block<code, Overflow>(g, b, x, codes, row, end, multiplier, in_range, rounding, tally);
        }
    }
};

} // namespace keel::inline KEEL_ABI
