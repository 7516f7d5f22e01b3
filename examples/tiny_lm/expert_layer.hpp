// The feed-forward half of a layer: a shared SwiGLU expert that every token visits, and routed ones of which a token visits top_k.
//
// The router counts its demand before capacity drops anything, and only that demand can move the balancing bias.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <keel/moe/balance.hpp>
#include <keel/moe/capacity.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/health.hpp>
#include <keel/moe/route.hpp>
#include <keel/moe/router_init.hpp>
#include <keel/nn/sum.hpp>
#include <keel/nn/swiglu.hpp>

#include "memory.hpp"
#include "model_shape.hpp"
#include "parameters.hpp"
#include "projection.hpp"

namespace tiny_lm {

/// A SwiGLU feed-forward network, or a stack of them: gate and up fused in one projection, then down.
template <class Backend, class Activation> class swiglu_network {
public:
    swiglu_network(parameter_list& parameters, std::string const& prefix, std::int64_t copies, std::int64_t hidden, model_shape const& shape,
                   bool fp8, std::int64_t most_rows)
        : hidden_(hidden), layers_(shape.layers),
          gate_up_(parameters.add({.name = prefix + "gate_up", .copies = copies, .rows = 2 * hidden, .columns = shape.width,
                                   .optimiser = updated_by::muon, .parts = {hidden, hidden}})),
          down_(parameters.add({.name = prefix + "down", .copies = copies, .rows = shape.width, .columns = hidden, .optimiser = updated_by::muon})),
          to_gate_up_(gate_up_, fp8, most_rows), to_down_(down_, fp8, most_rows), both_(most_rows, 2 * hidden), dboth_(most_rows, 2 * hidden),
          active_(most_rows, hidden), dactive_(most_rows, hidden) {}

    void initialise(parameter_list const& parameters, std::uint64_t seed) {
        gate_up_.randomise(seed, parameters.number(gate_up_), 1 / std::sqrt(static_cast<double>(gate_up_.columns)));
        down_.randomise(seed, parameters.number(down_), 1 / std::sqrt(2.0 * static_cast<double>(down_.columns * layers_)));
    }
    void refresh(Backend const& be) { to_gate_up_.refresh(be), to_down_.refresh(be); }

    /// `groups...`: nothing for a single network, the row groups for a stack.
    template <class... Groups>
    void forward(Backend const& be, keel::view<Activation, 2> x, Groups... groups, keel::view<Activation, 2> y, bool training, scratch& ws) {
        std::int64_t const rows = x.extent[0];
        to_gate_up_.forward(be, x, groups..., both_.rows(rows), training, ws);
        keel::swiglu(be, gate(both_, rows), up(both_, rows), active_.rows(rows)).or_throw();
        to_down_.forward(be, active_.rows(rows), groups..., y, training, ws);
    }
    template <class... Groups>
    void backward(Backend const& be, keel::view<Activation, 2> dy, keel::view<Activation, 2> x, Groups... groups, keel::view<Activation, 2> dx,
                  scratch& ws) {
        std::int64_t const rows = x.extent[0];
        to_down_.backward(be, dy, active_.rows(rows), groups..., dactive_.rows(rows), ws);
        keel::swiglu_backward(be, dactive_.rows(rows), gate(both_, rows), up(both_, rows), {.dgate = gate(dboth_, rows), .dup = up(dboth_, rows)})
            .or_throw();
        to_gate_up_.backward(be, dboth_.rows(rows), x, groups..., dx, ws);
    }

private:
    keel::view<Activation, 2> gate(matrix<Activation>& m, std::int64_t rows) const { return keel::columns(m.rows(rows), 0, hidden_); }
    keel::view<Activation, 2> up(matrix<Activation>& m, std::int64_t rows) const { return keel::columns(m.rows(rows), hidden_, hidden_); }

    std::int64_t hidden_, layers_;
    parameter &gate_up_, &down_;
    projection<Backend, Activation> to_gate_up_, to_down_;
    matrix<Activation> both_, dboth_, active_, dactive_;
};

/// How a layer's experts stand: the load, and the least and the largest part of the output that is one expert's. An expert may be asked
/// for as often as the others and yet add nothing.
struct expert_health {
    keel::balance_line line;
    double least_share = 0, largest_share = 0;
};

template <class Backend, class Activation> class expert_layer {
public:
    expert_layer(parameter_list& parameters, std::string const& prefix, model_shape const& shape, bool fp8, std::int64_t tokens)
        : shape_(shape),
          router_(parameters.add({.name = prefix + "router", .rows = shape.experts, .columns = shape.width})),
          shared_(parameters, prefix + "shared_", 1, shape.shared_width, shape, fp8, tokens),
          routed_(parameters, prefix + "expert_", shape.experts, shape.expert_width, shape, fp8, tokens * shape.top_k),
          to_logits_(router_, false, tokens), logits_(tokens, shape.experts), dlogits_(tokens, shape.experts), ids_(tokens, shape.top_k),
          weights_(tokens, shape.top_k), dweights_(tokens, shape.top_k), log_sum_(tokens, 1), slots_(tokens, shape.top_k),
          offsets_(1, shape.experts + 1), demand_memory_(1, shape.experts), served_memory_(1, shape.experts),
          expert_rows_(tokens * shape.top_k, shape.width), expert_out_(tokens * shape.top_k, shape.width), dexpert_(tokens * shape.top_k, shape.width),
          shared_out_(tokens, shape.width), dx_shared_(tokens, shape.width), dx_routed_(tokens, shape.width), share_terms_(tokens, 4), row_terms_(tokens * shape.top_k, 1), expert_shares_(1, shape.experts),
          bias_(1, shape.experts), pending_(1, shape.experts), ledger_(1, keel::balance_ledger_size(1)), signs_(1, shape.experts),
          demand_(demand_memory_.vec(shape.experts)), served_(served_memory_.vec(shape.experts)) {}

    void initialise(Backend const& be, parameter_list const& parameters, std::uint64_t seed) {
        keel::router_init(be, router_.weights(), {seed, 0, parameters.number(router_)}).or_throw();
        shared_.initialise(parameters, seed);
        routed_.initialise(parameters, seed);
    }
    void refresh(Backend const& be) { shared_.refresh(be), routed_.refresh(be); }

    /// y = shared(x) + sum of weight * expert(x) over the experts that took the token. Training drops beyond capacity; evaluation
    /// and generation drop nothing.
    void forward(Backend const& be, keel::view<Activation, 2> x, keel::view<Activation, 2> y, bool training, scratch& ws) {
        std::int64_t const t = x.extent[0];
        to_logits_.forward(be, x, logits_.rows(t), training, ws);
        keel::route(be, logits_.rows(t), {.bias = bias_.vec(shape_.experts)}, ids_.rows(t), weights_.rows(t), demand_,
                    {.log_sum = log_sum_.vec(t)}, {}, ws(keel::route_workspace(t, shape_.experts)))
            .or_throw();
        keel::capacity_options const capacity{training ? limit() : keel::capacity_limit::dropless()};
        keel::apply_capacity(be, ids_.rows(t), demand_, where(t), served_, capacity, ws(keel::apply_capacity_workspace(t, shape_.experts))).or_throw();
        std::int64_t const served = served_.total();
        keel::dispatch(be, x, where(t), expert_rows_.rows(served)).or_throw();
        routed_.template forward<row_groups>(be, expert_rows_.rows(served), groups(), expert_out_.rows(served), training, ws);
        shared_.forward(be, x, shared_out_.rows(t), training, ws);
        keel::combine(be, expert_out_.rows(served), where(t), weights_.rows(t), shared_out_.rows(t), y,
                      {.share_terms = share_terms_.rows(t), .row_terms = row_terms_.vec(served)})
            .or_throw();
    }

    void backward(Backend const& be, keel::view<Activation, 2> dy, keel::view<Activation, 2> x, keel::view<Activation, 2> dx, float z_loss,
                  scratch& ws) {
        std::int64_t const t = x.extent[0], served = served_.total();
        keel::combine_backward(be, dy, expert_out_.rows(served), where(t), weights_.rows(t),
                               {.dexpert_rows = dexpert_.rows(served), .dweights = dweights_.rows(t)})
            .or_throw();
        // expert_out_ has been read for the last time: the gradient of the experts' input takes its place.
        routed_.template backward<row_groups>(be, dexpert_.rows(served), expert_rows_.rows(served), groups(), expert_out_.rows(served), ws);
        keel::dispatch_backward(be, expert_out_.rows(served), where(t), dx_routed_.rows(t)).or_throw();
        shared_.backward(be, dy, x, dx_shared_.rows(t), ws);
        keel::route_backward(be, dweights_.rows(t), logits_.rows(t), ids_.rows(t), weights_.rows(t), dlogits_.rows(t), {},
                             {.z_loss = z_loss / static_cast<float>(t)})
            .or_throw();
        to_logits_.backward(be, dlogits_.rows(t), x, dx, ws);
        keel::sum(be, dx_shared_.rows(t), dx_routed_.rows(t), dx, dx).or_throw();
    }

    // --- the balancing bias ----------------------------------------------------------------------------------------

    /// Counts the last forward's demand, once.
    void count(Backend const& be, keel::balance_key key) { keel::commit(be, balance(), demand_, key).or_throw(); }
    /// Moves the bias by what was counted, if the gate lets the step happen; returns the largest move.
    double rebalance(Backend const& be, keel::step_gate const& gate, float rate) {
        std::vector<float> const before(bias_.data(), bias_.data() + shape_.experts);
        keel::demand_counts pending;
        keel::pending_demand(balance(), pending).or_throw();
        keel::update_balance(be, balance(), keel::reduced_over_ranks(pending), gate, {.rate = rate}).or_throw();
        double largest = 0;
        for (std::size_t e = 0; e < before.size(); ++e)
            largest = std::fmax(largest, static_cast<double>(std::fabs(bias_.data()[e] - before[e])));
        return largest;
    }
    /// The bias and its ledger: what a checkpoint keeps.
    keel::balance_state balance() {
        return {bias_.vec(shape_.experts), pending_.vec(shape_.experts), ledger_.vec(keel::balance_ledger_size(1)), signs_.vec(shape_.experts)};
    }

    // --- what the last training forward showed ---------------------------------------------------------------------

    /// Of `tokens`; what share of the model's parameters is routed stands beside this layer's routed share of the output.
    expert_health health(Backend const& be, std::int64_t tokens, double routed_parameters) {
        keel::routed_share routed;
        keel::measure_routed_share(be, share_terms_.rows(tokens), &routed).or_throw();
        expert_health out;
        keel::measure_balance(demand_, served_, balance(), out.line,
                              {static_cast<double>(routed.projection()), static_cast<double>(routed.norm()), routed_parameters})
            .or_throw();
        keel::measure_expert_shares(be, row_terms_.vec(served_.total()), groups(), routed, expert_shares_.vec(shape_.experts)).or_throw();
        auto const [least, largest] = std::minmax_element(expert_shares_.data(), expert_shares_.data() + shape_.experts);
        out.least_share = static_cast<double>(*least), out.largest_share = static_cast<double>(*largest);
        return out;
    }
    /// Which experts each token chose, and the row where each choice was served (-1: dropped).
    keel::view<std::int32_t const, 2> chosen(std::int64_t tokens) { return ids_.rows(tokens); }
    keel::view<std::int64_t const, 2> slots(std::int64_t tokens) { return slots_.rows(tokens); }

private:
    keel::capacity_limit limit() const {
        return shape_.capacity.dropless() ? keel::capacity_limit::dropless()
                                          : keel::capacity_limit::factor(shape_.capacity.numerator, shape_.capacity.denominator);
    }
    keel::expert_slots where(std::int64_t t) { return {slots_.rows(t), offsets_.vec(shape_.experts + 1)}; }
    row_groups groups() { return offsets_.vec(shape_.experts + 1); }

    model_shape shape_;
    parameter& router_;
    swiglu_network<Backend, Activation> shared_, routed_;
    projection<Backend, Activation> to_logits_;
    matrix<float> logits_;
    matrix<Activation> dlogits_;
    matrix<std::int32_t> ids_;
    matrix<float> weights_, dweights_, log_sum_;
    matrix<std::int64_t> slots_, offsets_, demand_memory_, served_memory_;
    matrix<Activation> expert_rows_, expert_out_, dexpert_, shared_out_, dx_shared_, dx_routed_;
    matrix<float> share_terms_, row_terms_, expert_shares_, bias_;
    matrix<std::int64_t> pending_, ledger_, signs_;
    keel::demand_counts demand_;
    keel::served_counts served_;
};

} // namespace tiny_lm
