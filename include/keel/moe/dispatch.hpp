// Dispatch and combine: token rows to the experts' rows and back, both ways, and how much of the output the experts made.
//
//     keel::dispatch(be, x, where, rows).or_throw();                              // [tokens, width] -> [served, width]
//     ...                                                                         // the experts, by grouped products
//     keel::combine(be, expert_rows, where, weights, shared, y, {.share_terms = terms}).or_throw();
//     keel::routed_share share;
//     keel::measure_routed_share(be, terms, &share).or_throw();
//
// A dropped assignment (slot -1) contributes nothing: not its input, not its weight. Kernels: dispatch_rows.hpp.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/moe/capacity.hpp>
#include <keel/moe/dispatch_rows.hpp>

namespace keel {

/// What combine can keep for the routed share, caller-owned.
struct combine_saved {
    view<float, 2> share_terms = {}; ///< [tokens, 4], for measure_routed_share. Absent: not measured
    view<float, 1> row_terms = {};   ///< [served], for measure_expert_shares. Absent: not measured
};

template <class DY> struct combine_gradients {
    view<DY, 2> dexpert_rows = {};  ///< [served, width], in dy's format; overwritten. Absent: not computed
    view<float, 2> dweights = {};   ///< [tokens, k]; overwritten, 0 for dropped assignments. Absent: not computed
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// A 64-bit mark of a row (Steele et al. 2014, SplitMix64's finaliser): sums of marks are equal for the same rows in any order, and
/// otherwise with a chance of 2^-64.
KEEL_FN uint64_t row_mark(int64_t row) {
    uint64_t z = (static_cast<uint64_t>(row) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/// The slots' shapes, that `row_count` is what their offsets end at, and that the assignments name each row once: two that shared one
/// would race, and the row that none names would be left as it was. By a sum of marks, so that it needs no memory.
template <class B> KEEL_HOST void check_slots(validation& check, expert_slots where, int64_t tokens, char const* rows, int64_t row_count) {
    check.extent("where.slots", where.slots, 0, tokens).present("where.offsets", where.offsets);
    check.require(where.offsets.extent[0] >= 1, status_code::bad_shape, "where.offsets", "length", where.offsets.extent[0], "experts + 1");
    if constexpr (backend_traits<B>::space == memory_space::host)
        if (check.ok()) {
            int64_t const served = where.offsets(where.offsets.extent[0] - 1);
            if (served != row_count) check.fail(status_code::bad_shape, rows, "rows", row_count, served);
            int64_t seen = 0;
            uint64_t marks = 0;
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t j = 0; j < where.slots.extent[1]; ++j) {
                    int64_t const slot = where.slots(t, j);
                    if (slot < -1 || slot >= row_count) check.fail(status_code::bad_option, "where.slots", "value", slot, 0, "-1 or a row");
                    seen += slot >= 0 ? 1 : 0;
                    marks += slot >= 0 ? row_mark(slot) : 0;
                }
            if (seen != row_count) check.fail(status_code::bad_option, "where.slots", "rows that are named", seen, row_count);
            for (int64_t row = 0; check.ok() && row < row_count; ++row) marks -= row_mark(row);
            if (check.ok() && marks != 0) check.fail(status_code::bad_option, "where.slots", "each row named once");
        }
}

/// Copies each token's row to the rows of its served assignments: expert_rows[slots[t, j]] = x[t].
///
/// Shapes         x [tokens, width], where from apply_capacity, expert_rows [served.total(), width]: every row is written once, in the
///                stable order of its expert's queue. Columns adjacent.
/// Formats        any, x and expert_rows alike: bits are copied, those of NaN too.
/// Status         bad_shape (also rows that are not what the offsets end at), bad_stride, bad_pointer, overlap; on host backends
///                bad_option (a slot that is no row, a row that no assignment names or that two do). No workspace.
/// Aliasing       expert_rows has memory of its own.
/// Cost           reads x once from memory, writes expert_rows, past the caches where they are larger. The check of the slots is one pass over
///                them on the calling thread.
template <row_backend B, class X, class R> status dispatch(B const& be, view<X, 2> x, expert_slots where, view<R, 2> expert_rows) {
    static_assert(std::is_same_v<std::remove_const_t<X>, R>, "x and expert_rows share one format");
    validation check("dispatch");
    check.present("x", x).unit_stride("x", x);
    check.extent("expert_rows", expert_rows, 1, x.extent[1]).unit_stride("expert_rows", expert_rows).distinct("expert_rows", expert_rows);
    check_slots<B>(check, where, x.extent[0], "expert_rows", expert_rows.extent[0]);
    check.disjoint("expert_rows", expert_rows, x, where.slots, where.offsets);
    if (!check.ok()) return check.result;
    be.for_rows(x.extent[0], x.extent[1] * (1 + where.slots.extent[1]), dispatch_row<R>{x, where.slots, expert_rows});
    return check.result;
}

/// The gradient of dispatch.
///
/// Formula        dx[t] = sum over j of dexpert_rows[slots[t, j]], fp32, from +0 in the order of j, one rounding. A token whose
///                assignments were all dropped gets 0.
/// Shapes         dexpert_rows [served.total(), width], dx [tokens, width], overwritten; columns adjacent. Formats as dispatch.
/// Non-finite     stays in its token. Error: (k - 1) 2^-24 of the sum of magnitudes, and dx's rounding.
/// Status         as dispatch. dx has memory of its own. No workspace.
/// Cost           reads dexpert_rows once, writes dx; the slots as in dispatch.
template <row_backend B, class R, class X>
status dispatch_backward(B const& be, view<R, 2> dexpert_rows, expert_slots where, view<X, 2> dx) {
    static_assert(std::is_same_v<std::remove_const_t<R>, X>, "dexpert_rows and dx share one format");
    validation check("dispatch_backward");
    check.present("dexpert_rows", dexpert_rows).unit_stride("dexpert_rows", dexpert_rows);
    check.extent("dx", dx, 1, dexpert_rows.extent[1]).unit_stride("dx", dx).distinct("dx", dx);
    check_slots<B>(check, where, dx.extent[0], "dexpert_rows", dexpert_rows.extent[0]);
    check.disjoint("dx", dx, dexpert_rows, where.slots, where.offsets);
    if (!check.ok()) return check.result;
    be.for_rows(dx.extent[0], dx.extent[1] * (1 + where.slots.extent[1]), dispatch_backward_row<X>{dexpert_rows, where.slots, dx});
    return check.result;
}

/// Sums each token's expert outputs by weight, and adds the shared experts' output.
///
/// Formula        r = fma chain over j of w_j * O[slot_j] from +0; y = r + h, or r where there is no shared part. fp32, one rounding.
/// Shapes         expert_rows [served.total(), width], weights [tokens, k], shared [tokens, width] or absent ({}), y [tokens, width];
///                columns adjacent. saved.share_terms [tokens, 4], 0 where `valid` [tokens] marks padding; saved.row_terms
///                [served.total()], <w_j O_j, y> of each row.
/// Formats        expert_rows, shared and y any of float, bf16, f16.
/// Dropped        contributes nothing; a token with every assignment dropped has y = h.
/// Non-finite     stays in its token.
/// Aliasing       y may be shared itself (same format, same strides). Otherwise outputs have memory of their own.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (slots, as dispatch). No workspace.
/// Error          (k + 1) 2^-24 of the sum of |w_j O| and |h|, and y's rounding; where no partial result is subnormal or overflows.
/// Cost           reads k rows and the shared one, writes one; the share terms cost no further pass, the row terms one over the token's
///                rows in the caches for each eight choices.
template <row_backend B, class O, class W, class S = float, class Y>
status combine(B const& be, view<O, 2> expert_rows, expert_slots where, view<W, 2> weights, view<S, 2> shared, view<Y, 2> y,
               combine_saved saved = {}, view<bool const, 1> valid = {}) {
    int64_t const tokens = y.extent[0], width = y.extent[1];
    validation check("combine");
    check.extent("expert_rows", expert_rows, 1, width).unit_stride("expert_rows", expert_rows);
    check.unit_stride("y", y).present("y", y).distinct("y", y);
    check_slots<B>(check, where, tokens, "expert_rows", expert_rows.extent[0]);
    check.shape("weights", weights, tokens, where.slots.extent[1]);
    if (!shared.absent()) check.shape("shared", shared, tokens, width).unit_stride("shared", shared);
    if (!saved.share_terms.absent())
        check.shape("saved.share_terms", saved.share_terms, tokens, 4).distinct("saved.share_terms", saved.share_terms);
    if (!saved.row_terms.absent())
        check.shape("saved.row_terms", saved.row_terms, expert_rows.extent[0]).distinct("saved.row_terms", saved.row_terms);
    if (!valid.absent()) check.shape("valid", valid, tokens);
    check.disjoint("y", y, expert_rows, weights, where.slots, where.offsets, valid).disjoint_or_same("y", y, shared);
    check.disjoint("saved.share_terms", saved.share_terms, y, weights, expert_rows, shared, where.slots, where.offsets, valid);
    check.disjoint("saved.row_terms", saved.row_terms, y, weights, expert_rows, shared, where.slots, where.offsets, valid, saved.share_terms);
    if (!check.ok()) return check.result;
    be.for_rows(tokens, width * (1 + where.slots.extent[1]),
                combine_row<std::remove_const_t<O>, std::remove_const_t<S>, Y>{expert_rows, where.slots, weights, shared, y,
                                                                               saved.share_terms, saved.row_terms, valid});
    return check.result;
}

/// The gradients of combine. The shared part's is dy itself.
///
/// Formula        dexpert_rows[slot_j] = w_j * dy, one rounding; dweights_j = sum(dy * O[slot_j]) in THE reduction order, fp32.
/// Dropped        dweights 0; nothing else is touched.
/// Shapes         dy [tokens, width], expert_rows [served.total(), width], weights [tokens, k]; out.dexpert_rows as expert_rows,
///                out.dweights as weights; columns adjacent but for weights. Each output may be absent.
/// Formats        dy and expert_rows any of float, bf16, f16; dexpert_rows in dy's; dweights fp32.
/// Non-finite     stays in its assignment.
/// Status         as combine; outputs have memory of their own. No workspace.
/// Cost           reads dy from memory once and each served row once, writes each gradient row once, in one walk.
template <row_backend B, class DY, class O, class W>
status combine_backward(B const& be, view<DY, 2> dy, view<O, 2> expert_rows, expert_slots where, view<W, 2> weights,
                        std::type_identity_t<combine_gradients<std::remove_const_t<DY>>> out) {
    int64_t const tokens = dy.extent[0], width = dy.extent[1], k = where.slots.extent[1];
    validation check("combine_backward");
    check.present("dy", dy).unit_stride("dy", dy);
    check.extent("expert_rows", expert_rows, 1, width).unit_stride("expert_rows", expert_rows);
    check_slots<B>(check, where, tokens, "expert_rows", expert_rows.extent[0]);
    check.shape("weights", weights, tokens, k);
    if (!out.dexpert_rows.absent())
        check.shape("out.dexpert_rows", out.dexpert_rows, expert_rows.extent[0], width)
            .unit_stride("out.dexpert_rows", out.dexpert_rows)
            .distinct("out.dexpert_rows", out.dexpert_rows);
    if (!out.dweights.absent()) check.shape("out.dweights", out.dweights, tokens, k).distinct("out.dweights", out.dweights);
    check.disjoint("out.dexpert_rows", out.dexpert_rows, dy, expert_rows, weights, where.slots, where.offsets);
    check.disjoint("out.dweights", out.dweights, weights, dy, expert_rows, out.dexpert_rows, where.slots, where.offsets);
    if (!check.ok()) return check.result;
    be.for_rows(tokens, width * (1 + k),
                combine_backward_row<std::remove_const_t<DY>, std::remove_const_t<O>>{dy, expert_rows, where.slots, weights,
                                                                                      out.dexpert_rows, out.dweights});
    return check.result;
}

/// Sums combine's terms over the tokens, in THE reduction order, into `share` (host memory on host backends).
template <row_backend B, class S> status measure_routed_share(B const& be, view<S, 2> share_terms, routed_share* share) {
    validation check("measure_routed_share");
    check.extent("share_terms", share_terms, 1, 4).require(share != nullptr, status_code::bad_pointer, "share", "data, not null");
    if (!check.ok()) return check.result;
    be.for_rows(1, share_terms.extent[0] * 4, share_sum_row{share_terms, share});
    return check.result;
}

/// Each expert's projection share of the layer's output, <its part of r, y> / <y, y>: they sum to share.projection(), up to rounding. Beside
/// the demand this shows an expert that takes tokens and adds nothing.
///
/// Shapes         row_terms [served.total()] from combine, offsets [experts + 1] from apply_capacity, shares [experts]; any strides.
/// Share          of the same tokens, on the host. Shares are 0 where there is no output, and for experts without rows.
/// Status         bad_shape, bad_pointer, overlap; on host backends bad_option (offsets that do not rise from 0 to the number of rows).
template <row_backend B, class R>
status measure_expert_shares(B const& be, view<R, 1> row_terms, std::type_identity_t<view<int64_t const, 1>> offsets, routed_share const& share,
                             view<float, 1> shares) {
    validation check("measure_expert_shares");
    check.present("row_terms", row_terms).present("offsets", offsets);
    check.shape("shares", shares, offsets.extent[0] - 1).distinct("shares", shares).disjoint("shares", shares, row_terms, offsets);
    if (!check.ok()) return check.result;
    if constexpr (backend_traits<B>::space == memory_space::host)
        for (int64_t e = 0; e < offsets.extent[0]; ++e) {
            bool const ends = e > 0 || offsets(e) == 0, last = e + 1 < offsets.extent[0] || offsets(e) == row_terms.extent[0];
            check.require(ends && last && (e == 0 || offsets(e) >= offsets(e - 1)), status_code::bad_option, "offsets", "an entry", offsets(e),
                          "entries that rise from 0 to the number of rows");
        }
    if (!check.ok()) return check.result;
    be.for_rows(shares.extent[0], row_terms.extent[0] / (shares.extent[0] + 1) + 1, expert_share_row{row_terms, offsets, share.output, shares});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
