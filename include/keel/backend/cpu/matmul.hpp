// The matrix service of the CPU backend: packed operands, a register-tile micro-kernel, blocks as the executor's chunks.
// How the work is cut: matmul_plan.hpp. In which order it is summed: backend/matmul.hpp.
#pragma once

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul_plan.hpp>
#include <keel/backend/cpu/packing.hpp>
#include <keel/backend/cpu/product_tiles.hpp>
#include <keel/backend/product_set.hpp>

namespace keel::inline KEEL_ABI::detail {

/// A part of one product's C that is packed and computed as a whole.
struct product_piece {
    one_product product;
    int64_t item, row, column, rows, columns; ///< the part
    float* packed_a;
    float* packed_b;
    float* partial; ///< tiles between depth-blocks; null where k is one block
    int64_t row_blocks, column_blocks;
    int64_t first_pack, first_block; ///< this piece's chunks in the group's numbering
};

/// Some pieces that share the workspace, and where in k they are.
template <class Arch, class Promotion> struct product_group {
    product_set const& set;
    matmul_plan const& plan;
    tile_functions functions;
    Promotion promote;

    product_piece pieces[std::size_t{most_pieces}];
    int64_t count = 0, packs = 0, blocks = 0, longest = 0;
    int64_t depth_begin = 0;

    /// Takes the piece if the workspace has room for it.
    KEEL_FN bool add(product_piece piece, workspace& ws) {
        if (count == most_pieces) return false;
        packed_sizes const size = sizes_of_piece(plan, piece.rows, piece.columns, piece.product.k);
        workspace left = ws;
        piece.packed_a = left.take<float>(size.a);
        piece.packed_b = left.take<float>(size.b);
        piece.partial = left.take<float>(size.partial);
        if (piece.packed_a == nullptr || piece.packed_b == nullptr || piece.partial == nullptr) return false;
        ws = left;
        piece.row_blocks = ceil_div(piece.rows, plan.block_rows);
        piece.column_blocks = ceil_div(piece.columns, plan.block_columns);
        piece.first_pack = packs;
        piece.first_block = blocks;
        packs += piece.row_blocks + piece.column_blocks;
        blocks += piece.row_blocks * piece.column_blocks;
        longest = larger(longest, piece.product.k);
        pieces[count++] = piece;
        return true;
    }

    /// Slots of the current depth-block; negative where the piece's k has ended. The first block is done even if empty.
    KEEL_FN int64_t depth_of(product_piece const& piece) const {
        int64_t const depth = smaller(piece.product.k - depth_begin, plan.depth);
        if (depth <= 0) return depth_begin == 0 ? 0 : -1;
        return functions.pairs ? round_up(depth, 2) : depth;
    }

    static void pack_chunk(void const* context, int64_t chunk) {
        auto const& self = *static_cast<product_group const*>(context);
        int64_t i = 0;
        while (i + 1 < self.count && self.pieces[i + 1].first_pack <= chunk) ++i;
        self.pack_block(self.pieces[i], chunk - self.pieces[i].first_pack);
    }
    static void block_chunk(void const* context, int64_t chunk) {
        auto const& self = *static_cast<product_group const*>(context);
        int64_t i = 0;
        while (i + 1 < self.count && self.pieces[i + 1].first_block <= chunk) ++i;
        product_piece const& piece = self.pieces[i];
        int64_t const block = chunk - piece.first_block;
        self.multiply_block(piece, block / piece.column_blocks, block % piece.column_blocks);
    }

    /// Block `index` of the piece: its row-blocks come first, then its column-blocks.
    void pack_block(product_piece const& piece, int64_t index) const {
        int64_t const slots = depth_of(piece);
        if (slots <= 0) return;
        one_product const& p = piece.product;
        int64_t const depth = smaller(p.k - depth_begin, plan.depth);
        auto const strip = [&](operand_layout const& x, void const* origin, bool is_a, int64_t line, int64_t count_) {
            int64_t const line_stride = is_a ? x.row : x.column, depth_stride = is_a ? x.column : x.row;
            int64_t const offset = ((is_a ? piece.row : piece.column) + line) * line_stride + depth_begin * depth_stride;
            return operand_block{static_cast<std::byte const*>(origin) + offset * x.element_bytes, line_stride, depth_stride, count_, depth};
        };
        if (index < piece.row_blocks) {
            int64_t const end = smaller((index + 1) * plan.block_rows, piece.rows);
            for (int64_t row = index * plan.block_rows; row < end; row += tile_rows<Arch>) {
                int64_t const rows = smaller(piece.rows - row, tile_rows<Arch>);
                functions.pack_a(strip(set.a, p.a, true, row, rows), kernel_rows<Arch>(rows), piece.packed_a + row * slots);
            }
        } else {
            int64_t const begin = (index - piece.row_blocks) * plan.block_columns;
            int64_t const end = smaller(begin + plan.block_columns, piece.columns);
            for (int64_t column = begin; column < end; column += tile_columns<Arch>) {
                int64_t const columns = smaller(piece.columns - column, tile_columns<Arch>);
                functions.pack_b(strip(set.b, p.b, false, column, columns), tile_columns<Arch>, piece.packed_b + column * slots);
            }
        }
    }

    /// All tiles of one block of C: strips of B outside, so that one stays in the nearest cache while tiles of A pass.
    void multiply_block(product_piece const& piece, int64_t row_block, int64_t column_block) const {
        int64_t const slots = depth_of(piece);
        if (slots < 0) return;
        bool const first = depth_begin == 0, last = depth_begin + plan.depth >= piece.product.k;
        int64_t const row_end = smaller((row_block + 1) * plan.block_rows, piece.rows);
        int64_t const column_end = smaller((column_block + 1) * plan.block_columns, piece.columns);
        int64_t const tile_count = ceil_div(piece.rows, tile_rows<Arch>);
        alignas(64) float local[std::size_t{tile_size<Arch>}];

        for (int64_t column = column_block * plan.block_columns; column < column_end; column += tile_columns<Arch>)
            for (int64_t row = row_block * plan.block_rows; row < row_end; row += tile_rows<Arch>) {
                int64_t const rows = smaller(piece.rows - row, tile_rows<Arch>);
                int64_t columns = smaller(piece.columns - column, tile_columns<Arch>);
                if (set.options.form == product_form::symmetric) { // nothing right of the diagonal
                    columns = smaller(columns, piece.row + row + rows - piece.column - column);
                    if (columns <= 0) continue;
                }
                int64_t const index = column / tile_columns<Arch> * tile_count + row / tile_rows<Arch>;
                float* const tile = first && last ? &local[0] : piece.partial + index * tile_size<Arch>;
                float const* const a = piece.packed_a + row * slots;
                float const* const b = piece.packed_b + column * slots;
                tile_position const at{piece.item, piece.row + row, piece.column + column, rows, columns};
                promote.template accumulate<Arch>(at, depth_begin, slots, a, b, tile, first);
                if (last) finish(piece, at, tile);
            }
    }

    KEEL_FN void finish(product_piece const& piece, tile_position const& at, float const* tile) const {
        int64_t const offset = at.row * set.c.row + at.column * set.c.column;
        functions.finish(tile, at.rows, at.columns, static_cast<std::byte*>(piece.product.c) + offset * set.c.element_bytes, set.c.row,
                         set.c.column, set.options.alpha, set.options.beta);
    }
};

/// The upper triangle from the lower one, a strip of rows a chunk.
struct mirror_job {
    product_set const& set;
    mirror_function mirror;
    int64_t strips; ///< of one product

