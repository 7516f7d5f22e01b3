// Matrix products: GF/s, the share of the peak that this core showed right before (fma of floats, dot of bf16 pairs), and Eigen on the same work.
// One thread. Symmetric products count the flops of the full one.
#include <cstring>
#include <random>
#include <vector>

#include <Eigen/Core>
#include <benchmark/benchmark.h>

#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/format/fp8.hpp>

#include "support/peak.hpp"

namespace {

using namespace keel;

template <class T> std::vector<T> random_matrix(int64_t n) {
    std::mt19937 engine(7);
    std::vector<T> x(static_cast<std::size_t>(n));
    for (T& v : x) {
        float const f = static_cast<float>(engine() >> 8) * 0x1p-23f - 1.0f;
        if constexpr (std::is_same_v<T, float>)
            v = f;
        else if constexpr (sizeof(T) > 1)
            v = encode<T>(f);
        else
            v = encode<T, overflow::saturate>(f);
    }
    return x;
}

/// Times body(), and reports flops a second against the peak.
template <class In> void measure(benchmark::State& state, double flops, auto const& body) {
    double const peak = std::is_same_v<In, float> ? keel_bench::fma_peak() : keel_bench::dot_peak();
    for (auto _ : state) {
        body();
        benchmark::ClobberMemory();
    }
    using benchmark::Counter;
    state.counters["flop/s"] = Counter(flops, Counter::kIsIterationInvariantRate);
    state.counters["of_peak"] = Counter(flops / peak, Counter::kIsIterationInvariantRate);
}

/// C[m, n] = A[m, k] W[n, k]^T, the forward product of a linear layer; with `turned`, C = A W with W [k, n], its input gradient.
template <class In, class Out>
void product(benchmark::State& state, bool turned, product_form form = product_form::full) {
    int64_t const m = state.range(0), n = state.range(1), k = state.range(2);
    auto const a = random_matrix<In>(m * k), w = random_matrix<In>(n * k);
    auto c = random_matrix<Out>(m * n);
    cpu<> const be;
    std::vector<std::byte> memory(static_cast<std::size_t>(matmul_workspace(be, m, n, k)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    auto const right = turned ? rows(w.data(), k, n) : transposed(rows(w.data(), n, k));
    state.SetLabel(plan_matmul<native_arch>(m, n, k).text());
    measure<In>(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
            [&] { matmul(be, rows(a.data(), m, k), right, rows(c.data(), m, n), {.form = form}, ws).or_throw(); });
}

void fp32(benchmark::State& state) { product<float, float>(state, false); }
void fp32_turned(benchmark::State& state) { product<float, float>(state, true); }
void fp32_symmetric(benchmark::State& state) { product<float, float>(state, false, product_form::symmetric); }
void bf16_to_bf16(benchmark::State& state) { product<bf16, bf16>(state, false); }
void bf16_turned(benchmark::State& state) { product<bf16, bf16>(state, true); }
void bf16_symmetric(benchmark::State& state) { product<bf16, bf16>(state, false, product_form::symmetric); }

/// A weight gradient: C[m, n] = X[k, m]^T Y[k, n].
void bf16_gradient(benchmark::State& state) {
    int64_t const m = state.range(0), n = state.range(1), k = state.range(2);
    auto const x = random_matrix<bf16>(m * k), y = random_matrix<bf16>(n * k);
    std::vector<float> c(static_cast<std::size_t>(m * n));
    cpu<> const be;
    std::vector<std::byte> memory(static_cast<std::size_t>(matmul_workspace(be, m, n, k)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    measure<bf16>(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k), [&] {
        matmul(be, transposed(rows(x.data(), k, m)), rows(y.data(), k, n), rows(c.data(), m, n), {}, ws).or_throw();
    });
}

struct line_scale {
    KEEL_FN float operator()(int64_t, int64_t line, int64_t block) const {
        return 1.0f + static_cast<float>(line + block);
    }
};
/// e4m3 codes with a scale every 128 k.
void e4m3_promoted(benchmark::State& state) {
    int64_t const m = state.range(0), n = state.range(1), k = state.range(2);
    auto const a = random_matrix<e4m3>(m * k), w = random_matrix<e4m3>(n * k);
    std::vector<bf16> c(static_cast<std::size_t>(m * n));
    cpu<> const be;
    std::vector<std::byte> memory(static_cast<std::size_t>(matmul_promoted_workspace(be, m, n, k, 128)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    product_set const set{layout_of(rows(a.data(), m, k)),
                          layout_of(transposed(rows(w.data(), n, k))),
                          layout_of(rows(c.data(), m, n)),
                          1,
                          m,
                          n,
                          k};
    measure<bf16>(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k), [&] {
        matmul_promoted<e4m3, e4m3, bf16>(be, set, promotion<line_scale, line_scale>{128, {}, {}}, ws).or_throw();
    });
}

void eigen(benchmark::State& state) {
    using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    Eigen::Index const m = state.range(0), n = state.range(1), k = state.range(2);
    matrix const a = matrix::Random(m, k), w = matrix::Random(n, k);
    matrix c(m, n);
    measure<float>(state, 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k),
            [&] { c.noalias() = a * w.transpose(); });
}

/// Many small products: batch x [64, 64, 64], as attention heads are.
void fp32_batch(benchmark::State& state) {
    int64_t const batch = state.range(0), n = state.range(1);
    auto const a = random_matrix<float>(batch * n * n), b = random_matrix<float>(batch * n * n);
    std::vector<float> c(a.size());
    cpu<> const be;
    std::vector<std::byte> memory(static_cast<std::size_t>(matmul_workspace(be, n, n, n, batch)));
    workspace const ws{memory.data(), static_cast<int64_t>(memory.size())};
    double const side = static_cast<double>(n);
    measure<float>(state, 2.0 * side * side * side * static_cast<double>(batch), [&] {
        matmul(be, cube(a.data(), batch, n, n), cube(b.data(), batch, n, n), cube(c.data(), batch, n, n), {}, ws)
            .or_throw();
    });
}

void squares(benchmark::internal::Benchmark* b) {
    for (int64_t n : {64, 128, 256, 512, 1024, 2048}) b->Args({n, n, n});
}
void token_shapes(benchmark::internal::Benchmark* b) { // tokens x width x width of a small model
    for (int64_t m : {128, 512, 1024})
        for (auto [n, k] : {std::pair<int64_t, int64_t>{128, 128}, {256, 256}, {512, 128}, {128, 512}})
            b->Args({m, n, k});
    b->Args({1, 256, 256})->Args({1024, 8, 128});
}
void gradient_shapes(benchmark::internal::Benchmark* b) {
    for (int64_t k : {512, 1024, 4096})
        for (int64_t n : {128, 256}) b->Args({128, n, k});
}

BENCHMARK(fp32)->Apply(squares)->Apply(token_shapes);
BENCHMARK(eigen)->Apply(squares)->Apply(token_shapes);
BENCHMARK(fp32_turned)->Apply(squares);
BENCHMARK(fp32_symmetric)->Apply(squares);
BENCHMARK(fp32_batch)->Args({64, 64})->Args({64, 32})->Args({256, 16});
BENCHMARK(bf16_to_bf16)->Apply(squares)->Apply(token_shapes);
BENCHMARK(bf16_turned)->Apply(token_shapes);
BENCHMARK(bf16_gradient)->Apply(gradient_shapes);
BENCHMARK(bf16_symmetric)->Apply(squares);
BENCHMARK(e4m3_promoted)->Apply(squares)->Apply(token_shapes);

} // namespace
