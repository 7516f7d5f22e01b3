// Blocks one column wide, walked row by row: a stretch of columns keeps its largest magnitudes and then its multipliers on the stack,
// so that memory is read in the order in which it lies. The bits are those of quantize_rows.hpp's walk.
#pragma once

#include <keel/backend/scaled_codes.hpp>
#include <keel/quantize/quantize_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Columns of one stretch: two lines of the stack's floats, and Rows of x that stay in the second-level cache.
inline constexpr int64_t column_stretch = 1024;

/// One strip: the blocks over rows [strip * Rows, ...), each of Rows elements of a column. x has adjacent columns; codes have too, or
/// lie turned, with adjacent rows.
template <class X, class Blocks, overflow Overflow, class Rule> struct quantize_column_strip {
    static_assert(Blocks::block_columns == 1);
    using code = typename Blocks::code;
    view<X const, 2> x;
    Blocks out;
    non_finite_policy policy;
    keel::report* report;

    template <class G> KEEL_FN void operator()(G const& g, int64_t strip) const {
        int64_t const first = strip * Blocks::block_rows, end = x.extent[0],
                      last = first + Blocks::block_rows < end ? first + Blocks::block_rows : end;
        quantize_tally<G, typename G::words> tally;
        for (int64_t column = 0; column < x.extent[1]; column += column_stretch) {
            int64_t const left = x.extent[1] - column;
            stretch(g, strip, first, last, column, left < column_stretch ? left : column_stretch, tally);
        }
        if (report != nullptr) tally.give(g, *report, (last - first) * x.extent[1]);
    }

private:
    template <class G, class Tally>
    KEEL_FN void stretch(G const& g, int64_t strip, int64_t first, int64_t last, int64_t column, int64_t n,
                         Tally& tally) const {
        using F = typename G::value;
        using U = typename G::words;
        alignas(64) float top[std::size_t{column_stretch}]; // magnitudes, then multipliers
        X const* const corner = x.at(first) + column;
        g.each(n, [&](auto at) { g.store(&top[0], at, F(0.0f)); });
        constexpr int64_t together = 8; // rows a pass
        for (int64_t row = first; row < last; row += together)
            raise_largest(g, corner + (row - first) * x.stride[0], x.stride[0], last - row < together ? last - row : together, n,
                          &top[0]);
        bool const finite = all_finite(g, &top[0], n);
        if (!finite && policy == non_finite_policy::isolate)
            g.each(n, [&](auto at) {
                U among(0u);
                for (int64_t row = first; row < last; ++row) among = umax(among, finite_magnitude(g.load(x.at(row) + column, at)));
                g.store(&top[0], at, as_float(among));
            });

        make_scales<X, Blocks, Rule>(g, &top[0], n, row_of(columns(out.scales, column, n), strip), tally);
        bool const in_range = Rule::bounded && finite;
        if (in_range) arrange_multipliers<X, code>(g, &top[0], n);
        constexpr int64_t counted = int64_t{1} << 20; // rows whose events fit into words
        for (int64_t row = first; row < last; row += counted) {
            int64_t const end = last - row < counted ? last : row + counted;
            tally.make_room(g, report, (end - row) * n);
            encode(g, row, end, column, n, &top[0], in_range, tally);
        }
    }

    /// The codes of rows [first, last) of a stretch.
    template <class G, class Tally>
    KEEL_FN void encode(G const& g, int64_t first, int64_t last, int64_t column, int64_t n, float const* multipliers, bool in_range,
                        Tally& tally) const {
        using F = typename G::value;
        using U = typename G::words;
        bool const turned = out.codes.stride[1] != 1 && x.extent[1] > 1;
        if (in_range) {
            if (turned)
                return encode_columns_turned(g, x.at(first) + column, x.stride[0], last - first, out.codes.at(first, column),
                                             out.codes.stride[1], n, multipliers, tally.flushed);
            for (int64_t row = first; row < last; ++row)
                encode_columns(g, x.at(row) + column, out.codes.at(row) + column, n, multipliers, tally.flushed);
            return;
        }
        for (int64_t row = first; row < last; ++row)
            g.each(n, [&](auto at) {
                F const v = g.load(x.at(row) + column, at), scaled = v * g.load(multipliers, at);
                U const word = encode_words<code, Overflow>(scaled);
                if (turned)
                    g.store_code(strided<code>{out.codes.at(row, column), out.codes.stride[1]}, at, word);
                else
                    g.store_code(out.codes.at(row) + column, at, word);
                tally.template add_elements<code>(v, scaled, word);
            });
    }
};

} // namespace keel::inline KEEL_ABI
