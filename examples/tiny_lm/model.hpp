// The model: embedding, layers, head, and the backward through all of them.
//
//     x = embedding[byte]
//     each layer:   n = rms_norm(x);  x = x + attention(n);  n = rms_norm(x);  x = x + experts(n)
//     logits = head(rms_norm(x))
//
// Each addition to the residual stream and the norm that follows it are one call, add_rms_norm.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <keel/guard/peak_magnitude.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <keel/nn/embedding.hpp>
#include <keel/norm/rms_norm.hpp>

#include "attention_layer.hpp"
#include "corpus.hpp"
#include "expert_layer.hpp"
#include "memory.hpp"
#include "model_shape.hpp"
#include "parameters.hpp"
#include "projection.hpp"

namespace tiny_lm {

/// Coefficients of the terms that keep logits from drifting, per token.
struct z_losses {
    float head = 1e-4f, router = 1e-3f;
};

template <class Backend, class Activation> class model {
public:
    /// For up to `tokens` tokens at a time.
    model(Backend const& be, model_shape const& shape, bool fp8, std::int64_t tokens)
        : be_(be), shape_(shape), parameters_(!std::is_same_v<Activation, float>),
          embedding_(parameters_.add({.name = "embedding", .rows = shape.vocabulary, .columns = shape.width})),
          norms_(static_cast<std::size_t>(2 * shape.layers + 1)), stream_(static_cast<std::size_t>(2 * shape.layers + 1)),
          normed_(static_cast<std::size_t>(2 * shape.layers + 1)), rrms_(static_cast<std::size_t>(2 * shape.layers + 1)) {
        for (std::size_t i = 0; i < norms_.size(); ++i) {
            stream_[i] = matrix<Activation>(tokens, shape.width);
            normed_[i] = matrix<Activation>(tokens, shape.width);
            rrms_[i] = matrix<float>(tokens, 1);
        }
        for (std::int64_t l = 0; l < shape.layers; ++l) {
            std::string const prefix = "layer_" + std::to_string(l) + ".";
            norms_[static_cast<std::size_t>(2 * l)] = &add_gain(prefix + "attention_delta");
            attention_.push_back(std::make_unique<attention_layer<Backend, Activation>>(parameters_, prefix, shape, fp8, tokens));
            norms_[static_cast<std::size_t>(2 * l + 1)] = &add_gain(prefix + "expert_delta");
            experts_.push_back(std::make_unique<expert_layer<Backend, Activation>>(parameters_, prefix, shape, fp8, tokens));
        }
        norms_.back() = &add_gain("final_delta");
        head_ = &parameters_.add({.name = "head", .rows = shape.vocabulary, .columns = shape.width});
        to_logits_ = std::make_unique<projection<Backend, Activation>>(*head_, false, tokens);
        branch_ = matrix<Activation>(tokens, shape.width);
        dstream_ = matrix<Activation>(tokens, shape.width);
        dnormed_ = matrix<Activation>(tokens, shape.width);
        logits_ = matrix<float>(tokens, shape.vocabulary);
        dlogits_ = matrix<Activation>(tokens, shape.vocabulary);
        loss_ = matrix<float>(tokens, 1);
        lse_ = matrix<float>(tokens, 1);
        std::int64_t const half = shape.rotary_dims / 2;
        cosine_ = matrix<float>(tokens, half);
        sine_ = matrix<float>(tokens, half);
        positions_.resize(static_cast<std::size_t>(tokens));
        frequencies_.resize(static_cast<std::size_t>(half));
        for (std::int64_t i = 0; i < half; ++i) // theta_i = 10000^(-2i/R), R the rotated elements
            frequencies_[static_cast<std::size_t>(i)] =
                static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rotary_dims)));
    }

    /// Fresh weights, a function of the seed alone.
    void initialise(std::uint64_t seed) {
        embedding_.randomise(seed, parameters_.number(embedding_), 1.0);
        head_->randomise(seed, parameters_.number(*head_), 0.5 / std::sqrt(static_cast<double>(shape_.width)));
        for (auto const& layer : attention_) layer->initialise(parameters_, seed);
        for (auto const& layer : experts_) layer->initialise(be_, parameters_, seed);
        for (auto& p : parameters_) p.refresh_shadow();
        refresh();
    }
    /// The operands of the products again, after the masters have changed.
    void refresh() {
        for (auto const& layer : attention_) layer->refresh(be_);
        for (auto const& layer : experts_) layer->refresh(be_);
    }

    /// Logits of every token: inputs are sequences of `length` bytes, end to end.
    void forward(std::vector<std::int32_t> const& inputs, std::int64_t length, bool training) {
        tokens_ = static_cast<std::int64_t>(inputs.size());
        place(length);
        sequence_positions const at = positions();
        auto const ids = keel::vec(inputs.data(), tokens_);
        if constexpr (std::is_same_v<Activation, float>) keel::embedding(be_, embedding_.weights(), ids, stream_[0].rows(tokens_)).or_throw();
        else keel::embedding(be_, keel::rows(embedding_.shadow.data(), shape_.vocabulary, shape_.width), ids, stream_[0].rows(tokens_)).or_throw();
        keel::rms_norm(be_, stream_[0].rows(tokens_), norms_[0]->vector(), normed_[0].rows(tokens_), {.rrms = rrms_[0].vec(tokens_)}).or_throw();
        for (std::size_t l = 0; l < attention_.size(); ++l) {
            attention_[l]->forward(be_, normed_[2 * l].rows(tokens_), at, branch_.rows(tokens_), training, scratch_);
            join(2 * l + 1);
            experts_[l]->forward(be_, normed_[2 * l + 1].rows(tokens_), branch_.rows(tokens_), training, scratch_);
            join(2 * l + 2);
        }
        to_logits_->forward(be_, normed_.back().rows(tokens_), logits_.rows(tokens_), training, scratch_);
    }

    /// Mean cross-entropy of the last forward against the targets, in nats, without the z-loss; NaN if a logit is.
    double loss(std::vector<std::int32_t> const& targets, z_losses const& z = {}) {
        auto const t = keel::vec(targets.data(), tokens_);
        keel::cross_entropy(be_, logits_.rows(tokens_), t, loss_.vec(tokens_), {.lse = lse_.vec(tokens_)}, {.z_loss = z.head}).or_throw();
        double sum = 0;
        for (std::int64_t i = 0; i < tokens_; ++i) {
            auto const lse = static_cast<double>(lse_.data()[i]);
            sum += static_cast<double>(loss_.data()[i]) - static_cast<double>(z.head) * lse * lse;
        }
        return sum / static_cast<double>(tokens_);
    }

    /// Every parameter's gradient of the mean loss, z-losses included, after forward(training) and loss.
    void backward(std::vector<std::int32_t> const& inputs, std::vector<std::int32_t> const& targets, z_losses const& z = {}) {
        sequence_positions const at = positions();
        auto const d = dstream_.rows(tokens_), dn = dnormed_.rows(tokens_);
        keel::cross_entropy_backward(be_, logits_.rows(tokens_), keel::vec(targets.data(), tokens_), {.lse = lse_.vec(tokens_)},
                                     dlogits_.rows(tokens_), {.z_loss = z.head, .scale = 1 / static_cast<float>(tokens_)})
            .or_throw();
        to_logits_->backward(be_, dlogits_.rows(tokens_), normed_.back().rows(tokens_), dn, scratch_);
        part(norms_.size() - 1, {});
        for (std::size_t l = attention_.size(); l-- > 0;) {
            experts_[l]->backward(be_, d, normed_[2 * l + 1].rows(tokens_), dn, z.router, scratch_);
            part(2 * l + 1, d);
            attention_[l]->backward(be_, d, normed_[2 * l].rows(tokens_), at, dn, scratch_);
            part(2 * l, d);
        }
        keel::embedding_backward(be_, d, keel::vec(inputs.data(), tokens_), embedding_.gradients(), {},
                                 scratch_(keel::embedding_backward_workspace(tokens_, shape_.vocabulary)))
            .or_throw();
    }

    parameter_list& parameters() { return parameters_; }
    std::int64_t layers() const { return shape_.layers; }
    attention_layer<Backend, Activation>& attention(std::int64_t l) { return *attention_[static_cast<std::size_t>(l)]; }
    expert_layer<Backend, Activation>& experts(std::int64_t l) { return *experts_[static_cast<std::size_t>(l)]; }
    scratch& memory() { return scratch_; }
    /// Logits of one token of the last forward.
    keel::view<float, 1> logits(std::int64_t token) { return keel::part(logits_.rows(tokens_), token); }

    /// Largest |x| in the residual stream of the last forward.
    double largest_activation() {
        keel::peak_magnitude top;
        for (auto& x : stream_) keel::measure_peak_magnitude(be_, x.rows(tokens_), &top).or_throw();
        return static_cast<double>(top.value());
    }
    /// Largest |1 + delta| of all norms.
    double largest_gain() {
        keel::peak_magnitude top;
        for (auto& p : parameters_)
            if (p.kind == parameter_kind::gain) keel::measure_peak_magnitude(be_, keel::rows(p.master.data(), 1, p.size()), &top, 1.0f).or_throw();
        return static_cast<double>(top.value());
    }

