// A fork-join pool of std::threads that the caller owns.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include <keel/backend/cpu/executor.hpp>

namespace keel::inline KEEL_ABI {

/// `threads - 1` workers and the calling thread. Chunks are claimed one at a time, so uneven chunks balance. Workers
/// look for work for some tens of microseconds after a run, then sleep: back-to-back primitives start fast, an idle pool costs nothing,
/// and on a busy machine nobody spins for long. run() inside a chunk, or from a second thread at the same time, runs serially.
class thread_pool {
  public:
    explicit thread_pool(int64_t threads)
        : worker_count_(threads > 1 ? threads - 1 : 0),
          workers_(worker_count_ > 0 ? std::make_unique<std::thread[]>(static_cast<std::size_t>(worker_count_)) : nullptr) {
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
        {
            std::lock_guard const lock(mutex_);
            task_ = task;
            chunks_ = chunks;
            next_.store(0, std::memory_order_relaxed);
            running_.store(worker_count_, std::memory_order_relaxed);
            round_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        claim(task, chunks);
        for (int spin = 0; running_.load(std::memory_order_acquire) != 0; ++spin)
            if (spin > spin_limit) {
                std::unique_lock lock(mutex_);
                done_.wait(lock, [this] { return running_.load(std::memory_order_acquire) == 0; });
            } else {
                relax();
            }
        busy_.store(false, std::memory_order_release);
    }

  private:
    static constexpr int spin_limit = 2000; // tens of microseconds

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
                wake_.wait(lock, [&] { return stopping_ || round_.load(std::memory_order_relaxed) != seen; });
                if (stopping_) return;
                seen = round_.load(std::memory_order_relaxed);
                task = task_;
                chunks = chunks_;
            }
            claim(task, chunks);
            if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard const lock(mutex_);
                done_.notify_one();
            }
        }
    }

    int64_t worker_count_;
    std::unique_ptr<std::thread[]> workers_;
    mutable std::mutex mutex_;
    mutable std::condition_variable wake_, done_;
    mutable std::atomic<bool> busy_{false};
    mutable std::atomic<uint64_t> round_{0};
    mutable std::atomic<int64_t> next_{0}, running_{0};
    mutable chunk_task task_;
    mutable int64_t chunks_ = 0;
    bool stopping_ = false;
};

} // namespace keel::inline KEEL_ABI
