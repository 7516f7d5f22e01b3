// Gated attention: causal scaled dot-product attention over packed documents with grouped key and value heads, an optional
// sigmoid gate on its output, and the backward of both. Telemetry comes from the same pass.
//
// The backward needs the gated output y and the gate, not the ungated output: with O = sum(P V), G = sigmoid(z), y = O * G,
//
//     dO = dy * G,   D = rowsum(dO * O) = rowsum(dy * y),   dz = dy * y * (1 - G), a head-wise gate's being (1 - G) * D.
//
// 1 - G is taken as sigmoid(-z), so a gate that has opened to 1 in the storage format still has its gradient. The matrices of
// scores exist a tile at a time. Order of work: attention_tiles.hpp; mathematics of a row: attention_rows.hpp.
#pragma once

#include <type_traits>

#include <keel/attention/attention_tiles.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/core/validate.hpp>

namespace keel {

struct attention_options {
    float scale = 0.0f; ///< multiplies q . k; 0 stands for 1 / sqrt(head_dim)
};

/// What the forward saved, as the backward reads it.
struct attention_kept {
    view<float const, 2> lse = {}, lse_rest = {};
};
/// What the backward needs besides y, [tokens, heads], fp32, caller-owned.
struct attention_saved {
    view<float, 2> lse = {};      ///< ln(sum of e^score) of each query and head
    view<float, 2> lse_rest = {}; ///< what rounding took from lse, for logits of more than some thousand; or absent
    KEEL_FN constexpr operator attention_kept() const { return {lse, lse_rest}; }
};

/// Numbers of each head, [heads], fp32, overwritten; each absent unless wanted. Divide a sum by tokens for its mean.
struct attention_telemetry {
    view<float, 1> max_logit =
        {}; ///< largest scaled score that any query sees, signed; -Inf without tokens, NaN once a score is NaN
    view<float, 1> first_token_sum = {}; ///< over queries: probability of the first key of the query's document
    view<float, 1> entropy_sum =
        {}; ///< over queries: entropy of the probabilities, in nats. Costs a second exponential
};

template <class T> struct attention_gradients {
    view<T, 3> dq = {};    ///< [tokens, heads, head_dim]; overwritten, as all of these. Absent: not computed
    view<T, 3> dk = {};    ///< [tokens, kv_heads, head_dim]
    view<T, 3> dv = {};    ///< [tokens, kv_heads, head_dim]
    view<T, 3> dgate = {}; ///< the gate's shape
};

/// What first_token_sum would be if every query spread its attention evenly over the keys it sees: the sum of 1 / (i + 1). A head
/// without an attention sink stays near it. documents as in gated_attention; absent: one document of `tokens`.
KEEL_FN double uniform_first_token_sum(view<int64_t const, 1> documents, int64_t tokens) {
    int64_t const count = documents.absent() ? 1 : documents.extent[0] - 1;
    double sum = 0;
    for (int64_t d = 0; d < count; ++d) {
        int64_t const length = documents.absent() ? tokens : documents(d + 1) - documents(d);
        for (int64_t i = 0; i < length; ++i) sum += 1.0 / static_cast<double>(i + 1);
    }
    return sum;
}

} // namespace keel

