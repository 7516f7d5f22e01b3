// Matrix products, for every backend that offers the service (backend/product_set.hpp).
//
// The order is part of the contract, so that the bits do not depend on instruction set, threads, blocking or batching:
//
//     acc = +0;  k ascending:  acc = fma(a[i,k], b[k,j], acc)      one chain an element, fp32, never split
//     c[i,j] = beta == 0 ? alpha * acc : fma(alpha, acc, beta * d[i,j])         d is c unless it is given
//
// Where A and B are both of formats that bf16 holds (bf16 itself, FP8), k goes by pairs, the odd element first (1, 0, 3, 2, ...), as
// hardware bf16 dots do; an odd k ends with a pair whose odd element is zero. The hardware's dot is used where it gives these bits, which
// packing finds out (backend/cpu/pair_dot.hpp). The plain words of all this are backend/reference_matmul.hpp.
#pragma once

#include <keel/backend/product_set.hpp>
#include <keel/core/validate.hpp>
#include <keel/format/float32.hpp>

namespace keel::inline KEEL_ABI {

namespace detail {

// The checks are compiled once for a set of formats, not once a backend.

template <class A, class B, class C>
validation check_product(view<A, 2> a, view<B, 2> b, view<C, 2> c, matmul_options options) {
    validation check("matmul");
    check.present("a", a).extent("b", b, 0, a.extent[1]).shape("c", c, a.extent[0], b.extent[1]);
    if (options.form == product_form::symmetric) check.extent("c", c, 1, a.extent[0]);
    return check.distinct("c", c).disjoint("c", c, a).disjoint("c", c, b);
}
template <class A, class B, class C>
validation check_product(view<A, 3> a, view<B, 3> b, view<C, 3> c, matmul_options options) {
    validation check("matmul");
    check.present("a", a).extent("b", b, 0, a.extent[0]).extent("b", b, 1, a.extent[2]);
    check.shape("c", c, a.extent[0], a.extent[1], b.extent[2]);
    if (options.form == product_form::symmetric) check.extent("c", c, 2, a.extent[1]);
    return check.distinct("c", c).disjoint("c", c, a).disjoint("c", c, b);
}
/// offsets[0 .. groups]: not decreasing, inside [0, extent].
inline void check_offsets(validation& check, view<int64_t const, 1> offsets, int64_t groups, int64_t extent,
                          matmul_options options) {
    check.require(options.form == product_form::full, status_code::bad_option, "options.form",
                  "full: groups have no symmetry");
    check.extent("offsets", offsets, 0, groups + 1).unit_stride("offsets", offsets);
    for (int64_t g = 0; g <= groups && check.ok(); ++g) {
        int64_t const least = g == 0 ? 0 : offsets.data[g - 1];
        check.require(offsets.data[g] >= least && offsets.data[g] <= extent, status_code::bad_option, "offsets",
                      "an entry", offsets.data[g],
                      "entries that do not decrease, from 0 or more to at most the rows they cut");
    }
}
template <class A, class B, class C> validation
check_row_groups(view<A, 2> a, view<B, 3> b, view<C, 2> c, view<int64_t const, 1> offsets, matmul_options options) {
    validation check("grouped_matmul");
    check.present("a", a).extent("b", b, 1, a.extent[1]).shape("c", c, a.extent[0], b.extent[2]);
    check_offsets(check, offsets, b.extent[0], a.extent[0], options);
    return check.distinct("c", c).disjoint("c", c, a).disjoint("c", c, b);
}
template <class A, class B, class C> validation
check_depth_groups(view<A, 2> a, view<B, 2> b, view<C, 3> c, view<int64_t const, 1> offsets, matmul_options options) {
    validation check("grouped_matmul");
    check.present("a", a).extent("b", b, 0, a.extent[1]).shape("c", c, c.extent[0], a.extent[0], b.extent[1]);
    check_offsets(check, offsets, c.extent[0], a.extent[1], options);
    return check.distinct("c", c).disjoint("c", c, a).disjoint("c", c, b);
}

template <class A, class B, class C, class Backend>
status run_products(Backend const& be, validation check, product_set const& set, workspace ws) {
    using a_format = std::remove_const_t<A>;
    using b_format = std::remove_const_t<B>;
    static_assert(scalar_format<a_format> && scalar_format<b_format> && scalar_format<C>,
                  "keel: operands are of a scalar format");
    static_assert(sizeof(C) > 1, "keel: C is float, bf16 or f16; FP8 results are made by a quantiser");
    if (check.ok()) check.enough(ws, matmul_service<Backend>::workspace(be, set.m, set.n, set.k, set.count));
    if (!check.ok() || set.count == 0 || set.m == 0 || set.n == 0) return check.result;
    matmul_service<Backend>::template run<a_format, b_format, C>(be, set, ws);
    return check.result;
}

} // namespace detail

/// Bytes of scratch for matmul of at most [m, k] by [k, n] (`batch` of them), whatever their formats, strides and form: what a
/// product needs is enough for every smaller one.
template <matmul_backend B> int64_t matmul_workspace(B const& be, int64_t m, int64_t n, int64_t k, int64_t batch = 1) {
    return matmul_service<B>::workspace(be, m, n, k, batch);
}

/// C = alpha * A * B + beta * C.
///
/// Formula        the chain at the head of this file; fp32 accumulator. symmetric: elements with j <= i are computed and copied to
///                (j, i), about half the work; for A * A^T, A^T * A, or polynomials of one symmetric matrix.
/// Shapes         a [m, k], b [k, n], c [m, n]. Any strides; a unit stride in either dimension is fast, so A^T is transposed(a).
/// Formats        A, B: float, bf16, f16, e4m3, e5m2 (codes as raw values), also mixed; C: float, bf16, f16. Operands are decoded
///                exactly; one rounding into C, nearest even, overflow to Inf.
/// Status         bad_shape, bad_stride (elements of c coincide), bad_pointer, overlap, small_workspace.
/// Non-finite     propagate as fma says; a NaN result is stored as the one NaN. Subnormals are kept. k = 0: acc = +0. m or n = 0:
///                nothing to do.
/// Aliasing       c shares no memory with a or b.
/// Workspace      matmul_workspace(be, m, n, k); sizes only, never threads.
/// Cost           2 m n k flops (half of it symmetric); each operand is read once for every 2112 rows or columns of C.
/// Source         blocking after Goto and van de Geijn 2008; the order contract is keel's own.
/// Example        matmul(be, x, transposed(w), y, {}, ws).or_throw();    // y = x w^T
template <matmul_backend Backend, class A, class B, class C> status
matmul(Backend const& be, view<A, 2> a, view<B, 2> b, view<C, 2> c, matmul_options options = {}, workspace ws = {}) {
    product_set const set{layout_of(a), layout_of(b), layout_of(c), 1,      a.extent[0], b.extent[1],
                          a.extent[1],  nullptr,      ragged::none, options};
    return detail::run_products<A, B, C>(be, detail::check_product(a, b, c, options), set, ws);
}

/// C = alpha * A * B + beta * D, so that nothing is copied first. Shapes d [m, n], any strides, in C's format; a, b and d may share memory,
/// c shares none with them unless d is c. Symmetric: d is symmetric too. The rest as above.
template <matmul_backend Backend, class A, class B, class D, class C>
    requires std::is_same_v<std::remove_const_t<D>, C>
status matmul(Backend const& be, view<A, 2> a, view<B, 2> b, view<D, 2> d, view<C, 2> c, matmul_options options = {}, workspace ws = {}) {
    validation check = detail::check_product(a, b, c, options);
    check.shape("d", d, c.extent[0], c.extent[1]).disjoint_or_same("c", c, d);
    product_set const set{layout_of(a), layout_of(b),  layout_of(c),       1, a.extent[0], b.extent[1], a.extent[1], nullptr,
                          ragged::none, options, layout_of(d)};
    return detail::run_products<A, B, C>(be, check, set, ws);
}

/// A batch: c[i] = alpha * a[i] * b[i] + beta * c[i]. Shapes a [batch, m, k], b [batch, k, n], c [batch, m, n]; a or b may be shared
/// by all items (stride 0). Small products are packed together, so they cost no more a flop than large ones. The rest as above,
/// with matmul_workspace(be, m, n, k, batch).
template <matmul_backend Backend, class A, class B, class C> status
matmul(Backend const& be, view<A, 3> a, view<B, 3> b, view<C, 3> c, matmul_options options = {}, workspace ws = {}) {
    product_set const set{layout_of(a), layout_of(b), layout_of(c), a.extent[0],  a.extent[1],
                          b.extent[2],  a.extent[2],  nullptr,      ragged::none, options};
    return detail::run_products<A, B, C>(be, detail::check_product(a, b, c, options), set, ws);
}

/// Groups of rows, each with a matrix of its own (the experts of a layer): for rows i of [offsets[g], offsets[g+1]),
/// c[i] = alpha * a[i] * b[g] + beta * c[i].
///
/// Shapes         a [rows, k], b [groups, k, n], c [rows, n]; offsets [groups + 1] in host memory, not decreasing, within [0, rows].
///                Groups may be empty; rows outside of all groups are not touched.
/// Status         as matmul, and bad_option for offsets.
/// Workspace      matmul_workspace(be, rows, n, k, groups): it does not depend on the offsets.
/// The bits of a row are those of matmul on that row alone. For input gradients, and for weights [groups, n, k], pass transposed(b).
template <matmul_backend Backend, class A, class B, class C>
status grouped_matmul(Backend const& be, view<A, 2> a, view<B, 3> b, view<C, 2> c, view<int64_t const, 1> offsets,
                      matmul_options options = {}, workspace ws = {}) {
    product_set const set{layout_of(a), layout_of(b), layout_of(c), b.extent[0],  a.extent[0],
                          b.extent[2],  a.extent[1],  offsets.data, ragged::rows, options};
    return detail::run_products<A, B, C>(be, detail::check_row_groups(a, b, c, offsets, options), set, ws);
}

/// The sum over k cut into groups (the experts' weight gradients): c[g] = alpha * a[:, rows of g] * b[rows of g, :] + beta * c[g].
///
/// Shapes         a [m, rows] (X^T is transposed(x)), b [rows, n], c [groups, m, n]; offsets as above. An empty group sums to +0.
/// Workspace      matmul_workspace(be, m, n, rows, groups).
template <matmul_backend Backend, class A, class B, class C>
status grouped_matmul(Backend const& be, view<A, 2> a, view<B, 2> b, view<C, 3> c, view<int64_t const, 1> offsets,
                      matmul_options options = {}, workspace ws = {}) {
    product_set const set{layout_of(a), layout_of(b), layout_of(c), c.extent[0],   a.extent[0],
                          b.extent[1],  a.extent[1],  offsets.data, ragged::depth, options};
    return detail::run_products<A, B, C>(be, detail::check_depth_groups(a, b, c, offsets, options), set, ws);
}

/// Bytes for matmul_promoted of at most [m, k] by [k, n], with blocks of `length` along k.
template <matmul_backend B>
int64_t matmul_promoted_workspace(B const& be, int64_t m, int64_t n, int64_t k, int64_t length) {
    return matmul_service<B>::promoted_workspace(be, m, n, k, length);
}

/// For block-scaled operands (quantize/scaled_matmul.hpp checks the arguments): every block of scales.length consecutive k sums
/// from zero, then total = fma(block, scale_a * scale_b, total); C from the total as in matmul. Workspace:
/// matmul_promoted_workspace(be, m, n, k, scales.length), which for long blocks is more than matmul's. Status: small_workspace. Pairs
/// (see above) start at a block's first k; in blocks of an odd length less than k, k ascends without pairs.
template <class A, class B, class C, matmul_backend Backend, class ScaleA, class ScaleB>
status matmul_promoted(Backend const& be, product_set const& set, promotion<ScaleA, ScaleB> const& scales, workspace ws) {
    validation check("matmul_promoted");
    check.enough(ws, matmul_promoted_workspace(be, set.m, set.n, set.k, scales.length));
    if (!check.ok() || set.count == 0 || set.m == 0 || set.n == 0) return check.result;
    matmul_service<Backend>::template run_promoted<A, B, C>(be, set, scales, ws);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
