// Codes of rows that another kernel makes: its elements never reach memory, only a piece of a row on the stack.
#pragma once

#include <keel/quantize/quantize_block_rows.hpp>
#include <keel/quantize/quantize_tensor.hpp>

namespace keel::inline KEEL_ABI {

/// Elements on the stack at once.
inline constexpr int64_t produced_piece = 1024;

/// One line for every row, as From of quantize_strip.
template <class T> struct same_line {
    using value = std::remove_const_t<T>;
    T* line;
    KEEL_FN T* operator()(int64_t) const { return line; }
};

/// A row of `source`, rounded to Via, then quantised: the bits of both steps done apart. `Blocks` are one row high.
///
///     auto state = source.begin(g, row)            what the row's elements need
///     source.put(g, state, column, at, p)          stores element column + at of the row to p[at], rounded to Via
///
/// Each lane loads only what it has stored itself, so the line may be the lane's own memory. OneThread: all lanes share it, so that the
/// blocks of a piece get their scales together.
template <class Source, class Via, class Blocks, overflow Overflow, class Rule, bool OneThread> struct quantize_produced_row {
    static_assert(Blocks::block_rows == 1, "a produced row is quantised by blocks within it");
    static constexpr int block_columns = Blocks::block_columns;
    static_assert(block_columns == whole || produced_piece % block_columns == 0, "keel: blocks of a produced row have a width that divides 1024, or whole");
    using code = typename Blocks::code;
    using scale_kind = typename Blocks::scale_kind;
    Source source;
    Blocks out;
    int64_t column_count;
    non_finite_policy policy;
    keel::report* report;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        auto const state = source.begin(g, row);
        if constexpr (block_columns == whole)
            one_scale(g, row, state);
        else if constexpr (OneThread && Rule::bounded)
            scale_a_piece(g, row, state);
        else
            scale_a_block(g, row, state);
    }

private:
    using strip = quantize_strip<same_line<Via const>, adjacent_rows<code>, Blocks, Overflow, Rule>;

    /// quantize_block_rows.hpp's way for a piece of one row; one with NaN or Inf goes block by block.
    template <class G, class State> KEEL_FN void scale_a_piece(G const& g, int64_t row, State const& state) const {
        alignas(64) Via line[std::size_t{produced_piece}];
        alignas(64) float top[std::size_t{produced_piece / block_columns}]; // magnitudes, then multipliers
        quantize_tally<G, typename G::words> tally;
        int64_t elements = 0;
        for (int64_t column = 0; column < column_count; column += produced_piece) {
            int64_t const left = column_count - column, n = left < produced_piece ? left : produced_piece, blocks = Blocks::scale_columns(n);
            g.each(n, [&](auto at) { Source::put(g, state, column, at, &line[0]); });
            tile<Via const> const made{&line[0], n, 1, n};
            largest_of_tile<block_columns>(g, made, &top[0]);
            auto const scales = columns(slice(out.scales, row, 1), column / block_columns, blocks);
            if (!all_finite(g, &top[0], blocks)) {
                strip{{&line[0]}, {columns(slice(out.codes, row, 1), column, n)}, scales, 1, n, policy, report}(g, 0);
                continue;
            }
            make_scale_rows<Via, Blocks, Rule>(g, &top[0], 1, blocks, scales, tally);
            encode_tile<block_columns>(g, made, tile<code>{out.codes.at(row) + column, n, 1, n}, &top[0], tally.flushed);
            elements += n;
        }
        if (report != nullptr) tally.give(g, *report, elements);
    }

    template <class G, class State> KEEL_FN void scale_a_block(G const& g, int64_t row, State const& state) const {
        alignas(64) Via line[std::size_t{produced_piece}];
        typename strip::template tally_of<G> tally;
        for (int64_t column = 0; column < column_count; column += produced_piece) {
            int64_t const left = column_count - column, n = left < produced_piece ? left : produced_piece;
            strip const piece{{&line[0]},
                              {columns(slice(out.codes, row, 1), column, n)},
                              columns(slice(out.scales, row, 1), column / block_columns, out.scale_columns(n)),
                              1,
                              n,
                              policy,
                              report};
            each_block<block_columns>(g, n, [&](auto const& b) {
                b.each([&](auto at) { Source::put(g, state, column, at, &line[0]); });
                piece.block(g, b, 0, 0, 1, tally);
            });
        }
        if (report != nullptr) tally.give(g, *report, column_count);
    }

    /// The row is made twice, once for its scale.
    template <class G, class State> KEEL_FN void one_scale(G const& g, int64_t row, State const& state) const {
        alignas(64) Via line[std::size_t{produced_piece}];
        Via const* const made = &line[0];
        auto const each_piece = [&](auto body) {
            for (int64_t column = 0; column < column_count; column += produced_piece) {
                int64_t const left = column_count - column;
                g.template blocks<int{produced_piece}>(left < produced_piece ? left : produced_piece, [&](auto const& b) {
                    b.each([&](auto at) { Source::put(g, state, column, at, &line[0]); });
                    body(b, column);
                });
            }
        };
        uint32_t top = 0;
        bool all_finite = true;
        each_piece([&](auto const& b, int64_t) {
            bool finite = true;
            top = umax(top, largest_finite(g, b, made, finite));
            all_finite = all_finite && finite;
        });
        uint32_t const amax = policy == non_finite_policy::poison && !all_finite ? nan_bits : top;
        block_scale<float> const s = Rule::template of<Via, code, float>(scale_kind{}, amax);
        if (g.leader()) put_scale<scale_kind>(lone_scale{}, row_of(out.scales, row), s.scale);
        quantize_tally<G, uint32_t> tally;
        tally.add_scale(lone_scale{}, s.scale);
        each_piece([&](auto const& b, int64_t column) {
            encode_block<code, Overflow>(g, b, same_line<Via const>{made}, adjacent_rows<code>{columns(slice(out.codes, row, 1), column, 1)},
                                                   0, 1, typename G::value(s.multiplier), Rule::bounded && all_finite, to_nearest{}, tally);
        });
        if (report != nullptr) tally.give(g, *report, column_count);
    }
};

} // namespace keel::inline KEEL_ABI
