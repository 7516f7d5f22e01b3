// Delayed scaling: a tensor's scale comes from the largest magnitudes of calls before, so that one pass over it does.
#pragma once

#include <keel/quantize/quantize.hpp>

namespace keel {

struct delayed_scaling_options {
    int margin = 0; ///< the scale covers 2^margin times the history's largest; 0 to 16
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// The largest of the history, 0 where nothing is recorded.
KEEL_FN float largest_amax(view<float const, 1> history) {
    uint32_t top = 0;
    for (int64_t i = 0; i < history.extent[0]; ++i) top = umax(top, magnitude(history(i)));
    return as_float(top);
}

/// Quantises a tensor by a scale that is known before it is read, and records its own largest magnitude for later calls.
///
/// Formula        amax = 2^margin * max(history), or where that is 0 (nothing recorded yet) the tensor's own, found in a pass before;
///                scale and multiplier by `Rule` from amax, code = encode(x * multiplier), as quantize. Then the history moves by one:
///                history[i] = history[i - 1], history[0] = the tensor's largest finite magnitude.
/// Shapes         x, out.codes [rows, columns], by any strides, fastest with adjacent columns; out.scales [1, 1]; history [1 or more],
///                newest first, zeros at the start: caller-owned state, to be kept with the model (of one entry: the scale of the last call's
///                tensor). Where x is empty there is no block, so out.scales has an extent of 0 too, and the history stays as it was.
/// Formats        as quantize; codes that have a NaN.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (margin; a history that is negative or not finite).
/// Overflow       elements beyond the scale's range are the price of not looking first: `Overflow` says what becomes of them, the
///                report counts them as saturated. A finite x whose product with the multiplier passes fp32's range too is still a
///                finite number to saturate_finite.
/// Non-finite     NaN and Inf become what `Overflow` says, and are not recorded, so one bad step does not spoil the steps after it.
/// Aliasing       outputs and history have memory of their own. Host backends.
/// Cost           sizeof(X) + 1 bytes an element, twice the reading where nothing is recorded yet.
/// Source         Micikevicius et al. 2022 (2209.05433); the history and margin of TransformerEngine's delayed scaling, which starts
///                from a scale of 1 instead.
template <overflow Overflow, class Rule = scale_rules::round_up, row_backend B, class X, class Code, class Scale>
status quantize_delayed(B const& be, view<X, 2> x, block_scaled<Code, Scale, whole, whole> out, view<float, 1> history,
                        delayed_scaling_options options = {}, report* report = nullptr) {
    static_assert(backend_traits<B>::space == memory_space::host, "the history is read on the host");
    static_assert(format_traits<Code>::has_nan, "keel: NaN is kept in its code here, so the codes need one");
    using value = std::remove_const_t<X>;
    validation check("quantize_delayed");
    check.present("x", x);
    check_new_blocks(check, "out.codes", "out.scales", x, out);
    check.present("history", history).distinct("history", history);
    check.require(history.extent[0] >= 1, status_code::bad_shape, "history", "length", history.extent[0], "1 or more");
    check.disjoint("history", history, x, out.codes, out.scales);
    check.require(options.margin >= 0 && options.margin <= 16, status_code::bad_option, "options.margin", "value",
                  options.margin, "0 to 16");
    for (int64_t i = 0; check.ok() && i < history.extent[0]; ++i)
        check.require(bits(history(i)) < infinity_bits, status_code::bad_option, "history",
                      "finite numbers, none negative");
    if (!check.ok() || x.empty()) return check.result;

    float const largest = largest_amax(history), covered = mul(largest, static_cast<float>(1 << options.margin));
    auto const quantised = [&](auto const& from, auto const& codes) {
        uint32_t const amax = largest == 0 ? tensor_amax(be, from, non_finite_policy::isolate) : umin(bits(covered), infinity_bits - 1);
        return quantize_tensor<Overflow, Rule>(be, from, codes, out, amax, report);
    };
    uint32_t const own = has_adjacent_columns(x) && has_adjacent_columns(out.codes)
                             ? quantised(adjacent_rows<value const>{x}, adjacent_rows<Code>{out.codes})
                             : quantised(spread_rows<value const>{x}, spread_rows<Code>{out.codes});
    for (int64_t i = history.extent[0] - 1; i > 0; --i) history(i) = history(i - 1);
    history(0) = as_float(own);
    return check.result;
}

} // namespace keel::inline KEEL_ABI