namespace keel::inline KEEL_ABI {

namespace detail {

/// The checks that the forward and the backward share.
template <class T> KEEL_FN void check_attention(validation& check, view<T const, 3> q, view<T const, 3> k,
                                                view<T const, 3> v, view<T const, 3> gate,
                                                view<int64_t const, 1> documents, attention_options options) {
    int64_t const tokens = q.extent[0], heads = q.extent[1], kv_heads = k.extent[1], head_dim = q.extent[2];
    check.present("q", q).unit_stride("q", q);
    check.require(head_dim > 0, status_code::bad_shape, "q", "head_dim", head_dim, "1 or more");
    check.shape("k", k, tokens, kv_heads, head_dim).unit_stride("k", k);
    check.shape("v", v, tokens, kv_heads, head_dim).unit_stride("v", v);
    check.require(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, status_code::bad_shape, "k", "heads", kv_heads,
                  "a divisor of q's heads");
    if (!gate.absent()) {
        check.extent("gate", gate, 0, tokens).extent("gate", gate, 1, heads).unit_stride("gate", gate);
        check.require(gate.extent[2] == 1 || gate.extent[2] == head_dim, status_code::bad_shape, "gate", "dimension 2",
                      gate.extent[2], "1 (a gate for each head) or head_dim (one for each element)");
    }
    if (!documents.absent()) {
        check.present("documents", documents);
        check.require(documents.extent[0] >= 1, status_code::bad_shape, "documents", "length", documents.extent[0],
                      "documents + 1");
        for (int64_t i = 0; check.ok() && i < documents.extent[0]; ++i) {
            int64_t const least = i == 0 ? 0 : documents(i - 1), most = i == 0 ? 0 : tokens;
            check.require(documents(i) >= least && documents(i) <= most, status_code::bad_option, "documents",
                          "an entry", documents(i), "entries that start at 0 and do not decrease");
        }
        if (check.ok() && documents(documents.extent[0] - 1) != tokens)
            check.fail(status_code::bad_option, "documents", "last entry", documents(documents.extent[0] - 1), tokens);
    }
    check.require(magnitude(options.scale) < infinity_bits, status_code::bad_option, "options.scale",
                  "a finite number");
}

/// `a` starts no later than `b`.
template <class T> KEEL_FN void apart_in_order(validation& check, char const* argument, view<T, 3> a, view<T, 3> b) {
    auto const row = [](view<T, 3> const& x) { return (x.extent[1] - 1) * x.stride[1] + x.extent[2]; };
    int64_t const pitch = a.stride[0], step = a.stride[1];
    bool apart_in_rows = false;
    if (pitch > 0 && b.stride[0] == pitch && step > 0 && b.stride[1] > 0) {
        auto const bytes = reinterpret_cast<std::uintptr_t>(b.data) - reinterpret_cast<std::uintptr_t>(a.data);
        int64_t const from = static_cast<int64_t>(bytes / sizeof(T)) % pitch;
        bool const in_rows = row(a) <= pitch && from + row(b) <= pitch;
        bool const in_heads = b.stride[1] == step && from % step >= a.extent[2] && from % step + b.extent[2] <= step;
        apart_in_rows = in_rows && (from >= row(a) || in_heads);
    }
    if (!apart_in_rows) check.disjoint(argument, b, a);
}
/// Two outputs may lie in one buffer, as the parts of a fused projection's gradient do: each on its own stretch of a token's
/// row, or of every head's stretch of the row.
template <class T> KEEL_FN void apart(validation& check, char const* argument, view<T, 3> a, view<T, 3> b) {
    if (a.absent() || b.absent() || a.empty() || b.empty()) return;
    if (a.data <= b.data)
        apart_in_order(check, argument, a, b);
    else
        apart_in_order(check, argument, b, a);
}

template <class T, class B> int64_t attention_worker_bytes(B const& be, attention_shape shape, bool backward) {
    attention_plan const plan = plan_attention(shape);
    return attention_scratch<T>::bytes(shape, plan, backward, tile_product_workspace(be.alone(), shape, plan));
}

KEEL_FN float attention_scale(attention_options options, int64_t head_dim) {
    return magnitude(options.scale) != 0 ? options.scale : div(1.0f, sqrt(static_cast<float>(head_dim)));
}

} // namespace detail

/// Bytes for gated_attention with storage format T. They depend on the shape and on how many workers the backend has.
template <class T, matmul_backend B> int64_t gated_attention_workspace(B const& be, attention_shape shape) {
    return workspace_total(3 * workspace_bytes<float>(shape.tokens * shape.heads) +
                           be.concurrency() * detail::attention_worker_bytes<T>(be, shape, false));
}
/// Bytes for gated_attention_backward.
template <class T, matmul_backend B> int64_t gated_attention_backward_workspace(B const& be, attention_shape shape) {
    int64_t const rows = shape.tokens * shape.heads;
    return workspace_total(workspace_bytes<float>(rows) + workspace_bytes<T>(rows * shape.head_dim) +
                           workspace_bytes<float>(rows * shape.head_dim) +
                           be.concurrency() * detail::attention_worker_bytes<T>(be, shape, true));
}

/// Causal attention of grouped heads within documents, times a sigmoid gate.
///
/// Formula        for query i of a document and its keys j <= i: s_j = scale * (q . k_j); by tiles of keys, with m the largest score
///                so far, p_j = e^(s_j - m), sums rescaled by e^(m_old - m) as m grows; o = (sum p_j v_j) / (sum p_j);
///                lse = m + ln(sum p_j); y = o * sigmoid(gate). Products in the order of backend/matmul.hpp, the sum of p in THE
///                reduction order a tile, all fp32. p is summed unrounded, and rounded to the storage format for the product with v.
/// Shapes         q, y [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim], heads a multiple of kv_heads, head h on kv head
///                h / (heads / kv_heads); gate [tokens, heads, 1] or [tokens, heads, head_dim] or absent; saved.lse and saved.lse_rest [tokens,
///                heads] or absent. Tokens and heads may have any stride: parts of fused projections, gates between the queries' heads.
///                documents: host int64 [count + 1], where documents start, from 0 to tokens; absent: one document. Empty ones are fine.
/// Formats        float or bf16, one for q, k, v, gate and y. One rounding, to y.
/// Bits           of a token depend on its document up to it alone: packed equals unpacked, and what comes later leaves no trace, be it
///                NaN. Any thread count, architecture and backend gives them (subnormals: backend/matmul.hpp).
/// Status         bad_shape, bad_stride, bad_pointer, bad_option (documents, scale), overlap, small_workspace.
/// Non-finite     NaN in q, in the gate, or in a key that a query sees makes its head NaN, as do a score of +Inf and scores of nothing
///                but -Inf (lse is then -Inf). A score of -Inf beside finite ones has probability 0. NaN and Inf in a value that a
///                query sees reach that element; Inf with probability 0 is NaN.
/// Aliasing       y, what is saved and the telemetry have memory of their own.
/// Workspace      gated_attention_workspace<T>(be, shape).
/// Cost           4 * head_dim flops a query-key pair, plus one exponential.
/// Source         Dao 2023 (FlashAttention-2) for the tiles; Qiu et al. 2025, "Gated Attention for Large Language Models", for the gate
///                after attention. Query blocks and key tiles: attention_plan.hpp.
template <matmul_backend B, class Q>
status gated_attention(B const& be, view<Q, 3> q, std::type_identity_t<view<std::remove_const_t<Q> const, 3>> k,
                       std::type_identity_t<view<std::remove_const_t<Q> const, 3>> v,
                       std::type_identity_t<view<std::remove_const_t<Q> const, 3>> gate,
                       view<int64_t const, 1> documents, std::type_identity_t<view<std::remove_const_t<Q>, 3>> y,
                       attention_saved saved = {}, attention_telemetry telemetry = {}, attention_options options = {},
                       workspace ws = {}) {
    using T = std::remove_const_t<Q>;
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16>, "attention takes float or bf16");
    static_assert(backend_traits<B>::space == memory_space::host, "this attention runs on the host");
    attention_shape const shape{q.extent[0], q.extent[1], k.extent[1], q.extent[2]};
    validation check("gated_attention");
    detail::check_attention<T>(check, q, k, v, gate, documents, options);
    check.shape("y", y, shape.tokens, shape.heads, shape.head_dim).unit_stride("y", y).distinct("y", y);
    if (!saved.lse.absent())
        check.shape("saved.lse", saved.lse, shape.tokens, shape.heads).distinct("saved.lse", saved.lse);
    if (!saved.lse_rest.absent())
        check.shape("saved.lse_rest", saved.lse_rest, shape.tokens, shape.heads)
            .distinct("saved.lse_rest", saved.lse_rest);
    auto const per_head = [&](char const* argument, view<float, 1> x) {
        if (!x.absent()) check.shape(argument, x, shape.heads).distinct(argument, x);
        check.disjoint(argument, x, q, k, v, gate, documents, y, saved.lse, saved.lse_rest);
    };
    per_head("telemetry.max_logit", telemetry.max_logit);
    per_head("telemetry.first_token_sum", telemetry.first_token_sum);
    per_head("telemetry.entropy_sum", telemetry.entropy_sum);
    check.disjoint("telemetry.first_token_sum", telemetry.first_token_sum, telemetry.max_logit);
    check.disjoint("telemetry.entropy_sum", telemetry.entropy_sum, telemetry.max_logit, telemetry.first_token_sum);
    check.disjoint("y", y, q, k, v, gate, documents).disjoint("saved.lse", saved.lse, q, k, v, gate, documents, y);
    check.disjoint("saved.lse_rest", saved.lse_rest, q, k, v, gate, documents, y, saved.lse);
    if (check.ok()) check.enough(ws, gated_attention_workspace<T>(be, shape));
    if (!check.ok()) return check.result;

