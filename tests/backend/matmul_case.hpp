// Matrices of every layout for the tests of products, and the chain over k in the tests' own words.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include <keel/core/detail/exact_fma.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <support/data.hpp>

namespace keel_test {

struct shape {
    int64_t m, n, k;
};

// Empty, single, primes, tile edges of every architecture (12x32, 6x16, 6x8, 8x8, 4x2) with one more and one less, several
// depth-blocks, several row- and column-blocks.
inline constexpr shape edge_shapes[] = {{0, 5, 3},    {5, 0, 3},    {3, 4, 0},     {1, 1, 1},     {1, 17, 5},
                                 {17, 1, 5},   {2, 3, 1},    {7, 11, 13},   {12, 32, 8},   {13, 33, 2},
                                 {11, 31, 9},  {6, 16, 17},  {24, 64, 127}, {25, 65, 129}, {97, 41, 31},
                                 {8, 300, 16}, {200, 9, 40}, {31, 37, 513}, {14, 45, 1100}};

enum class layout { plain, turned, spread };
inline constexpr layout layouts[] = {layout::plain, layout::turned, layout::spread};

/// A matrix whose view is row-major, column-major, or with gaps in both dimensions.
template <class T> class laid_out {
public:
    laid_out(int64_t rows, int64_t columns, layout how, std::vector<float> const& values)
        : rows_(rows), columns_(columns), how_(how),
          memory_(how == layout::plain    ? guarded_matrix<T>(rows, columns, 3)
                  : how == layout::turned ? guarded_matrix<T>(columns, rows, 5)
                                          : guarded_matrix<T>(rows, 2 * columns, 1)) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                view()(i, j) = to_format<T>(values[static_cast<std::size_t>(i * columns + j)]);
    }
    keel::view<T, 2> view() {
        keel::view<T, 2> const v = memory_.view();
        if (how_ == layout::turned) return transposed(v);
        if (how_ == layout::spread) return {v.data, {rows_, columns_}, {v.stride[0], 2}};
        return v;
    }
    bool untouched() const { return memory_.untouched(); }

private:
    int64_t rows_, columns_;
    layout how_;
    guarded_matrix<T> memory_;
};

template <class T> int64_t differences(keel::view<T, 2> got, keel::view<T, 2> want) {
    int64_t count = 0;
    for (int64_t i = 0; i < want.extent[0]; ++i)
        for (int64_t j = 0; j < want.extent[1]; ++j) count += std::memcmp(got.at(i, j), want.at(i, j), sizeof(T)) != 0;
    return count;
}

/// The chain in the test's own words, with the emulated fma: nothing of the library's kernels or reference.
inline float chain_of(std::vector<std::pair<float, float>> factors, bool pairs) {
    if (pairs) {
        if (factors.size() % 2 != 0) factors.emplace_back(0.0f, 0.0f);
        for (std::size_t p = 0; p < factors.size(); p += 2) std::swap(factors[p], factors[p + 1]);
    }
    float acc = 0.0f;
    for (auto const& [x, y] : factors) acc = keel::detail::exact_fma(x, y, acc);
    return acc;
}
/// bf16 holds every value of T.
template <class T> inline constexpr bool by_pairs = std::is_same_v<T, keel::bf16> || sizeof(T) == 1;
template <class A, class B> float chain_of(guarded_matrix<A> const& a, guarded_matrix<B> const& b, int64_t i, int64_t j,
                                           int64_t first, int64_t last, bool pairs = true) {
    std::vector<std::pair<float, float>> factors;
    for (int64_t p = first; p < last; ++p)
        factors.emplace_back(static_cast<float>(a.at(i, p)), static_cast<float>(b.at(p, j)));
    return chain_of(factors, pairs && by_pairs<A> && by_pairs<B>);
}

} // namespace keel_test
