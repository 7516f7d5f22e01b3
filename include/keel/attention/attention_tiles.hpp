// Attention tile by tile: which matrix products and row kernels one task runs, and in which order.
//
//   forward, a task for each (document, kv head, query block):       backward, a task for each (document, kv head):
//     for each key tile up to the queries                              for each key tile, for each head group and query block from it on
//       S = scale * Q K^T                                                S = scale * Q K^T;  dP = dO V^T
//       P = e^(S - max), output and sums rescaled                        P = e^(S - lse);    dS = P * (dP - D)
//       O = P V, or O += P V                                             dV += P^T dO; dK += scale * dS^T Q; dQ += scale * dS K
//     y = O / sum * gate                                               dK, dV of the tile rounded; at the end dQ
//
// O, dQ, dK, dV and the sums are fp32, added in this order; P and dS are rounded to the storage format before a product takes
// them. Masked entries are zeros in P and dS. Where a zero would meet a NaN or Inf of a key or query that the row must not
// see, the product is made row by row, only of what is seen: the chain is the same, without the zeros.
#pragma once

#include <keel/attention/attention_plan.hpp>
#include <keel/attention/attention_rows.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/core/workspace.hpp>

namespace keel::inline KEEL_ABI {

/// Where documents start: offsets [documents + 1], or absent for one document of all tokens.
struct document_list {
    view<int64_t const, 1> offsets;
    int64_t tokens;

    KEEL_FN int64_t count() const { return offsets.absent() ? 1 : offsets.extent[0] - 1; }
    KEEL_FN int64_t begin(int64_t i) const { return offsets.absent() ? 0 : offsets(i); }
    KEEL_FN int64_t length(int64_t i) const { return offsets.absent() ? tokens : offsets(i + 1) - offsets(i); }

