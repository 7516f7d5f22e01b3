// What happens to one tile of C: the sum over a depth-block, promotion by scales, the last step into C, and the mirror.
#pragma once

#include <keel/backend/cpu/encoded_store.hpp>
#include <keel/backend/cpu/micro_kernel.hpp>
#include <keel/backend/cpu/packing_pairs.hpp>
#include <keel/backend/product_set.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Where a tile lies in its product.
struct tile_position {
    int64_t item, row, column, rows, columns;
};

/// Where a tile's part of C lies, and the part of D that beta multiplies. Strides in elements.
struct tile_target {
    void* c;
    int64_t row_stride, column_stride;
    void const* d;
    int64_t d_row_stride, d_column_stride;
    int64_t first_row_columns; ///< row i ends with the register that holds this column, counted from 1, plus i: the diagonal
    int64_t element_bytes;

    KEEL_FN tile_target from_row(int64_t i) const {
        tile_target t = *this;
        t.c = static_cast<std::byte*>(c) + i * row_stride * element_bytes;
        t.d = static_cast<std::byte const*>(d) + i * d_row_stride * element_bytes;
        t.first_row_columns += i;
        return t;
    }
};

using finish_function = void (*)(float const* tile, int64_t rows, int64_t columns, tile_target const& to, float alpha, float beta);
using mirror_function = void (*)(void* c, int64_t row_stride, int64_t column_stride, int64_t row, int64_t row_end, int64_t column,
                                 int64_t column_end);

/// What the slots of packed strips hold (packing.hpp, packing_pairs.hpp).
enum class slot_kind : uint8_t { singles, exchanged_pairs, pair_words };
KEEL_FN int64_t depth_of_slot(slot_kind kind) { return kind == slot_kind::pair_words ? 2 : 1; }
/// Slots of a strip of `depth`; pairs end whole.
KEEL_FN int64_t slots_of(slot_kind kind, int64_t depth) { return (kind == slot_kind::singles ? depth : round_up(depth, 2)) / depth_of_slot(kind); }

/// The functions of a product that know its formats; all else is compiled once an architecture.
struct tile_functions {
    pack_function pack_a, pack_b;
    finish_function finish;
    mirror_function mirror;
    slot_kind slots;
    watch_function watch_a;           ///< of A where it lies; null where it has to be packed
    straight_kernels const* straight; ///< of fma_step, or of the dot of pairs; null where there are none

    KEEL_FN int64_t slots_of(int64_t depth) const { return detail::slots_of(slots, depth); }
};

/// Rows of A where they lie, and bytes from a row to the next and from a slot to the next.
struct lying_rows {
    std::byte const* data = nullptr;
    int64_t row = 0, step = 0;
};

/// A packed strip of B and one of A, packed or where it lies, what their slots hold, and the kernels for it. `depth_begin` is the k of their
/// first slot.
struct strip_pair {
    float const* a;
    float const* b;
    int64_t depth_begin, slots;
    slot_kind kind;
    tile_kernels kernels;
    lying_rows lying; ///< a's, where it is not packed

    KEEL_FN bool lies() const { return lying.data != nullptr; }
    /// The tile's chains over slots [begin, begin + count).
    template <class Arch>
    KEEL_FN void multiply(int64_t rows, int64_t columns, int64_t begin, int64_t count, float* tile, chain_start start, tile_scales scales = {}) const {
        constexpr int width = tile_columns<Arch>;
        float const* const right = b + begin * width;
        if (!lies())
            return kernels.packed(kernel_rows<Arch>(rows), columns)(count, a + begin * tile_rows<Arch>, right, {tile, start, scales});
        for (int64_t i = 0, step = 0; i < rows; i += step) {
            step = loose_rows<Arch>(rows - i);
            kernels.loose(static_cast<int>(step), columns)(count, lying.data + i * lying.row + begin * lying.step, lying.row, lying.step, right, width,
                                                           {tile + i * width, start, scales.from_row(i)});
        }
    }
};

/// The last part of chains, straight into C where there is a kernel for it, else through the tile: of one tile, or, from the first part on and
/// where A lies, of any number of rows, for which the tile is scratch. C's columns are adjacent, and no row ends early.
template <class Arch>
void multiply_into_c(strip_pair const& s, straight_kernels const& straight, finish_function finish, tile_target const& to, int64_t rows, int64_t columns,
                     float alpha, float* tile, bool first) {
    straight_target target{to.c, to.row_stride, columns, alpha, first ? nullptr : tile};
    chain_start const start = first ? chain_start::zero : chain_start::tile;
    if (!s.lies()) {
        if (auto const kernel = straight.packed(static_cast<int>(rows), columns)) return kernel(s.slots, s.a, s.b, target);
        s.multiply<Arch>(rows, columns, 0, s.slots, tile, start);
        return finish(tile, rows, columns, to, alpha, 0.0f);
    }
    constexpr int width = tile_columns<Arch>;
    std::byte const* a = s.lying.data;
    for (int64_t i = 0, step = 0; i < rows; i += step) {
        step = loose_rows<Arch>(rows - i);
        float* const part = first ? tile : tile + i * width;
        if (auto const kernel = straight.loose(static_cast<int>(step), columns)) {
            kernel(s.slots, a, s.lying.row, s.lying.step, s.b, width, target);
        } else {
            s.kernels.loose(static_cast<int>(step), columns)(s.slots, a, s.lying.row, s.lying.step, s.b, width, {part, start, {}});
            finish(part, step, columns, to.from_row(i), alpha, 0.0f);
        }
        a += step * s.lying.row;
        target.c = static_cast<std::byte*>(target.c) + step * to.row_stride * to.element_bytes;
        if (!first) target.before += step * width;
    }
}

