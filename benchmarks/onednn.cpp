// Matrix products in turns with oneDNN's on the same memory, one thread: flop/s, the share of this core's peak (fma for fp32, the dot of
// pairs for bf16), and of_onednn, oneDNN's time as a share of keel's: above 1 keel is faster. Medians over the rounds.
// oneDNN's threads are OpenMP's: run with OMP_NUM_THREADS=1, as run.sh does.
#include <cstdlib>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include <benchmark/benchmark.h>
#include <oneapi/dnnl/dnnl.hpp>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>

#include "support/in_turns.hpp"
#include "support/peak.hpp"

namespace {

using namespace keel;

template <class T> keel_bench::aligned_vector<T> random_numbers(int64_t n) {
    std::mt19937 engine(7);
    keel_bench::aligned_vector<T> x(static_cast<std::size_t>(n));
    for (T& v : x) {
        float const f = static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f;
        if constexpr (std::is_same_v<T, float>) v = f;
        else v = encode<T>(f);
    }
    return x;
}

/// C[i] = A[i] B[i] for `batch` products, B in rows, or in columns where `turned`: the forward of a linear layer.
template <class T> struct products {
    int64_t batch, m, n, k;
    bool turned;
    keel_bench::aligned_vector<T> a, b, own, peers;
    std::vector<std::byte> memory;
    dnnl::engine engine{dnnl::engine::kind::cpu, 0};
    dnnl::stream stream{engine};
    dnnl::matmul primitive;
    std::unordered_map<int, dnnl::memory> arguments;

    products(benchmark::State const& state, bool in_columns)
        : batch(state.range(0)), m(state.range(1)), n(state.range(2)), k(state.range(3)), turned(in_columns),
          a(random_numbers<T>(batch * m * k)), b(random_numbers<T>(batch * k * n)), own(static_cast<std::size_t>(batch * m * n)), peers(own.size()),
          memory(static_cast<std::size_t>(matmul_workspace(cpu<>{}, m, n, k, batch))) {
        auto const type = std::is_same_v<T, float> ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
        dnnl::memory::desc const left({batch, m, k}, type, dnnl::memory::dims{m * k, k, 1}), out({batch, m, n}, type, dnnl::memory::dims{m * n, n, 1});
        dnnl::memory::desc const right({batch, k, n}, type, turned ? dnnl::memory::dims{k * n, 1, k} : dnnl::memory::dims{k * n, n, 1});
#if DNNL_VERSION_MAJOR >= 3
        primitive = dnnl::matmul(dnnl::matmul::primitive_desc(engine, left, right, out));
#else
        primitive = dnnl::matmul(dnnl::matmul::primitive_desc(dnnl::matmul::desc(left, right, out), engine));
#endif
        arguments = {{DNNL_ARG_SRC, {left, engine, a.data()}}, {DNNL_ARG_WEIGHTS, {right, engine, b.data()}}, {DNNL_ARG_DST, {out, engine, peers.data()}}};
    }
    double flops() const { return 2.0 * static_cast<double>(batch) * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k); }
    void run() {
        auto const right = turned ? transposed(cube(b.data(), batch, n, k)) : cube(b.data(), batch, k, n);
        matmul(cpu<>{}, cube(a.data(), batch, m, k), right, cube(own.data(), batch, m, n), {}, {memory.data(), static_cast<int64_t>(memory.size())}).or_throw();
    }
    void run_peer() {
        primitive.execute(stream, arguments);
        stream.wait();
    }
    bool agree() const {
        for (std::size_t i = 0; i < own.size(); ++i) {
            float const x = load_element(&own[i]), y = load_element(&peers[i]);
            if (!(std::abs(x - y) <= 0.02f * (std::abs(x) + std::abs(y)) + 0.05f)) return false;
        }
        return true;
    }
};

template <class T> void against_onednn(benchmark::State& state, bool turned) {
    char const* const threads = std::getenv("OMP_NUM_THREADS");
    if (threads == nullptr || std::string(threads) != "1") return state.SkipWithError("OMP_NUM_THREADS is not 1");
    products<T> all(state, turned);
    all.run(), all.run_peer();
    if (!all.agree()) return state.SkipWithError("the products differ");
    double const peak = std::is_same_v<T, float> ? keel_bench::fma_peak() : keel_bench::dot_peak();
    auto const call = [&] { all.run(); };
    auto const batch = 1 + static_cast<int64_t>(2e-3 / keel_bench::seconds(1, call));
    std::vector<double> speed, ratio;
    while (state.KeepRunningBatch(batch)) {
        double const own = keel_bench::seconds(batch, call);
        state.PauseTiming();
        speed.push_back(all.flops() / own);
        ratio.push_back(keel_bench::seconds(batch, [&] { all.run_peer(); }) / own);
        state.ResumeTiming();
    }
    state.counters["flop/s"] = keel_bench::median(speed);
    state.counters["of_peak"] = keel_bench::median(speed) / peak;
    state.counters["of_onednn"] = keel_bench::median(ratio);
}
void fp32(benchmark::State& state) { against_onednn<float>(state, false); }
void fp32_turned(benchmark::State& state) { against_onednn<float>(state, true); }
void bf16_(benchmark::State& state) { against_onednn<bf16>(state, false); }
void bf16_turned(benchmark::State& state) { against_onednn<bf16>(state, true); }

void squares(benchmark::internal::Benchmark* b) {
    b->ArgNames({"batch", "m", "n", "k"})->Unit(benchmark::kMicrosecond);
    for (int64_t n : {64, 128, 256, 512, 1024, 2048}) b->Args({1, n, n, n});
}
void experts(benchmark::internal::Benchmark* b) { // tokens of an expert by its widths, and heads of attention
    for (int64_t tokens : {16, 64, 128}) b->Args({16, tokens, 256, 128});
    b->Args({64, 64, 64, 64})->Args({64, 32, 32, 32})->Args({256, 16, 16, 16});
}
BENCHMARK(fp32)->Apply(squares)->Apply(experts);
BENCHMARK(fp32_turned)->Apply(squares);
BENCHMARK(bf16_)->Name("bf16")->Apply(squares)->Apply(experts);
BENCHMARK(bf16_turned)->Apply(squares);

} // namespace
