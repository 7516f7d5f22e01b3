// The innermost product: a tile of C stays in registers while k runs through a strip of A and one of B, packed or where they lie.
#pragma once

#include <keel/backend/cpu/encoded_store.hpp>
#include <keel/backend/cpu/pack.hpp>
#include <keel/backend/cpu/pair_dot.hpp>

namespace keel::inline KEEL_ABI::detail {

/// The register tile of an architecture: `rows` by `vectors` packs. Accumulators, the packs of B and one broadcast of A fill
/// the registers: 24 + 2 + 1 of 32 for AVX-512, 12 + 2 + 1 of 16 for AVX2 and SSE, 16 + 2 + 1 of 32 for NEON.
template <class A> struct register_tile { static constexpr int rows = 6, vectors = 2; };
template <> struct register_tile<arch::avx512> { static constexpr int rows = 12, vectors = 2; };
template <> struct register_tile<arch::avx512bf16> : register_tile<arch::avx512> {};
template <> struct register_tile<arch::neon> { static constexpr int rows = 8, vectors = 2; };
template <> struct register_tile<arch::scalar> { static constexpr int rows = 4, vectors = 2; };

template <class A> inline constexpr int tile_rows = register_tile<A>::rows;
template <class A> inline constexpr int tile_columns = register_tile<A>::vectors* A::width;
template <class A> inline constexpr int tile_size = tile_rows<A>* tile_columns<A>;

/// The last tile of a column of tiles has fewer rows; kernels exist for 1, 2, 4, 8 rows and the full tile.
template <class A> KEEL_FN constexpr int kernel_rows(int64_t count) {
    int rows = 1;
    while (rows < count && rows < tile_rows<A>) rows *= 2;
    return rows < tile_rows<A> ? rows : tile_rows<A>;
}

/// A slot holds one k: a float a line.
template <class A> struct fma_step {
    KEEL_FN static pack<A> add(pack<A> const& left, pack<A> const& right, pack<A> const& sum) { return fma(left, right, sum); }
};

/// Where a chain that ends in a tile begins: from +0; from what stands in the tile; from +0 with what stands in the tile added at last; or from +0, and
/// then tile = fma(chain, scale of its row * scale of its column, tile).
enum class chain_start : uint8_t { zero, tile, zero_then_tile, zero_then_scaled };
/// The scales of a tile's rows and columns.
struct tile_scales {
    float const *rows = nullptr, *columns = nullptr;
    KEEL_FN tile_scales from_row(int64_t i) const { return rows == nullptr ? tile_scales{} : tile_scales{rows + i, columns}; }
};
/// Where a chain begins and ends: in a tile, rows of tile_columns floats.
struct tile_end {
    float* tile;
    chain_start start;
    tile_scales scales;

    template <class A, class F> KEEL_FN F begin(int i, int v) const {
        return start == chain_start::tile ? load<F>(tile + i * tile_columns<A> + v * A::width) : F(0.0f);
    }
    template <class A, int Rows, int Vectors, class F> KEEL_FN void end(F (&c)[std::size_t{Rows}][std::size_t{Vectors}]) const {
        constexpr int w = A::width, columns = tile_columns<A>;
        auto const each = [&](auto const& last) {
            repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { store(tile + i * columns + v * w, last(i, v)); }); });
        };
        auto const old = [&](auto i, auto v) { return load<F>(tile + i * columns + v * w); };
        if (start == chain_start::zero_then_tile) return each([&](auto i, auto v) { return add(c[i][v], old(i, v)); });
        if (start == chain_start::zero_then_scaled)
            return each([&](auto i, auto v) { return fma(c[i][v], mul(F(scales.rows[i]), load<F>(scales.columns + v * w)), old(i, v)); });
        each([&](auto i, auto v) { return c[i][v]; });
    }
};
/// Straight into C as alpha * sum: into `columns` adjacent elements of each row, `row` elements from one to the next; from `before`, rows of a
/// tile, or where there is none from +0.
struct straight_target {
    void* c;
    int64_t row, columns;
    float alpha;
    float const* before;
};
template <class C> struct straight_end : straight_target {
    template <class A, class F> KEEL_FN F begin(int i, int v) const {
        return before != nullptr ? load<F>(before + i * tile_columns<A> + v * A::width) : F(0.0f);
    }
    template <class A, int Rows, int Vectors, class F> KEEL_FN void end(F (&sums)[std::size_t{Rows}][std::size_t{Vectors}]) const {
        if (alpha != 1.0f) repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { sums[i][v] = mul(F(alpha), sums[i][v]); }); });
        repeat<Rows>([&](auto i) { store_encoded_row<Vectors>(static_cast<C*>(c) + i * row, sums[i], columns); });
    }
};

