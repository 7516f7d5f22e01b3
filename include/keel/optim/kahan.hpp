// Weights of 16 bits without an fp32 master: an update is added with Kahan's compensation, so that what the rounding takes away is kept
// and comes back. Kernels: kahan_rows.hpp.
//
// bf16 has 8 digits: a weight of 1 ignores every step below 2^-8. A second tensor of the same format holds what was lost so far, and
// weight + compensation behaves as a number of 16 digits (f16: 22) at 4 bytes an element, where a master with its shadow takes 6.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/kahan_rows.hpp>

namespace keel::inline KEEL_ABI {

/// weight += update, with compensation, unless the gate is closed (who has no guard passes open_gate()). The update is any optimiser's
/// change of the weights, its learning rate, sign and decay included; gate.clip belongs to gradients and is not applied.
///
/// Formula        y = d + c; s = w + y; lost = what this sum rounds away, exactly (two-sum); w = s in the weight's format;
///                c = (s - w) + lost, with the new w, in the weight's format. y, s and the last sum are one rounding each in fp32, s - w is
///                exact; the formats round to nearest even.
/// Shapes         update, weights.weight, weights.compensation [count], adjacent elements.
/// Formats        update float (or any format that loads); weight and compensation bf16 or f16.
/// Error          a call, with w and c before and w', c' after, u = 2^-8 for bf16 and 2^-11 for f16:
///                |(w' + c') - (w + c + d)| <= 2^-24 |d + c| + 1.01 u^2 |w'| + the format's smallest subnormal; |c'| <= 1.01 u |w'|.
///                It does not matter which of w and d is the larger. f16's smallest subnormal, 2^-24, is what limits it for weights below
///                2^-2: there bf16 keeps more.
/// Status         bad_shape, bad_stride, bad_pointer, overlap.
/// Skipped        gate.apply == 0: every byte of both stays as it was.
/// Non-finite     a NaN or Inf update makes its weight NaN or Inf, and so does a sum past the format's largest value; the compensation is 0
///                then, so an Inf stays an Inf until somebody looks. The other elements are not touched by it.
/// Zeros          an update of 0 keeps w + c (at a tie w may move to the even neighbour, and c to the other side); a weight of -0
///                becomes +0.
/// Aliasing       none between update, weight and compensation. Zero sizes: nothing happens. No workspace.
/// Cost           reads update, w, c, writes w, c: 12 bytes an element with fp32 updates.
/// Source         Kahan 1965; for bf16 weights Zamirai et al. 2020 (2010.06192), algorithm 3. Deviation: the sums are fp32, not bf16, and
///                two-sum takes Kahan's subtraction, which is exact only for |w| >= |y|.
template <class Weight = bf16, row_backend B, class Update>
status kahan_update(B const& be, view<Update, 1> update, kahan_weights<Weight> weights, step_gate const& gate) {
    static_assert(sizeof(Weight) == 2, "keel: compensation is for weights of 16 bits; fp32 weights are masters");
    int64_t const count = weights.weight.extent[0];
    validation check("kahan_update");
    check.present("weights.weight", weights.weight).unit_stride("weights.weight", weights.weight);
    check.shape("weights.compensation", weights.compensation, count).unit_stride("weights.compensation", weights.compensation);
    check.shape("update", update, count).unit_stride("update", update);
    check.disjoint("update", update, weights.weight, weights.compensation);
    check.disjoint("weights.compensation", weights.compensation, weights.weight);
    if (!check.ok()) return check.result;
    be.for_rows((count + kahan_chunk - 1) / kahan_chunk, kahan_chunk,
                kahan_row<Weight, std::remove_const_t<Update>>{update.data, weights.weight.data, weights.compensation.data, count, &gate});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
