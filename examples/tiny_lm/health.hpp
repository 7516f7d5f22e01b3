// One step of training as a person reads it: a line of a table, with an alarm at its end when a figure smells.
//
// Each figure says where it was taken. Norms are from before clipping, demand from before capacity, "largest" means
// over the whole model and batch; a share stands beside what it would be if nothing were wrong.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <string_view>

#include "numbers.hpp"

namespace tiny_lm {

inline constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

struct health {
    std::int64_t step = 0;  ///< steps done, this one included
    std::int64_t steps = 0; ///< of the whole run
    double loss = unknown;  ///< mean cross-entropy of this batch before the update, nats a byte, no auxiliary terms
    double gradient_norm = unknown; ///< of the whole model, before clipping
    double update_to_weight =
        unknown; ///< root mean square of the update over that of the weights; the largest matrix counts
    double learning_rate = unknown;        ///< Muon's, this step
    double largest_activation = unknown;   ///< |x| in the residual stream
    double largest_gain = unknown;         ///< |1 + delta| of the norms
    double largest_logit = unknown;        ///< q . k * scale, before the softmax of attention
    double first_token_share = unknown;    ///< attention paid to the first token: mean of layers, heads and queries
    double first_token_uniform = unknown;  ///< the same if attention were uniform: see uniform_first_token_share
    double demand_max_over_mean = unknown; ///< tokens that asked for the busiest expert over the mean; the worst layer
    double served_max_over_mean = unknown; ///< the same of those that it took
    double largest_bias_change = unknown;  ///< largest move of a balancing bias in this step
    std::int64_t concealed_layer = -1;     ///< the first whose capacity hides an imbalance while its bias stands still; -1: none
    double dropped_share = unknown;        ///< expert visits refused for want of capacity, over those asked for; the worst layer
    std::int64_t dead_experts = 0;         ///< whose demand is below a hundredth of the mean, in all layers
    double routed_output_share = unknown;  ///< of the feed-forward output, <routed, y> / <y, y>; the layer with the least
    double routed_parameter_share = unknown; ///< of all parameters
    std::int64_t skipped_steps = 0;          ///< in this run so far
    std::int64_t non_finite = 0;             ///< elements of this step's gradients
    double tokens_per_second = unknown;
    double share_of_peak = unknown; ///< model flops over what measure_peak found
    double seconds_left = unknown;

