// Executors: every chunk once, whatever runs them; the pool survives nesting, two callers and many rounds.
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#endif

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <support/catch.hpp>

namespace {

struct tally {
    std::vector<std::atomic<int>> count;
    explicit tally(std::size_t n) : count(n) {}
    static void add(void const* context, int64_t chunk) {
        auto const& self = *static_cast<tally const*>(context);
        const_cast<std::atomic<int>&>(self.count[static_cast<std::size_t>(chunk)]).fetch_add(1);
    }
    bool all_once() const {
        for (auto const& c : count)
            if (c.load() != 1) return false;
        return true;
    }
};

template <keel::executor E> void check(E const& e) {
    for (std::size_t n : {0u, 1u, 2u, 3u, 7u, 100u, 1000u}) {
        tally t(n);
        e.run(static_cast<int64_t>(n), {&tally::add, &t});
        CHECK(t.all_once());
    }
}

/// A caller's own executor: one thread a chunk.
struct thread_a_chunk {
    int64_t concurrency() const { return 3; }
    void run(int64_t chunks, keel::chunk_task task) const {
        std::vector<std::thread> threads;
        for (int64_t i = 0; i < (chunks < 20 ? chunks : 0); ++i) threads.emplace_back([=] { task(i); });
        for (auto& t : threads) t.join();
        for (int64_t i = 20; i < chunks; ++i) task(i);
        if (chunks >= 20)
            for (int64_t i = 0; i < 20; ++i) task(i);
    }
};

/// One that says it has no workers, and runs chunks all the same.
struct no_workers {
    int64_t concurrency() const { return 0; }
    void run(int64_t chunks, keel::chunk_task task) const {
        for (int64_t i = 0; i < chunks; ++i) task(i);
    }
};

struct count_row {
    std::atomic<int64_t>* sum;
    template <class G> KEEL_FN void operator()(G const&, int64_t row) const { sum->fetch_add(row + 1); }
};

struct nested {
    keel::thread_pool const* pool;
    tally* inner;
    static void outer(void const* context, int64_t) {
        auto const& self = *static_cast<nested const*>(context);
        tally own(5);
        self.pool->run(5, {&tally::add, &own});
        if (own.all_once()) tally::add(self.inner, 0);
    }
};

/// Chunks that end when all of them have begun, or at a deadline.
struct meeting {
    int wanted;
    std::atomic<int> arrived;
    std::chrono::steady_clock::time_point deadline;
    static void arrive(void const* context, int64_t) {
        auto& self = *static_cast<meeting*>(const_cast<void*>(context));
        ++self.arrived;
        while (self.arrived < self.wanted && std::chrono::steady_clock::now() < self.deadline) std::this_thread::yield();
    }
};

#if defined(__linux__)
/// The processors that the worker may run on, seen from a chunk.
struct where_from {
    std::thread::id caller;
    cpu_set_t worker;
    std::atomic<int> arrived;
    std::mutex lock;
    static void look(void const* context, int64_t) {
        auto& self = *static_cast<where_from*>(const_cast<void*>(context));
        if (std::this_thread::get_id() != self.caller) {
            std::lock_guard const own(self.lock);
            sched_getaffinity(0, sizeof self.worker, &self.worker);
        }
        ++self.arrived;
        auto const deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        while (self.arrived < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    }
};
#endif

} // namespace

TEST_CASE("every executor runs every chunk once") {
    check(keel::serial{});
    for (int64_t threads : {1, 2, 3, 5})
        for (auto placement : {keel::worker_placement::by_system, keel::worker_placement::away_from_caller})
            check(keel::thread_pool(threads, placement));
    check(thread_a_chunk{});
#if defined(_OPENMP)
    check(keel::openmp{2});
#endif
}

TEST_CASE("the pool stays right over thousands of rounds, nested and from two threads at once") {
    keel::thread_pool const pool(3);
    for (int round = 0; round < 3000; ++round) {
        tally t(static_cast<std::size_t>(round % 9));
        pool.run(round % 9, {&tally::add, &t});
        if (!t.all_once()) FAIL("round " << round);
    }
    tally inner(1);
    nested const context{&pool, &inner};
    pool.run(8, {&nested::outer, &context});
    CHECK(inner.count[0] == 8);
    std::atomic<bool> good{true};
    auto const loop = [&] {
        for (int round = 0; round < 500; ++round) {
            tally t(6);
            pool.run(6, {&tally::add, &t});
            if (!t.all_once()) good = false;
        }
    };
    std::thread second(loop);
    loop();
    second.join();
    CHECK(good);
}

TEST_CASE("the pool waits for no worker that came too late, and wakes those that sleep") {
    using clock = std::chrono::steady_clock;
    for (auto placement : {keel::worker_placement::by_system, keel::worker_placement::away_from_caller}) {
        keel::thread_pool const pool(4, placement);
        for (int round = 0; round < 40; ++round) {
            std::this_thread::sleep_for(std::chrono::microseconds(round * 20)); // some workers sleep, some look for work
            tally t(static_cast<std::size_t>(2 + round % 7));
            pool.run(2 + round % 7, {&tally::add, &t});
            if (!t.all_once()) FAIL("round " << round);
        }
        // Chunks that wait for each other: without workers this would never end.
        meeting m{2, {0}, clock::now() + std::chrono::seconds(60)};
        pool.run(2, {&meeting::arrive, &m});
        CHECK(m.arrived == 2);
    }
}

#if defined(__linux__)
TEST_CASE("workers stay within the processors of the pool's maker, and keep away from the caller's where asked to") {
    cpu_set_t own;
    REQUIRE(sched_getaffinity(0, sizeof own, &own) == 0);
    for (auto placement : {keel::worker_placement::by_system, keel::worker_placement::away_from_caller}) {
        keel::thread_pool const pool(2, placement);
        where_from w{std::this_thread::get_id(), {}, {0}, {}};
        pool.run(2, {&where_from::look, &w});
        REQUIRE(w.arrived == 2);
        for (std::size_t c = 0; c < CPU_SETSIZE; ++c)
            if (CPU_ISSET(c, &w.worker)) CHECK(CPU_ISSET(c, &own));
        if (placement == keel::worker_placement::by_system) CHECK(CPU_EQUAL(&w.worker, &own));
        else CHECK(CPU_COUNT(&w.worker) == (CPU_COUNT(&own) >= 2 ? CPU_COUNT(&own) - 1 : 1));
        cpu_set_t after;
        REQUIRE(sched_getaffinity(0, sizeof after, &after) == 0);
        CHECK(CPU_EQUAL(&after, &own)); // the caller's own is left alone
    }
}
#endif

TEST_CASE("a backend runs each row once, however it is cut") {
    keel::thread_pool const pool(2);
    for (int64_t rows : {0, 1, 2, 63, 1000})
        for (int64_t width : {0, 1, 100, 1000000}) {
            std::atomic<int64_t> sum{0};
            keel::cpu(pool).for_rows(rows, width, count_row{&sum});
            CHECK(sum == rows * (rows + 1) / 2);
        }
}

TEST_CASE("an executor of no workers is one of one: no task is lost") {
    no_workers const e;
    tally t(7);
    keel::cpu const be(e);
    CHECK(be.concurrency() == 1);
    be.for_tasks(7, [&](int64_t i, int64_t worker) {
        if (worker == 0) tally::add(&t, i);
    });
    CHECK(t.all_once());
    std::atomic<int64_t> sum{0};
    be.for_rows(5, 3, count_row{&sum});
    CHECK(sum == 15);
}
