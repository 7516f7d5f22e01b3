// Keel's router on a caller's buffers, as C functions for router.py. Matrices are dense and row-major; bf16 comes as its bits. 0: the
// call succeeded.
#include <cstddef>
#include <cstring>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/moe/capacity.hpp>
#include <keel/moe/route.hpp>

using namespace keel;

extern "C" {
/// The memory of one router. Logits and their gradient are fp32, or bf16 where `halves` is not 0; softmax, or sigmoid where `sigmoid` is
/// not 0. Capacity is numerator / denominator of the mean load.
struct router_memory {
    int64_t tokens, experts, k, halves, sigmoid, numerator, denominator;
    void const* logits;    // [tokens, experts]
    float const* bias;     // [experts]
    int32_t* ids;          // [tokens, k]
    float* weights;        // [tokens, k]
    int64_t *asked, *given; // [experts]
    int64_t *slots, *offsets; // [tokens, k], [experts + 1]
    float const* dweights; // [tokens, k]
    void* dlogits;         // [tokens, experts]
    std::byte* scratch;
    int64_t scratch_size;
};
}

namespace {

route_options options_of(router_memory const& m) {
    return {.score = m.sigmoid != 0 ? score_function::sigmoid : score_function::softmax};
}

template <class L> bool forward(cpu<native_arch, thread_pool> const& be, router_memory const& m) {
    demand_counts demand(vec(m.asked, m.experts));
    served_counts served(vec(m.given, m.experts));
    auto const ids = rows(m.ids, m.tokens, m.k);
    workspace const ws{m.scratch, m.scratch_size};
    return route(be, rows(static_cast<L const*>(m.logits), m.tokens, m.experts), {.bias = vec(m.bias, m.experts)}, ids, rows(m.weights, m.tokens, m.k),
                 demand, {}, options_of(m), ws)
               .ok() &&
           apply_capacity(be, ids, demand, {rows(m.slots, m.tokens, m.k), vec(m.offsets, m.experts + 1)}, served,
                          {.limit = capacity_limit::factor(m.numerator, m.denominator)}, ws)
               .ok();
}
template <class L> bool backward(cpu<native_arch, thread_pool> const& be, router_memory const& m) {
    return route_backward(be, rows(m.dweights, m.tokens, m.k), rows(static_cast<L const*>(m.logits), m.tokens, m.experts), rows(m.ids, m.tokens, m.k),
                          rows(m.weights, m.tokens, m.k), rows(static_cast<L*>(m.dlogits), m.tokens, m.experts), options_of(m))
        .ok();
}

struct copying {
    char const* from;
    char* to;
    int64_t bytes, parts;
    static void part(void const* context, int64_t index) {
        auto const& self = *static_cast<copying const*>(context);
        int64_t const each = self.bytes / self.parts, first = each * index;
        std::memcpy(self.to + first, self.from + first, static_cast<std::size_t>(index + 1 == self.parts ? self.bytes - first : each));
    }
};

} // namespace

extern "C" {

int64_t keel_router_scratch(int64_t tokens, int64_t experts) {
    int64_t const to_route = route_workspace(tokens, experts), to_place = apply_capacity_workspace(tokens, experts);
    return to_route > to_place ? to_route : to_place;
}
/// Selection, weights, demand, places and offsets.
int keel_router_forward(thread_pool const* pool, router_memory const* m) {
    cpu const be(*pool);
    return !(m->halves != 0 ? forward<bf16>(be, *m) : forward<float>(be, *m));
}
int keel_router_both(thread_pool const* pool, router_memory const* m) {
    cpu const be(*pool);
    return !(m->halves != 0 ? forward<bf16>(be, *m) && backward<bf16>(be, *m) : forward<float>(be, *m) && backward<float>(be, *m));
}
/// Copies by as many threads, in one part each: the floor.
void keel_copy(thread_pool const* pool, char const* from, char* to, int64_t bytes) {
    copying const all{from, to, bytes, pool->concurrency()};
    pool->run(all.parts, {&copying::part, &all});
}

} // extern "C"