    static void chunk(void const* context, int64_t index) {
        auto const& self = *static_cast<mirror_job const*>(context);
        one_product const p = self.set.at(index / self.strips);
        self.mirror(p.c, self.set.c.row, self.set.c.column, p.m, index % self.strips * mirror_rows);
    }
};

/// Groups of pieces, one after the other, until all products are done.
template <class Arch, class Backend, class Promotion>
void multiply_set(Backend const& be, product_set const& set, matmul_plan const& plan, tile_functions const& functions,
                  Promotion const& promote, workspace const ws) {
    int64_t item = 0, row = 0, column = 0;
    while (item < set.count) {
        product_group<Arch, Promotion> group{set, plan, functions, promote, {}};
        workspace left = ws;
        while (item < set.count) {
            product_piece piece{};
            piece.product = set.at(item);
            piece.item = item, piece.row = row, piece.column = column;
            piece.rows = smaller(piece.product.m - row, plan.outer_rows);
            piece.columns = smaller(piece.product.n - column, plan.outer_columns);
            if (piece.rows > 0 && piece.columns > 0 && !group.add(piece, left)) break;
            row += plan.outer_rows; // the next piece: down, then to the right, then the next product
            if (row >= piece.product.m) row = 0, column += plan.outer_columns;
            if (column >= piece.product.n) column = 0, row = 0, ++item;
        }
        KEEL_ASSERT(group.count > 0 || item == set.count); // matmul_plan_bytes() has room for one piece
        using group_type = product_group<Arch, Promotion>;
        for (group.depth_begin = 0; group.depth_begin == 0 || group.depth_begin < group.longest; group.depth_begin += plan.depth) {
            be.run(group.packs, {&group_type::pack_chunk, &group});
            be.run(group.blocks, {&group_type::block_chunk, &group});
        }
    }
    if (set.options.form == product_form::symmetric && set.m > 0) {
        mirror_job const job{set, functions.mirror, ceil_div(set.m, mirror_rows)};
        be.run(set.count * job.strips, {&mirror_job::chunk, &job});
    }
}

struct cpu_matmul_service {
    static constexpr bool offered = true;

