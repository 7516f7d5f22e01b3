// Small products of pairs of bf16, or of floats whose B lies in columns; A is read where it lies. A strip of B at a time is packed on the
// stack and meets all rows while it is there, and the sums go straight into C. It takes 0.4 (at 16) to 0.9 (at 128) of the time of pieces
// that share a workspace (matmul.hpp), which plan, pack and finish in walks of their own.
#pragma once

#include <keel/backend/cpu/direct_products.hpp>
#include <keel/backend/cpu/product_tiles.hpp>

namespace keel::inline KEEL_ABI::detail {

/// The longest strip of B on the stack: 16 KB of the nearest cache, at 32 columns.
inline constexpr int64_t most_direct_slots = 128;
/// Slots of an A that stays beside it while strips of B pass.
inline constexpr int64_t largest_direct_a = int64_t{1} << 13;
inline constexpr int64_t enough_items = 8; // to go round

template <class Arch, class A, class B, class C> class direct_strips {
  public:
    static constexpr bool pairs = takes_pairs<A, B>;
    /// Whether there is such a path for these formats.
    static constexpr bool offered = pairs ? has_pair_dot<Arch> && std::is_same_v<A, bf16> : std::is_same_v<A, float> && std::is_same_v<B, float>;

    /// Strides and shapes decide, but no bit depends on it.
    KEEL_FN static bool takes(product_set const& set) {
        bool const ragged_rows = set.cut == ragged::rows;
        int64_t const slots = set.k / depth_of_slot(kind);
        if (set.options.form != product_form::full || (set.cut != ragged::none && !ragged_rows) || set.c.column != 1) return false;
        if (pairs ? set.a.column != 1 || set.k % 2 != 0 : set.b.row != 1) return false;
        return slots > 0 && slots <= most_direct_slots && set.m * slots <= largest_direct_a * (ragged_rows ? set.count : 1);
    }

    /// A is looked through once a part, so its columns are cut only where one thread would have them all.
    KEEL_FN direct_strips(product_set const& products, bool alone)
        : set_(products), slots_(products.k / depth_of_slot(kind)),
          parts_(products, smaller(products.m, largest_direct_a / slots_), alone || products.count >= enough_items, tile_rows<Arch>, tile_columns<Arch>) {}
    KEEL_FN int64_t chunks() const { return parts_.chunks(); }

    static void chunk(void const* context, int64_t index) {
        auto const& self = *static_cast<direct_strips const*>(context);
        self.parts_.each(index, [&](one_product const& p, int64_t row, int64_t row_end, int64_t column, int64_t column_end) {
            self.multiply(p, row, row_end - row, column, column_end);
        });
    }

  private:
    static constexpr slot_kind kind = pairs ? slot_kind::pair_words : slot_kind::singles;
    static constexpr int width = tile_columns<Arch>;

    KEEL_FN static exponent_range pack(operand_block const& from, float* strip) {
        if constexpr (pairs) return pack_pair_strip<Arch, B, width>(from, strip);
        else return pack_strip<Arch, B, false, width>(from, strip);
    }
    KEEL_FN static exponent_range watch(operand_block const& from) {
        if constexpr (pairs) return watch_pairs<Arch, A>(from);
        else return {};
    }

    void multiply(one_product const& p, int64_t row, int64_t row_count, int64_t column, int64_t column_end) const {
        alignas(64) float strip[std::size_t{most_direct_slots * width}];
        operand_layout const &a = set_.a, &b = set_.b, &c = set_.c, &d = set_.added();
        A const* const left = static_cast<A const*>(p.a) + row * a.row;
        exponent_range const range_of_a = watch({left, a.row, a.column, row_count, row_count, p.k});
        constexpr auto bytes = static_cast<int64_t>(sizeof(A));
        strip_pair s{nullptr, &strip[0], 0, slots_, kind, {}, {reinterpret_cast<std::byte const*>(left), a.row * bytes, depth_of_slot(kind) * a.column * bytes}};
        for (; column < column_end; column += width) {
            int64_t const columns = smaller(column_end - column, width);
            exponent_range const range = pack({static_cast<B const*>(p.b) + column * b.column, b.column, b.row, columns, p.n - column, p.k}, &strip[0]);
            tile_target const to{static_cast<C*>(p.c) + row * c.row + column, c.row, 1, static_cast<C const*>(p.d) + row * d.row + column * d.column,
                                 d.row, d.column, no_diagonal, c.element_bytes};
            if constexpr (!pairs) multiply_strip<fma_step<Arch>>(s, to, row_count, columns);
            else if (moderate(range_of_a, range)) multiply_strip<pair_dot_step<Arch>>(s, to, row_count, columns);
            else multiply_by_tiles<two_fma_step<Arch>>(s, to, row_count, columns);
        }
    }
    template <class Step> KEEL_FN void multiply_strip(strip_pair& s, tile_target const& to, int64_t row_count, int64_t columns) const {
        if (set_.options.adds()) return multiply_by_tiles<Step>(s, to, row_count, columns);
        alignas(64) float tile[std::size_t{tile_size<Arch>}];
        s.kernels = kernels_of<Arch, Step>;
        multiply_into_c<Arch>(s, straight_kernels_of<Arch, Step, C>, &finish_tile<Arch, C>, to, row_count, columns, set_.options.alpha, &tile[0], true);
    }
    template <class Step> void multiply_by_tiles(strip_pair s, tile_target const& to, int64_t row_count, int64_t columns) const {
        alignas(64) float tile[std::size_t{tile_size<Arch>}];
        s.kernels = kernels_of<Arch, Step>;
        for (int64_t row = 0; row < row_count; row += tile_rows<Arch>) {
            int64_t const now = smaller(row_count - row, tile_rows<Arch>);
            s.multiply<Arch>(now, columns, 0, slots_, &tile[0], chain_start::zero);
            finish_tile<Arch, C>(&tile[0], now, columns, to.from_row(row), set_.options.alpha, set_.options.beta);
            s.lying.data += tile_rows<Arch> * s.lying.row;
        }
    }

    product_set const& set_;
    int64_t slots_;
    product_parts parts_;
};

} // namespace keel::inline KEEL_ABI::detail
