// One training step: forward, loss, backward, one gate for the whole model, both optimisers, the balancing bias.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <keel/guard/step_gate.hpp>

#include "batch.hpp"
#include "checkpoint.hpp"
#include "flop_ledger.hpp"
#include "health.hpp"
#include "model.hpp"
#include "optimiser.hpp"
#include "options.hpp"
#include "sampler.hpp"
#include "schedule.hpp"

namespace tiny_lm {

template <class Backend, class Activation> class trainer {
public:
    trainer(Backend const& be, options const& run, corpus const& text)
        : be_(be), run_(run), samples_(text, run.sequence, run.seed), ledger_(run.model, run.sequence),
          model_(be, run.model, run.mode == precision::fp8, run.batch * run.sequence), optimiser_(model_.parameters()) {
        for (auto& p : model_.parameters()) gradients_.emplace_back(p.gradients());
    }

    /// Fresh weights; or load_checkpoint(file, network(), ...) and go_on_from.
    void initialise() { model_.initialise(run_.seed); }
    void go_on_from(progress const& at) { at_ = at; }

    /// The next step. Its figures are complete but for speed, which the caller measures.
    health step() {
        health h;
        h.step = at_.step + 1, h.steps = run_.steps;
        batch_.clear();
        for (std::int64_t b = 0; b < run_.batch; ++b) batch_.add(samples_(at_.step * run_.batch + b));
        model_.forward(batch_.inputs, run_.sequence, true);
        h.loss = model_.loss(batch_.targets);
        model_.backward(batch_.inputs, batch_.targets);

        keel::step_gate gate;
        auto const gradients = keel::vec<keel::gradient_tensor const>(gradients_.data(), static_cast<std::int64_t>(gradients_.size()));
        keel::make_gate(be_, gradients, {.max_norm = static_cast<float>(run_.clip)}, &gate, model_.memory()(keel::make_gate_workspace(gradients)))
            .or_throw();
        double const factor = learning_rate_factor(at_.step, run_.warmup, run_.steps);
        h.learning_rate = run_.learning_rate * factor;
        learning_rates const rates{h.learning_rate, run_.adam_learning_rate * factor, run_.weight_decay};
        h.update_to_weight = optimiser_.step(be_, gate, rates, model_.memory());
        h.largest_bias_change = 0;
        auto const balance_rate = static_cast<float>(first_balance_rate * balance_rate_factor(at_.step, run_.steps));
        for (std::int64_t l = 0; l < model_.layers(); ++l) {
            model_.experts(l).count(be_, {.step = at_.step});
            h.largest_bias_change = std::fmax(h.largest_bias_change, model_.experts(l).rebalance(be_, gate, balance_rate));
        }
        model_.refresh();

        ++at_.step;
        at_.skipped += gate.apply == 0 ? 1 : 0;
        h.gradient_norm = gate.pre_clip_norm;
        h.non_finite = gate.non_finite();
        h.skipped_steps = at_.skipped;
        examine(h);
        return h;
    }

    model<Backend, Activation>& network() { return model_; }
    progress const& at() const { return at_; }
    flop_ledger const& ledger() const { return ledger_; }
    /// The balance line of each layer, of the last step; empty before the first.
    std::vector<expert_health> const& balance() const { return balance_; }

private:
    static constexpr double first_balance_rate = 1e-2;

    /// What the layers show of the step's forward. Of several layers the worst is told, never their average.
    void examine(health& h) {
        auto const tokens = run_.batch * run_.sequence;
        double first_token = 0;
        h.largest_activation = model_.largest_activation();
        h.largest_gain = model_.largest_gain();
        h.largest_logit = -std::numeric_limits<double>::infinity();
        h.demand_max_over_mean = h.served_max_over_mean = 0;
        h.dropped_share = 0, h.routed_output_share = std::numeric_limits<double>::infinity();
        balance_.clear();
        for (std::int64_t l = 0; l < model_.layers(); ++l) {
            auto& attention = model_.attention(l);
            auto& experts = model_.experts(l);
            h.largest_logit = std::fmax(h.largest_logit, attention.largest_logit());
            first_token += attention.first_token_sum();
            balance_.push_back(experts.health(be_, tokens, ledger_.routed_parameter_share()));
            auto const& line = balance_.back().line;
            if (line.demand_max > h.demand_max_over_mean) h.demand_max_over_mean = line.demand_max, h.served_max_over_mean = line.served_max;
            h.dead_experts += line.dead;
            if (line.concealed() && h.concealed_layer < 0) h.concealed_layer = l;
            h.dropped_share = std::fmax(h.dropped_share, line.dropped);
            h.routed_output_share = std::fmin(h.routed_output_share, line.shares.output);
        }
        auto const queries = static_cast<double>(tokens * run_.model.layers * run_.model.heads);
        h.first_token_share = first_token / queries;
        h.first_token_uniform = uniform_first_token_share(run_.sequence);
        h.routed_parameter_share = ledger_.routed_parameter_share();
    }

    Backend be_;
    options run_;
    sampler samples_;
    flop_ledger ledger_;
    model<Backend, Activation> model_;
    optimiser<Backend> optimiser_;
    std::vector<keel::gradient_tensor> gradients_;
    batch batch_;
    std::vector<expert_health> balance_;
    progress at_;
};

} // namespace tiny_lm