    attention_marks marks;
    auto const room_for = [&](view<float, 1> x) {
        return x.absent() ? nullptr : ws.take<float>(shape.tokens * shape.heads);
    };
    marks.max_logit = room_for(telemetry.max_logit);
    marks.first_token = room_for(telemetry.first_token_sum);
    marks.entropy = room_for(telemetry.entropy_sum);
    attention_plan const plan = plan_attention(shape);
    document_list const list{documents, shape.tokens};
    int64_t const bytes = detail::attention_worker_bytes<T>(be, shape, false);
    worker_scratch const scratch{ws.part(be.concurrency() * bytes), bytes};
    float const scale = detail::attention_scale(options, shape.head_dim);
    auto const alone = be.alone();
    attention_forward_task<T, std::remove_const_t<decltype(alone)>> const task{
        alone, shape, plan, list, scale, q, k, v, gate, y, saved.lse, saved.lse_rest, marks, scratch};
    be.for_tasks(task.count(), task);
    if (marks.max_logit != nullptr || marks.first_token != nullptr || marks.entropy != nullptr)
        be.for_rows(shape.heads, shape.tokens,
                    attention_telemetry_row{marks, shape.tokens, telemetry.max_logit, telemetry.first_token_sum,
                                            telemetry.entropy_sum});
    return check.result;
}

