// The sum of two or three tensors with one rounding: where gradients of several branches meet.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/validate.hpp>

namespace keel::inline KEEL_ABI {

template <class X, class Y> struct sum_row {
    view<X const, 2> a, b, c;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        g.each(y.extent[1], [&](auto at) {
            F const first = g.load(a.at(row), at) + g.load(b.at(row), at);
            g.store(y.at(row), at, c.absent() ? first : F(first + g.load(c.at(row), at)));
        });
    }
};

/// y = (a + b) + c in fp32, one rounding to y; c may be absent.
///
/// Shapes         a, b, c, y [rows, columns], columns adjacent. a, b, c of one format; any of float, bf16, f16.
/// Status         bad_shape, bad_stride, bad_pointer, overlap. NaN and Inf as IEEE addition has them (NaN as the one that is stored).
/// Aliasing       y may be any of the inputs (same format, same strides). No workspace.
template <row_backend B, class X, class Y>
status sum(B const& be, view<X, 2> a, std::type_identity_t<view<std::remove_const_t<X> const, 2>> b,
           std::type_identity_t<view<std::remove_const_t<X> const, 2>> c, view<Y, 2> y) {
    int64_t const row_count = y.extent[0], column_count = y.extent[1];
    validation check("sum");
    check.present("y", y).unit_stride("y", y).distinct("y", y);
    check.shape("a", a, row_count, column_count).unit_stride("a", a).shape("b", b, row_count, column_count).unit_stride("b", b);
    if (!c.absent()) check.shape("c", c, row_count, column_count).unit_stride("c", c);
    check.disjoint_or_same("y", y, a).disjoint_or_same("y", y, b).disjoint_or_same("y", y, c);
    if (!check.ok() || y.empty()) return check.result;
    be.for_rows(row_count, column_count, sum_row<std::remove_const_t<X>, Y>{a, b, c, y});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