/// The chain over slots ascending of Step::add(a[slot][i], b[slot][j], sum).
/// a: `depth` slots of tile_rows words, of which Rows are used. b: `depth` slots of tile_columns words.
template <class A, class Step, int Rows, int Vectors, class End, class Target>
KEEL_FLATTEN void micro_kernel(int64_t depth, float const* a, float const* b, Target const& target) {
    End const to{target};
    using F = pack<A>;
    constexpr int w = A::width, columns = tile_columns<A>;
    F c[std::size_t{Rows}][std::size_t{Vectors}];
    repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { c[i][v] = to.template begin<A, F>(i, v); }); });
    for (int64_t k = 0; k < depth; ++k) {
        F right[std::size_t{Vectors}];
        repeat<Vectors>([&](auto v) { right[v] = load<F>(b + v * w); });
        repeat<Rows>([&](auto i) {
            F const left(a[i]);
            repeat<Vectors>([&](auto v) { c[i][v] = Step::add(left, right[v], c[i][v]); });
        });
        a += tile_rows<A>;
        b += columns;
    }
    to.template end<A, Rows, Vectors>(c);
}

KEEL_FN float word_at(std::byte const* p) { // pairs of bf16 need not be aligned
    float word;
    __builtin_memcpy(&word, p, sizeof word);
    return word;
}
/// The same chain with a's words where they lie, floats or pairs of bf16: a_row bytes from a row to the next, a_step from a slot to the next.
/// b_step words from a slot of b to the next.
template <class A, class Step, int Rows, int Vectors, class End, class Target>
KEEL_FLATTEN void loose_kernel(int64_t depth, std::byte const* a, int64_t a_row, int64_t a_step, float const* b, int64_t b_step, Target const& target) {
    using F = pack<A>;
    End const to{target};
    constexpr int w = A::width, together = 3; // rows that one pointer and the stride's multiples reach
    constexpr int pointers = (Rows + together - 1) / together;
    F c[std::size_t{Rows}][std::size_t{Vectors}];
    std::byte const* left[std::size_t{pointers}];
    repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { c[i][v] = to.template begin<A, F>(i, v); }); });
    repeat<pointers>([&](auto p) { left[p] = a + together * p * a_row; });
    for (int64_t k = 0; k < depth; ++k) {
        F right[std::size_t{Vectors}];
        repeat<Vectors>([&](auto v) { right[v] = load<F>(b + v * w); });
        repeat<Rows>([&](auto i) {
            F const factor(word_at(left[i / together] + i % together * a_row));
            repeat<Vectors>([&](auto v) { c[i][v] = Step::add(factor, right[v], c[i][v]); });
        });
        repeat<pointers>([&](auto p) { left[p] += a_step; });
        b += b_step;
    }
    to.template end<A, Rows, Vectors>(c);
}

template <class Target> using micro_kernel_function = void (*)(int64_t, float const*, float const*, Target const&);
template <class Target> using loose_kernel_function = void (*)(int64_t, std::byte const*, int64_t, int64_t, float const*, int64_t, Target const&);
/// The kernels of one Step for one kind of target, by their rows and as many packs as the columns need; null where there is none.
template <class Target> struct kernel_set {
    micro_kernel_function<Target> (*packed)(int rows, int64_t columns);
    loose_kernel_function<Target> (*loose)(int rows, int64_t columns);
};
using tile_kernels = kernel_set<tile_end>;
using straight_kernels = kernel_set<straight_target>;

