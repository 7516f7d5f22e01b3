// Sums down the columns of a matrix in their fixed order (core/reduce.hpp): the gradients of gains and biases.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/reduce.hpp>
#include <keel/core/workspace.hpp>

namespace keel::inline KEEL_ABI {

// Both passes walk row by row, whole rows, with the sums in memory that stays in cache: down the columns, a register at a time, costs two
// to three times as much.

/// Pass 1: one tile of 64 rows to one row of partial sums. `Term` is acc = term(group, acc, row, at).
template <class Term> struct column_tile_sum {
    Term term;
    int64_t row_count, width;
    float* partial;

    template <class G> KEEL_FN void operator()(G const& g, int64_t tile) const {
        using F = typename G::value;
        int64_t const first = tile * column_tile;
        int64_t const last = first + column_tile < row_count ? first + column_tile : row_count;
        float* const sum = partial + tile * width;
        g.each(width, [&](auto at) { g.store(sum, at, term(g, F(0.0f), first, at)); });
        for (int64_t row = first + 1; row < last; ++row)
            g.each(width, [&](auto at) { g.store(sum, at, term(g, g.load(static_cast<float const*>(sum), at), row, at)); });
    }
};

/// Pass 2: the tiles in order, from +0, into the first; then written, or added to what stands there.
struct column_total {
    float* partial;
    int64_t tiles, width;
    float* total;
    grad_mode mode;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        using F = typename G::value;
        auto const load = [&](float const* p, auto at) { return g.load(p, at); };
        for (int64_t tile = 0; tile < tiles; ++tile)
            g.each(width, [&](auto at) {
                F const before = tile == 0 ? F(0.0f) : load(partial, at);
                g.store(partial, at, before + load(partial + tile * width, at));
            });
        g.each(width, [&](auto at) {
            F const acc = tiles == 0 ? F(0.0f) : load(partial, at);
            g.store(total, at, mode == accumulate ? F(load(total, at) + acc) : acc);
        });
    }
};

KEEL_FN int64_t column_tiles(int64_t row_count) { return (row_count + column_tile - 1) / column_tile; }

/// Bytes that column_sum needs.
KEEL_FN int64_t column_sum_workspace(int64_t row_count, int64_t width) {
    return workspace_bytes<float>(column_tiles(row_count) * width);
}

/// total[j] = (mode == accumulate ? total[j] : 0) + sum over rows of the term, j in [0, width). The caller has checked `ws`.
template <class B, class Term>
void column_sum(B const& be, int64_t row_count, int64_t width, Term const& term, float* total, grad_mode mode, workspace ws) {
    int64_t const tiles = column_tiles(row_count);
    float* const partial = ws.take<float>(tiles * width);
    be.for_rows(tiles, width * column_tile, column_tile_sum<Term>{term, row_count, width, partial});
    be.for_rows(1, width, column_total{partial, tiles, width, total, mode});
}

} // namespace keel::inline KEEL_ABI
