// A parameter of muon_step in any formats, with memory that notices a stray access.
#pragma once

#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/muon.hpp>
#include <support/backends.hpp>
#include <support/data.hpp>

namespace keel_test {

/// Momentum of kind M for [rows, columns].
template <class M> struct momentum_memory {
    guarded_matrix<M> values;
    momentum_memory(int64_t rows, int64_t columns) : values(rows, columns, 2) {}
    keel::view<M, 3> get(int64_t stack, int64_t rows) {
        auto const v = values.view();
        return {v.data, {stack, rows, v.extent[1]}, {rows * v.stride[0], v.stride[0], 1}};
    }
    float at(int64_t i, int64_t j) const { return static_cast<float>(values.at(i, j)); }
    void add_to(digest& d) const { d.add(values); }
    bool untouched() const { return values.untouched(); }
};
template <class Code, class Scale, int C> struct momentum_memory<keel::block_scaled<Code, Scale, 1, C>> {
    using blocks = keel::block_scaled<Code, Scale, 1, C>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    momentum_memory(int64_t rows, int64_t columns) : codes(rows, columns, 3), scales(rows, blocks::scale_columns(columns), 1) {}
    blocks get(int64_t, int64_t) { return {codes.view(), scales.view()}; }
    float at(int64_t i, int64_t j) const { return keel::decode(codes.get(i, j)) * static_cast<float>(scales.at(i, j / C)); }
    void add_to(digest& d) const { d.add(codes), d.add(scales); }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

/// Weights W, momentum M, all optional state.
template <class M = float, class W = float> struct muon_problem {
    using parameter_type = keel::muon_parameter<float, float, keel::bf16, M, W>;
    static constexpr bool has_master = std::is_same_v<W, float>;
    keel::muon_plan<> plan;
    guarded_matrix<float> gradient, second;
    guarded_matrix<W> weight, rest;
    guarded_matrix<keel::bf16> shadow;
    momentum_memory<M> momentum;
    keel::step_change change;
    int64_t applied = 0;
    keel::random_elements random = {.key = {.seed = 5, .step = 100, .tensor = 2}};
    bool balanced = false, compensated = false, shadowed = false;

    explicit muon_problem(keel::muon_plan<> const& p, uint64_t seed = 1)
        : plan(p), gradient(rows(), p.columns, 3, floats(data_kind::normal, rows() * p.columns, seed)), second(p.stack, p.rows),
          weight(rows(), p.columns, 1, floats(data_kind::uniform, rows() * p.columns, seed + 50)), rest(rows(), p.columns),
          shadow(rows(), p.columns), momentum(rows(), p.columns) {}
    int64_t rows() const { return plan.stack * plan.rows; }
    template <class T> keel::view<T, 3> cube(guarded_matrix<T>& m) {
        auto const v = m.view();
        return {v.data, {plan.stack, plan.rows, plan.columns}, {plan.rows * v.stride[0], v.stride[0], 1}};
    }
    parameter_type get() {
        parameter_type p{.plan = plan, .gradient = cube(gradient), .weight = cube(weight), .momentum = momentum.get(plan.stack, plan.rows), .change = &change,
                         .applied = &applied, .random = random};
        if (shadowed) p.shadow = cube(shadow);
        if (balanced) p.second_moment = second.view();
        if (compensated) p.compensation = cube(rest);
        return p;
    }
    template <class B> keel::status step(B const& be, keel::step_gate const& gate, keel::muon_options const& options) {
        parameter_type const p[] = {get()};
        scratch memory(keel::muon_step_workspace(be, keel::vec(p, 1)));
        return keel::muon_step(be, keel::vec(p, 1), gate, options, memory.get());
    }
    void set_gradient(uint64_t seed) {
        auto const values = floats(data_kind::normal, rows() * plan.columns, seed);
        for (int64_t i = 0; i < rows(); ++i)
            for (int64_t j = 0; j < plan.columns; ++j) gradient.set(i, j, values[static_cast<std::size_t>(i * plan.columns + j)]);
    }
    /// Row i of this becomes row k of another, gradient, weight and state.
    template <class Other> void take_row(int64_t i, Other const& other, int64_t k) {
        for (int64_t j = 0; j < plan.columns; ++j) {
            gradient.set(i, j, other.gradient.get(k, j));
            weight.set(i, j, other.weight.get(k, j));
        }
    }
    /// Whether row i is row k of another, bit for bit.
    bool same_row(int64_t i, muon_problem const& other, int64_t k, int64_t item_row, int64_t other_item_row) const {
        bool same = true;
        for (int64_t j = 0; j < plan.columns; ++j) {
            same = same && keel::to_word(weight.get(i, j)) == keel::to_word(other.weight.get(k, j));
            same = same && keel::to_word(rest.get(i, j)) == keel::to_word(other.rest.get(k, j));
            same = same && shadow.get(i, j).bits == other.shadow.get(k, j).bits;
            same = same && keel::bits(momentum.at(i, j)) == keel::bits(other.momentum.at(k, j));
        }
        return same && second.at(i / plan.rows, item_row) == other.second.at(k / other.plan.rows, other_item_row);
    }
    uint64_t bits() const {
        digest d;
        d.add(weight), d.add(rest), d.add(shadow), d.add(second), momentum.add_to(d);
        d.add(&applied, sizeof applied);
        return d.value();
    }
    bool untouched() const {
        return weight.untouched() && rest.untouched() && shadow.untouched() && second.untouched() && momentum.untouched() && gradient.untouched();
    }
};

} // namespace keel_test
