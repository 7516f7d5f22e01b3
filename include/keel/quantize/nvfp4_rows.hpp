// The kernels of NVFP4: rows are walked by pairs, in blocks of eight pairs, so that the lane which owns a pair stores its byte.
#pragma once

#include <keel/backend/pairs.hpp>
#include <keel/quantize/nvfp4_matrix.hpp>
#include <keel/quantize/nvfp4_rule.hpp>
#include <keel/quantize/quantize_tensor.hpp>

namespace keel::inline KEEL_ABI {

static_assert(nvfp4_block == 2 * 8, "eight_pairs are a block");

/// *amax = 0, where a launch has to do it.
struct nvfp4_begin_row {
    uint32_t* amax;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (g.leader()) *amax = 0;
    }
};

/// The block scales and codes of a row by the tensor's largest magnitude, each block read twice, the second time from cache.
template <class X, class Rule, class Layout> struct quantize_nvfp4_row {
    view<X const, 2> x;
    nvfp4_matrix<e2m1x2, Layout> out;
    uint32_t const* amax;
    keel::report* report;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        if (report != nullptr)
            walk<true>(g, row);
        else
            walk<false>(g, row);
    }

private:
    template <bool Counting, class G> KEEL_FN void walk(G const& g, int64_t row) const {
        using U = typename G::words;
        Rule const rule(*amax);
        X const* const from = x.at(row);
        int64_t const n = x.extent[1];
        quantize_tally<G, typename eight_pairs<G>::words> tally;
        eight_pairs<G>::each(g, out.pairs(n), [&](auto const& b) {
            using F = typename std::remove_cvref_t<decltype(b)>::lane;
            U top(0u);
            b.each([&](auto at) {
                auto const v = load_pair(g, from, at, n);
                top = umax(top, umax(magnitude(v.even), magnitude(v.odd)));
            });
            block_scale<F> const s = rule.template of<F>(b.max_bits(top));
            b.template put<overflow::saturate>(row_of(out.scales, row), s.scale);
            if constexpr (Counting) tally.add_scale(b, F(s.scale * F(rule.scale)));
            auto const multiplier = b.spread(s.multiplier), worth = b.spread(worth_of(s));
            b.each([&](auto at) {
                auto const v = load_pair(g, from, at, n);
                U const low = encode_words<e2m1, overflow::saturate>(v.even * multiplier),
                        high = encode_words<e2m1, overflow::saturate>(v.odd * multiplier);
                g.store_code(out.codes.at(row), at, low | shl<4>(high));
                if constexpr (Counting) {
                    tally.template add_elements<e2m1>(v.even, v.even * worth, shown(low, worth));
                    tally.template add_elements<e2m1>(v.odd, v.odd * worth, shown(high, worth));
                }
            });
        });
        if constexpr (Counting) tally.give(g, *report, n);
    }

    /// The code as far as the decoded values show it: 0 under a scale of 0, none of 0 under NaN.
    template <class F> KEEL_FN static bits_of<F> shown(bits_of<F> const& code, F const& worth) {
        using U = bits_of<F>;
        return select(is_nan(worth), U(format_traits<e2m1>::max_code), select(eq(bits(worth), U(0u)), U(0u), code));
    }
    /// The multiplier as far as the decoded values show it: 0 where the scale is 0, NaN where it is NaN.
    template <class F> KEEL_FN static F worth_of(block_scale<F> const& s) {
        using U = bits_of<F>;
        return select(is_nan(s.scale), s.scale, select(eq(bits(s.scale), U(0u)), F(0.0f), s.multiplier));
    }
};

/// After all rows: the tensor's scale, where the largest magnitude may have lain until now.
template <class Rule> struct nvfp4_end_row {
    uint32_t const* amax;
    float* tensor_scale;

    template <class G> KEEL_FN void operator()(G const& g, int64_t) const {
        if (g.leader()) *tensor_scale = canonical(Rule(*amax).scale);
    }
};

/// y = (decode(code) * decode(scale)) * tensor_scale: the first product exact, one rounding for the second and one to y.
template <class Y, class Layout> struct dequantize_nvfp4_row {
    nvfp4_matrix<e2m1x2 const, Layout> in;
    view<Y, 2> y;

    template <class G> KEEL_FN void operator()(G const& g, int64_t row) const {
        using F = typename G::value;
        F const tensor(*in.tensor_scale.data);
        e2m1x2 const* const from = in.codes.at(row);
        int64_t const n = y.extent[1];
        eight_pairs<G>::each(g, in.pairs(n), [&](auto const& b) {
            auto const scale = b.spread(b.get(row_of(in.scales, row)));
            b.each([&](auto at) {
                F const even = g.load(halves<0>(from), at) * scale, odd = g.load(halves<4>(from), at) * scale;
                store_pair(g, y.at(row), at, n, {even * tensor, odd * tensor});
            });
        });
    }
};

} // namespace keel::inline KEEL_ABI
