// The largest magnitude of a tensor, for meters: NaN outranks Inf outranks numbers, so a fault is never lost in a maximum.
#pragma once

#include <keel/backend/concepts.hpp>
#include <keel/core/lanes.hpp>
#include <keel/core/report.hpp>
#include <keel/core/validate.hpp>

namespace keel {

/// In the backend's memory; zero at first. Several calls may add to one.
struct peak_magnitude {
    uint32_t word = 0; ///< |x| as fp32 bits
    KEEL_FN float value() const { return as_float(word > infinity_bits ? nan_bits : word); }
};

} // namespace keel

namespace keel::inline KEEL_ABI {

template <class X> struct peak_magnitude_row {
    view<X const, 2> x;
    float offset;
    peak_magnitude* out;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        typename G::words top(0u);
        g.each(x.extent[1], [&](auto at) { top = umax(top, magnitude(g.inside(at, F(g.load(x.at(row), at) + F(offset))))); });
        uint32_t const largest = g.max_bits(top);
        if (g.leader()) max_shared(out->word, largest);
    }
};

/// out = max(out, |x + offset|) over x [rows, columns]; offset 1 measures a zero-centred norm's gain. An integer maximum of bits: the
/// same for any order and thread count. Columns adjacent; float, bf16, f16 or FP8 codes as raw values. No workspace.
template <row_backend B, class X> status measure_peak_magnitude(B const& be, view<X, 2> x, peak_magnitude* out, float offset = 0.0f) {
    validation check("measure_peak_magnitude");
    check.present("x", x).unit_stride("x", x).require(out != nullptr, status_code::bad_pointer, "out", "data, not null");
    if (!check.ok() || x.empty()) return check.result;
    be.for_rows(x.extent[0], x.extent[1], peak_magnitude_row<std::remove_const_t<X>>{x, offset, out});
    return check.result;
}

} // namespace keel::inline KEEL_ABI
