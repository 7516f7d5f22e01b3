// The router and what surrounds the experts: tokens a second, and the time as a multiple of the floor, which is reading the inputs and
// writing the outputs at the speed that a copy of that many bytes reached right before. One thread.
#include <cstring>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/moe/dispatch.hpp>
#include <keel/moe/route.hpp>

#include "support/in_turns.hpp"
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

/// DeepSeek-V3's limit: four of eight groups.
void route_groups(benchmark::State& state) {
    batch<float> b(state, score_function::sigmoid);
    b.options.groups = 8, b.options.top_groups = 4;
    measure(state, b.tokens, b.logit_bytes() + b.tokens * b.k * 8, [&] { b.route_all(); });
}
/// What capacity alone takes in each order. Floor: the ids read, the slots written.
void place_by(benchmark::State& state, drop_order order) {
    batch<float> b(state, score_function::sigmoid);
    std::vector<std::byte> queues(batch<float>::size(apply_capacity_workspace(b.tokens, b.experts, b.k, order)));
    workspace const ws{queues.data(), static_cast<int64_t>(queues.size())};
    b.route_all();
    measure(state, b.tokens, b.tokens * b.k * 12, [&] {
        apply_capacity(cpu<>{}, b.id(), b.w(), b.demand, b.where(), b.served, {}, {capacity_limit::factor(1, 1), order}, ws).or_throw();
    });
}
/// With two next choices a token.
void reroute(benchmark::State& state) {
    batch<float> b(state, score_function::sigmoid);
    b.options.spare = 2;
    std::vector<int32_t> choices(batch<float>::size(b.tokens * (b.k + 2)));
    std::vector<std::byte> queues(batch<float>::size(reroute_overflow_workspace(b.tokens, b.experts, b.k, 2)));
    workspace const ws{queues.data(), static_cast<int64_t>(queues.size())};
    auto const all = rows(choices.data(), b.tokens, b.k + 2);
    route(cpu<>{}, b.z(), {.bias = vec(b.bias.data(), b.experts)}, all, b.w(), b.demand, {}, b.options, b.ws()).or_throw();
    measure(state, b.tokens, b.tokens * (b.k * 12 + (b.k + 2) * 4), [&] {
        reroute_overflow(cpu<>{}, all, b.w(), b.demand, b.id(), b.where(), b.served, {}, {capacity_limit::factor(1, 1)}, ws).or_throw();
    });
}

/// Rows of bf16 of the given width on their way to the experts and back. Floor: each row that is read, each that is written.
struct moved_rows : batch<float> {
    int64_t width;
    keel_bench::aligned_vector<bf16> x, expert_rows, y, dexpert_rows;

    explicit moved_rows(benchmark::State const& state)
        : batch<float>(state, score_function::sigmoid), width(state.range(3)), x(size(tokens * width)), y(x.size()) {
        route_all(), place();
        expert_rows.resize(size(served.total() * width)), dexpert_rows.resize(expert_rows.size());
    }
    view<bf16, 2> of_tokens(keel_bench::aligned_vector<bf16>& v) { return rows(v.data(), tokens, width); }
    view<bf16, 2> of_experts(keel_bench::aligned_vector<bf16>& v) { return rows(v.data(), served.total(), width); }
    int64_t row_bytes(int64_t token_rows, int64_t expert_row_sets) const {
        return (token_rows * tokens + expert_row_sets * served.total()) * 2 * width;
    }
};
void dispatch_rows(benchmark::State& state) {
    moved_rows m(state);
    measure(state, m.tokens, m.row_bytes(1, 1), [&] { dispatch(cpu<>{}, m.of_tokens(m.x), m.where(), m.of_experts(m.expert_rows)).or_throw(); });
}
void combine_rows(benchmark::State& state) {
    moved_rows m(state);
    measure(state, m.tokens, m.row_bytes(2, 1), [&] {
        combine(cpu<>{}, m.of_experts(m.expert_rows), m.where(), m.w(), m.of_tokens(m.x), m.of_tokens(m.y)).or_throw();
    });
}
void combine_with_share(benchmark::State& state) {
    moved_rows m(state);
    std::vector<float> terms(moved_rows::size(4 * m.tokens));
    measure(state, m.tokens, m.row_bytes(2, 1), [&] {
        combine(cpu<>{}, m.of_experts(m.expert_rows), m.where(), m.w(), m.of_tokens(m.x), m.of_tokens(m.y), {.share_terms = rows(terms.data(), m.tokens, 4)})
            .or_throw();
    });
}
void dispatch_gradient(benchmark::State& state) {
    moved_rows m(state);
    measure(state, m.tokens, m.row_bytes(1, 1), [&] { dispatch_backward(cpu<>{}, m.of_experts(m.expert_rows), m.where(), m.of_tokens(m.y)).or_throw(); });
}
void combine_gradient(benchmark::State& state) {
    moved_rows m(state);
    measure(state, m.tokens, m.row_bytes(1, 2), [&] {
        combine_backward(cpu<>{}, m.of_tokens(m.y), m.of_experts(m.expert_rows), m.where(), m.w(),
                         {.dexpert_rows = m.of_experts(m.dexpert_rows), .dweights = rows(m.dweights.data(), m.tokens, m.k)})
            .or_throw();
    });
}

void route_fp32(benchmark::State& state, score_function f) { route_only<float>(state, f); }
void route_bf16(benchmark::State& state, score_function f) { route_only<bf16>(state, f); }
void route_place_fp32(benchmark::State& state, score_function f) { route_and_place<float>(state, f); }
void forward_backward_fp32(benchmark::State& state, score_function f) { forward_and_backward<float>(state, f); }

#define KEEL_ROUTER_CASES ->Args({8192, 64, 8})->Args({8192, 256, 8})->Args({8192, 512, 10})->Args({8192, 896, 16})->Unit(benchmark::kMillisecond)
BENCHMARK_CAPTURE(route_fp32, softmax, score_function::softmax) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_fp32, sqrt_softplus, score_function::sqrt_softplus) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_bf16, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(route_place_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK_CAPTURE(forward_backward_fp32, sigmoid, score_function::sigmoid) KEEL_ROUTER_CASES;
BENCHMARK(route_groups)->Args({8192, 256, 8})->Unit(benchmark::kMillisecond);
#define KEEL_PLACE_CASES ->Args({8192, 64, 8})->Args({8192, 256, 8})->Unit(benchmark::kMillisecond)
BENCHMARK_CAPTURE(place_by, position, drop_order::position) KEEL_PLACE_CASES;
BENCHMARK_CAPTURE(place_by, weight, drop_order::weight) KEEL_PLACE_CASES;
BENCHMARK_CAPTURE(place_by, batch_prioritised, drop_order::batch_prioritised) KEEL_PLACE_CASES;
BENCHMARK(reroute) KEEL_PLACE_CASES;
#define KEEL_MOVED_CASES ->Args({2048, 64, 8, 1024})->Args({8192, 64, 8, 2048})->Unit(benchmark::kMillisecond)
BENCHMARK(dispatch_rows) KEEL_MOVED_CASES;
BENCHMARK(dispatch_gradient) KEEL_MOVED_CASES;
BENCHMARK(combine_rows) KEEL_MOVED_CASES;
BENCHMARK(combine_with_share) KEEL_MOVED_CASES;
BENCHMARK(combine_gradient) KEEL_MOVED_CASES;

} // namespace
