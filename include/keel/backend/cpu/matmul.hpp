// The matrix service of the CPU backend: operands packed or where they lie, a register-tile micro-kernel, blocks as the executor's chunks.
// How the work is cut: matmul_plan.hpp. In which order it is summed: backend/matmul.hpp.
#pragma once

#include <exception>
#include <new>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/direct_products.hpp>
#include <keel/backend/cpu/direct_strips.hpp>
#include <keel/backend/cpu/matmul_plan.hpp>
#include <keel/backend/cpu/packing.hpp>
#include <keel/backend/cpu/product_tiles.hpp>
#include <keel/backend/product_set.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Columns of B in one packing chunk: a multiple of every tile.
inline constexpr int64_t pack_columns_step = 128;
/// A larger C does not stay in a second cache.
inline constexpr int64_t largest_near_c = int64_t{1} << 21;
inline constexpr int64_t most_columns_for_strided_a = 256;
/// Rows of B at a time, where its columns are adjacent.
inline constexpr int64_t pack_rows_step = 32;

/// A part of one product's C that is packed and computed as a whole.
struct product_piece {
    one_product product;
    int64_t item, row, column, rows, columns; ///< the part
    float* packed_a;
    float* packed_b;
    float* partial; ///< tiles between depth-blocks; null where k is one block
    exponent_range *ranges_a, *ranges_b; ///< of each strip up to the current depth-block; null unless slots are pair words
    int64_t row_blocks, column_blocks;
    bool a_lies;                     ///< A is read where it lies
    bool packs_a_late;               ///< with one column-block, A is packed by the chunk that uses it, while it is near
    int64_t first_pack, first_block; ///< this piece's chunks in the group's numbering
};

/// Whether a symmetric product is mirrored strip by strip of its blocks, while they are near, rather than at last. It takes 0.95 of the
/// time where C and its operands about fill the second cache; a larger C's far lines would push them out (1.03 at 4 MB), and in a
/// smaller one nothing is far.
KEEL_FN bool mirrors_early(product_set const& set) {
    int64_t const bytes = set.n * set.n * set.c.element_bytes;
    return set.options.form == product_form::symmetric && bytes >= int64_t{1} << 18 && bytes <= largest_near_c;
}

