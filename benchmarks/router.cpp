// The router and what surrounds the experts: tokens a second, and the time as a multiple of the floor, which is reading the inputs and
// writing the outputs at the speed that a copy of that many bytes reached right before. One thread.
#include <cstring>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/route.hpp>

#include "support/peak.hpp"

namespace {

using namespace keel;

/// Seconds that moving `bytes` takes when half of them are read and half written, best of five.
double copy_seconds(int64_t bytes) {
    std::vector<char> from(static_cast<std::size_t>(bytes / 2) + 1, 1), to(from.size());
    double best = 1e9;
    for (int run = 0; run < 5; ++run) {
        double const start = keel_bench::thread_seconds();
        std::memcpy(to.data(), from.data(), from.size());
        benchmark::DoNotOptimize(to.data());
        benchmark::ClobberMemory();
        double const seconds = keel_bench::thread_seconds() - start;
        if (seconds < best) best = seconds;
    }
    return best;
}

void measure(benchmark::State& state, int64_t tokens, int64_t bytes, auto const& body) {
    double const floor = copy_seconds(bytes);
    double const start = keel_bench::thread_seconds();
    for (auto _ : state) {
        body();
        benchmark::ClobberMemory();
    }
    double const each = (keel_bench::thread_seconds() - start) / static_cast<double>(state.iterations());
    using benchmark::Counter;
    state.counters["tokens/s"] = Counter(static_cast<double>(tokens), Counter::kIsIterationInvariantRate);
    state.counters["of_floor"] = each / floor;
    state.SetBytesProcessed(state.iterations() * bytes);
}

/// A routed batch and all of its buffers.
template <class L> struct batch {
    int64_t tokens, experts, k;
    std::vector<L> logits;
    std::vector<float> bias, weights, dweights, dlogits;
    std::vector<int32_t> ids;
    std::vector<int64_t> asked, given, slots, offsets;
    std::vector<std::byte> memory;
    demand_counts demand;
    served_counts served;
    route_options options;

    batch(benchmark::State const& state, score_function score)
        : tokens(state.range(0)), experts(state.range(1)), k(state.range(2)), logits(size(tokens * experts)), bias(size(experts)),
          weights(size(tokens * k)), dweights(size(tokens * k), 1.0f), dlogits(size(tokens * experts)), ids(size(tokens * k)),
          asked(size(experts)), given(size(experts)), slots(size(tokens * k)), offsets(size(experts + 1)),
          memory(size(route_workspace(tokens, experts) + apply_capacity_workspace(tokens, experts))), demand(vec(asked.data(), experts)),
          served(vec(given.data(), experts)), options{.score = score} {
        std::mt19937 engine(1);
        std::normal_distribution<float> normal;
        for (L& z : logits) {
            if constexpr (std::is_same_v<L, float>) z = normal(engine);
            else z = encode<L>(normal(engine));
        }
        for (float& b : bias) b = 0.02f * normal(engine);
    }
    static std::size_t size(int64_t n) { return static_cast<std::size_t>(n); }
    workspace ws() { return {memory.data(), static_cast<int64_t>(memory.size())}; }
    expert_slots where() { return {rows(slots.data(), tokens, k), vec(offsets.data(), experts + 1)}; }
    view<L, 2> z() { return rows(logits.data(), tokens, experts); }
    view<int32_t, 2> id() { return rows(ids.data(), tokens, k); }
    view<float, 2> w() { return rows(weights.data(), tokens, k); }

    void route_all() { route(cpu<>{}, z(), {.bias = vec(bias.data(), experts)}, id(), w(), demand, {}, options, ws()).or_throw(); }
    void place() { apply_capacity(cpu<>{}, id(), demand, where(), served, {.limit = capacity_limit::factor(5, 4)}, ws()).or_throw(); }
    int64_t logit_bytes() const { return tokens * experts * static_cast<int64_t>(sizeof(L)); }
};

template <class L> void route_only(benchmark::State& state, score_function score) {
    batch<L> b(state, score);
    measure(state, b.tokens, b.logit_bytes() + b.tokens * b.k * 8, [&] { b.route_all(); });
}
template <class L> void route_and_place(benchmark::State& state, score_function score) {
    batch<L> b(state, score);
    measure(state, b.tokens, b.logit_bytes() + b.tokens * b.k * 16, [&] { b.route_all(), b.place(); });
}
template <class L> void forward_and_backward(benchmark::State& state, score_function score) {
    batch<L> b(state, score);
    measure(state, b.tokens, 3 * b.logit_bytes() + b.tokens * b.k * 28, [&] {
        b.route_all(), b.place();
        route_backward(cpu<>{}, rows(b.dweights.data(), b.tokens, b.k), b.z(), b.id(), b.w(), rows(b.dlogits.data(), b.tokens, b.experts), b.options)
            .or_throw();
    });
}

/// Moving rows of bf16 of the given width.
void dispatch_and_combine(benchmark::State& state) {
    batch<float> b(state, score_function::sigmoid);
    int64_t const width = state.range(3);
    b.route_all(), b.place();
    std::vector<bf16> x(batch<float>::size(b.tokens * width)), expert_rows(batch<float>::size(b.served.total() * width)), y(x.size());
    auto const all = rows(expert_rows.data(), b.served.total(), width);
    measure(state, b.tokens, 2 * (b.tokens + b.served.total()) * 2 * width, [&] {
        dispatch(cpu<>{}, rows(x.data(), b.tokens, width), b.where(), all).or_throw();
        combine(cpu<>{}, all, b.where(), b.w(), view<bf16, 2>{}, rows(y.data(), b.tokens, width)).or_throw();
    });
}

void route_fp32(benchmark::State& state, score_function f) { route_only<float>(state, f); }
void route_bf16(benchmark::State& state, score_function f) { route_only<bf16>(state, f); }
void route_place_fp32(benchmark::State& state, score_function f) { route_and_place<float>(state, f); }
void forward_backward_fp32(benchmark::State& state, score_function f) { forward_and_backward<float>(state, f); }

#define KEEL_ROUTER_CASES ->Args({8192, 64, 8})->Args({8192, 256, 8})->Unit(benchmark::kMillisecond)
BENCHMARK_CAPTURE(route_fp32, softmax, score_function::softmax) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_fp32, sqrt_softplus, score_function::sqrt_softplus) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_bf16, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_place_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(forward_backward_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK(dispatch_and_combine)->Args({2048, 64, 8, 1024})->Unit(benchmark::kMillisecond);

} // namespace