/// A part of a product's C and the depth-block at hand.
struct depth_part {
    int64_t item, row, rows, column, columns; ///< the rows of a block of C, the columns of one strip
    int64_t depth_begin, depth;
};

/// The plain sum: the chain goes on in the tile.
struct no_promotion {
    static constexpr bool may_split_pairs = false;
    template <class Arch> struct scales_at_hand {
        KEEL_FN void take_rows(no_promotion const&, depth_part const&) {}
        KEEL_FN void take_columns(no_promotion const&, depth_part const&) {}
    };
    KEEL_FN no_promotion transposed() const { return {}; }
    KEEL_FN static bool keeps_pairs(int64_t) { return true; }
    template <class Arch>
    KEEL_FN void accumulate(tile_position const& at, strip_pair const& s, scales_at_hand<Arch> const&, depth_part const&, float* tile, bool first) const {
        s.multiply<Arch>(at.rows, at.columns, 0, s.slots, tile, first ? chain_start::zero : chain_start::tile);
    }
};

/// Every scale block sums from zero, then total = fma(block, scale_a * scale_b, total); the tile holds the total. Where all scales are 1 the
/// kernel adds the block itself.
template <class ScaleA, class ScaleB> struct scaled_promotion {
    static constexpr bool may_split_pairs = true, all_one = std::is_same_v<ScaleA, unit_scale> && std::is_same_v<ScaleB, unit_scale>;
    promotion<ScaleA, ScaleB> scales;

    /// The scales of a block of rows and of a strip of columns, fetched once for all their tiles: up to `most` scale blocks of k; where there
    /// are more, each tile asks for its own.
    template <class Arch> struct scales_at_hand {
        static constexpr int64_t most = all_one ? 1 : 32, most_rows = all_one ? 1 : largest_block_rows, width = all_one ? 1 : tile_columns<Arch>;
        alignas(64) float left[std::size_t{most}][std::size_t{most_rows}];
        alignas(64) float right[std::size_t{most}][std::size_t{width}];
        int64_t first = 0, blocks = 0; ///< blocks: 0 where they are too many

        KEEL_FN void take_rows(scaled_promotion const& promote, depth_part const& part) {
            if constexpr (all_one) return;
            first = part.depth_begin / promote.scales.length, blocks = ceil_div(part.depth, promote.scales.length);
            if (blocks > most) blocks = 0;
            for (int64_t b = 0; b < blocks; ++b)
                for (int64_t i = 0; i < round_up(part.rows, tile_rows<Arch>); ++i) // past the last row: 0
                    left[b][i] = i < part.rows ? promote.scales.scale_a(part.item, part.row + i, first + b) : 0.0f;
        }
        KEEL_FN void take_columns(scaled_promotion const& promote, depth_part const& part) {
            if constexpr (all_one) return;
            for (int64_t b = 0; b < blocks; ++b) promote.columns_of(part.item, part.column, part.columns, first + b, &right[b][0], width);
        }
    };
    /// Those past the last column are 0.
    KEEL_FN void columns_of(int64_t item, int64_t column, int64_t count, int64_t block, float* to, int64_t width) const {
        for (int64_t j = 0; j < count; ++j) to[j] = scales.scale_b(item, column + j, block);
        for (int64_t j = count; j < width; ++j) to[j] = 0.0f;
    }

    KEEL_FN scaled_promotion<ScaleB, ScaleA> transposed() const {
        return {{scales.length, scales.scale_b, scales.scale_a}};
    }
    KEEL_FN bool keeps_pairs(int64_t k) const { return scales.keeps_pairs(k); }

    template <class Arch>
    void accumulate(tile_position const& at, strip_pair const& s, scales_at_hand<Arch> const& hand, depth_part const& part, float* tile,
                    bool first_part) const {
        constexpr int64_t width = tile_columns<Arch>;
        int64_t const block_slots = slots_of(s.kind, scales.length);
        if (first_part)
            for (int64_t i = 0; i < tile_size<Arch>; ++i) tile[i] = 0.0f;
        if constexpr (all_one) {
            for (int64_t begin = 0; begin < s.slots; begin += block_slots)
                s.multiply<Arch>(at.rows, at.columns, begin, smaller(block_slots, s.slots - begin), tile, chain_start::zero_then_tile);
            return;
        }
        alignas(64) float left[std::size_t{tile_rows<Arch>}] = {}, right[std::size_t{width}];
        for (int64_t begin = 0; begin < s.slots; begin += block_slots) {
            int64_t const block = (s.depth_begin + begin * depth_of_slot(s.kind)) / scales.length;
            tile_scales own{&left[0], &right[0]};
            if (hand.blocks > 0) {
                own = {&hand.left[block - hand.first][at.row - part.row], &hand.right[block - hand.first][0]};
            } else {
                columns_of(at.item, at.column, at.columns, block, &right[0], width);
                for (int64_t i = 0; i < at.rows; ++i) left[i] = scales.scale_a(at.item, at.row + i, block);
            }
            s.multiply<Arch>(at.rows, at.columns, begin, smaller(block_slots, s.slots - begin), tile, chain_start::zero_then_scaled, own);
        }
    }
};