/// Some pieces that share the workspace, and where in k they are.
template <class Arch, class Promotion> struct product_group {
    product_set const& set;
    matmul_plan const& plan;
    tile_functions functions;
    Promotion promote;
    bool early; ///< mirrors_early(set)
    bool alone; ///< chunks come one after the other, so late-packed blocks of A may share their memory

    product_piece pieces[std::size_t{most_pieces}]; ///< of which `count` are made
    int64_t count = 0, packs = 0, blocks = 0, longest = 0;
    int64_t depth_begin = 0;

    product_group(product_set const& products, matmul_plan const& how, tile_functions const& of_formats, Promotion const& promotion_of, bool one_by_one)
        : set(products), plan(how), functions(of_formats), promote(promotion_of), early(mirrors_early(products)), alone(one_by_one) {}

    /// Takes the piece if the workspace has room for it.
    KEEL_FN bool add(product_piece piece, workspace& ws) {
        if (count == most_pieces) return false;
        int64_t const depth = smaller(piece.product.k, plan.depth);
        packed_sizes const size = sizes_of_piece(plan, piece.rows, piece.columns, functions.slots_of(depth), piece.product.k > depth);
        workspace left = ws;
        piece.packed_a = left.take<float>(size.a);
        piece.packed_b = left.take<float>(size.b);
        piece.partial = left.take<float>(size.partial);
        if (piece.packed_a == nullptr || piece.packed_b == nullptr || piece.partial == nullptr) return false;
        if (functions.slots == slot_kind::pair_words) {
            piece.ranges_a = ranges_after(piece.packed_a + size.a, ceil_div(piece.rows, tile_rows<Arch>));
            piece.ranges_b = ranges_after(piece.packed_b + size.b, ceil_div(piece.columns, tile_columns<Arch>));
        }
        ws = left;
        piece.row_blocks = ceil_div(piece.rows, plan.block_rows);
        piece.column_blocks = ceil_div(piece.columns, plan.block_columns);
        piece.first_pack = packs;
        piece.first_block = blocks;
        piece.a_lies = may_lie(piece);
        piece.packs_a_late = piece.column_blocks == 1;
        packs += ceil_div(piece.columns, pack_columns_step) + (piece.packs_a_late ? 0 : piece.row_blocks);
        blocks += piece.row_blocks * piece.column_blocks;
        longest = larger(longest, piece.product.k);
        pieces[count++] = piece;
        return true;
    }

    /// A's rows feed the kernel from where they lie, in 0.85 to 0.98 of the packed product's time, while their lines stay in the nearest cache:
    /// not where rows a page apart compete for the same places in it, nor where every k is far from the last and many columns read it again.
    KEEL_FN bool may_lie(product_piece const& piece) const {
        if (functions.watch_a == nullptr || set.a.row * set.a.element_bytes % 4096 == 0) return false;
        if (functions.slots == slot_kind::pair_words && (set.a.column != 1 || piece.product.k % 2 != 0)) return false;
        return set.a.column == 1 || piece.columns <= most_columns_for_strided_a;
    }

    /// Slots of the current depth-block; negative where the piece's k has ended. The first block is done even if empty.
    KEEL_FN int64_t depth_of(product_piece const& piece) const {
        int64_t const depth = smaller(piece.product.k - depth_begin, plan.depth);
        if (depth <= 0) return depth_begin == 0 ? 0 : -1;
        return functions.slots_of(depth);
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
        int64_t const row_block = block / piece.column_blocks;
        if (piece.packs_a_late) self.pack_rows(piece, row_block);
        self.multiply_block(piece, row_block, block % piece.column_blocks);
    }

    KEEL_FN float* strip_of_a(product_piece const& piece, int64_t row, int64_t slots) const {
        int64_t const from = piece.packs_a_late && alone ? row % plan.block_rows : row;
        return piece.packed_a + from / tile_rows<Arch> * strip_stride<Arch, tile_rows<Arch>>(slots);
    }
    KEEL_FN float* strip_of_b(product_piece const& piece, int64_t column, int64_t slots) const {
        return piece.packed_b + column / tile_columns<Arch> * strip_stride<Arch, tile_columns<Arch>>(slots);
    }

    /// Pack chunk `index` of the piece: columns of B come first, then row-blocks of A.
    void pack_block(product_piece const& piece, int64_t index) const {
        int64_t const of_b = ceil_div(piece.columns, pack_columns_step);
        if (index < of_b)
            pack_columns(piece, index * pack_columns_step);
        else
            pack_rows(piece, index - of_b);
    }
    void pack_rows(product_piece const& piece, int64_t row_block) const {
        int64_t const slots = depth_of(piece), depth = smaller(piece.product.k - depth_begin, plan.depth);
        if (slots <= 0 || (piece.a_lies && piece.ranges_a == nullptr)) return;
        int64_t const end = smaller((row_block + 1) * plan.block_rows, piece.rows);
        for (int64_t row = row_block * plan.block_rows; row < end; row += tile_rows<Arch>) {
            operand_block const from{at_a(piece, row), set.a.row, set.a.column, smaller(end - row, tile_rows<Arch>), piece.product.m - piece.row - row,
                                     depth};
            note(piece.ranges_a, row / tile_rows<Arch>, piece.a_lies ? functions.watch_a(from) : functions.pack_a(from, strip_of_a(piece, row, slots)));
        }
    }
    /// A at this row of the piece and the current depth-block.
    KEEL_FN std::byte const* at_a(product_piece const& piece, int64_t row) const {
        return static_cast<std::byte const*>(piece.product.a) + ((piece.row + row) * set.a.row + depth_begin * set.a.column) * set.a.element_bytes;
    }
    KEEL_FN lying_rows lying_at(product_piece const& piece, int64_t row) const {
        if (!piece.a_lies) return {};
        return {at_a(piece, row), set.a.row * set.a.element_bytes, depth_of_slot(functions.slots) * set.a.column * set.a.element_bytes};
    }
    void pack_columns(product_piece const& piece, int64_t begin) const {
        int64_t const slots = depth_of(piece), depth = smaller(piece.product.k - depth_begin, plan.depth);
        if (slots <= 0) return;
        int64_t const end = smaller(begin + pack_columns_step, piece.columns);
        // Rows of B go through all strips a few at a time: a strip of its own would touch another page with each of them.
        bool const far_rows = set.b.column == 1 && set.b.row * set.b.element_bytes >= 2048;
        int64_t const step = far_rows ? pack_rows_step : depth;
        for (int64_t k = 0; k < depth; k += step)
            for (int64_t column = begin; column < end; column += tile_columns<Arch>) {
                int64_t const offset = (piece.column + column) * set.b.column + (depth_begin + k) * set.b.row;
                note(piece.ranges_b, column / tile_columns<Arch>,
                     functions.pack_b({static_cast<std::byte const*>(piece.product.b) + offset * set.b.element_bytes, set.b.column, set.b.row,
                                       smaller(end - column, tile_columns<Arch>), piece.product.n - piece.column - column, smaller(depth - k, step)},
                                      strip_of_b(piece, column, slots) + functions.slots_of(k) * tile_columns<Arch>),
                     k);
            }
    }

    /// The `count` ranges that end where the strips' memory does: less than the strips leave of it (sizes_of_piece's gaps).
    KEEL_FN static exponent_range* ranges_after(float* end, int64_t count) {
        return new (end - count * static_cast<int64_t>(sizeof(exponent_range) / sizeof(float))) exponent_range[static_cast<std::size_t>(count)];
    }
    /// The accumulator comes from the earlier depth-blocks, so their elements count as well.
    KEEL_FN void note(exponent_range* ranges, int64_t strip, exponent_range const& found, int64_t k = 0) const {
        if (ranges != nullptr) ranges[strip] = depth_begin + k == 0 ? found : ranges[strip].with(found);
    }
    /// The kernels for the tile of two strips.
    KEEL_FN tile_kernels kernels_for(product_piece const& piece, int64_t row, int64_t column) const {
        if constexpr (has_pair_dot<Arch>)
            if (piece.ranges_a != nullptr)
                return moderate(piece.ranges_a[row / tile_rows<Arch>], piece.ranges_b[column / tile_columns<Arch>])
                           ? kernels_of<Arch, pair_dot_step<Arch>>
                           : kernels_of<Arch, two_fma_step<Arch>>;
        return kernels_of<Arch, fma_step<Arch>>;
    }

    /// Whether the straight kernels, which know the dot alone, are for the tile of two strips.
    KEEL_FN bool dots(product_piece const& piece, int64_t row, int64_t column) const {
        return piece.ranges_a == nullptr || moderate(piece.ranges_a[row / tile_rows<Arch>], piece.ranges_b[column / tile_columns<Arch>]);
    }
    KEEL_FN bool goes_straight() const {
        return std::is_same_v<Promotion, no_promotion> && functions.straight != nullptr && set.c.column == 1 && !set.options.adds();
    }

    /// All tiles of one block of C: strips of B outside, so that one stays in the nearest cache while tiles of A pass.
    void multiply_block(product_piece const& piece, int64_t row_block, int64_t column_block) const {
        int64_t const slots = depth_of(piece);
        if (slots < 0) return;
        bool const first = depth_begin == 0, last = depth_begin + plan.depth >= piece.product.k;
        int64_t const row_end = smaller((row_block + 1) * plan.block_rows, piece.rows);
        int64_t const column_end = smaller((column_block + 1) * plan.block_columns, piece.columns);
        int64_t const tile_count = ceil_div(piece.rows, tile_rows<Arch>);
        bool const symmetric = set.options.form == product_form::symmetric, mirrors = last && early;
        bool const straight = last && goes_straight();
        bool const far = set.c.column == 1 && set.added().column == 1 && set.m * set.n * set.c.element_bytes > largest_near_c;
        alignas(64) float local[std::size_t{tile_size<Arch>}];
        int64_t const row_begin = row_block * plan.block_rows;
        depth_part part{piece.item, piece.row + row_begin, row_end - row_begin, 0, 0, depth_begin, smaller(piece.product.k - depth_begin, plan.depth)};
        typename Promotion::template scales_at_hand<Arch> scales;
        scales.take_rows(promote, part);

        for (int64_t column = column_block * plan.block_columns; column < column_end; column += tile_columns<Arch>) {
            if (symmetric && piece.column + column >= piece.row + row_end) break; // nothing right of the diagonal
            part.column = piece.column + column, part.columns = smaller(piece.columns - column, tile_columns<Arch>);
            scales.take_columns(promote, part);
            for (int64_t row = row_begin; row < row_end; row += tile_rows<Arch>) {
                int64_t const rows = smaller(piece.rows - row, tile_rows<Arch>);
                int64_t columns = smaller(piece.columns - column, tile_columns<Arch>);
                if (symmetric) {
                    columns = smaller(columns, round_up(piece.row + row + rows - piece.column - column, Arch::width));
                    if (columns <= 0) continue;
                }
                int64_t const index = column / tile_columns<Arch> * tile_count + row / tile_rows<Arch>;
                float* const tile = first && last ? &local[0] : piece.partial + index * tile_size<Arch>;
                strip_pair const strips{strip_of_a(piece, row, slots), strip_of_b(piece, column, slots), depth_begin, slots,
                                        functions.slots, kernels_for(piece, row, column), lying_at(piece, row)};
                tile_position const at{piece.item, piece.row + row, piece.column + column, rows, columns};
                if (last && far) ask_for(target_of(piece, at), rows, columns);
                if (tile_target const to = target_of(piece, at); straight && to.first_row_columns >= columns && dots(piece, row, column)) {
                    multiply_into_c<Arch>(strips, *functions.straight, functions.finish, to, rows, columns, set.options.alpha, tile, first);
                    continue;
                }
                promote.template accumulate<Arch>(at, strips, scales, part, tile, first);
                if (last) functions.finish(tile, rows, columns, target_of(piece, at), set.options.alpha, set.options.beta);
            }
            if (mirrors) // while the strip is near
                functions.mirror(piece.product.c, set.c.row, set.c.column, piece.row + row_begin, piece.row + row_end,
                                 piece.column + column, piece.column + smaller(column + tile_columns<Arch>, column_end));
        }
    }

    KEEL_FN tile_target target_of(product_piece const& piece, tile_position const& at) const {
        operand_layout const &c = set.c, &d = set.added();
        int64_t const bytes = c.element_bytes;
        return {static_cast<std::byte*>(piece.product.c) + (at.row * c.row + at.column * c.column) * bytes, c.row, c.column,
                static_cast<std::byte const*>(piece.product.d) + (at.row * d.row + at.column * d.column) * bytes, d.row, d.column,
                early ? at.row + 1 - at.column : no_diagonal, bytes}; // what is right of it is the mirror's
    }
    /// The lines that a tile's last step writes and reads come while its sum is made: 0.97 of the time at 1024 x 4096.
    KEEL_FN void ask_for(tile_target const& to, int64_t rows, int64_t columns) const {
        int64_t const bytes = set.c.element_bytes;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t b = 0; b < columns * bytes; b += 64) {
                __builtin_prefetch(static_cast<std::byte const*>(to.c) + i * to.row_stride * bytes + b, 1);
                if (to.d != to.c && set.options.beta != 0.0f)
                    __builtin_prefetch(static_cast<std::byte const*>(to.d) + i * to.d_row_stride * bytes + b);
            }
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
        int64_t const row = index % self.strips * mirror_rows;
        self.mirror(p.c, self.set.c.row, self.set.c.column, row, smaller(row + mirror_rows, p.m), 0, p.m);
    }
};