/// choose(Rows, Vectors) of what there are kernels for.
template <class A, class Choose> KEEL_FN auto find_kernel_of(int rows, int64_t columns, Choose const& choose) {
    constexpr int full = tile_rows<A>, wide = register_tile<A>::vectors;
    auto const of_rows = [&]<int Rows>(std::integral_constant<int, Rows> r) {
        return columns <= A::width ? choose(r, std::integral_constant<int, 1>{}) : choose(r, std::integral_constant<int, wide>{});
    };
    if (rows == full) return of_rows(std::integral_constant<int, full>{});
    if constexpr (full > 8)
        if (rows == 8) return of_rows(std::integral_constant<int, 8>{});
    if constexpr (full > 4)
        if (rows == 4) return of_rows(std::integral_constant<int, 4>{});
    if (rows == 2) return of_rows(std::integral_constant<int, 2>{});
    return of_rows(std::integral_constant<int, 1>{});
}
/// For `rows` = kernel_rows(count), or loose_rows(count).
template <class A, class Step> micro_kernel_function<tile_end> find_micro_kernel(int rows, int64_t columns) {
    return find_kernel_of<A>(rows, columns, []<int R, int V>(std::integral_constant<int, R>, std::integral_constant<int, V>) {
        return &micro_kernel<A, Step, R, V, tile_end, tile_end>;
    });
}
template <class A, class Step> loose_kernel_function<tile_end> find_loose_kernel(int rows, int64_t columns) {
    return find_kernel_of<A>(rows, columns, []<int R, int V>(std::integral_constant<int, R>, std::integral_constant<int, V>) {
        return &loose_kernel<A, Step, R, V, tile_end, tile_end>;
    });
}
template <class A, class Step> inline constexpr tile_kernels kernels_of{&find_micro_kernel<A, Step>, &find_loose_kernel<A, Step>};

/// Straight kernels are those of whole tiles, and loose ones of 8 rows: few rows gain little.
template <class A, class Step, class C> micro_kernel_function<straight_target> find_straight_micro_kernel(int rows, int64_t columns) {
    constexpr int full = tile_rows<A>, wide = register_tile<A>::vectors;
    return rows == full && columns > A::width ? &micro_kernel<A, Step, full, wide, straight_end<C>, straight_target> : nullptr;
}
template <class A, class Step, class C> loose_kernel_function<straight_target> find_straight_loose_kernel(int rows, int64_t columns) {
    constexpr int full = tile_rows<A>, wide = register_tile<A>::vectors, part = full > 8 ? 8 : full;
    bool const narrow = columns <= A::width;
    if (rows == full) return narrow ? &loose_kernel<A, Step, full, 1, straight_end<C>, straight_target> : &loose_kernel<A, Step, full, wide, straight_end<C>, straight_target>;
    if (rows == part) return narrow ? &loose_kernel<A, Step, part, 1, straight_end<C>, straight_target> : &loose_kernel<A, Step, part, wide, straight_end<C>, straight_target>;
    return nullptr;
}
template <class A, class Step, class C> inline constexpr straight_kernels straight_kernels_of{&find_straight_micro_kernel<A, Step, C>,
                                                                                              &find_straight_loose_kernel<A, Step, C>};

/// Rows of the next loose kernel where `left` are left: none past the end is read. Two of 8 rather than one of 12 and one of 4, whose sums
/// would wait for each other.
template <class A> KEEL_FN constexpr int loose_rows(int64_t left) {
    if (left >= tile_rows<A> && !(tile_rows<A> == 12 && left == 16)) return tile_rows<A>;
    int64_t rows = 1;
    while (2 * rows <= left && 2 * rows < tile_rows<A>) rows *= 2;
    return static_cast<int>(rows);
}

} // namespace keel::inline KEEL_ABI::detail
