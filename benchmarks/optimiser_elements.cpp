// The element work of a step beside a copy of the same bytes: make_gate reads 4 bytes a weight, adamw_step moves 28 (30 with a shadow), muon_step
// around its products 8 for the norm, 16 for the direction and 12 (14) for the weights.
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/optim/adamw.hpp>
#include <keel/optim/muon_rows.hpp>

namespace {

using namespace keel;

void bytes(benchmark::State& state, double a_weight) {
    state.SetBytesProcessed(static_cast<int64_t>(static_cast<double>(state.iterations() * state.range(0)) * a_weight));
}
std::vector<float> numbers(int64_t n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(static_cast<int>(i * 7919 % 2048) - 1024) * 0x1p-10f;
    return x;
}

void copy(benchmark::State& state) {
    auto const x = numbers(state.range(0));
    std::vector<float> y(x.size());
    for (auto _ : state) {
        std::memcpy(y.data(), x.data(), x.size() * sizeof(float));
        benchmark::ClobberMemory();
    }
    bytes(state, 8);
}
void gate(benchmark::State& state) {
    auto const x = numbers(state.range(0));
    gradient_tensor const list[] = {vec(x.data(), state.range(0))};
    std::vector<std::byte> memory(static_cast<std::size_t>(make_gate_workspace(vec(list, 1))));
    step_gate g;
    for (auto _ : state) {
        make_gate(cpu{}, vec(list, 1), {.max_norm = 1.0f}, &g, {memory.data(), static_cast<int64_t>(memory.size())}).or_throw();
        benchmark::DoNotOptimize(g);
    }
    bytes(state, 4);
}
void adamw(benchmark::State& state, bool shadowed, bool measured) {
    int64_t const n = state.range(0);
    auto const gradient = numbers(n);
    auto w = numbers(n), m = numbers(n), v = std::vector<float>(gradient.size(), 1.0f);
    std::vector<bf16> shadow(shadowed ? gradient.size() : 0);
    int64_t applied = 0;
    step_gate const pass = open_gate();
    step_change change;
    std::vector<std::byte> memory(static_cast<std::size_t>(adamw_step_workspace(n)));
    for (auto _ : state) {
        adamw_step(cpu{}, vec(gradient.data(), n), {.master = vec(w.data(), n), .shadow = vec(shadowed ? shadow.data() : nullptr, shadowed ? n : 0)},
                   {.m = vec(m.data(), n), .v = vec(v.data(), n), .applied = &applied}, pass, {.weight_decay = 0.1f},
                   measured ? &change : nullptr, {memory.data(), static_cast<int64_t>(memory.size())})
            .or_throw();
        benchmark::ClobberMemory();
    }
    bytes(state, shadowed ? 30 : 28);
}
void adamw_fp32(benchmark::State& state) { adamw(state, false, false); }
void adamw_with_shadow(benchmark::State& state) { adamw(state, true, false); }
void adamw_with_shadow_and_change(benchmark::State& state) { adamw(state, true, true); }

/// The walks of muon_step over a matrix of 1024 columns.
struct muon_memory {
    static constexpr int64_t columns = 1024;
    int64_t rows;
    std::vector<float> gradient, momentum, weight, direction;
    std::vector<bf16> shadow;
    std::vector<row_norm> norms;
    step_gate gate = open_gate();
    float inverse = 0.01f;

    explicit muon_memory(int64_t n)
        : rows(n / columns), gradient(numbers(n)), momentum(numbers(n)), weight(numbers(n)), direction(numbers(n)),
          shadow(static_cast<std::size_t>(n)), norms(static_cast<std::size_t>(rows)) {}
    auto matrix(auto& values) { return keel::rows(values.data(), rows, columns); }
    momentum_source<float, float> source() { return {matrix(gradient), matrix(momentum), {}, &gate, 0.95f, 0.05f, true, {}}; }
};
void muon_norm(benchmark::State& state) {
    muon_memory x(state.range(0));
    for (auto _ : state) {
        cpu{}.for_rows(x.rows, x.columns, row_norm_row<momentum_source<float, float>>{x.source(), x.columns, x.norms.data()});
        benchmark::ClobberMemory();
    }
    bytes(state, 8);
}
void muon_direction(benchmark::State& state) {
    muon_memory x(state.range(0));
    for (auto _ : state) {
        cpu{}.for_rows(x.rows, x.columns, direction_row<momentum_source<float, float>, float>{x.source(), {2.0f, 1.0f}, &x.inverse, x.matrix(x.direction), x.columns});
        benchmark::ClobberMemory();
    }
    bytes(state, 16);
}
void muon_weights(benchmark::State& state, bool shadowed) {
    muon_memory x(state.range(0));
    view<bf16, 2> const shadow = shadowed ? x.matrix(x.shadow) : view<bf16, 2>{};
    for (auto _ : state) {
        cpu{}.for_rows(x.rows, x.columns, muon_update_row<float, master_weight_matrix<bf16>>{x.matrix(x.direction), {}, {x.matrix(x.weight), shadow}, {}, x.columns,
                                                                                             {1e-3f, 1e-4f, false}, {}, nullptr});
        benchmark::ClobberMemory();
    }
    bytes(state, shadowed ? 14 : 12);
}
void muon_weights_fp32(benchmark::State& state) { muon_weights(state, false); }
void muon_weights_with_shadow(benchmark::State& state) { muon_weights(state, true); }

/// Moments and weights of 16 bits rounded by chance: 16 bytes a weight; moments in 8-bit blocks with compensated weights: 16 too.
template <class State, class Weights> void adamw_few_bits(benchmark::State& state, State& moments, Weights weights, std::vector<float> const& gradient) {
    for (auto _ : state) {
        adamw_step(cpu{}, vec(gradient.data(), state.range(0)), weights, moments, open_gate(), {.weight_decay = 0.1f}).or_throw();
        benchmark::ClobberMemory();
    }
    bytes(state, 16);
}
void adamw_bf16(benchmark::State& state) {
    int64_t const n = state.range(0);
    auto const gradient = numbers(n);
    std::vector<bf16> w(gradient.size()), m(gradient.size()), v(gradient.size());
    int64_t applied = 0;
    adamw_state_of<bf16> moments{vec(m.data(), n), vec(v.data(), n), &applied};
    adamw_few_bits(state, moments, stochastic_weights<>{vec(w.data(), n)}, gradient);
}
void adamw_8_bits(benchmark::State& state) {
    int64_t const n = state.range(0), blocks = (n + 127) / 128;
    auto const gradient = numbers(n);
    std::vector<bf16> w(gradient.size()), c(gradient.size());
    std::vector<e4m3> m(gradient.size());
    std::vector<e5m2> v(gradient.size());
    std::vector<float> m_scales(static_cast<std::size_t>(blocks)), v_scales(static_cast<std::size_t>(blocks));
    int64_t applied = 0;
    adamw_state_of<row_blocks<e4m3>, row_blocks<e5m2>> moments{{rows(m.data(), 1, n), rows(m_scales.data(), 1, blocks)},
                                                               {rows(v.data(), 1, n), rows(v_scales.data(), 1, blocks)}, &applied};
    adamw_few_bits(state, moments, kahan_weights<>{vec(w.data(), n), vec(c.data(), n)}, gradient);
}

BENCHMARK(copy)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(gate)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_fp32)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_with_shadow)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_with_shadow_and_change)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_bf16)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_8_bits)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(muon_norm)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(muon_direction)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(muon_weights_fp32)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(muon_weights_with_shadow)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);

} // namespace