/// The backend's run() without its type, so that what follows is compiled once an architecture and not once an executor.
struct chunk_runner {
    void const* backend;
    void (*call)(void const* backend, int64_t chunks, chunk_task task);
    bool alone; ///< chunks run one after the other

    /// With the backend's threads, or by the caller alone.
    template <class Backend> KEEL_FN static chunk_runner of(Backend const& be, bool shared) {
        if (shared) return {&be, &call_run<Backend>, be.concurrency() == 1};
        return {&be, [](void const*, int64_t chunks, chunk_task task) { serial{}.run(chunks, task); }, true};
    }
    KEEL_FN void run(int64_t chunks, chunk_task task) const { call(backend, chunks, task); }

private:
    template <class Backend> static void call_run(void const* be, int64_t chunks, chunk_task task) {
        static_cast<Backend const*>(be)->run(chunks, task);
    }
};

/// Groups of pieces, one after the other, until all products are done.
template <class Arch, class Promotion> void multiply_set(chunk_runner be, product_set const& set,
                                                         matmul_plan const& plan, tile_functions const& functions,
                                                         Promotion const& promote, workspace const ws) {
    int64_t item = 0, row = 0, column = 0;
    while (item < set.count) {
        product_group<Arch, Promotion> group(set, plan, functions, promote, be.alone);
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
        if (group.count == 0 && item < set.count) std::terminate(); // the workspace, which was checked, has room for one piece
        using group_type = product_group<Arch, Promotion>;
        for (group.depth_begin = 0; group.depth_begin == 0 || group.depth_begin < group.longest;
             group.depth_begin += plan.depth) {
            be.run(group.packs, {&group_type::pack_chunk, &group});
            be.run(group.blocks, {&group_type::block_chunk, &group});
        }
    }
    if (set.options.form == product_form::symmetric && set.m > 0 && !mirrors_early(set)) {
        mirror_job const job{set, functions.mirror, ceil_div(set.m, mirror_rows)};
        be.run(set.count * job.strips, {&mirror_job::chunk, &job});
    }
}

