// One scale for a whole tensor: the largest magnitude by rows, the scale from it, the codes by rows.
#pragma once

#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Elements that are looked at together, the second time from cache; no result depends on it.
inline constexpr int tensor_piece = 1024;

/// The largest magnitude of a block as a word, of its finite elements if there are others; `finite` tells.
template <class G, class Block, class X>
KEEL_FN uint32_t largest_finite(G const& g, Block const& b, X const* p, bool& finite) {
    uint32_t const top = g.max_bits(largest_magnitude(g, b, p));
    finite = top < infinity_bits;
    if (finite) return top;
    typename G::words among(0u);
    b.each([&](auto at) { among = umax(among, finite_magnitude(g.load(p, at))); });
    return g.max_bits(among);
}

/// The largest finite magnitude of a row into *top, as a word; *non_finite becomes 1 where there are NaN or Inf.
template <class X> struct tensor_largest_row {
    view<X const, 2> x;
    uint32_t* top;
    uint32_t* non_finite;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        uint32_t largest = 0, bad = 0;
        g.template blocks<tensor_piece>(x.extent[1], [&](auto const& b) {
            bool finite = true;
            largest = umax(largest, largest_finite(g, b, x.at(row), finite));
            if (!finite) bad = 1;
        });
        if (!g.leader()) return;
        max_shared(*top, largest);
        max_shared(*non_finite, bad);
    }
};

/// A row's codes by a multiplier that is known. Elements of a magnitude up to `limit` round to at most code_max once scaled, if `bounded`:
/// for pieces of such the short encoding does. *top takes the largest finite magnitude.
template <class X, class Code, overflow Overflow> struct tensor_encode_row {
    view<X const, 2> x;
    view<Code, 2> codes;
    float multiplier;
    bool bounded;
    uint32_t limit;
    uint32_t* top;
    keel::report* report;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        if (report != nullptr)
            walk<true>(g, row);
        else
            walk<false>(g, row);
    }

private:
    template <bool Counting, class G> KEEL_FN void walk(G const& g, int64_t row) const {
        quantize_tally<G, uint32_t> tally;
        X const* const from = x.at(row);
        Code* const to = codes.at(row);
        typename G::value const factor(multiplier);
        uint32_t largest = 0;
        g.template blocks<tensor_piece>(x.extent[1], [&](auto const& b) {
            bool finite = true;
            uint32_t const here = largest_finite(g, b, from, finite);
            largest = umax(largest, here);
            if (bounded && finite && here <= limit) {
                encode_scaled<Code, Counting>(g, b, from, to, factor, tally.flushed);
                return;
            }
            b.each([&](auto at) {
                auto const v = g.load(from, at), scaled = v * factor;
                g.template store<Overflow>(to, at, scaled);
                if constexpr (Counting) tally.template add_elements<Code>(v, scaled);
            });
        });
        if constexpr (Counting) tally.give(g, *report);
        if (g.leader()) max_shared(*top, largest);
    }
};

/// amax of all of x as a word: of its finite elements, or with `poison` a NaN where x holds NaN or Inf. Host backends.
template <class B, class X> uint32_t tensor_amax(B const& be, view<X const, 2> x, non_finite_policy policy) {
    uint32_t top = 0, non_finite = 0;
    be.for_rows(x.extent[0], x.extent[1], tensor_largest_row<X>{x, &top, &non_finite});
    return policy == non_finite_policy::poison && non_finite != 0 ? nan_bits : top;
}

/// The scale for `amax` into out and the codes of x by it; the largest finite magnitude that was met. Host backends.
template <overflow Overflow, class Rule, class B, class X, class Code, class Scale>
uint32_t quantize_tensor(B const& be, view<X const, 2> x, block_scaled<Code, Scale, whole, whole> out, uint32_t amax,
                         report* report) {
    block_scale<float> const s = Rule::template of<X, Code, float>(Scale{}, amax);
    if constexpr (std::is_same_v<Scale, e8m0_scale>)
        store_element<overflow::to_nonfinite, rounding::toward_zero>(out.scales.at(0, 0), s.scale);
    else
        store_element(out.scales.at(0, 0), s.scale);
    if (report != nullptr && magnitude(s.scale) < infinity_bits) {
        min_shared(report->scale_min_bits, bits(s.scale));
        max_shared(report->scale_max_bits, bits(s.scale));
    }
    uint32_t top = 0;
    be.for_rows(x.extent[0], x.extent[1],
                tensor_encode_row<X, Code, Overflow>{x, out.codes, s.multiplier,
                                                     Rule::bounded && magnitude(s.multiplier) < infinity_bits, amax, &top,
                                                     report});
    return top;
}

} // namespace keel::inline KEEL_ABI
