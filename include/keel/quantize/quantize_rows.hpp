// The kernels of block quantisation: one walk over a strip of blocks, whatever their shape.
#pragma once

#include <keel/backend/scaled_codes.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/report.hpp>
#include <keel/quantize/scale_rule.hpp>

namespace keel::inline KEEL_ABI {

/// A block one column wide, with the members of a row group's block: each lane is a block of its own, scales adjacent.
template <class G, class At> struct column_block {
    using lane = typename G::value;
    using lane_words = typename G::words;
    G const& g;
    At at;
    int64_t n;

    template <class Body> KEEL_FN void each(Body body) const { body(at); }
    KEEL_FN lane_words max_bits(lane_words const& u) const { return u; }
    template <auto... Policy, class T> KEEL_FN void put(T* p, lane const& v, int64_t = 1) const {
        g.template store<Policy...>(p, at, v);
    }
    template <class T> KEEL_FN lane get(T const* p, int64_t = 1) const { return g.load(p, at); }
    KEEL_FN mask_of<lane> valid() const { return gt(lane_words(static_cast<uint32_t>(n)), g.position(at)); }
    KEEL_FN static lane spread(lane const& v) { return v; }
};

/// body(b) over the blocks of Columns elements along a row.
template <int Columns, class G, class Body> KEEL_FN void each_block(G const& g, int64_t n, Body body) {
    if constexpr (Columns == 1)
        g.each(n, [&](auto at) { body(column_block<G, decltype(at)>{g, at, n}); });
    else
        g.template blocks<Columns>(n, body);
}

/// Magnitudes as words, with NaN and Inf as 0.
template <class F> KEEL_FN bits_of<F> finite_magnitude(F const& v) {
    using U = bits_of<F>;
    U const m = magnitude(v);
    return select(gt(m, U(infinity_bits - 1)), U(0u), m);
}

/// One code's rounding boundary past its largest value: magnitudes above it overflow under nearest even.
template <class Code> inline constexpr uint32_t overflow_boundary = format_traits<Code>::max_float_bits +
                                                                    (1u << (22 - format_traits<Code>::mantissa_bits)) -
                                                                    (format_traits<Code>::max_code & 1u);

/// What the events of one strip add up to, lane by lane. Elements are counted in the group's words, scales in W.
template <class G, class W> struct quantize_tally {
    using U = typename G::words;
    U saturated, flushed, non_finite;
    W scale_min, scale_max;
    KEEL_FN quantize_tally() : saturated(0u), flushed(0u), non_finite(0u), scale_min(0xffffffffu), scale_max(0u) {}

    template <class Code, class F> KEEL_FN void add_elements(F const& x, F const& scaled) {
        U const m = magnitude(x), s = magnitude(scaled), one(1u), none(0u);
        auto const past = both(gt(s, U(overflow_boundary<Code>)),
                               gt(U(infinity_bits + 1), s)); // a poisoned element is NaN, not large
        saturated = saturated + select(both(gt(U(infinity_bits), m), past), one, none);
        flushed = flushed + select(both(gt(m, none), gt(U(bits(format_traits<Code>::min_subnormal() * 0.5f) + 1u), s)),
                                   one, none);
        non_finite = non_finite + select(gt(m, U(infinity_bits - 1)), one, none);
    }
    template <class Block, class F> KEEL_FN void add_scale(Block const& b, F const& scale) {
        auto const counted = both(b.valid(), gt(W(infinity_bits), magnitude(scale)));
        scale_min = umin(scale_min, select(counted, bits(scale), W(0xffffffffu)));
        scale_max = umax(scale_max, select(counted, bits(scale), W(0u)));
    }
    KEEL_FN void give(G const& g, report& r) const {
        int64_t const s = g.total(saturated), f = g.total(flushed), b = g.total(non_finite);
        uint32_t const low = ~g.max_bits(scale_min ^ W(0xffffffffu)), high = g.max_bits(scale_max);
        if (!g.leader()) return;
        add_shared(r.saturated, s);
        add_shared(r.flushed, f);
        add_shared(r.non_finite, b);
        min_shared(r.scale_min_bits, low);
        max_shared(r.scale_max_bits, high);
    }
};

/// One strip: the blocks over rows [strip * Rows, ...). Each block is read twice, the second time from cache: once for its largest
/// magnitude, once to encode code = encode(x * multiplier). A block without NaN and Inf stays within the codes' range by its own scale, so
/// the short encoding does.
template <class X, class Code, class Scale, int Rows, int Columns, overflow Overflow, class Rule>
struct quantize_strip {
    view<X const, 2> x;
    block_scaled<Code, Scale, Rows, Columns> out;
    non_finite_policy policy;
    keel::report* report;

