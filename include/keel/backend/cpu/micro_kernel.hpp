// The innermost product: a tile of C stays in registers while k runs through one packed strip of A and one of B.
#pragma once

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

/// Where a tile's chain begins: from +0, from what stands in the tile, or from +0 with what stands in the tile added at last.
enum class chain_start : uint8_t { zero, tile, zero_then_tile };

/// tile[i][j] = the chain over slots ascending of Step::add(a[slot][i], b[slot][j], sum).
/// a: `depth` slots of tile_rows words, of which Rows are used. b: `depth` slots of tile_columns words. tile: rows of tile_columns floats.
template <class A, class Step, int Rows, int Vectors>
KEEL_FLATTEN void micro_kernel(int64_t depth, float const* a, float const* b, float* tile, chain_start start) {
    using F = pack<A>;
    constexpr int w = A::width, columns = tile_columns<A>;
    F c[std::size_t{Rows}][std::size_t{Vectors}];
    repeat<Rows>([&](auto i) {
        repeat<Vectors>([&](auto v) { c[i][v] = start == chain_start::tile ? load<F>(tile + i * columns + v * w) : F(0.0f); });
    });
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
    if (start == chain_start::zero_then_tile)
        repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { c[i][v] = add(c[i][v], load<F>(tile + i * columns + v * w)); }); });
    repeat<Rows>([&](auto i) { repeat<Vectors>([&](auto v) { store(tile + i * columns + v * w, c[i][v]); }); });
}

using micro_kernel_function = void (*)(int64_t, float const*, float const*, float*, chain_start);
using find_kernel_function = micro_kernel_function (*)(int rows, int64_t columns);

/// The kernel for `rows` = kernel_rows(count) and as many packs as `columns` need.
template <class A, class Step> micro_kernel_function find_micro_kernel(int rows, int64_t columns) {
    constexpr int full = tile_rows<A>, wide = register_tile<A>::vectors;
    bool const narrow = columns <= A::width;
    auto const choose = [&]<int Rows>(std::integral_constant<int, Rows>) {
        return narrow ? &micro_kernel<A, Step, Rows, 1> : &micro_kernel<A, Step, Rows, wide>;
    };
    if (rows == full) return choose(std::integral_constant<int, full>{});
    if constexpr (full > 8)
        if (rows == 8) return choose(std::integral_constant<int, 8>{});
    if constexpr (full > 4)
        if (rows == 4) return choose(std::integral_constant<int, 4>{});
    if (rows == 2) return choose(std::integral_constant<int, 2>{});
    return choose(std::integral_constant<int, 1>{});
}

} // namespace keel::inline KEEL_ABI::detail
