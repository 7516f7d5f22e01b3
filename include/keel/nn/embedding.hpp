// Token embedding: a row of the table for each token, and the table's gradient in a fixed order.
#pragma once

#include <keel/backend/partition.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/validate.hpp>

namespace keel {

struct embedding_backward_options {
    grad_mode grad = overwrite;
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <class W, class Y> struct embedding_row {
    view<W const, 2> table;
    view<int32_t const, 1> ids;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        g.each(y.extent[1], [&](auto at) { g.store(y.at(row), at, g.load(table.at(ids(row)), at)); });
    }
};

/// Columns of the table's gradient that are summed at once, token after token, in a strip of 16 KB on the stack.
/// Measured with one frequent id and 4096 columns: strips half as wide took twice as long.
inline constexpr int64_t embedding_strip = 4096;

/// dtable[id] = sum of dy over the tokens with that id, in ascending token order, from +0. An item is one id's strip of
/// columns, all ids of a strip before the next strip, so that threads also share the columns of a frequent id.
template <class DY> struct embedding_backward_strip {
    view<DY const, 2> dy;
    int64_t const *offsets, *order;
    view<float, 2> dtable;
    grad_mode grad;

    template <class G> KEEL_FN void operator()(G const& g, int64_t item) const {
        using F = typename G::value;
        int64_t const id = item % dtable.extent[0], first = item / dtable.extent[0] * embedding_strip;
        int64_t const left = dtable.extent[1] - first, n = left < embedding_strip ? left : embedding_strip;
        int64_t const begin = offsets[id], end = offsets[id + 1];
        if (grad == accumulate && begin == end) return;
        alignas(64) float sum[std::size_t{embedding_strip}];
        float const* const so_far = sum;
        g.each(n, [&](auto at) { g.store(sum, at, F(0.0f)); });
        for (int64_t i = begin; i < end; ++i) {
            DY const* const gradient = dy.at(order[i], first);
            g.each(n, [&](auto at) { g.store(sum, at, g.load(so_far, at) + g.load(gradient, at)); });
        }
        float* const out = dtable.at(id, first);
        g.each(n, [&](auto at) {
            F const total = g.load(so_far, at);
            g.store(out, at, grad == accumulate ? F(g.load(static_cast<float const*>(out), at) + total) : total);
        });
    }
};

/// Bytes for embedding_backward.
KEEL_FN int64_t embedding_backward_workspace(int64_t tokens, int64_t vocabulary) {
    return workspace_total(workspace_bytes<int64_t>(vocabulary + 1) + workspace_bytes<int64_t>(tokens));
}

/// y[t] = table[ids[t]].
///
/// Shapes         table [vocabulary, width], ids [tokens] with 0 <= id < vocabulary, y [tokens, width]. Columns adjacent.
/// Formats        table and y any of float, bf16, f16; one rounding where they differ.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (an id out of range; on host backends).
/// Non-finite     copied (NaN as the canonical one).
/// Aliasing       y has memory of its own. No workspace.
/// Cost           sizeof(W) + sizeof(Y) bytes an element of y.
template <row_backend B, class W, class I, class Y> status embedding(B const& be, view<W, 2> table, view<I, 1> ids, view<Y, 2> y) {
    validation check("embedding");
    check.present("table", table).unit_stride("table", table).present("ids", ids);
    check.shape("y", y, ids.extent[0], table.extent[1]).unit_stride("y", y).distinct("y", y).disjoint("y", y, table, ids);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host)
        for (int64_t t = 0; t < ids.extent[0]; ++t)
            if (ids(t) < 0 || ids(t) >= table.extent[0])
                return check.fail(status_code::bad_option, "ids", "value", ids(t), 0, "an index in [0, vocabulary)").result;
    be.for_rows(ids.extent[0], table.extent[1], embedding_row<std::remove_const_t<W>, Y>{table, ids, y});
    return check.result;
}

/// The gradient of the table.
///
/// Formula        sum = dy of the id's tokens, added in ascending order from +0; dtable[id] = sum, or dtable[id] + sum
///                under accumulate: the bits of a plain loop, for any thread count. Rows of ids that do not occur become
///                +0 (overwrite) or keep every bit (accumulate).
/// Shapes         dy [tokens, width], ids [tokens] with 0 <= id < vocabulary, dtable [vocabulary, width]. Columns adjacent.
/// Formats        dy float, bf16 or f16; sums and dtable fp32.
/// Error          n tokens of one id: n 2^-24 sum|dy| where no partial result is subnormal or overflows; one more rounding under accumulate.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, small_workspace, bad_option (an id out of range).
/// Non-finite     NaN and Inf reach their id's column and no other.
/// Aliasing       dtable has memory of its own.
/// Workspace      embedding_backward_workspace(tokens, vocabulary).
/// Cost           reads dy once; writes dtable once (overwrite), or reads and writes the rows of ids that occur
///                (accumulate). Threads share out ids and strips of 4096 columns.
template <row_backend B, class DY, class I>
status embedding_backward(B const& be, view<DY, 2> dy, view<I, 1> ids, view<float, 2> dtable, embedding_backward_options options = {},
                          workspace ws = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "the partition by id is a service of host backends so far");
    int64_t const tokens = dy.extent[0], vocabulary = dtable.extent[0];
    validation check("embedding_backward");
    check.present("dy", dy).unit_stride("dy", dy).shape("ids", ids, tokens);
    check.extent("dtable", dtable, 1, dy.extent[1]).unit_stride("dtable", dtable).distinct("dtable", dtable);
    check.disjoint("dtable", dtable, dy, ids).enough(ws, embedding_backward_workspace(tokens, vocabulary));
    if (!check.ok()) return check.result;
    for (int64_t t = 0; t < tokens; ++t)
        if (ids(t) < 0 || ids(t) >= vocabulary)
            return check.fail(status_code::bad_option, "ids", "value", ids(t), 0, "an index in [0, vocabulary)").result;
    auto* const offsets = ws.take<int64_t>(vocabulary + 1);
    auto* const order = ws.take<int64_t>(tokens);
    stable_partition(tokens, vocabulary, [&](int64_t t) { return static_cast<int64_t>(ids(t)); }, offsets, order);
    int64_t const width = dtable.extent[1], strips = (width + embedding_strip - 1) / embedding_strip;
    be.for_rows(vocabulary * strips, (width < embedding_strip ? width : embedding_strip) * (1 + tokens / (vocabulary + 1)),
                embedding_backward_strip<std::remove_const_t<DY>>{dy, offsets, order, dtable, options.grad});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