    template <class G> KEEL_FN void operator()(G const& g, int64_t strip) const {
        int64_t const first = strip * Rows, end = x.extent[0];
        int64_t const last = Rows == 1 || first + Rows < end ? first + Rows : end;
        if (report != nullptr)
            walk<true>(g, strip, first, last);
        else
            walk<false>(g, strip, first, last);
    }

private:
    /// A scale a block: in a column of blocks each lane is one.
    template <class G> using scale_words =
        typename std::conditional_t<Columns == 1, std::type_identity<typename G::words>,
                                    std::type_identity<typename G::template block_lane_words<Columns>>>::type;

    template <bool Counting, class G> KEEL_FN void walk(G const& g, int64_t strip, int64_t first, int64_t last) const {
        quantize_tally<G, scale_words<G>> tally;
        each_block<Columns>(g, x.extent[1], [&](auto const& b) {
            using F = typename std::remove_cvref_t<decltype(b)>::lane;
            using words = typename G::words;
            words top(0u);
            for (int64_t row = first; row < last; ++row) top = umax(top, largest_magnitude(g, b, x.at(row)));
            auto amax = b.max_bits(top);
            bool const finite = !g.any(gt(amax, bits_of<F>(infinity_bits - 1)));
            if (!finite && policy == non_finite_policy::isolate) {
                top = words(0u);
                for (int64_t row = first; row < last; ++row)
                    b.each([&](auto at) { top = umax(top, finite_magnitude(g.load(x.at(row), at))); });
                amax = b.max_bits(top);
            }
            block_scale<F> const s = Rule::template of<X, Code, F>(Scale{}, amax);
            if constexpr (std::is_same_v<Scale, e8m0_scale>)
                b.template put<overflow::to_nonfinite, rounding::toward_zero>(out.scales.at(strip), s.scale,
                                                                              out.scales.stride[1]);
            else
                b.put(out.scales.at(strip), s.scale, out.scales.stride[1]);
            if constexpr (Counting) tally.add_scale(b, s.scale);
            auto const multiplier = b.spread(s.multiplier);
            for (int64_t row = first; row < last; ++row) {
                if (Rule::bounded && finite) {
                    encode_scaled<Code, Counting>(g, b, x.at(row), out.codes.at(row), multiplier, tally.flushed);
                } else {
                    b.each([&](auto at) {
                        auto const v = g.load(x.at(row), at);
                        auto const scaled = v * multiplier;
                        g.template store<Overflow>(out.codes.at(row), at, scaled);
                        if constexpr (Counting) tally.template add_elements<Code>(v, scaled);
                    });
                }
            }
        });
        if constexpr (Counting) tally.give(g, *report);
    }
};

/// y = decode(code) * scale, one rounding.
template <class Code, class Scale, int Rows, int Columns, class Y> struct dequantize_row {
    block_scaled<Code const, Scale, Rows, Columns> in;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        each_block<Columns>(g, y.extent[1], [&](auto const& b) {
            auto const scale = b.spread(b.get(in.scales.at(row / Rows), in.scales.stride[1]));
            decode_scaled(g, b, in.codes.at(row), y.at(row), scale);
        });
    }
};

} // namespace keel::inline KEEL_ABI