    template <class Arch, class E>
    KEEL_FN static int64_t workspace(cpu<Arch, E> const&, int64_t m, int64_t n, int64_t k, int64_t count) {
        return matmul_plan_bytes(plan_matmul<Arch>(m, n, k, count), m, n, k);
    }
    template <class A, class B, class C, class Arch, class E>
    static void run(cpu<Arch, E> const& be, product_set const& set, keel::workspace ws) {
        run_planned<A, B, C>(be, set, plan_matmul<Arch>(set.m, set.n, set.k, set.count), no_promotion{}, ws);
    }
    template <class A, class B, class C, class Arch, class E, class ScaleA, class ScaleB>
    static void run_promoted(cpu<Arch, E> const& be, product_set const& set, promotion<ScaleA, ScaleB> const& scales, keel::workspace ws) {
        matmul_plan const plan = plan_matmul<Arch>(set.m, set.n, set.k, set.count);
        run_planned<A, B, C>(be, set, plan, scaled_promotion<ScaleA, ScaleB>{scales}, ws);
    }
    /// With a plan of the caller's. A C with adjacent rows is computed as C^T, whose columns are adjacent.
    template <class A, class B, class C, class Arch, class E, class Promotion>
    static void run_planned(cpu<Arch, E> const& be, product_set const& set, matmul_plan const& plan, Promotion const& promote,
                            keel::workspace ws) {
        bool const turn = set.c.column != 1 && set.c.row == 1 && set.options.form == product_form::full;
        constexpr bool pairs = takes_pairs<A, B>;
        if (turn) {
            tile_functions const functions{&pack_strip<Arch, B, pairs>, &pack_strip<Arch, A, pairs>, &finish_tile<Arch, C>,
                                           &mirror_strip<Arch, C>, pairs};
            multiply_set<Arch>(be, set.transposed(), plan, functions, promote.transposed(), ws);
        } else {
            tile_functions const functions{&pack_strip<Arch, A, pairs>, &pack_strip<Arch, B, pairs>, &finish_tile<Arch, C>,
                                           &mirror_strip<Arch, C>, pairs};
            multiply_set<Arch>(be, set, plan, functions, promote, ws);
        }
    }
};

} // namespace keel::inline KEEL_ABI::detail

namespace keel {

template <class Arch, class Executor> struct matmul_service<cpu<Arch, Executor>> : detail::cpu_matmul_service {};

} // namespace keel
