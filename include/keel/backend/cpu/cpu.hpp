// The CPU backend: SIMD of one architecture, threads of one executor.
#pragma once

#include <keel/backend/cpu/arch.hpp>
#include <keel/backend/cpu/executor.hpp>
#include <keel/backend/cpu/pairs.hpp>
#include <keel/backend/cpu/row_group.hpp>
#include <keel/backend/cpu/scaled_codes_x86.hpp>
#include <keel/backend/cpu/scaled_floats_x86.hpp>
#include <keel/backend/cpu/scaled_words_x86.hpp>
#include <keel/backend/cpu/top_k.hpp>
#include <keel/backend/cpu/top_rows.hpp>
#include <keel/backend/cpu/turned_codes.hpp>

namespace keel::inline KEEL_ABI {

/// Outputs from this size on go past the caches, which they would only flush: as much as cores commonly share of one.
inline constexpr int64_t streamed_bytes = int64_t{1} << 25;
/// What was stored past the caches comes before what this thread stores next: its word that a chunk is done.
KEEL_FN void store_fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/// One chunk of rows. A named type, so that nothing of a caller's lambda crosses the launch.
template <class Arch, class Kernel> struct cpu_row_chunk {
    Kernel const& kernel;
    int64_t row_count, rows_per_chunk;

    KEEL_FLATTEN static void run(void const* context, int64_t chunk) {
        auto const& self = *static_cast<cpu_row_chunk const*>(context);
        int64_t const first = chunk * self.rows_per_chunk;
        int64_t const last = first + self.rows_per_chunk < self.row_count ? first + self.rows_per_chunk : self.row_count;
        cpu_row_group<Arch> group{};
        if constexpr (requires { self.kernel.output_bytes(); }) group.streams = self.kernel.output_bytes() >= streamed_bytes;
        for (int64_t row = first; row < last; ++row) self.kernel(group, row);
        if (group.streams) store_fence();
    }
};

/// One worker's share of independent host tasks, dealt round robin so that the cut is fixed.
template <class Task> struct cpu_task_chunk {
    Task const& task;
    int64_t task_count, workers;

    static void run(void const* context, int64_t worker) {
        auto const& self = *static_cast<cpu_task_chunk const*>(context);
        for (int64_t i = worker; i < self.task_count; i += self.workers) self.task(i, worker);
    }
};

} // namespace keel::inline KEEL_ABI

namespace keel {

/// `keel::cpu be;` uses this translation unit's architecture on the calling thread. `keel::cpu be(pool);` borrows an executor,
/// which must outlive every call. A value type of one pointer; copies are free.
template <class Arch = native_arch, executor Executor = serial> class cpu {
  public:
    using arch = Arch;

    KEEL_FN cpu()
        requires std::same_as<Executor, serial>
        : executor_(nullptr) {}
    KEEL_FN explicit cpu(Executor const& e) : executor_(&e) {}
    cpu(Executor const&&) = delete; ///< a temporary would be gone before the first call

    KEEL_FN int64_t concurrency() const {
        if constexpr (std::same_as<Executor, serial>) return 1;
        else return at_least_one(executor_->concurrency());
    }
    /// The same architecture on the calling thread: for work inside a task.
    KEEL_FN cpu<Arch, serial> alone() const { return cpu<Arch, serial>{}; }

    /// kernel(group, row) for each row. Rows are cut into chunks of at least some 16 thousand elements; the cut never shows
    /// in the results, because a row is computed by one group in one order.
    template <class Kernel> KEEL_FN void for_rows(int64_t row_count, int64_t width, Kernel const& kernel) const {
        if (row_count <= 0) return;
        int64_t const smallest = 16384 / (width < 1 ? 1 : width) + 1;
        int64_t const workers = concurrency();
        int64_t per_chunk = (row_count + 4 * workers - 1) / (4 * workers);
        if (per_chunk < smallest) per_chunk = smallest;
        if (workers == 1) per_chunk = row_count;
        using chunk = cpu_row_chunk<Arch, Kernel>;
        chunk const context{kernel, row_count, per_chunk};
        run((row_count + per_chunk - 1) / per_chunk, {&chunk::run, &context});
    }

    /// task(i, worker) for each i in [0, n), on up to concurrency() workers; `worker` numbers them, so each can have its own
    /// scratch. Tasks must be independent. Inside a task use alone().
    template <class Task> KEEL_FN void for_tasks(int64_t n, Task const& task) const {
        int64_t const most = concurrency(), workers = n < most ? n : most;
        using chunk = cpu_task_chunk<Task>;
        chunk const context{task, n, workers};
        run(workers, {&chunk::run, &context});
    }

    /// Chunks straight to the executor.
    KEEL_FN void run(int64_t chunks, chunk_task task) const {
        if constexpr (std::same_as<Executor, serial>) serial{}.run(chunks, task);
        else executor_->run(chunks, task);
    }

  private:
    KEEL_FN static int64_t at_least_one(int64_t n) { return n < 1 ? 1 : n; }

    Executor const* executor_;
};
template <executor Executor> cpu(Executor const&) -> cpu<native_arch, Executor>;
cpu() -> cpu<native_arch, serial>;

template <class Arch, class Executor> struct backend_traits<cpu<Arch, Executor>> {
    static constexpr bool is_backend = true;
    static constexpr bool asynchronous = false;
    static constexpr bool one_thread_a_row = true;
    static constexpr memory_space space = memory_space::host;
};

} // namespace keel
