// How products are cut into blocks. A plan depends on the shapes and the architecture, never on the thread count, and
// no plan changes a bit of the result: every element is one chain over k, whatever the blocks.
//
//   for each group of pieces              a piece: at most outer_rows x outer_columns of one product's C
//     for each depth-block of k
//       pack A and B of all pieces        in parallel, by row-blocks and column-blocks
//       multiply all blocks               in parallel: block_rows x block_columns of C, tile by tile
#pragma once

#include <string>

#include <keel/backend/cpu/micro_kernel.hpp>
#include <keel/core/workspace.hpp>

namespace keel {

struct matmul_plan {
    int64_t tile_rows = 0, tile_columns = 0;   ///< the register tile
    int64_t depth = 0;                         ///< k in one packed block
    int64_t block_rows = 0, block_columns = 0; ///< of C in one task
    int64_t outer_rows = 0, outer_columns = 0; ///< of C packed at once
    bool shared = true;                        ///< by the backend's threads; small products end before a thread is woken

    KEEL_FN std::string text() const {
        return "tile " + std::to_string(tile_rows) + "x" + std::to_string(tile_columns) + ", depth " +
               std::to_string(depth) + ", block " + std::to_string(block_rows) + "x" + std::to_string(block_columns) +
               ", outer " + std::to_string(outer_rows) + "x" + std::to_string(outer_columns) + (shared ? ", shared" : ", by the caller");
    }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

namespace detail {
KEEL_FN constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
KEEL_FN constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
KEEL_FN constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
KEEL_FN constexpr int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

/// Every depth-block but the last is a multiple of this, so bf16 pairs and 128-long scale blocks are never split.
inline constexpr int64_t depth_unit = 128;
inline constexpr int64_t largest_outer = 2112; // whole blocks and tiles of every architecture, and no less than 2048
inline constexpr int64_t most_pieces = 32;
inline constexpr int64_t largest_block_rows = 48 + 16; ///< 48, in whole tiles
/// Room for a tile that juts out, whichever operand it belongs to.
inline constexpr int64_t tile_margin = 32;
/// Floats after a packed strip whose last store may write too much: a register less one element, and then aligned.
inline constexpr int64_t strip_gap = 16;

/// Floats of the packed operands and the partial sums of one group of pieces.
struct packed_sizes {
    int64_t a, b, partial;
    KEEL_FN int64_t bytes() const {
        return workspace_bytes<float>(a) + workspace_bytes<float>(b) + workspace_bytes<float>(partial);
    }
};
inline constexpr int64_t shared_pass_bytes = int64_t{1} << 19; // what small products fill together
/// A strip of B of 256 slots stays in the nearest cache; where the partial sums no longer fit the next one, they are written
/// and read half as often instead.
KEEL_FN constexpr int64_t largest_depth(int64_t m, int64_t n) { return m * n <= (int64_t{1} << 19) ? 256 : 512; }

/// in_parts: k is cut, so partial sums are kept between the depth-blocks of `slots`.
KEEL_FN packed_sizes sizes_of_piece(matmul_plan const& plan, int64_t m, int64_t n, int64_t slots, bool in_parts) {
    int64_t const rows = smaller(m, plan.outer_rows) + tile_margin,
                  columns = smaller(n, plan.outer_columns) + tile_margin;
    int64_t const depth = round_up(larger(1, slots), 2);
    int64_t const gaps = 4; // floats a line: strips with a gap have at least 6 lines
    return {rows * (depth + gaps), columns * (depth + gaps), in_parts ? rows * columns : 0};
}
KEEL_FN packed_sizes sizes_of_piece(matmul_plan const& plan, int64_t m, int64_t n, int64_t k) {
    return sizes_of_piece(plan, m, n, smaller(k, plan.depth), k > plan.depth);
}
} // namespace detail

/// Flops from which on threads share them: some 25 microseconds of one core's, several times what waking another takes.
inline constexpr double smallest_shared = 0x1p21;

/// The plan for `count` products of [m, k] by [k, n]. How many small ones are packed at once is what the workspace has room for.
template <class Arch> KEEL_FN matmul_plan plan_matmul(int64_t m, int64_t n, int64_t k, int64_t count = 1) {
    using namespace detail;
    matmul_plan plan;
    plan.tile_rows = tile_rows<Arch>;
    plan.tile_columns = tile_columns<Arch>;
    int64_t const depth_blocks = larger(ceil_div(k, largest_depth(m, n)), 1);
    plan.depth = larger(round_up(ceil_div(k, depth_blocks), depth_unit), depth_unit);
    plan.block_rows = round_up(48, plan.tile_rows);
    plan.block_columns = round_up(512, plan.tile_columns);
    plan.outer_rows = plan.outer_columns = largest_outer;
    plan.shared = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k) * static_cast<double>(count) >= smallest_shared;
    return plan;
}

/// The plan with depth-blocks that hold whole scale blocks of `length` (none is changed where length divides 128).
KEEL_FN matmul_plan for_scale_blocks(matmul_plan plan, int64_t length) {
    plan.depth = length > plan.depth ? length : plan.depth / length * length;
    return plan;
}

/// Bytes of scratch that a plan needs for one product of at most [m, k] by [k, n], or its transpose.
KEEL_FN int64_t matmul_plan_bytes(matmul_plan const& plan, int64_t m, int64_t n, int64_t k) {
    return workspace_total(detail::larger(detail::sizes_of_piece(plan, m, n, k).bytes(),
                                          detail::sizes_of_piece(plan, n, m, k).bytes()));
}

/// Bytes that suffice for `batch` products of at most [m, k] by [k, n], with scale blocks of `length` (0: without): never less for
/// a larger shape, though the depth of its plan may be smaller.
template <class Arch>
KEEL_FN int64_t most_matmul_bytes(int64_t m, int64_t n, int64_t k, int64_t batch = 1, int64_t length = 0) {
    using namespace detail;
    if (m == 0 || n == 0 || batch == 0) return 0;
    matmul_plan const plan = plan_matmul<Arch>(m, n, k);
    int64_t const slots = smaller(k, larger(largest_depth(m, n), length)); // the longest packed block of any of them
    bool const in_parts = k > (length > 0 ? length : largest_depth(0, 0)); // whether one of them may be cut along k
    int64_t const one = larger(sizes_of_piece(plan, m, n, slots, in_parts).bytes(),
                               sizes_of_piece(plan, n, m, slots, in_parts).bytes());
    return workspace_total(larger(one, smaller(smaller(batch, most_pieces) * one, shared_pass_bytes)));
}

} // namespace keel::inline KEEL_ABI