struct cpu_matmul_service {
    static constexpr bool offered = true;

    template <class Arch, class E>
    KEEL_FN static int64_t workspace(cpu<Arch, E> const&, int64_t m, int64_t n, int64_t k, int64_t count) {
        return most_matmul_bytes<Arch>(m, n, k, count);
    }
    /// Of one promoted product with scale blocks of `length` along k.
    template <class Arch, class E>
    KEEL_FN static int64_t promoted_workspace(cpu<Arch, E> const&, int64_t m, int64_t n, int64_t k, int64_t length) {
        return most_matmul_bytes<Arch>(m, n, k, 1, length);
    }
    template <class A, class B, class C, class Arch, class E>
    static void run(cpu<Arch, E> const& be, product_set const& set, keel::workspace ws) {
        matmul_plan const plan = plan_of<Arch>(set, takes_pairs<A, B>);
        chunk_runner const runner = chunk_runner::of(be, plan.shared);
        if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
            product_set const products = turns(set) ? set.transposed() : set;
            if (takes_directly<Arch>(products)) {
                direct_products<Arch, C> const direct(products);
                return runner.run(direct.chunks(), {&direct_products<Arch, C>::chunk, &direct});
            }
        }
        using strips = direct_strips<Arch, A, B, C>;
        if constexpr (strips::offered)
            if (strips::takes(set)) {
                strips const direct(set, runner.alone);
                return runner.run(direct.chunks(), {&strips::chunk, &direct});
            }
        run_planned<A, B, C>(be, set, plan, no_promotion{}, ws);
    }
    template <class A, class B, class C, class Arch, class E, class ScaleA, class ScaleB>
    static void run_promoted(cpu<Arch, E> const& be, product_set const& set, promotion<ScaleA, ScaleB> const& scales,
                             keel::workspace ws) {
        matmul_plan const plan = for_scale_blocks(plan_of<Arch>(set, takes_pairs<A, B> && scales.keeps_pairs(set.k)), scales.length);
        run_planned<A, B, C>(be, set, plan, scaled_promotion<ScaleA, ScaleB>{scales}, ws);
    }
    /// With a plan of the caller's, always packed.
    template <class A, class B, class C, class Arch, class E, class Promotion>
    static void run_planned(cpu<Arch, E> const& be, product_set const& set, matmul_plan const& plan,
                            Promotion const& promote, keel::workspace ws) {
        bool const turn = turns(set);
        bool const pairs = takes_pairs<A, B> && promote.keeps_pairs(set.k);
        chunk_runner const runner = chunk_runner::of(be, plan.shared);
        if (turn)
            multiply_set<Arch>(runner, set.transposed(), plan, functions_for<Arch, B, A, C, Promotion>(pairs), promote.transposed(), ws);
        else
            multiply_set<Arch>(runner, set, plan, functions_for<Arch, A, B, C, Promotion>(pairs), promote, ws);
    }

