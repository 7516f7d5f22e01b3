// Rows of 1 x C blocks where one thread has the whole row: a rule makes the scales of a register of blocks at once, at the price of one.
// The bits are those of quantize_rows.hpp's walk.
#pragma once

#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Blocks whose scales are made together: those of 4 KB of bf16 in blocks of 128, which stay in the first-level cache.
inline constexpr int64_t scales_together = 16;

/// One row, its elements and its codes adjacent. Pieces with NaN or Inf go block by block, and all do where each block's events are asked for.
template <class X, class Blocks, overflow Overflow, class Rule> struct quantize_block_row {
    static_assert(Blocks::block_rows == 1 && Rule::bounded);
    static constexpr int block_columns = Blocks::block_columns;
    using code = typename Blocks::code;
    view<X const, 2> x;
    Blocks out;
    non_finite_policy policy;
    keel::report* report;
    view<block_events, 2> events = {};

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        constexpr int64_t stretch = scales_together * block_columns;
        quantize_tally<G, typename G::words> tally;
        int64_t elements = 0;
        for (int64_t column = 0; column < x.extent[1]; column += stretch) {
            int64_t const left = x.extent[1] - column, n = left < stretch ? left : stretch;
            if (piece(g, row, column, n, tally)) elements += n;
        }
        if (report != nullptr) tally.give(g, *report, elements);
    }

private:
    /// Whether `tally` has counted it.
    template <class G, class Tally> KEEL_FN bool piece(G const& g, int64_t row, int64_t column, int64_t n, Tally& tally) const {
        alignas(64) float top[std::size_t{scales_together}] = {}; // magnitudes, then multipliers
        int64_t const count = Blocks::scale_columns(n), first = column / block_columns;
        X const* const from = x.at(row) + column;
        code* const to = out.codes.at(row) + column;
        g.template blocks<block_columns>(n, [&](auto const& b) { b.put(&top[0], as_float(b.max_bits(largest_magnitude(g, b, from)))); });
        if (!all_finite(g, &top[0], count) || !events.absent()) {
            using strip = quantize_strip<adjacent_rows<X const>, adjacent_rows<code>, Blocks, Overflow, Rule>;
            strip{{columns(slice(x, row, 1), column, n)}, {columns(slice(out.codes, row, 1), column, n)},
                  columns(slice(out.scales, row, 1), first, count), 1, n, policy, report,
                  events.absent() ? events : columns(slice(events, row, 1), first, count)}(g, 0);
            return false;
        }
        make_scales<X, Blocks, Rule>(g, &top[0], count, row_of(columns(out.scales, first, count), row), tally);
        g.template blocks<block_columns>(n, [&](auto const& b) {
            encode_scaled<code>(g, b, from, to, b.spread(b.get(&top[0])), tally.flushed);
        });
        return true;
    }
};

} // namespace keel::inline KEEL_ABI
