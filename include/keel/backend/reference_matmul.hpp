// The matrix service of the reference backend and of simt: the order of a matrix product, in the plainest words.
//
//     acc = +0
//     for k ascending:  acc = fma(a[k], b[k], acc)
//     c = beta == 0 ? alpha * acc : fma(alpha, acc, beta * d)
//
// With both operands of formats that bf16 holds, k goes by pairs: first the odd element, then the even one; an odd k ends with a pair
// whose odd element is 0 * 0. Hardware bf16 dots take this order too. A NaN is stored as the one NaN.
#pragma once

#include <keel/backend/product_set.hpp>
#include <keel/backend/reference.hpp>
#include <keel/backend/simt.hpp>
#include <keel/core/workspace.hpp>

namespace keel::inline KEEL_ABI::detail {

/// Rows i of A and columns j of B of one product, element by element.
template <class A, class B> struct chain_operands {
    product_set const& set;
    one_product const& p;

    static constexpr bool exact_pairs = takes_pairs<A, B>;

    KEEL_FN float a(int64_t i, int64_t k) const {
        return load_element(static_cast<A const*>(p.a) + i * set.a.row + k * set.a.column);
    }
    KEEL_FN float b(int64_t k, int64_t j) const {
        return load_element(static_cast<B const*>(p.b) + k * set.b.row + j * set.b.column);
    }

    /// The chain over k in [first, last), from +0. Pairs start at `first`.
    KEEL_FN float chain(int64_t i, int64_t j, int64_t first, int64_t last, bool pairs) const {
        float acc = 0.0f;
        if (pairs) {
            for (int64_t k = first; k < last; k += 2) {
                bool const whole = k + 1 < last;
                acc = fma(whole ? a(i, k + 1) : 0.0f, whole ? b(k + 1, j) : 0.0f, acc);
                acc = fma(a(i, k), b(k, j), acc);
            }
        } else {
            for (int64_t k = first; k < last; ++k) acc = fma(a(i, k), b(k, j), acc);
        }
        return acc;
    }
};

/// c[i][j] from chain(item, operands, i, j) of every product.
template <class A, class B, class C, class Chain> void run_chains(product_set const& set, Chain const& chain) {
    for (int64_t item = 0; item < set.count; ++item) {
        one_product const p = set.at(item);
        chain_operands<A, B> const operands{set, p};
        auto const c = [&](int64_t i, int64_t j) { return static_cast<C*>(p.c) + i * set.c.row + j * set.c.column; };
        auto const d = [&](int64_t i, int64_t j) { return static_cast<C const*>(p.d) + i * set.added().row + j * set.added().column; };
        bool const symmetric = set.options.form == product_form::symmetric;
        for (int64_t i = 0; i < p.m; ++i)
            for (int64_t j = 0; j < (symmetric ? i + 1 : p.n); ++j) {
                float const acc = chain(item, operands, i, j);
                float const alpha = set.options.alpha, beta = set.options.beta;
                bool const reads = (bits(beta) & magnitude_mask) != 0;
                store_element(c(i, j), reads ? fma(alpha, acc, mul(beta, load_element(d(i, j)))) : mul(alpha, acc));
                if (symmetric) *c(j, i) = *c(i, j);
            }
    }
}

struct plain_chain {
    template <class Operands> KEEL_FN float operator()(int64_t, Operands const& x, int64_t i, int64_t j) const {
        return x.chain(i, j, 0, x.p.k, Operands::exact_pairs);
    }
};

/// Each block's sum from zero, then total = fma(block, scale_a * scale_b, total).
template <class Promotion> struct promoted_chain {
    Promotion const& scales;
    template <class Operands> KEEL_FN float operator()(int64_t item, Operands const& x, int64_t i, int64_t j) const {
        bool const pairs = Operands::exact_pairs && scales.keeps_pairs(x.p.k);
        float total = 0.0f;
        for (int64_t first = 0, block = 0; first < x.p.k; first += scales.length, ++block) {
            int64_t const last = first + scales.length < x.p.k ? first + scales.length : x.p.k;
            float const scale = mul(scales.scale_a(item, i, block), scales.scale_b(item, j, block));
            total = fma(x.chain(i, j, first, last, pairs), scale, total);
        }
        return total;
    }
};

struct scalar_matmul_service {
    static constexpr bool offered = true;
    template <class Backend> KEEL_FN static int64_t workspace(Backend const&, int64_t, int64_t, int64_t, int64_t) {
        return 0;
    }
    template <class Backend> KEEL_FN static int64_t promoted_workspace(Backend const&, int64_t, int64_t, int64_t, int64_t) {
        return 0;
    }
    template <class A, class B, class C, class Backend>
    static void run(Backend const&, product_set const& set, keel::workspace) {
        run_chains<A, B, C>(set, plain_chain{});
    }
    template <class A, class B, class C, class Backend, class Promotion>
    static void run_promoted(Backend const&, product_set const& set, Promotion const& scales, keel::workspace) {
        run_chains<A, B, C>(set, promoted_chain<Promotion>{scales});
    }
};

} // namespace keel::inline KEEL_ABI::detail

namespace keel {

template <> struct matmul_service<reference> : detail::scalar_matmul_service {};
template <int W> struct matmul_service<simt<W>> : detail::scalar_matmul_service {};

} // namespace keel
