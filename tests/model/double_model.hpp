// tiny_lm's formula in double, written from the papers and not from the code: the oracle of its gradients.
// Which experts a token visits and which visits are dropped is given, since a choice has no derivative.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../../examples/tiny_lm/model_shape.hpp"

namespace keel_test {

using numbers = std::vector<double>;

struct frozen_routing {
    std::vector<std::vector<int64_t>> experts; ///< [token][choice]
    std::vector<std::vector<bool>> served;
};

struct double_model {
    tiny_lm::model_shape shape;
    std::map<std::string, numbers> parameters;
    std::vector<frozen_routing> routing; ///< of each layer
    double head_z = 0, router_z = 0;
    static constexpr double epsilon = 1e-6;

    static double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
    static double silu(double x) { return x * sigmoid(x); }

    numbers const& at(std::string const& name) const { return parameters.at(name); }

    /// u * (1 + delta) with u = x / rms(x), over `width` elements.
    static void norm(double* x, int64_t width, numbers const& delta) {
        double squares = 0;
        for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
        double const r = 1 / std::sqrt(squares / static_cast<double>(width) + epsilon);
        for (int64_t i = 0; i < width; ++i) x[i] *= r * (1 + delta[static_cast<std::size_t>(i)]);
    }
    /// W x with W [rows, x.size()], rows starting at `row`.
    static numbers product(numbers const& w, int64_t row, int64_t rows, numbers const& x) {
        numbers y(static_cast<std::size_t>(rows));
        for (std::size_t o = 0; o < y.size(); ++o)
            for (std::size_t i = 0; i < x.size(); ++i) y[o] += w[(static_cast<std::size_t>(row) + o) * x.size() + i] * x[i];
        return y;
    }
    static double log_sum_exp(numbers const& x) {
        double sum = 0;
        for (double v : x) sum += std::exp(v - x[0]);
        return x[0] + std::log(sum);
    }

    void head(double* x, int64_t position, numbers const& delta) const {
        norm(x, shape.head_dim, delta);
        int64_t const half = shape.rotary_dims / 2;
        for (int64_t i = 0; i < half; ++i) {
            double const angle = static_cast<double>(position) * std::pow(10000.0, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rotary_dims));
            double const a = x[i], b = x[i + half];
            x[i] = a * std::cos(angle) - b * std::sin(angle);
            x[i + half] = b * std::cos(angle) + a * std::sin(angle);
        }
    }

    numbers feed_forward(numbers const& gate_up, numbers const& down, int64_t copy, int64_t hidden, numbers const& x) const {
        auto const both = product(gate_up, copy * 2 * hidden, 2 * hidden, x);
        numbers active(static_cast<std::size_t>(hidden));
        for (std::size_t i = 0; i < active.size(); ++i) active[i] = silu(both[i]) * both[i + active.size()];
        return product(down, copy * shape.width, shape.width, active);
    }

    /// Mean loss with both z-losses.
    double loss(std::vector<int32_t> const& inputs, std::vector<int32_t> const& targets, int64_t length) const {
        auto const tokens = inputs.size(), width = static_cast<std::size_t>(shape.width);
        std::vector<numbers> x(tokens);
        for (std::size_t t = 0; t < tokens; ++t) {
            auto const row = static_cast<std::ptrdiff_t>(inputs[t]) * shape.width;
            x[t].assign(at("embedding").begin() + row, at("embedding").begin() + row + shape.width);
        }
        double total = 0;
        for (int64_t l = 0; l < shape.layers; ++l) {
            std::string const p = "layer_" + std::to_string(l) + ".";
            int64_t const d = shape.head_dim, qw = shape.query_width(), kw = shape.kv_width();
            std::vector<numbers> fused(tokens);
            for (std::size_t t = 0; t < tokens; ++t) {
                numbers n = x[t];
                norm(n.data(), shape.width, at(p + "attention_delta"));
                fused[t] = product(at(p + "qkv_gate"), 0, qw + 2 * kw + shape.gate_width(), n);
                auto const position = static_cast<int64_t>(t) % length;
                for (int64_t h = 0; h < shape.heads; ++h) head(fused[t].data() + h * d, position, at(p + "query_delta"));
                for (int64_t h = 0; h < shape.kv_heads; ++h) head(fused[t].data() + qw + h * d, position, at(p + "key_delta"));
            }
            for (std::size_t t = 0; t < tokens; ++t) {
                numbers y(static_cast<std::size_t>(qw));
                auto const first = static_cast<std::size_t>(static_cast<int64_t>(t) / length * length);
                for (int64_t h = 0; h < shape.heads; ++h) {
                    int64_t const group = h / (shape.heads / shape.kv_heads);
                    numbers score;
                    for (std::size_t s = first; s <= t; ++s) {
                        double dot = 0;
                        for (int64_t i = 0; i < d; ++i) dot += fused[t][static_cast<std::size_t>(h * d + i)] * fused[s][static_cast<std::size_t>(qw + group * d + i)];
                        score.push_back(dot / std::sqrt(static_cast<double>(d)));
                    }
                    double const lse = log_sum_exp(score);
                    for (int64_t i = 0; i < d; ++i) {
                        double o = 0;
                        for (std::size_t s = first; s <= t; ++s)
                            o += std::exp(score[s - first] - lse) * fused[s][static_cast<std::size_t>(qw + kw + group * d + i)];
                        int64_t const g = shape.gate == tiny_lm::gate_kind::head ? h : h * d + i;
                        y[static_cast<std::size_t>(h * d + i)] = o * sigmoid(fused[t][static_cast<std::size_t>(qw + 2 * kw + g)]);
                    }
                }
                auto const out = product(at(p + "output"), 0, shape.width, y);
                for (std::size_t i = 0; i < width; ++i) x[t][i] += out[i];
            }
            auto const& chosen = routing[static_cast<std::size_t>(l)];
            for (std::size_t t = 0; t < tokens; ++t) {
                numbers n = x[t];
                norm(n.data(), shape.width, at(p + "expert_delta"));
                auto const z = product(at(p + "router"), 0, shape.experts, n);
                double const lse = log_sum_exp(z);
                total += router_z * lse * lse;
                auto sum = feed_forward(at(p + "shared_gate_up"), at(p + "shared_down"), 0, shape.shared_width, n);
                double scores = 0;
                for (int64_t e : chosen.experts[t]) scores += sigmoid(z[static_cast<std::size_t>(e)]);
                for (std::size_t j = 0; j < chosen.experts[t].size(); ++j) {
                    if (!chosen.served[t][j]) continue;
                    int64_t const e = chosen.experts[t][j];
                    auto const out = feed_forward(at(p + "expert_gate_up"), at(p + "expert_down"), e, shape.expert_width, n);
                    // One expert a token has its score as weight; several share 1 by their scores.
                    double const s = sigmoid(z[static_cast<std::size_t>(e)]), weight = chosen.experts[t].size() == 1 ? s : s / scores;
                    for (std::size_t i = 0; i < width; ++i) sum[i] += weight * out[i];
                }
                for (std::size_t i = 0; i < width; ++i) x[t][i] += sum[i];
            }
        }
        for (std::size_t t = 0; t < tokens; ++t) {
            norm(x[t].data(), shape.width, at("final_delta"));
            auto const logits = product(at("head"), 0, shape.vocabulary, x[t]);
            double const lse = log_sum_exp(logits);
            total += lse - logits[static_cast<std::size_t>(targets[t])] + head_z * lse * lse;
        }
        return total / static_cast<double>(tokens);
    }
};

} // namespace keel_test
