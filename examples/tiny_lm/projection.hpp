// y = x W^T with the weights of one parameter, in the run's precision: the one place where fp32, bf16 and fp8 differ.
//
//     fp32   products read the masters
//     bf16   products read the bf16 shadow of the masters; activations and their gradients are bf16
//     fp8    products read e4m3 codes: W in 128x128 tiles made from the masters once a step, activations and gradients in
//            blocks of 128 made on the fly, promoted to fp32 every 128; everything between products is bf16
#pragma once

#include <cstdint>
#include <type_traits>
#include <vector>

#include <keel/nn/fp8_linear.hpp>

#include "memory.hpp"
#include "parameters.hpp"

namespace tiny_lm {

/// Rows of a product that belong to one copy of the weights: expert e has rows [offsets[e], offsets[e + 1]).
using row_groups = keel::view<std::int64_t const, 1>;

template <class Backend, class Activation> class projection {
public:
    /// At most `most_rows` rows of activations at a time. `fp8`: through codes.
    projection(parameter& weights, bool fp8, std::int64_t most_rows) : weights_(&weights), fp8_(fp8) {
        if (!fp8) return;
        auto const each = plan(0);
        codes_.resize(static_cast<std::size_t>(weights.size()));
        scales_.resize(static_cast<std::size_t>(weights.copies * each.weight_scales()));
        saved_codes_.resize(static_cast<std::size_t>(most_rows * weights.columns));
        // Every expert's rows start a new block of 128, so each may need one block more than the rows fill.
        saved_scales_.resize(static_cast<std::size_t>((most_rows / 128 + weights.copies) * weights.columns));
    }

    /// The operand again, after the masters have changed.
    void refresh(Backend const& be) {
        if (!fp8_) return;
        for (std::int64_t c = 0; c < weights_->copies; ++c)
            keel::quantize<keel::overflow::saturate_finite>(be, keel::slice(weights_->weights(), c * weights_->rows, weights_->rows), codes(c))
                .or_throw();
    }

    /// y = x W^T; in fp8, `keep` keeps the codes of x for the backward.
    template <class Y> void forward(Backend const& be, keel::view<Activation, 2> x, keel::view<Y, 2> y, bool keep, scratch& ws) {
        if (fp8_) return forward_fp8(be, 0, 0, x, y, keep, ws);
        keel::linear(be, x, operand(), y, ws(keel::linear_workspace(be, x.extent[0], weights_->columns, weights_->rows))).or_throw();
    }
    /// dx = dy W, unless absent; the parameter's gradient = dy^T x.
    void backward(Backend const& be, keel::view<Activation, 2> dy, keel::view<Activation, 2> x, keel::view<Activation, 2> dx, scratch& ws) {
        if (fp8_) return backward_fp8(be, 0, 0, dy, dx, ws);
        keel::linear_backward(be, dy, x, operand(), {.dx = dx, .dw = weights_->gradients()}, {},
                              ws(keel::linear_workspace(be, x.extent[0], weights_->columns, weights_->rows)))
            .or_throw();
    }

    /// The same with a copy of the weights for each group of rows.
    void forward(Backend const& be, keel::view<Activation, 2> x, row_groups groups, keel::view<Activation, 2> y, bool keep, scratch& ws) {
        if (fp8_) {
            for (std::int64_t e = 0; e < weights_->copies; ++e) {
                std::int64_t const first = groups(e), count = groups(e + 1) - first;
                forward_fp8(be, e, first, keel::slice(x, first, count), keel::slice(y, first, count), keep, ws);
            }
            return;
        }
        auto const bytes = keel::matmul_workspace(be, x.extent[0], weights_->rows, weights_->columns, weights_->copies);
        keel::grouped_matmul(be, x, turned(stack()), y, groups, {}, ws(bytes)).or_throw();
    }
    void backward(Backend const& be, keel::view<Activation, 2> dy, keel::view<Activation, 2> x, row_groups groups,
                  keel::view<Activation, 2> dx, scratch& ws) {
        if (fp8_) {
            for (std::int64_t e = 0; e < weights_->copies; ++e) {
                std::int64_t const first = groups(e), count = groups(e + 1) - first;
                backward_fp8(be, e, first, keel::slice(dy, first, count), keel::slice(dx, first, count), ws);
            }
            return;
        }
        auto const to_x = keel::matmul_workspace(be, x.extent[0], weights_->columns, weights_->rows, weights_->copies);
        auto const to_w = keel::matmul_workspace(be, weights_->rows, weights_->columns, x.extent[0], weights_->copies);
        keel::grouped_matmul(be, dy, stack(), dx, groups, {}, ws(to_x)).or_throw();
        keel::grouped_matmul(be, keel::transposed(dy), x,
                             keel::cube(weights_->gradient.data(), weights_->copies, weights_->rows, weights_->columns), groups, {}, ws(to_w))
            .or_throw();
    }

private:
    using plan_type = keel::fp8_linear_plan<>;

    plan_type plan(std::int64_t rows) const { return {rows, weights_->columns, weights_->rows}; }

    Activation const* operand_data() const {
        if constexpr (std::is_same_v<Activation, float>) return weights_->master.data();
        else return weights_->shadow.data();
    }
    keel::view<Activation const, 2> operand() const { return keel::rows(operand_data(), weights_->rows, weights_->columns); }
    keel::view<Activation const, 3> stack() const { return keel::cube(operand_data(), weights_->copies, weights_->rows, weights_->columns); }
    static keel::view<Activation const, 3> turned(keel::view<Activation const, 3> w) {
        return {w.data, {w.extent[0], w.extent[2], w.extent[1]}, {w.stride[0], w.stride[2], w.stride[1]}};
    }

    plan_type::weight_blocks codes(std::int64_t copy) {
        auto const p = plan(0);
        return p.weight(codes_.data() + copy * weights_->rows * weights_->columns, scales_.data() + copy * p.weight_scales());
    }
    plan_type::token_blocks saved(std::int64_t copy, std::int64_t first, std::int64_t rows) {
        return plan(rows).saved(saved_codes_.data() + first * weights_->columns,
                                saved_scales_.data() + (first / 128 + copy) * weights_->columns);
    }
    template <class Y>
    void forward_fp8(Backend const& be, std::int64_t copy, std::int64_t first, keel::view<Activation, 2> x, keel::view<Y, 2> y, bool keep,
                     scratch& ws) {
        auto const p = plan(x.extent[0]);
        keel::fp8_linear(be, p, x, codes(copy), y, keep ? saved(copy, first, x.extent[0]) : plan_type::token_blocks{}, nullptr,
                         ws(keel::fp8_linear_workspace(be, p)))
            .or_throw();
    }
    void backward_fp8(Backend const& be, std::int64_t copy, std::int64_t first, keel::view<Activation, 2> dy, keel::view<Activation, 2> dx,
                      scratch& ws) {
        auto const p = plan(dy.extent[0]);
        auto const dw = keel::slice(weights_->gradients(), copy * weights_->rows, weights_->rows);
        keel::fp8_linear_backward(be, p, dy, codes(copy), saved(copy, first, dy.extent[0]), {.dx = dx, .dw = dw}, {}, nullptr,
                                  ws(keel::fp8_linear_workspace(be, p)))
            .or_throw();
    }

    parameter* weights_;
    bool fp8_;
    std::vector<keel::e4m3> codes_, saved_codes_;
    std::vector<float> scales_, saved_scales_;
};

} // namespace tiny_lm