private:
    parameter& add_gain(std::string name) {
        return parameters_.add({.name = std::move(name), .columns = shape_.width, .kind = parameter_kind::gain});
    }
    /// Adds the branch to the stream before norm `i`, and norms.
    void join(std::size_t i) {
        keel::add_rms_norm(be_, branch_.rows(tokens_), stream_[i - 1].rows(tokens_), norms_[i]->vector(), stream_[i].rows(tokens_),
                           normed_[i].rows(tokens_), {.rrms = rrms_[i].vec(tokens_)})
            .or_throw();
    }
    /// The backward of join, or of the first norm: the stream's gradient, from that of the norm's output and what came past it.
    void part(std::size_t i, keel::view<Activation, 2> past) {
        keel::add_rms_norm_backward(be_, dnormed_.rows(tokens_), past, stream_[i].rows(tokens_), norms_[i]->vector(),
                                    {.rrms = rrms_[i].vec(tokens_)}, {.dx = dstream_.rows(tokens_), .ddelta = norms_[i]->vector_gradient()}, {},
                                    scratch_(keel::rms_norm_backward_workspace(tokens_, shape_.width)))
            .or_throw();
    }
    /// Positions and sequence starts for sequences of that length.
    void place(std::int64_t length) {
        if (length == placed_length_ && tokens_ == placed_tokens_) return;
        placed_length_ = length, placed_tokens_ = tokens_;
        starts_.clear();
        for (std::int64_t t = 0; t < tokens_; ++t) {
            positions_[static_cast<std::size_t>(t)] = static_cast<std::int32_t>(t % length);
            if (t % length == 0) starts_.push_back(t);
        }
        starts_.push_back(tokens_);
        keel::rope_table(be_, keel::vec(positions_.data(), tokens_), keel::vec<float const>(frequencies_.data(), shape_.rotary_dims / 2),
                         cosine_.rows(tokens_), sine_.rows(tokens_))
            .or_throw();
    }
    sequence_positions positions() {
        return {keel::vec<std::int64_t const>(starts_.data(), static_cast<std::int64_t>(starts_.size())),
                {cosine_.rows(tokens_), sine_.rows(tokens_)}};
    }

    Backend be_;
    model_shape shape_;
    parameter_list parameters_;
    parameter& embedding_;
    parameter* head_ = nullptr;
    std::vector<parameter*> norms_; ///< before each attention and each expert layer, and before the head
    std::vector<std::unique_ptr<attention_layer<Backend, Activation>>> attention_;
    std::vector<std::unique_ptr<expert_layer<Backend, Activation>>> experts_;
    std::unique_ptr<projection<Backend, Activation>> to_logits_;
    std::vector<matrix<Activation>> stream_, normed_; ///< the residual stream at each norm, and the norm's output
    std::vector<matrix<float>> rrms_;
    matrix<Activation> branch_, dstream_, dnormed_, dlogits_;
    matrix<float> logits_, loss_, lse_, cosine_, sine_;
    std::vector<float> frequencies_;
    std::vector<std::int32_t> positions_;
    std::vector<std::int64_t> starts_;
    std::int64_t tokens_ = 0, placed_length_ = 0, placed_tokens_ = 0;
    scratch scratch_;
};

} // namespace tiny_lm
