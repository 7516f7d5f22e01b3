// A fork-join pool of std::threads that the caller owns.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <keel/backend/cpu/executor.hpp>

namespace keel::inline KEEL_ABI {

/// Where a pool's workers may run.
enum class worker_placement : uint8_t {
    by_system,        ///< wherever the system puts them: nothing is asked for
    away_from_caller, ///< not on the processor that the thread calling run() is on (Linux; elsewhere as by_system)
};

/// `threads - 1` workers and the calling thread. Chunks are claimed one at a time, so uneven chunks balance. Workers look for work for some
/// tens of microseconds after a run, then sleep: back-to-back primitives start fast, an idle pool costs nothing, and on a busy machine nobody
/// spins for long. run() waits for the workers that took part, never for one that came too late, and wakes no more than it has chunks for.
/// run() inside a chunk, or from a second thread at the same time, runs serially.
///
/// Linux in a KVM guest wakes a sleeping worker on the caller's own processor, as it takes idle ones for lost, and moves it milliseconds later:
/// short calls then run on one processor. away_from_caller forbids the workers that processor, by their affinity, within the one that the
/// pool's maker had; it does so only where the caller moved since the last time, and where there are processors for all threads.
class thread_pool {
  public:
    explicit thread_pool(int64_t threads, worker_placement placement = worker_placement::by_system)
        : worker_count_(threads > 1 ? threads - 1 : 0),
          workers_(worker_count_ > 0 ? std::make_unique<std::thread[]>(static_cast<std::size_t>(worker_count_)) : nullptr) {
        if (placement == worker_placement::away_from_caller) affinity_.learn(worker_count_ + 1);
        start(); // std::system_error where the machine has no more threads to give; those that did start are joined
    }
    ~thread_pool() { stop(worker_count_); }
    thread_pool(thread_pool const&) = delete;
    thread_pool& operator=(thread_pool const&) = delete;

    int64_t concurrency() const { return worker_count_ + 1; }

    void run(int64_t chunks, chunk_task task) const {
        bool idle = false;
        if (worker_count_ == 0 || chunks <= 1 || !busy_.compare_exchange_strong(idle, true, std::memory_order_acquire)) {
            serial{}.run(chunks, task);
            return;
        }
        affinity_.keep_away(workers_.get(), worker_count_);
        int64_t to_wake = 0;
        {
            std::lock_guard const lock(mutex_);
            task_ = task;
            chunks_ = chunks;
            open_ = true;
            next_.store(0, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
            int64_t const wanted = chunks - 1 - (worker_count_ - sleeping_); // besides those that look for work
            to_wake = sleeping_ < wanted ? sleeping_ : wanted;
        }
        for (int64_t i = 0; i < to_wake; ++i) wake_.notify_one();
        claim(task, chunks);
        {
            std::lock_guard const lock(mutex_);
            open_ = false;
        }
        for (int spin = 0; joined_.load(std::memory_order_acquire) != 0; ++spin)
            if (spin > spin_limit) {
                std::unique_lock lock(mutex_);
                done_.wait(lock, [this] { return joined_.load(std::memory_order_acquire) == 0; });
            } else {
                relax();
            }
        busy_.store(false, std::memory_order_release);
    }

  private:
    static constexpr int spin_limit = 2000; // tens of microseconds

    /// The processors of the pool's maker, and which of them the workers were last kept away from.
    struct affinity {
#if defined(__linux__)
        cpu_set_t allowed = {};
        int caller = -1;
        bool known = false;

        void learn(int64_t threads) { known = sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) >= threads; }
        void keep_away(std::thread* workers, int64_t count) {
            if (!known) return;
            int const here = sched_getcpu();
            if (here == caller || here < 0 || here >= CPU_SETSIZE) return;
            cpu_set_t others = allowed;
            CPU_CLR(static_cast<std::size_t>(here), &others);
            for (int64_t i = 0; i < count; ++i) pthread_setaffinity_np(workers[i].native_handle(), sizeof others, &others);
            caller = here;
        }
#else
        void learn(int64_t) {}
        void keep_away(std::thread*, int64_t) {}
#endif
    };

    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
    void start() {
        int64_t started = 0;
        struct undo {
            thread_pool& pool;
            int64_t const& started;
            ~undo() {
                if (started < pool.worker_count_) pool.stop(started);
            }
        } const guard{*this, started};
        for (; started < worker_count_; ++started) workers_[static_cast<std::size_t>(started)] = std::thread([this] { work(); });
    }
    void stop(int64_t started) {
        {
            std::lock_guard const lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (int64_t i = 0; i < started; ++i) workers_[static_cast<std::size_t>(i)].join();
    }
    void claim(chunk_task task, int64_t chunks) const {
        for (int64_t i = next_.fetch_add(1, std::memory_order_relaxed); i < chunks; i = next_.fetch_add(1, std::memory_order_relaxed))
            task(i);
    }
    void work() {
        uint64_t seen = 0;
        for (;;) {
            for (int spin = 0; spin < spin_limit && round_.load(std::memory_order_acquire) == seen; ++spin) relax();
            chunk_task task;
            int64_t chunks = 0;
            {
                std::unique_lock lock(mutex_);
                ++sleeping_;
                wake_.wait(lock, [&] { return stopping_ || round_.load(std::memory_order_relaxed) != seen; });
                --sleeping_;
                if (stopping_) return;
                seen = round_.load(std::memory_order_relaxed);
                if (!open_) continue; // too late
                joined_.fetch_add(1, std::memory_order_relaxed);
                task = task_;
                chunks = chunks_;
            }
            claim(task, chunks);
            if (joined_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard const lock(mutex_);
                done_.notify_one();
            }
        }
    }

    int64_t worker_count_;
    std::unique_ptr<std::thread[]> workers_;
    mutable affinity affinity_;
    mutable std::mutex mutex_;
    mutable std::condition_variable wake_, done_;
    mutable std::atomic<bool> busy_{false};
    mutable std::atomic<uint64_t> round_{0};
    mutable std::atomic<int64_t> next_{0}, joined_{0};
    // Under the mutex.
    mutable chunk_task task_;
    mutable int64_t chunks_ = 0;
    mutable bool open_ = false; ///< workers may join the round
    int64_t sleeping_ = 0;      ///< workers that wait to be woken
    bool stopping_ = false;
};

} // namespace keel::inline KEEL_ABI
