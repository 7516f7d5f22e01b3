// How a CPU backend spends threads: it asks an executor to run n independent chunks and waits. Keel never makes threads
// of its own; the caller hands an executor in, and may hand in any type that models `executor`.
#pragma once

#include <concepts>

#include <keel/config.hpp>

namespace keel {

/// One task of many: call with a chunk index. Trivially copyable; valid until run() returns.
struct chunk_task {
    void (*call)(void const* context, int64_t chunk) = nullptr;
    void const* context = nullptr;
    KEEL_FN void operator()(int64_t chunk) const { call(context, chunk); }
};

/// `run(n, task)` calls task(0) ... task(n - 1), each once, in any order, on any threads, and returns when all are done.
/// `concurrency()` is the number of chunks that can make progress at once. It decides how work is cut, never a result's bits.
template <class E>
concept executor = requires(E const& e, int64_t chunks, chunk_task task) {
    { e.concurrency() } -> std::convertible_to<int64_t>;
    e.run(chunks, task);
};

/// The calling thread alone.
struct serial {
    KEEL_FN int64_t concurrency() const { return 1; }
    KEEL_FN void run(int64_t chunks, chunk_task task) const {
        for (int64_t i = 0; i < chunks; ++i) task(i);
    }
};

#if defined(_OPENMP)
/// OpenMP's threads, where the translation unit is compiled with OpenMP.
struct openmp {
    int threads = 1;
    KEEL_FN int64_t concurrency() const { return threads; }
    KEEL_FN void run(int64_t chunks, chunk_task task) const {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
        for (int64_t i = 0; i < chunks; ++i) task(i);
    }
};
#endif

} // namespace keel