    double bits_per_byte() const { return loss / std::numbers::ln2; }
};

/// Mean attention on the first token of a causal sequence of n tokens if each query attends evenly: (1 + 1/2 + ... +
/// 1/n) / n.
inline double uniform_first_token_share(std::int64_t n) {
    double sum = 0;
    for (std::int64_t keys = n; keys > 0; --keys) sum += 1 / static_cast<double>(keys);
    return n > 0 ? sum / static_cast<double>(n) : 0;
}

/// Calls visit(name, value) for every figure, in order; values are int64 or double. The log's members are these.
template <class Visit> void for_each_figure(health const& h, Visit const& visit) {
    visit("step", h.step);
    visit("steps", h.steps);
    visit("loss", h.loss);
    visit("bits_per_byte", h.bits_per_byte());
    visit("gradient_norm", h.gradient_norm);
    visit("update_to_weight", h.update_to_weight);
    visit("learning_rate", h.learning_rate);
    visit("largest_activation", h.largest_activation);
    visit("largest_gain", h.largest_gain);
    visit("largest_logit", h.largest_logit);
    visit("first_token_share", h.first_token_share);
    visit("first_token_uniform", h.first_token_uniform);
    visit("demand_max_over_mean", h.demand_max_over_mean);
    visit("served_max_over_mean", h.served_max_over_mean);
    visit("largest_bias_change", h.largest_bias_change);
    visit("concealed_layer", h.concealed_layer);
    visit("dropped_share", h.dropped_share);
    visit("dead_experts", h.dead_experts);
    visit("routed_output_share", h.routed_output_share);
    visit("routed_parameter_share", h.routed_parameter_share);
    visit("skipped_steps", h.skipped_steps);
    visit("non_finite", h.non_finite);
    visit("tokens_per_second", h.tokens_per_second);
    visit("share_of_peak", h.share_of_peak);
    visit("seconds_left", h.seconds_left);
}

/// What is wrong with this step, in words; empty if nothing is.
inline std::string alarms(health const& h) {
    constexpr double gain_limit = 40; // a norm that is used as a volume knob
    std::string out;
    auto const raise = [&](bool wrong, std::string const& what) {
        if (wrong) out += (out.empty() ? "" : ", ") + what;
    };
    raise(!std::isfinite(h.loss), "loss is " + shortest(h.loss));
    raise(h.non_finite > 0, "step skipped");
    raise(h.largest_gain > gain_limit, "a norm's gain is above " + shortest(gain_limit));
    raise(h.concealed_layer >= 0, "capacity hides an imbalance of layer " + shortest(h.concealed_layer) + ", whose bias stands still");
    return out;
}

namespace detail {

inline std::string percent(double share) {
    double const value = 100 * share;
    return std::isfinite(value) ? fixed(value, std::fabs(value) < 9.95 ? 1 : 0) : shortest(value);
}
inline std::string of(std::int64_t part, std::int64_t whole) { return shortest(part) + "/" + shortest(whole); }

struct column {
    char const* title;
    std::size_t width;
    std::string (*text)(health const&);
};

inline constexpr std::array columns = {
    column{"step", 10, [](health const& h) { return of(h.step, h.steps); }},
    column{"loss", 7, [](health const& h) { return fixed(h.loss, 4); }},
    column{"bit/byte", 8, [](health const& h) { return fixed(h.bits_per_byte(), 3); }},
    column{"|grad|", 6, [](health const& h) { return compact(h.gradient_norm); }},
    column{"upd/wt", 6, [](health const& h) { return compact(h.update_to_weight); }},
    column{"lr", 6, [](health const& h) { return compact(h.learning_rate); }},
    column{"act", 6, [](health const& h) { return compact(h.largest_activation); }},
    column{"gain", 5, [](health const& h) { return compact(h.largest_gain); }},
    column{"logit", 6, [](health const& h) { return compact(h.largest_logit); }},
    column{"1st/even%", 9,
           [](health const& h) { return percent(h.first_token_share) + "/" + percent(h.first_token_uniform); }},
    column{"asked/served", 12,
           [](health const& h) { return fixed(h.demand_max_over_mean, 2) + "/" + fixed(h.served_max_over_mean, 2); }},
    column{"drop%", 5, [](health const& h) { return percent(h.dropped_share); }},
    column{"dead", 4, [](health const& h) { return shortest(h.dead_experts); }},
    column{"routed/par%", 11,
           [](health const& h) { return percent(h.routed_output_share) + "/" + percent(h.routed_parameter_share); }},
    column{"skip", 4, [](health const& h) { return shortest(h.skipped_steps); }},
    column{"nonfin", 6, [](health const& h) { return metric(static_cast<double>(h.non_finite)); }},
    column{"tok/s", 6, [](health const& h) { return metric(h.tokens_per_second); }},
    column{"peak%", 5, [](health const& h) { return percent(h.share_of_peak); }},
    column{"left", 7, [](health const& h) { return duration(h.seconds_left); }},
};

/// Appends a cell, right-aligned. One too wide takes from the gap before it, then pushes the rest.
inline void append_cell(std::string& line, std::string_view text, std::size_t end) {
    std::size_t const used = line.size() + text.size() + (line.empty() ? 0 : 1);
    line.append(used < end ? end - line.size() - text.size() : (line.empty() ? 0 : 1), ' ');
    line += text;
}

template <class Text> std::string table_row(Text const& text) {
    std::string line;
    std::size_t end = 0;
    for (auto const& c : columns) append_cell(line, text(c), end += c.width + (end == 0 ? 0 : 2));
    return line;
}

} // namespace detail

/// The titles above the columns of health_line.
inline std::string health_header() {
    return detail::table_row([](detail::column const& c) { return std::string(c.title); });
}

/// The step as one line of the table, about 160 columns, alarms after it.
inline std::string health_line(health const& h) {
    std::string const line = detail::table_row([&](detail::column const& c) { return c.text(h); });
    std::string const alarm = alarms(h);
    return alarm.empty() ? line : line + "  ! " + alarm;
}

/// What the titles mean, for the start of a run.
inline std::string health_legend() {
    return "loss: nats a byte of this batch | |grad|: norm of all gradients before clipping | upd/wt: rms of update "
           "over rms of weight\n"
           "act, gain, logit: largest residual activation, norm gain and attention logit | 1st/even: attention on the "
           "first token / if even\n"
           "asked/served: busiest expert over the mean, before / after capacity | drop: expert visits refused | dead: "
           "experts hardly asked for\n"
           "routed/par: routed experts' share of the feed-forward output / of all parameters | skip: steps, so far | "
           "nonfin: gradient elements\n"
           "peak: model flops over this machine's measured multiply-add rate | left: time to the last step\n";
}

} // namespace tiny_lm
