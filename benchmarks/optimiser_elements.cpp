// The element work of a step beside a copy of the same bytes: make_gate reads 4 bytes a weight, adamw_step moves 28 (30 with a shadow).
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/optim/adamw.hpp>

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

BENCHMARK(copy)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(gate)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_fp32)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_with_shadow)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);
BENCHMARK(adamw_with_shadow_and_change)->Arg(1 << 14)->Arg(1 << 18)->Arg(1 << 23);

} // namespace
