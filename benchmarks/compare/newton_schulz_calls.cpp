// Keel's Newton-Schulz on a caller's buffers, as C functions for newton_schulz.py. Five steps of a set, in a format: `kind` is 0 for Keller
// Jordan's set in fp32, 1 in bf16, 2 for Polar Express in fp32, 3 in bf16. Matrices are dense and row-major, fp32 in, the format out.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/optim/newton_schulz.hpp>

using namespace keel;

namespace {

template <class T> newton_schulz_options<T> options_of(int kind) {
    return {.coefficients = kind < 2 ? coefficients<keller, T>() : coefficients<polar_express, T>()};
}
template <class T>
status run(thread_pool const& pool, int kind, int64_t batch, int64_t row_count, int64_t columns, float const* u, void* o, void* memory, int64_t bytes) {
    return newton_schulz<T>(cpu(pool), cube(u, batch, row_count, columns), cube(static_cast<T*>(o), batch, row_count, columns), {},
                            options_of<T>(kind), {static_cast<std::byte*>(memory), bytes});
}

} // namespace

extern "C" {

int64_t keel_newton_schulz_bytes(thread_pool const* pool, int kind, int64_t batch, int64_t row_count, int64_t columns) {
    if (kind % 2 == 1) return newton_schulz_workspace<bf16>(cpu(*pool), row_count, columns, batch, options_of<bf16>(kind));
    return newton_schulz_workspace<float>(cpu(*pool), row_count, columns, batch, options_of<float>(kind));
}
int keel_newton_schulz(thread_pool const* pool, int kind, int64_t batch, int64_t row_count, int64_t columns, float const* u, void* o, void* memory,
                       int64_t bytes) {
    if (kind % 2 == 1) return !run<bf16>(*pool, kind, batch, row_count, columns, u, o, memory, bytes).ok();
    return !run<float>(*pool, kind, batch, row_count, columns, u, o, memory, bytes).ok();
}

} // extern "C"