private:
    /// A C with adjacent rows is computed as C^T, whose columns are adjacent.
    KEEL_FN static bool turns(product_set const& set) { return set.c.column != 1 && set.c.row == 1 && set.options.form == product_form::full; }
    /// Offsets cut what m, n or k say as a whole. Words of pairs hold twice the depth in the same memory.
    template <class Arch> KEEL_FN static matmul_plan plan_of(product_set const& set, bool pairs) {
        matmul_plan plan = plan_matmul<Arch>(set.m, set.n, set.k, set.cut == ragged::none ? set.count : 1);
        if (has_pair_dot<Arch> && pairs) plan.depth *= 2;
        return plan;
    }
    template <class Arch, class A, class B, class C, class Promotion> KEEL_FN static tile_functions functions_for(bool pairs) {
        constexpr int r = tile_rows<Arch>, c = tile_columns<Arch>;
        tile_functions f{nullptr, nullptr, &finish_tile<Arch, C>, &mirror_block<Arch, C>, slot_kind::singles, nullptr, nullptr};
        if constexpr (takes_pairs<A, B> && has_pair_dot<Arch>) {
            f.pack_a = &pack_pair_strip<Arch, A, r>, f.pack_b = &pack_pair_strip<Arch, B, c>, f.slots = slot_kind::pair_words;
            if constexpr (std::is_same_v<A, bf16>) f.watch_a = &watch_pairs<Arch, A>;
        } else if constexpr (takes_pairs<A, B>)
            f.pack_a = &pack_strip<Arch, A, true, r>, f.pack_b = &pack_strip<Arch, B, true, c>, f.slots = slot_kind::exchanged_pairs;
        if constexpr (!takes_pairs<A, B> || Promotion::may_split_pairs)
            if (!pairs)
                f.pack_a = &pack_strip<Arch, A, false, r>, f.pack_b = &pack_strip<Arch, B, false, c>, f.slots = slot_kind::singles, f.watch_a = nullptr;
        if constexpr (!Promotion::may_split_pairs) {
            using step = std::conditional_t<takes_pairs<A, B> && has_pair_dot<Arch>, pair_dot_step<Arch>, fma_step<Arch>>;
            f.straight = &straight_kernels_of<Arch, step, C>;
        }
        if constexpr (std::is_same_v<A, float>) f.watch_a = [](operand_block const&) { return exponent_range{}; };
        return f;
    }
};

} // namespace keel::inline KEEL_ABI::detail

namespace keel {

template <class Arch, class Executor> struct matmul_service<cpu<Arch, Executor>> : detail::cpu_matmul_service {};

} // namespace keel
