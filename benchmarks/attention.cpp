// Attention: flops of the causal triangle a second (4 and 10 times head_dim a query-key pair, forward and backward), as a share of
// the fma peak measured right before. QK-norm: bytes moved a second. One thread.
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include <keel/attention/gated_attention.hpp>
#include <keel/attention/qk_norm.hpp>
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/format/float32.hpp>

#include "support/peak.hpp"

namespace {

using namespace keel;

std::size_t size(int64_t n) { return static_cast<std::size_t>(n); }

template <class T> std::vector<T> normal_values(int64_t n) {
    std::mt19937 engine(1);
    std::normal_distribution<float> normal;
    std::vector<T> x(size(n));
    for (T& v : x) {
        if constexpr (std::is_same_v<T, float>)
            v = normal(engine);
        else
            v = encode<T>(normal(engine));
    }
    return x;
}

/// Documents of one length, and all that a call takes. Arguments: documents, length, heads, kv_heads, head_dim, gate_dim.
template <class T> struct attention_call {
    int64_t documents, length, tokens, heads, kv_heads, head_dim, gate_dim;
    std::vector<T> q, k, v, gate, y, dy, dq, dk, dv, dgate;
    std::vector<float> lse;
    std::vector<int64_t> offsets;
    std::vector<std::byte> forward_memory, backward_memory;

    explicit attention_call(benchmark::State const& state)
        : documents(state.range(0)), length(state.range(1)), tokens(documents * length), heads(state.range(2)),
          kv_heads(state.range(3)), head_dim(state.range(4)), gate_dim(state.range(5)),
          q(normal_values<T>(tokens * heads * head_dim)), k(normal_values<T>(tokens * kv_heads * head_dim)), v(k),
          gate(normal_values<T>(tokens * heads * gate_dim)), y(q.size()), dy(q), dq(q.size()), dk(k.size()),
          dv(k.size()), dgate(gate.size()), lse(size(tokens * heads)),
          forward_memory(size(gated_attention_workspace<T>(cpu<>{}, shape()))),
          backward_memory(size(gated_attention_backward_workspace<T>(cpu<>{}, shape()))) {
        for (int64_t d = 0; d <= documents; ++d) offsets.push_back(d * length);
    }
    attention_shape shape() const { return {tokens, heads, kv_heads, head_dim}; }
    view<T, 3> of(std::vector<T>& x, int64_t head_count) { return cube(x.data(), tokens, head_count, head_dim); }
    view<T, 3> gate_of(std::vector<T>& x) {
        return gate_dim == 0 ? view<T, 3>{} : cube(x.data(), tokens, heads, gate_dim);
    }
    view<int64_t, 1> starts() { return vec(offsets.data(), documents + 1); }

    void forward(attention_telemetry telemetry = {}) {
        gated_attention(cpu<>{}, of(q, heads), of(k, kv_heads), of(v, kv_heads), gate_of(gate), starts(), of(y, heads),
                        {.lse = rows(lse.data(), tokens, heads)}, telemetry, {},
                        {forward_memory.data(), static_cast<int64_t>(forward_memory.size())})
            .or_throw();
    }
    void backward() {
        gated_attention_backward(
            cpu<>{}, of(dy, heads), of(q, heads), of(k, kv_heads), of(v, kv_heads), gate_of(gate), starts(),
            of(y, heads), {.lse = rows(lse.data(), tokens, heads)},
            {.dq = of(dq, heads), .dk = of(dk, kv_heads), .dv = of(dv, kv_heads), .dgate = gate_of(dgate)}, {},
            {backward_memory.data(), static_cast<int64_t>(backward_memory.size())})
            .or_throw();
    }
    double pairs() const {
        return static_cast<double>(documents * heads) * static_cast<double>(length * (length + 1)) / 2;
    }
};

void measure(benchmark::State& state, double flops, std::string const& plan, auto const& body) {
    double const peak = keel_bench::fma_peak();
    double const start = keel_bench::thread_seconds();
    for (auto _ : state) {
        body();
        benchmark::ClobberMemory();
    }
    double const rate = flops * static_cast<double>(state.iterations()) / (keel_bench::thread_seconds() - start);
    state.counters["flop/s"] = rate;
    state.counters["of_peak"] = rate / peak;
    state.SetLabel(plan);
}

template <class T> void forward(benchmark::State& state) {
    attention_call<T> call(state);
    measure(state, 4 * static_cast<double>(call.head_dim) * call.pairs(), plan_attention(call.shape()).text(),
            [&] { call.forward(); });
}
template <class T> void forward_with_telemetry(benchmark::State& state) {
    attention_call<T> call(state);
    std::vector<float> numbers(size(3 * call.heads));
    auto const of = [&](int64_t i) { return vec(numbers.data() + i * call.heads, call.heads); };
    measure(state, 4 * static_cast<double>(call.head_dim) * call.pairs(), plan_attention(call.shape()).text(),
            [&] { call.forward({.max_logit = of(0), .first_token_sum = of(1), .entropy_sum = of(2)}); });
}
template <class T> void backward(benchmark::State& state) {
    attention_call<T> call(state);
    call.forward();
    measure(state, 10 * static_cast<double>(call.head_dim) * call.pairs(), plan_attention(call.shape()).text(),
            [&] { call.backward(); });
}

// One long document; batches as small models train on them.
#define KEEL_ATTENTION_CASES                                                                                           \
    ->Args({1, 1024, 8, 8, 64, 0})                                                                                     \
        ->Args({8, 256, 4, 2, 64, 1})                                                                                  \
        ->Args({8, 256, 6, 2, 32, 32})                                                                                 \
        ->Unit(benchmark::kMillisecond)
BENCHMARK(forward<float>) KEEL_ATTENTION_CASES;
BENCHMARK(forward<bf16>) KEEL_ATTENTION_CASES;
BENCHMARK(forward_with_telemetry<bf16>) KEEL_ATTENTION_CASES;
BENCHMARK(backward<float>) KEEL_ATTENTION_CASES;
BENCHMARK(backward<bf16>) KEEL_ATTENTION_CASES;

/// Arguments: tokens, heads, head_dim, rotated elements.
void qk_norm_both_ways(benchmark::State& state, rope_layout layout) {
    int64_t const tokens = state.range(0), heads = state.range(1), head_dim = state.range(2), half = state.range(3) / 2;
    auto x = normal_values<bf16>(tokens * heads * head_dim), y = x, dx = x;
    std::vector<float> delta(size(head_dim)), ddelta(delta), rrms(size(tokens * heads)), cosine(size(tokens * half)),
        sine(cosine), frequencies(size(half), 0.01f);
    std::vector<int64_t> positions(size(tokens), 7);
    std::vector<std::byte> memory(size(qk_norm_backward_workspace(tokens, heads, head_dim)));
    auto const of = [&](std::vector<bf16>& v) { return cube(v.data(), tokens, heads, head_dim); };
    auto const c = rows(cosine.data(), tokens, half), s = rows(sine.data(), tokens, half);
    rope_table(cpu<>{}, vec(positions.data(), tokens), vec(frequencies.data(), half), c, s).or_throw();
    for (auto _ : state) {
        qk_norm(cpu<>{}, of(x), vec(delta.data(), head_dim), {c, s}, of(y), {.rrms = rows(rrms.data(), tokens, heads)},
                {.layout = layout})
            .or_throw();
        qk_norm_backward(cpu<>{}, of(y), of(x), vec(delta.data(), head_dim), {c, s},
                         {.rrms = rows(rrms.data(), tokens, heads)},
                         {.dx = of(dx), .ddelta = vec(ddelta.data(), head_dim)}, {.layout = layout},
                         {memory.data(), static_cast<int64_t>(memory.size())})
            .or_throw();
        benchmark::ClobberMemory();
    }
    state.SetBytesProcessed(state.iterations() * tokens * heads * head_dim * 10); // x, y; dy, x, dx in bf16
}
BENCHMARK_CAPTURE(qk_norm_both_ways, half_pairs, rope_layout::half_pairs)
    ->Args({8192, 8, 64, 32})
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(qk_norm_both_ways, interleaved_pairs, rope_layout::interleaved_pairs)
    ->Args({8192, 8, 64, 32})
    ->Unit(benchmark::kMillisecond);

} // namespace