    // Blocks of `size` tokens of all documents in one numbering: document i has the numbers from first_number(i) on, and at most one
    // of them too many, so that no table is needed and many short documents beside a long one cost little.
    KEEL_FN int64_t first_number(int64_t i, int64_t size) const { return begin(i) / size + i; }
    KEEL_FN int64_t numbers(int64_t size) const { return tokens / size + count(); }
    /// The document that has the number.
    KEEL_FN int64_t document_of(int64_t number, int64_t size) const {
        int64_t low = 0, high = count();
        while (high - low > 1) {
            int64_t const middle = low + (high - low) / 2;
            (first_number(middle, size) <= number ? low : high) = middle;
        }
        return low;
    }
};

/// Rows [first, first + count) of a document's head.
template <class T> KEEL_FN view<T, 2> head_rows(view<T, 3> x, int64_t token, int64_t head, int64_t count) {
    return {x.at(token, head), {count, x.extent[2]}, {x.stride[0], x.stride[2]}};
}

// --- products ----------------------------------------------------------------------------------------------------------

/// A product whose arguments are this file's own: should one be refused, the program ends (noexcept) rather than go on with a
/// tile that was not computed.
template <class B, class X, class Y>
void tile_product(B const& be, view<X, 2> a, view<Y, 2> b, view<float, 2> c, float alpha, float beta,
                  workspace ws) noexcept {
    matmul(be, a, b, c, {.alpha = alpha, .beta = beta}, ws).or_throw();
}

template <class B, class T> uint32_t largest_magnitude(B const& be, view<T const, 2> x) {
    uint32_t largest = 0;
    be.for_rows(x.extent[0], x.extent[1], score_largest_row<T>{x, &largest});
    return largest;
}
KEEL_FN bool finite(uint32_t largest) { return largest < infinity_bits; }

/// c [rows, n] = alpha * w [rows, keys] * x [keys, n] + beta * c, w being zero where a row does not see a key.
template <class B, class T> void masked_product(B const& be, query_rows const& block, key_columns keys,
                                                view<T const, 2> w, view<T const, 2> x, view<float, 2> c, float alpha,
                                                float beta, workspace ws) {
    int64_t const seen_by_all = keys.seen_by(block.query);
    if (seen_by_all == keys.count || finite(largest_magnitude(be, slice(x, seen_by_all, keys.count - seen_by_all)))) {
        tile_product(be, w, x, c, alpha, beta, ws);
        return;
    }
    for (int64_t row = 0; row < block.rows(); ++row) {
        int64_t const seen = keys.seen_by(block.query_of(row));
        tile_product(be, columns(slice(w, row, 1), 0, seen), slice(x, 0, seen), slice(c, row, 1), alpha, beta, ws);
    }
}

/// c [keys, n] = alpha * w^T * x [rows, n] + beta * c. Where x is not finite, its rows are overwritten.
template <class B, class T> void masked_transposed_product(B const& be, query_rows const& block, key_columns keys,
                                                           view<T const, 2> w, view<T, 2> x, bool x_finite,
                                                           view<float, 2> c, float alpha, float beta, workspace ws) {
    int64_t const seen_by_all = x_finite ? keys.count : keys.seen_by(block.query);
    view<T const, 2> const by_key = transposed(w);
    tile_product(be, slice(by_key, 0, seen_by_all), x, slice(c, 0, seen_by_all), alpha, beta, ws);
    for (int64_t key = seen_by_all; key < keys.count; ++key) {
        // From here on no key is seen by the query before this one.
        int64_t const unseen = keys.first + key - 1 - block.query;
        for (int64_t head = 0; head < block.heads; ++head)
            for (int64_t j = 0; j < x.extent[1]; ++j) x(head * block.queries + unseen, j) = T{};
        tile_product(be, slice(by_key, key, 1), x, slice(c, key, 1), alpha, beta, ws);
    }
}

// --- scratch -----------------------------------------------------------------------------------------------------------

KEEL_FN constexpr int64_t tile_keys(attention_plan plan, int64_t tokens) {
    return tokens < plan.key_tile ? tokens : plan.key_tile;
}
/// Elements between rows of a tile: off the powers of two, whose lines would share few places of the cache.
KEEL_FN constexpr int64_t tile_pitch(attention_plan plan, int64_t tokens) {
    return (tile_keys(plan, tokens) + 31) / 32 * 32 + 32;
}

/// Bytes that any of a tile's products takes.
template <class B> int64_t tile_product_workspace(B const& be, attention_shape shape, attention_plan plan) {
    int64_t const keys = tile_keys(plan, shape.tokens), rows = plan.rows();
    int64_t most = 0;
    auto const consider = [&](int64_t m, int64_t n, int64_t k) {
        int64_t const bytes = matmul_workspace(be, m, n, k);
        if (bytes > most) most = bytes;
    };
    consider(rows, keys, shape.head_dim);
    consider(rows, shape.head_dim, keys);
    consider(keys, shape.head_dim, rows);
    return workspace_bytes<std::byte>(most);
}

/// One worker's scratch.
template <class T> struct attention_scratch {
    static constexpr bool in_place = std::is_same_v<T, float>; ///< P over S, dS over dP

    int64_t pitch = 0;
    uint32_t* largest = nullptr;
    T* queries = nullptr;
    float* scores = nullptr;
    T* probabilities = nullptr;
    // forward
    float* output = nullptr;
    softmax_state* states = nullptr;
    // backward
    T* upper = nullptr;
    float* score_gradients = nullptr;
    T* slopes = nullptr;
    float* dk = nullptr;
    float* dv = nullptr;
    workspace products;

    static int64_t bytes(attention_shape shape, attention_plan plan, bool backward, int64_t product_bytes) {
        int64_t const tile = plan.rows() * tile_pitch(plan, shape.tokens), stack = plan.rows() * shape.head_dim;
        int64_t const keys = tile_keys(plan, shape.tokens) * shape.head_dim;
        int64_t const shared = workspace_bytes<uint32_t>(1) + workspace_bytes<T>(stack) + product_bytes +
                               workspace_bytes<float>(tile) + (in_place ? 0 : workspace_bytes<T>(tile));
        if (!backward) return shared + workspace_bytes<float>(stack) + workspace_bytes<softmax_state>(plan.rows());
        return shared + workspace_bytes<T>(stack) + workspace_bytes<float>(tile) +
               (in_place ? 0 : workspace_bytes<T>(tile)) + 2 * workspace_bytes<float>(keys);
    }

    KEEL_FN attention_scratch(workspace ws, attention_shape shape, attention_plan plan, bool backward) {
        pitch = tile_pitch(plan, shape.tokens);
        int64_t const tile = plan.rows() * pitch, stack = plan.rows() * shape.head_dim,
                      keys = tile_keys(plan, shape.tokens) * shape.head_dim;
        largest = ws.take<uint32_t>(1);
        queries = ws.take<T>(stack);
        scores = ws.take<float>(tile);
        if constexpr (in_place)
            probabilities = scores;
        else
            probabilities = ws.take<T>(tile);
        if (backward) {
            upper = ws.take<T>(stack);
            score_gradients = ws.take<float>(tile);
            if constexpr (in_place)
                slopes = score_gradients;
            else
                slopes = ws.take<T>(tile);
            dk = ws.take<float>(keys);
            dv = ws.take<float>(keys);
        } else {
            output = ws.take<float>(stack);
            states = ws.take<softmax_state>(plan.rows());
        }
        products = ws;
    }
};

/// The workers' scratch, one behind the other.
struct worker_scratch {
    workspace all;
    int64_t bytes_each;
    KEEL_FN workspace of(int64_t worker) const { return {all.data + worker * bytes_each, bytes_each}; }
};

// --- tasks -------------------------------------------------------------------------------------------------------------

template <class T, class B> struct attention_forward_task {
    B be; ///< of one thread
    attention_shape shape;
    attention_plan plan;
    document_list documents;
    float scale;
    view<T const, 3> q, k, v, gate;
    view<T, 3> y;
    view<float, 2> lse, lse_rest;
    attention_marks marks;
    worker_scratch scratch;

    KEEL_FN int64_t parts() const { return (shape.group() + plan.heads_together - 1) / plan.heads_together; }
    KEEL_FN int64_t count() const { return documents.numbers(plan.query_block) * shape.kv_heads * parts(); }

    /// Task i: of each document the last query blocks, which have the most keys, come first.
    void operator()(int64_t i, int64_t worker) const {
        int64_t const part = i % parts(), rest = i / parts(), kv_head = rest % shape.kv_heads;
        int64_t const number = documents.numbers(plan.query_block) - 1 - rest / shape.kv_heads;
        int64_t const document = documents.document_of(number, plan.query_block), length = documents.length(document);
        int64_t const query = (number - documents.first_number(document, plan.query_block)) * plan.query_block;
        if (query >= length) return;
        query_rows block;
        block.document = documents.begin(document);
        block.query = query;
        block.queries = length - query < plan.query_block ? length - query : plan.query_block;
        block.head = kv_head * shape.group() + part * plan.heads_together;
        int64_t const left = (kv_head + 1) * shape.group() - block.head;
        block.heads = left < plan.heads_together ? left : plan.heads_together;
        run(block, kv_head, attention_scratch<T>(scratch.of(worker), shape, plan, false));
    }

    void run(query_rows const& block, int64_t kv_head, attention_scratch<T> const& room) const {
        int64_t const rows = block.rows(), n = shape.head_dim, end = block.query + block.queries;
        view<T const, 2> queries = head_rows(q, block.document + block.query, block.head, block.queries);
        if (block.heads > 1) {
            *room.largest = 0;
            be.for_rows(rows, n, stack_row<T>{block, q, room.queries, room.largest});
            queries = keel::rows(static_cast<T const*>(room.queries), rows, n);
        }
        for (int64_t first = 0; first < end; first += plan.key_tile) {
            key_columns const keys{first, end - first < plan.key_tile ? end - first : plan.key_tile};
            auto const tile_k = head_rows(k, block.document + first, kv_head, keys.count);
            auto const tile_v = head_rows(v, block.document + first, kv_head, keys.count);
            tile_product(be, queries, transposed(tile_k), keel::rows(room.scores, rows, keys.count, room.pitch), scale,
                         0.0f, room.products);
            be.for_rows(rows, keys.count,
                        softmax_tile_row<T>{block, keys, room.scores, room.probabilities, room.pitch, room.output, n,
                                            room.states, marks.entropy != nullptr});
            masked_product(be, block, keys,
                           keel::rows(static_cast<T const*>(room.probabilities), rows, keys.count, room.pitch), tile_v,
                           keel::rows(room.output, rows, n), 1.0f, first == 0 ? 0.0f : 1.0f, room.products);
        }
        be.for_rows(rows, n, attention_output_row<T>{block, room.output, room.states, gate, y, lse, lse_rest, marks});
    }
};

template <class T, class B> struct attention_backward_task {
    B be;
    attention_shape shape;
    attention_plan plan;
    document_list documents;
    float scale;
    view<T const, 3> q, k, v, upper; ///< upper: the gradient of the ungated output
    view<float const, 2> lse, lse_rest;
    float const* products; ///< D, [tokens, heads]
    view<T, 3> dq, dk, dv;
    float* query_gradients; ///< fp32 sums of dq: [tokens, heads, head_dim] in the order of the stacks
    worker_scratch scratch;

    KEEL_FN int64_t count() const { return documents.count() * shape.kv_heads; }

    void operator()(int64_t i, int64_t worker) const {
        int64_t const kv_head = i % shape.kv_heads, document = i / shape.kv_heads, length = documents.length(document);
        attention_scratch<T> const room(scratch.of(worker), shape, plan, true);
        for (int64_t first = 0; first < length; first += plan.key_tile)
            key_tile(documents.begin(document), length, kv_head,
                     {first, length - first < plan.key_tile ? length - first : plan.key_tile}, room);
        if (dq.absent()) return;
        each_block(documents.begin(document), length, kv_head, 0, [&](query_rows const& block, float* sums) {
            be.for_rows(block.rows(), shape.head_dim, unstack_row<T>{block, sums, dq});
        });
    }

    /// body(block, the block's part of query_gradients) for the head parts of a group and, in each, the query blocks from `query` on.
    template <class Body>
    void each_block(int64_t begin, int64_t length, int64_t kv_head, int64_t query, Body const& body) const {
        int64_t const group = shape.group();
        for (int64_t part = 0; part < group; part += plan.heads_together)
            for (int64_t at = query; at < length; at += plan.query_block) {
                query_rows const block{begin, at, length - at < plan.query_block ? length - at : plan.query_block,
                                       kv_head * group + part,
                                       group - part < plan.heads_together ? group - part : plan.heads_together};
                int64_t const before = begin * shape.heads + (kv_head * group + part) * length + at * block.heads;
                body(block, query_gradients + before * shape.head_dim);
            }
    }

    void key_tile(int64_t begin, int64_t length, int64_t kv_head, key_columns whole,
                  attention_scratch<T> const& room) const {
        int64_t const n = shape.head_dim;
        each_block(begin, length, kv_head, whole.first, [&](query_rows const& block, float* sums) {
            int64_t const rows = block.rows(), end = block.query + block.queries;
            key_columns const keys{whole.first, end - whole.first < whole.count ? end - whole.first : whole.count};
            bool const starts = block.query == whole.first && block.head == kv_head * shape.group();
            view<T, 2> const queries = keel::rows(room.queries, rows, n), above = keel::rows(room.upper, rows, n);
            bool const queries_finite = stack(block, q, queries, room), above_finite = stack(block, upper, above, room);
            auto const tile_k = head_rows(k, begin + whole.first, kv_head, keys.count);
            auto const tile_v = head_rows(v, begin + whole.first, kv_head, keys.count);
            view<T const, 2> const stacked_q = queries, stacked_do = above;
            tile_product(be, stacked_q, transposed(tile_k), keel::rows(room.scores, rows, keys.count, room.pitch),
                         scale, 0.0f, room.products);
            tile_product(be, stacked_do, transposed(tile_v),
                         keel::rows(room.score_gradients, rows, keys.count, room.pitch), 1.0f, 0.0f, room.products);
            be.for_rows(rows, keys.count,
                        attention_backward_tile_row<T>{block, keys, room.scores, room.score_gradients,
                                                       room.probabilities, room.slopes, room.pitch, lse, lse_rest, products,
                                                       shape.heads});
            view<T const, 2> const p =
                keel::rows(static_cast<T const*>(room.probabilities), rows, keys.count, room.pitch);
            view<T const, 2> const ds = keel::rows(static_cast<T const*>(room.slopes), rows, keys.count, room.pitch);
            if (!dq.absent())
                masked_product(be, block, keys, ds, tile_k, keel::rows(sums, rows, n), scale,
                               whole.first == 0 ? 0.0f : 1.0f, room.products);
            // The first block need not see all keys of the tile, so the sums start from zeros.
            if (starts) zero(room, whole.count * n);
            if (!dv.absent())
                masked_transposed_product(be, block, keys, p, above, above_finite, keel::rows(room.dv, keys.count, n),
                                          1.0f, 1.0f, room.products);
            if (!dk.absent())
                masked_transposed_product(be, block, keys, ds, queries, queries_finite,
                                          keel::rows(room.dk, keys.count, n), scale, 1.0f, room.products);
        });
        query_rows const tile{begin, whole.first, whole.count, kv_head, 1};
        if (!dk.absent()) be.for_rows(whole.count, n, unstack_row<T>{tile, room.dk, dk});
        if (!dv.absent()) be.for_rows(whole.count, n, unstack_row<T>{tile, room.dv, dv});
    }

    /// Copies the block's rows of x; whether all are finite.
    bool stack(query_rows const& block, view<T const, 3> x, view<T, 2> to, attention_scratch<T> const& room) const {
        *room.largest = 0;
        be.for_rows(block.rows(), shape.head_dim, stack_row<T>{block, x, to.data, room.largest});
        return finite(*room.largest);
    }
    void zero(attention_scratch<T> const& room, int64_t n) const {
        for (int64_t i = 0; i < n; ++i) room.dk[i] = room.dv[i] = 0.0f;
    }
};

} // namespace keel::inline KEEL_ABI
