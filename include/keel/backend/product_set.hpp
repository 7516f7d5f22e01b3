// What the matrix service of a backend is asked for: one product, a batch of them, or groups of unequal size.
#pragma once

#include <type_traits>

#include <keel/backend/concepts.hpp>
#include <keel/format/bf16.hpp>

namespace keel {

/// full: every element of C is computed. symmetric: C is known to be symmetric; its lower triangle is computed and mirrored.
enum class product_form : uint8_t { full, symmetric };

struct matmul_options {
    float alpha = 1.0f;
    float beta = 0.0f; ///< at 0, what it multiplies is not read
    product_form form = product_form::full;

    /// Whether what beta multiplies is read.
    KEEL_FN bool adds() const { return beta != 0.0f; }
};

/// Which extent differs from product to product, given by offsets: product i has [offsets[i], offsets[i + 1]) of it.
enum class ragged : uint8_t { none, rows, columns, depth };

/// One operand of every product of a set. Strides in elements; `item` leads from one product to the next.
struct operand_layout {
    void const* data = nullptr;
    int64_t element_bytes = 0;
    int64_t item = 0, row = 0, column = 0;

    KEEL_FN void const* at(int64_t i, int64_t r, int64_t c) const {
        if (data == nullptr) return nullptr; // without elements, which an offset would make no less undefined
        return static_cast<std::byte const*>(data) + (i * item + r * row + c * column) * element_bytes;
    }
    KEEL_FN operand_layout transposed() const { return {data, element_bytes, item, column, row}; }
};

/// One product of a set: C[m, n] = alpha * A[m, k] * B[k, n] + beta * D.
struct one_product {
    void const* a;
    void const* b;
    void* c;
    int64_t m, n, k;
    void const* d;
};

/// `count` products that share strides, formats and options. The formats are known to whoever made it.
struct product_set {
    operand_layout a, b, c;
    int64_t count = 1;
    int64_t m = 0, n = 0, k = 0; ///< of every product; the ragged one is the whole extent that the offsets cut
    int64_t const* offsets = nullptr;
    ragged cut = ragged::none;
    matmul_options options = {};
    operand_layout d = {}; ///< in C's format; without data: C itself

    KEEL_FN operand_layout const& added() const { return d.data == nullptr ? c : d; }
    KEEL_FN one_product at(int64_t i) const {
        int64_t const first = cut == ragged::none ? 0 : offsets[i];
        int64_t const size = cut == ragged::none ? 0 : offsets[i + 1] - first;
        int64_t const row = cut == ragged::rows ? first : 0, column = cut == ragged::columns ? first : 0;
        int64_t const depth = cut == ragged::depth ? first : 0;
        return {a.at(i, row, depth),
                b.at(i, depth, column),
                const_cast<void*>(c.at(i, row, column)),
                cut == ragged::rows ? size : m,
                cut == ragged::columns ? size : n,
                cut == ragged::depth ? size : k,
                added().at(i, row, column)};
    }
    /// The same products as C^T = B^T A^T. Each element is the same chain: fma does not mind which factor comes first.
    KEEL_FN product_set transposed() const {
        product_set t = *this;
        t.a = b.transposed(), t.b = a.transposed(), t.c = c.transposed(), t.d = d.transposed();
        t.m = n, t.n = m;
        if (cut == ragged::rows) t.cut = ragged::columns;
        if (cut == ragged::columns) t.cut = ragged::rows;
        return t;
    }
};

template <class T> KEEL_FN operand_layout layout_of(view<T, 2> v) {
    return {v.data, static_cast<int64_t>(sizeof(T)), 0, v.stride[0], v.stride[1]};
}
template <class T> KEEL_FN operand_layout layout_of(view<T, 3> v) {
    return {v.data, static_cast<int64_t>(sizeof(T)), v.stride[0], v.stride[1], v.stride[2]};
}

/// Whether bf16 holds every value of T: bf16 itself and the formats of 8 bits and less.
template <class T> inline constexpr bool exact_in_bf16 = std::is_same_v<T, bf16> || sizeof(T) == 1;
/// Whether k runs through pairs, odd element first: the order of the hardware's bf16 dot.
template <class A, class B> inline constexpr bool takes_pairs = exact_in_bf16<A> && exact_in_bf16<B>;

/// A scale of 1 for every block: promotion then adds up the sums of slices of k.
struct unit_scale {
    KEEL_FN float operator()(int64_t, int64_t, int64_t) const { return 1.0f; }
};

/// Scales of block-scaled operands for a promoted product. Block b is k in [b * length, (b + 1) * length) of the product;
/// scale_a(item, row, b) and scale_b(item, column, b) give floats, called with rows and columns counted inside the product.
template <class ScaleA, class ScaleB> struct promotion {
    int64_t length; ///< 1 or more
    ScaleA scale_a;
    ScaleB scale_b;

    /// Whether pairs can be taken: none of them lies across two blocks.
    KEEL_FN constexpr bool keeps_pairs(int64_t k) const { return length % 2 == 0 || length >= k; }
};

/// The matrix service: specialised beside each backend that offers it, with
///     workspace(be, m, n, k, count)          bytes of scratch, for any formats, strides and offsets; never less for a larger shape
///     promoted_workspace(be, m, n, k, length)  of one promoted product
///     run<A, B, C>(be, set, ws)              arguments are valid and ws is large enough
///     run_promoted<A, B, C>(be, set, promotion, ws)
template <class B> struct matmul_service { static constexpr bool offered = false; };

template <class B> concept matmul_backend = row_backend<B> && matmul_service<std::remove_cvref_t<B>>::offered;

} // namespace keel