/// No row of a tile ends early.
inline constexpr int64_t no_diagonal = int64_t{1} << 32;

/// C = alpha * tile, or fma(alpha, tile, beta * D); one rounding into C's format, one NaN.
template <class A, class C>
KEEL_FLATTEN void finish_tile(float const* tile, int64_t rows, int64_t widest, tile_target const& to, float alpha, float beta) {
    using F = pack<A>;
    constexpr int w = A::width, width = tile_columns<A>, vectors = register_tile<A>::vectors;
    F const scale(alpha), keep(beta);
    bool const adds = (bits(beta) & magnitude_mask) != 0, adjacent = to.column_stride == 1 && (!adds || to.d_column_stride == 1);
    auto const each_row = [&](auto const& last_step) {
        for (int64_t i = larger(0, 1 - to.first_row_columns); i < rows; ++i) {
            // Whole registers: what they write right of the diagonal comes before the mirror of the same strip.
            int64_t const columns = smaller(widest, (to.first_row_columns + i + w - 1) & -w);
            C* const row = static_cast<C*>(to.c) + i * to.row_stride;
            C const* const old = static_cast<C const*>(to.d) + i * to.d_row_stride;
            float const* const sums = tile + i * width;
            if (adjacent) {
                F result[std::size_t{vectors}];
                repeat<vectors>([&](auto v) {
                    int64_t const left = columns - v * w;
                    if (left >= w) result[v] = last_step(load<F>(sums + v * w), [&] { return load_decoded<F>(old + v * w); });
                    else if (left > 0) result[v] = last_step(load<F>(sums + v * w), [&] { return load_decoded_partial<F>(old + v * w, left); });
                    else result[v] = F(0.0f);
                });
                store_encoded_row<vectors>(row, result, columns);
            } else {
                for (int64_t j = 0; j < columns; ++j)
                    store_encoded_partial(row + j * to.column_stride,
                                          last_step(F(sums[j]), [&] { return load_decoded_partial<F>(old + j * to.d_column_stride, 1); }), 1);
            }
        }
    };
    if (!adds)
        each_row([&](F const& acc, auto const&) { return mul(scale, acc); });
    else
        each_row([&](F const& acc, auto const& old) { return fma(scale, acc, mul(keep, old())); });
}

/// Stored elements as words, and back.
template <class U, class C> KEEL_FN U load_code(C const* p) {
    if constexpr (std::is_same_v<C, float>)
        return bits(load<pack<typename U::arch>>(p));
    else
        return load_words<U>(&p->bits);
}
template <class U, class C> KEEL_FN void store_code(C* p, U const& code) {
    if constexpr (std::is_same_v<C, float>)
        store(p, as_float(code));
    else
        store_words(&p->bits, code);
}

inline constexpr int64_t mirror_rows = 32;

/// The part of the lower triangle in rows [row, row_end) and columns [column, column_end), copied above the diagonal: W x W blocks
/// through registers, the last rows and strided matrices one by one. row and column are multiples of W.
template <class A, class C>
KEEL_FLATTEN void mirror_block(void* c, int64_t row_stride, int64_t column_stride, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
    using U = bits_of<pack<A>>;
    constexpr int w = A::width;
    C* const data = static_cast<C*>(c);
    for (; row < row_end; row += w) {
        if (column_stride != 1 || row + w > row_end) {
            for (int64_t i = row; i < smaller(row + w, row_end); ++i)
                for (int64_t j = column; j < smaller(column_end, i); ++j)
                    data[j * row_stride + i * column_stride] = data[i * row_stride + j * column_stride];
            continue;
        }
        for (int64_t left = column; left <= smaller(column_end - 1, row); left += w) { // so left + W is no more than row + W
            C const* const from = data + row * row_stride + left;
            C* const to = data + left * row_stride + row;
            U block[std::size_t{w}], old[std::size_t{w}];
            repeat<w>([&](auto i) { old[i] = block[i] = load_code<U>(from + i * row_stride); });
            transpose(block);
            if (left < row) {
                repeat<w>([&](auto i) { store_code(to + i * row_stride, block[i]); });
            } else { // the diagonal: row i keeps what is left of it
                repeat<w>([&](auto i) {
                    auto const above = gt(iota<U>(), U(static_cast<uint32_t>(i())));
                    store_code(to + i * row_stride, select(above, block[i], old[i]));
                });
            }
        }
    }
}

} // namespace keel::inline KEEL_ABI::detail
