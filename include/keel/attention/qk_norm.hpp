// QK-norm: zero-centred RMSNorm of each query and key head, then rotary positions on the first R elements, in one pass with
// one rounding; and its backward. Kernels: qk_norm_rows.hpp.
//
// The norm bounds every attention logit: a rotation keeps lengths, so |q . k| <= head_dim * max|1 + delta_q| * max|1 + delta_k|.
// Queries and keys share a table of angles (rope_table); the backward turns by the opposite angle with the same table.
#pragma once

#include <concepts>

#include <keel/attention/qk_norm_rows.hpp>
#include <keel/backend/column_sum.hpp>
#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>

namespace keel {

struct qk_norm_options {
    float epsilon = 1e-6f; ///< added to mean(x^2) of a head, in units of x squared; at least 2^-126
    rope_layout layout = rope_layout::half_pairs;
};

/// What the forward saved, as the backward reads it.
struct qk_norm_kept {
    view<float const, 2> rrms = {};
};
/// What the backward needs: 1 / rms of each head, [tokens, heads], fp32, caller-owned. Absent: not saved.
struct qk_norm_saved {
    view<float, 2> rrms = {};
    KEEL_FN constexpr operator qk_norm_kept() const { return {rrms}; }
};

template <class DY> struct qk_norm_gradients {
    view<DY, 3> dx = {};        ///< [tokens, heads, head_dim], in dy's format; overwritten. Absent: not computed
    view<float, 1> ddelta = {}; ///< [head_dim]; written or added to, by `grad`. Absent: not computed
};

struct qk_norm_backward_options {
    rope_layout layout = rope_layout::half_pairs; ///< as in the forward
    grad_mode grad = overwrite;                   ///< of ddelta
};

/// The checks that the forward and the backward share.
KEEL_FN void validate_rope(validation& check, rope_angles rope, int64_t tokens, int64_t head_dim) {
    if (rope.cosine.absent() && rope.sine.absent()) return;
    check.extent("rope.cosine", rope.cosine, 0, tokens).unit_stride("rope.cosine", rope.cosine);
    check.shape("rope.sine", rope.sine, tokens, rope.cosine.extent[1]).unit_stride("rope.sine", rope.sine);
    check.require(2 * rope.cosine.extent[1] <= head_dim, status_code::bad_shape, "rope.cosine", "columns",
                  rope.cosine.extent[1], "at most head_dim / 2");
}

} // namespace keel