/// The gradients of gated_attention.
///
/// Formula        D = sum(dy * y); dO = dy * sigmoid(gate); dgate = dy * y * sigmoid(-gate), or D * sigmoid(-gate) for a head's gate;
///                then with p = e^((s - lse) - lse_rest), by tiles: ds = p * (dO . v - D); dq = scale * sum ds k; dk = scale * sum ds q;
///                dv = sum p dO. dk and dv sum over the heads of a group too. All sums fp32 in a fixed order (attention_tiles.hpp), each
///                gradient rounded once at the end; dO, p and ds are rounded to the storage format where a product takes them.
/// Shapes         dy as y; q, k, v, gate, documents, y, saved.lse and saved.lse_rest as in the forward. dq, dk, dv, dgate shaped like q, k, v, gate;
///                they may be parts of one buffer, beside each other. All in the storage format.
/// Error          without saved.lse_rest p carries the rounding of lse, 2^-24 |lse|, as a relative error: 6e-4 at logits of 1e4, 6 %
///                at 1e6 (as everywhere where only an fp32 lse is kept). qk_norm bounds logits by sqrt(head_dim) times the gains.
/// Non-finite     as the forward: a token's dq and dgate are NaN where its y or dy is; dk and dv are NaN at keys that such a query saw,
///                or, for dk, where a NaN query did. What a query cannot see leaves no trace.
/// Aliasing       gradients share no memory with inputs.
/// Workspace      gated_attention_backward_workspace<T>(be, shape).
/// Cost           10 * head_dim flops a query-key pair. Threads divide the (document, kv head) pairs.
/// Source         the softmax's gradient as in Dao 2023; D from the gated output and the gate's gradient: the head of this file. D is
///                taken from the stored y, so a bf16 y leaves its rounding in D.
template <matmul_backend B, class Q>
status gated_attention_backward(B const& be, std::type_identity_t<view<std::remove_const_t<Q> const, 3>> dy,
                                view<Q, 3> q, std::type_identity_t<view<std::remove_const_t<Q> const, 3>> k,
                                std::type_identity_t<view<std::remove_const_t<Q> const, 3>> v,
                                std::type_identity_t<view<std::remove_const_t<Q> const, 3>> gate,
                                view<int64_t const, 1> documents,
                                std::type_identity_t<view<std::remove_const_t<Q> const, 3>> y, attention_kept saved,
                                std::type_identity_t<attention_gradients<std::remove_const_t<Q>>> out,
                                attention_options options = {}, workspace ws = {}) {
    using T = std::remove_const_t<Q>;
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16>, "attention takes float or bf16");
    static_assert(backend_traits<B>::space == memory_space::host, "this attention runs on the host");
    attention_shape const shape{q.extent[0], q.extent[1], k.extent[1], q.extent[2]};
    validation check("gated_attention_backward");
    detail::check_attention<T>(check, q, k, v, gate, documents, options);
    check.shape("y", y, shape.tokens, shape.heads, shape.head_dim).unit_stride("y", y);
    check.shape("dy", dy, shape.tokens, shape.heads, shape.head_dim).unit_stride("dy", dy);
    check.shape("saved.lse", saved.lse, shape.tokens, shape.heads);
    if (!saved.lse_rest.absent()) check.shape("saved.lse_rest", saved.lse_rest, shape.tokens, shape.heads);
    auto const gradient = [&](char const* argument, view<T, 3> x, view<T const, 3> like) {
        if (x.absent()) return;
        check.shape(argument, x, like.extent[0], like.extent[1], like.extent[2])
            .unit_stride(argument, x)
            .distinct(argument, x);
        check.disjoint(argument, x, q, k, v, gate, documents, dy, y, saved.lse, saved.lse_rest);
    };
    gradient("out.dq", out.dq, q);
    gradient("out.dk", out.dk, k);
    gradient("out.dv", out.dv, v);
    check.require(out.dgate.absent() || !gate.absent(), status_code::bad_shape, "out.dgate",
                  "no gradient of a gate that is absent");
    gradient("out.dgate", out.dgate, gate);
    detail::apart(check, "out.dk", out.dq, out.dk);
    detail::apart(check, "out.dv", out.dq, out.dv);
    detail::apart(check, "out.dv", out.dk, out.dv);
    detail::apart(check, "out.dgate", out.dq, out.dgate);
    detail::apart(check, "out.dgate", out.dk, out.dgate);
    detail::apart(check, "out.dgate", out.dv, out.dgate);
    if (check.ok()) check.enough(ws, gated_attention_backward_workspace<T>(be, shape));
    if (!check.ok()) return check.result;
    if (q.empty()) { // keys that no query reads
        for (view<T, 3> const x : {out.dk, out.dv})
            if (!x.absent()) be.for_rows(x.extent[0] * x.extent[1], x.extent[2], zero_gradient_row<T>{x});
        return check.result;
    }

    int64_t const row_count = shape.tokens * shape.heads, n = shape.head_dim;
    float* const products = ws.take<float>(row_count);
    T* const inner = gate.absent() ? nullptr : ws.take<T>(row_count * n);
    be.for_rows(row_count, n, attention_gate_backward_row<T>{dy, y, gate, inner, products, out.dgate});
    if (out.dq.absent() && out.dk.absent() && out.dv.absent()) return check.result;
    view<T const, 3> const upper = gate.absent() ? dy : view<T const, 3>(cube(inner, shape.tokens, shape.heads, n));
    float* const query_gradients = ws.take<float>(row_count * n);
    int64_t const bytes = detail::attention_worker_bytes<T>(be, shape, true);
    worker_scratch const scratch{ws.part(be.concurrency() * bytes), bytes};
    document_list const list{documents, shape.tokens};
    float const scale = detail::attention_scale(options, n);
    auto const alone = be.alone();
    attention_backward_task<T, std::remove_const_t<decltype(alone)>> const task{
        alone,  shape,  plan_attention(shape), list,   scale, q, k, v, upper, saved.lse, saved.lse_rest, products, out.dq,
        out.dk, out.dv, query_gradients,       scratch};
    be.for_tasks(task.count(), task);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
