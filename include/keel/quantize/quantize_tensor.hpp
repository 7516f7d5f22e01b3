// One scale for a whole tensor: the largest magnitude by rows, the scale from it, the codes by rows.
#pragma once

#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Elements that are looked at together, the second time from cache; no result depends on it.
inline constexpr int tensor_piece = 1024;

/// Where a lone scale is put, as a block would.
struct lone_scale {
    template <auto... Policy, class P> KEEL_FN void put(P p, float v) const { store_element<Policy...>(element_of(p, 0), v); }
    KEEL_FN bool valid() const { return true; }
};

/// The largest magnitude of a block as a word, of its finite elements if there are others; `finite` tells.
template <class G, class Block, class P>
KEEL_FN uint32_t largest_finite(G const& g, Block const& b, P p, bool& finite) {
    uint32_t const top = g.max_bits(largest_magnitude(g, b, p));
    finite = top < infinity_bits;
    if (finite) return top;
    typename G::words among(0u);
    b.each([&](auto at) { among = umax(among, finite_magnitude(g.load(p, at))); });
    return g.max_bits(among);
}

/// Raises *top to a row's largest finite magnitude, as a word; with poison a row with NaN or Inf makes it NaN.
template <class From> struct tensor_amax_row {
    From x;
    int64_t column_count;
    non_finite_policy policy;
    uint32_t* top;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        uint32_t largest = 0;
        g.template blocks<tensor_piece>(column_count, [&](auto const& b) {
            bool finite = true;
            uint32_t const here = largest_finite(g, b, x(row), finite);
            largest = umax(largest, finite || policy == non_finite_policy::isolate ? here : nan_bits);
        });
        if (g.leader()) max_shared(*top, largest);
    }
};

/// A row's codes by a multiplier that is known. Elements of a magnitude up to `limit` round to at most code_max once scaled, if `bounded`:
/// for pieces of such the short encoding does. *top takes the largest finite magnitude.
template <class From, class To, overflow Overflow, class Rounding> struct tensor_encode_row {
    From x;
    To codes;
    int64_t column_count;
    float multiplier;
    bool bounded;
    uint32_t limit;
    uint32_t* top;
    keel::report* report;
    Rounding rounding = {};

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        quantize_tally<G, uint32_t> tally;
        uint32_t largest = 0;
        g.template blocks<tensor_piece>(column_count, [&](auto const& b) {
            bool finite = true;
            uint32_t const here = largest_finite(g, b, x(row), finite);
            largest = umax(largest, here);
            encode_block<typename To::value, Overflow>(g, b, x, codes, row, row + 1, typename G::value(multiplier),
                                                                 bounded && finite && here <= limit, rounding, tally);
        });
        if (report != nullptr) tally.give(g, *report, column_count);
        if (g.leader()) max_shared(*top, largest);
    }
};

/// amax of all of x as a word: of its finite elements, or with `poison` a NaN where x holds NaN or Inf. Host backends.
template <class B, class From> uint32_t tensor_amax(B const& be, From const& x, non_finite_policy policy) {
    uint32_t top = 0;
    be.for_rows(x.v.extent[0], x.v.extent[1], tensor_amax_row<From>{x, x.v.extent[1], policy, &top});
    return top;
}

/// The scale for `amax` into out and the codes of x by it; the largest finite magnitude that was met. Host backends.
template <overflow Overflow, class Rule, class B, class From, class To, class Blocks, class Rounding = to_nearest>
uint32_t quantize_tensor(B const& be, From const& x, To const& codes, Blocks const& out, uint32_t amax, report* report,
                         Rounding const& rounding = {}) {
    using scale_kind = typename Blocks::scale_kind;
    block_scale<float> const s = Rule::template of<typename From::value, typename To::value, float>(scale_kind{}, amax);
    put_scale<scale_kind>(lone_scale{}, row_of(out.scales, 0), s.scale);
    if (report != nullptr && magnitude(s.scale) < infinity_bits) {
        min_shared(report->scale_min_bits, bits(s.scale));
        max_shared(report->scale_max_bits, bits(s.scale));
    }
    uint32_t top = 0;
    be.for_rows(x.v.extent[0], x.v.extent[1],
                tensor_encode_row<From, To, Overflow, Rounding>{x, codes, x.v.extent[1], s.multiplier,
                                                                Rule::bounded && magnitude(s.multiplier) < infinity_bits, amax, &top, report,
                                                                rounding});
    return top;
}

} // namespace keel::inline KEEL_ABI