namespace keel::inline KEEL_ABI {

/// Bytes for qk_norm_backward (only where ddelta is wanted), for any number of heads.
KEEL_FN int64_t qk_norm_backward_workspace(int64_t tokens, int64_t /*heads*/, int64_t head_dim) {
    return workspace_total(column_sum_workspace(tokens, head_dim) + workspace_bytes<float>(head_dim));
}

/// Cosines and sines of position * frequency for every token: what queries, keys and the backward share.
///
/// Formula        cosine[t, i] = cos(positions[t] * frequencies[i]), likewise sine. The exact product is reduced (core/math.hpp:
///                sincos_product), so an angle far out is as accurate as a small one: at most 1 ulp.
/// Shapes         positions [tokens] of int32 or int64, any stride; frequencies [R/2] in radians a position (for the usual
///                base b: b^(-2i/R), with R the number of rotated elements, not head_dim); cosine, sine [tokens, R/2], rows may be
///                strided.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Limits         positions beyond 2^24 are rounded to fp32; an angle beyond 2^24 radians gives NaN, as do NaN and Inf frequencies.
/// Cost           about 60 operations and 8 bytes an angle. No workspace.
template <row_backend B, class P>
    requires std::same_as<std::remove_const_t<P>, int32_t> || std::same_as<std::remove_const_t<P>, int64_t>
        status rope_table(B const& be, view<P, 1> positions, view<float const, 1> frequencies, view<float, 2> cosine,
                          view<float, 2> sine) {
        int64_t const tokens = positions.extent[0], half = frequencies.extent[0];
        validation check("rope_table");
        check.present("positions", positions)
            .present("frequencies", frequencies)
            .unit_stride("frequencies", frequencies);
        check.shape("cosine", cosine, tokens, half).unit_stride("cosine", cosine).distinct("cosine", cosine);
        check.shape("sine", sine, tokens, half).unit_stride("sine", sine).distinct("sine", sine);
        check.disjoint("cosine", cosine, frequencies).disjoint("cosine", cosine, positions);
        check.disjoint("sine", sine, frequencies).disjoint("sine", sine, positions).disjoint("sine", sine, cosine);
        if (!check.ok()) return check.result;
        be.for_rows(tokens, half * 16, rope_table_row<std::remove_const_t<P>>{positions, frequencies, cosine, sine});
        return check.result;
    }

/// Normalises each head by its root mean square, applies the gain 1 + delta that all heads share, and rotates.
///
/// Formula        r = 1 / sqrt(sum(x^2) / head_dim + epsilon); u = x * r; z = fma(u, delta, u), as rms_norm does with a row for each
///                head. Then for each of the R/2 pairs (a, b) of z: y_a = fma(a, cos, -(b * sin)), y_b = fma(b, cos, a * sin); elements
///                from R on pass. All fp32.
/// Shapes         x, y [tokens, heads, head_dim], tokens and heads with any stride, so the q and k parts of a fused QKV
///                projection are views of it; delta [head_dim] or absent (gain 1); rope: cosine, sine [tokens, R/2] with
///                R <= head_dim, or absent (no rotation); saved.rrms [tokens, heads] or absent.
/// Formats        x, delta, y any of float, bf16, f16. One rounding, to y.
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (epsilon below 2^-126 or not finite), overlap.
/// Non-finite     a NaN makes its head NaN; an Inf makes its element and what rotates with it NaN, the rest 0. A zero head gives zeros.
/// Aliasing       y may be x itself (same format and strides), but then the backward has lost its x.
/// Cost           reads x twice (the second time from cache), writes y, reads the table: sizeof(X) + sizeof(Y) + 4 * R / head_dim bytes
///                an element. No workspace.
/// Source         Henry et al. 2020 (QK-norm), Su et al. 2021 (RoFormer); norm before rotation as in Qwen3 and OLMo 2. With a gain
///                that differs between the elements of a pair the two orders differ.
template <row_backend B, class X, class D, class Y>
status qk_norm(B const& be, view<X, 3> x, view<D, 1> delta, rope_angles rope, view<Y, 3> y, qk_norm_saved saved = {},
               qk_norm_options options = {}) {
    int64_t const tokens = x.extent[0], heads = x.extent[1], head_dim = x.extent[2];
    validation check("qk_norm");
    check.present("x", x).unit_stride("x", x);
    if (!delta.absent()) check.shape("delta", delta, head_dim).unit_stride("delta", delta);
    validate_rope(check, rope, tokens, head_dim);
    check.shape("y", y, tokens, heads, head_dim).unit_stride("y", y).distinct("y", y);
    if (!saved.rrms.absent()) check.shape("saved.rrms", saved.rrms, tokens, heads).distinct("saved.rrms", saved.rrms);
    check.require(options.epsilon >= 0x1p-126f && options.epsilon <= 0x1.fffffep127f, status_code::bad_option,
                  "options.epsilon", "a finite number of at least 2^-126");
    check.disjoint_or_same("y", y, x).disjoint("y", y, delta, rope.cosine, rope.sine);
    check.disjoint("saved.rrms", saved.rrms, x, delta, rope.cosine, rope.sine, y);
    if (!check.ok() || x.empty()) return check.result;
    auto const run = [&]<rope_layout Layout>() {
        be.for_rows(tokens, heads * head_dim,
                    qk_norm_row<Layout, std::remove_const_t<X>, std::remove_const_t<D>, Y>{
                        x, delta, rope, y, saved.rrms, options.epsilon});
    };
    if (options.layout == rope_layout::half_pairs)
        run.template operator()<rope_layout::half_pairs>();
    else
        run.template operator()<rope_layout::interleaved_pairs>();
    return check.result;
}

/// The gradients of qk_norm.
///
/// Formula        w = dy turned by the opposite angles; g = fma(w, delta, w); u = x * r; c = sum(g * u) / head_dim;
///                dx = fma(-c, u, g) * r; ddelta = sum over tokens and heads of w * u in the column order of core/reduce.hpp, a row
///                being a token whose heads follow each other in the chain. c's sum takes the rotated pairs, then the other
///                elements, each in THE reduction order. All fp32.
/// Shapes         as qk_norm; saved.rrms from the forward. dx in dy's format.
/// Aliasing       out.dx may be dy itself.
/// Workspace      qk_norm_backward_workspace(tokens, heads, head_dim) where ddelta is wanted.
/// Non-finite     a NaN or Inf stays in its head of dx, and reaches ddelta.
/// Cost           reads dy and x twice for dx, and twice more for ddelta (once for each element of a pair).
template <row_backend B, class DY, class X, class D>
status qk_norm_backward(B const& be, view<DY, 3> dy, view<X, 3> x, view<D, 1> delta, rope_angles rope,
                        qk_norm_kept saved, std::type_identity_t<qk_norm_gradients<std::remove_const_t<DY>>> out,
                        qk_norm_backward_options options = {}, workspace ws = {}) {
    using dy_format = std::remove_const_t<DY>;
    using x_format = std::remove_const_t<X>;
    int64_t const tokens = x.extent[0], heads = x.extent[1], head_dim = x.extent[2];
    validation check("qk_norm_backward");
    check.present("x", x).unit_stride("x", x);
    check.shape("dy", dy, tokens, heads, head_dim).unit_stride("dy", dy);
    if (!delta.absent()) check.shape("delta", delta, head_dim).unit_stride("delta", delta);
    validate_rope(check, rope, tokens, head_dim);
    check.shape("saved.rrms", saved.rrms, tokens, heads);
    if (!out.dx.absent())
        check.shape("out.dx", out.dx, tokens, heads, head_dim).unit_stride("out.dx", out.dx).distinct("out.dx", out.dx);
    if (!out.ddelta.absent()) {
        check.shape("out.ddelta", out.ddelta, head_dim).unit_stride("out.ddelta", out.ddelta);
        check.enough(ws, qk_norm_backward_workspace(tokens, heads, head_dim));
    }
    check.disjoint_or_same("out.dx", out.dx, dy).disjoint("out.dx", out.dx, x, delta, rope.cosine, rope.sine, saved.rrms);
    check.disjoint("out.ddelta", out.ddelta, out.dx, dy, x, delta, rope.cosine, rope.sine, saved.rrms);
    if (!check.ok()) return check.result;
    auto const run = [&]<rope_layout Layout>() {
        // ddelta first: dx may take dy's place.
        if (!out.ddelta.absent() && head_dim > 0) {
            int64_t const half = rope.cosine.extent[1];
            float* const sums = ws.take<float>(head_dim);
            auto const sum = [&]<class Part>(Part, int64_t width, float* total) {
                column_sum(be, tokens, width,
                           qk_norm_gain_term<Part, Layout, dy_format, x_format>{dy, x, rope, saved.rrms}, total,
                           overwrite, ws);
            };
            sum(pair_firsts<Layout>{half}, half, sums);
            sum(pair_seconds<Layout>{half}, half, sums + half);
            sum(unrotated{half}, head_dim - 2 * half, sums + 2 * half);
            be.for_rows(1, head_dim, qk_norm_gain_row<Layout>{sums, half, out.ddelta, options.grad});
        }
        if (!out.dx.absent() && !x.empty())
            be.for_rows(tokens, heads * head_dim,
                        qk_norm_backward_row<Layout, dy_format, x_format, std::remove_const_t<D>>{dy, x, delta, rope,
                                                                                                  saved.rrms, out.dx});
    };
    if (options.layout == rope_layout::half_pairs)
        run.template operator()<rope_layout::half_pairs>();
    else
        run.template operator()<rope_layout::interleaved_pairs>();
    return check.result;
}

} // namespace keel::inline KEEL_ABI
