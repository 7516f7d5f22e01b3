// The attention half of a layer: one fused projection to queries, keys, values and gates; QK-norm with rotary positions; gated
// attention; the output projection.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <keel/attention/gated_attention.hpp>
#include <keel/attention/qk_norm.hpp>

#include "memory.hpp"
#include "model_shape.hpp"
#include "parameters.hpp"
#include "projection.hpp"

namespace tiny_lm {

/// What is the same for all layers of one forward pass.
struct sequence_positions {
    keel::view<std::int64_t const, 1> starts; ///< where each sequence begins, and the end
    keel::rope_angles rope;                   ///< of every token's position in its sequence
};

template <class Backend, class Activation> class attention_layer {
public:
    attention_layer(parameter_list& parameters, std::string const& prefix, model_shape const& shape, bool fp8, std::int64_t tokens)
        : shape_(shape), query_(0), key_(shape.query_width()), value_(key_ + shape.kv_width()), gate_(value_ + shape.kv_width()),
          fused_width_(gate_ + shape.gate_width()),
          input_(parameters.add({.name = prefix + "qkv_gate", .rows = fused_width_, .columns = shape.width, .optimiser = updated_by::muon,
                                 .parts = {shape.query_width(), shape.kv_width(), shape.kv_width(), shape.gate_width()}})),
          output_(parameters.add({.name = prefix + "output", .rows = shape.width, .columns = shape.query_width(), .optimiser = updated_by::muon})),
          query_gain_(parameters.add({.name = prefix + "query_delta", .columns = shape.head_dim, .kind = parameter_kind::gain})),
          key_gain_(parameters.add({.name = prefix + "key_delta", .columns = shape.head_dim, .kind = parameter_kind::gain})),
          to_fused_(input_, fp8, tokens), to_output_(output_, fp8, tokens), fused_(tokens, fused_width_), dfused_(tokens, fused_width_),
          q_(tokens, shape.query_width()), k_(tokens, shape.kv_width()), dq_(tokens, shape.query_width()), dk_(tokens, shape.kv_width()),
          y_(tokens, shape.query_width()), dy_(tokens, shape.query_width()), lse_(tokens, shape.heads), q_rrms_(tokens, shape.heads),
          k_rrms_(tokens, shape.kv_heads), max_logit_(1, shape.heads), first_token_(1, shape.heads) {}

    void initialise(parameter_list const& parameters, std::uint64_t seed) {
        auto const fan_in = [](parameter const& p) { return 1 / std::sqrt(static_cast<double>(p.columns)); };
        input_.randomise(seed, parameters.number(input_), fan_in(input_));
        output_.randomise(seed, parameters.number(output_), fan_in(output_) / std::sqrt(2.0 * static_cast<double>(shape_.layers)));
    }
    void refresh(Backend const& be) { to_fused_.refresh(be), to_output_.refresh(be); }

    /// out = attention(x). With `training`, keeps what the backward needs and measures the telemetry.
    void forward(Backend const& be, keel::view<Activation, 2> x, sequence_positions const& at, keel::view<Activation, 2> out, bool training,
                 scratch& ws) {
        std::int64_t const t = x.extent[0];
        to_fused_.forward(be, x, fused_.rows(t), training, ws);
        keel::qk_norm(be, queries(fused_, t), query_gain_.vector(), at.rope, q(t), {.rrms = q_rrms_.rows(t)}).or_throw();
        keel::qk_norm(be, keys(fused_, t), key_gain_.vector(), at.rope, k(t), {.rrms = k_rrms_.rows(t)}).or_throw();
        keel::attention_telemetry telemetry;
        if (training) telemetry = {.max_logit = max_logit_.vec(shape_.heads), .first_token_sum = first_token_.vec(shape_.heads)};
        keel::gated_attention(be, q(t), k(t), values(fused_, t), gates(fused_, t), at.starts, heads(y_, t), {.lse = lse_.rows(t)}, telemetry, {},
                              ws(keel::gated_attention_workspace<Activation>(be, attention_shape(t))))
            .or_throw();
        to_output_.forward(be, y_.rows(t), out, training, ws);
    }

    /// dx from dout; every parameter's gradient.
    void backward(Backend const& be, keel::view<Activation, 2> dout, keel::view<Activation, 2> x, sequence_positions const& at,
                  keel::view<Activation, 2> dx, scratch& ws) {
        std::int64_t const t = x.extent[0];
        to_output_.backward(be, dout, y_.rows(t), dy_.rows(t), ws);
        keel::gated_attention_backward(be, heads(dy_, t), q(t), k(t), values(fused_, t), gates(fused_, t), at.starts, heads(y_, t),
                                       {.lse = lse_.rows(t)},
                                       {.dq = heads(dq_, t), .dk = dk_.heads(t, 0, shape_.kv_heads, shape_.head_dim), .dv = values(dfused_, t),
                                        .dgate = gates(dfused_, t)},
                                       {}, ws(keel::gated_attention_backward_workspace<Activation>(be, attention_shape(t))))
            .or_throw();
        keel::qk_norm_backward(be, heads(dq_, t), queries(fused_, t), query_gain_.vector(), at.rope, {.rrms = q_rrms_.rows(t)},
                               {.dx = queries(dfused_, t), .ddelta = query_gain_.vector_gradient()}, {},
                               ws(keel::qk_norm_backward_workspace(t, shape_.heads, shape_.head_dim)))
            .or_throw();
        keel::qk_norm_backward(be, dk_.heads(t, 0, shape_.kv_heads, shape_.head_dim), keys(fused_, t), key_gain_.vector(), at.rope,
                               {.rrms = k_rrms_.rows(t)}, {.dx = keys(dfused_, t), .ddelta = key_gain_.vector_gradient()}, {},
                               ws(keel::qk_norm_backward_workspace(t, shape_.kv_heads, shape_.head_dim)))
            .or_throw();
        to_fused_.backward(be, dfused_.rows(t), x, dx, ws);
    }

    /// Of the last training forward.
    double largest_logit() {
        double top = -std::numeric_limits<double>::infinity();
        for (std::int64_t h = 0; h < shape_.heads; ++h) top = std::fmax(top, static_cast<double>(max_logit_.data()[h]));
        return top;
    }
    /// Attention paid to the first token, summed over heads and queries.
    double first_token_sum() {
        double sum = 0;
        for (std::int64_t h = 0; h < shape_.heads; ++h) sum += static_cast<double>(first_token_.data()[h]);
        return sum;
    }

private:
    using matrix_type = matrix<Activation>;

    keel::attention_shape attention_shape(std::int64_t t) const { return {t, shape_.heads, shape_.kv_heads, shape_.head_dim}; }
    keel::view<Activation, 3> queries(matrix_type& m, std::int64_t t) const { return m.heads(t, query_, shape_.heads, shape_.head_dim); }
    keel::view<Activation, 3> keys(matrix_type& m, std::int64_t t) const { return m.heads(t, key_, shape_.kv_heads, shape_.head_dim); }
    keel::view<Activation, 3> values(matrix_type& m, std::int64_t t) const { return m.heads(t, value_, shape_.kv_heads, shape_.head_dim); }
    keel::view<Activation, 3> gates(matrix_type& m, std::int64_t t) const {
        return m.heads(t, gate_, shape_.heads, shape_.gate == gate_kind::head ? 1 : shape_.head_dim);
    }
    keel::view<Activation, 3> heads(matrix_type& m, std::int64_t t) const { return m.heads(t, 0, shape_.heads, shape_.head_dim); }
    keel::view<Activation, 3> q(std::int64_t t) { return heads(q_, t); }
    keel::view<Activation, 3> k(std::int64_t t) { return k_.heads(t, 0, shape_.kv_heads, shape_.head_dim); }

    model_shape shape_;
    std::int64_t query_, key_, value_, gate_, fused_width_; ///< columns of the fused projection
    parameter &input_, &output_, &query_gain_, &key_gain_;
    projection<Backend, Activation> to_fused_, to_output_;
    matrix_type fused_, dfused_, q_, k_, dq_, dk_, y_, dy_;
    matrix<float> lse_, q_rrms_, k_rrms_, max_logit_, first_token_;
};

} // namespace tiny_lm
