// Keel's row primitives on a caller's buffers, as C functions for compare.py. Matrices are dense and row-major; bf16 and e4m3 come as
// their bits. 0: the call succeeded.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/swiglu.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/quantize/quantize.hpp>

using namespace keel;

namespace {
row_blocks<> blocks(e4m3* codes, float* scales, int64_t row_count, int64_t columns) {
    int64_t const blocks_a_row = row_blocks<>::scale_columns(columns);
    return {rows(codes, row_count, columns), rows(scales, row_count, blocks_a_row)};
}
} // namespace

extern "C" {

thread_pool* keel_start(int64_t threads) { return new thread_pool(threads, worker_placement::away_from_caller); }
void keel_stop(thread_pool* pool) { delete pool; }

int keel_quantise(thread_pool const* pool, int64_t row_count, int64_t columns, bf16 const* x, e4m3* codes, float* scales) {
    report counts;
    return !quantize<overflow::saturate>(cpu(*pool), rows(x, row_count, columns), blocks(codes, scales, row_count, columns), {}, &counts).ok();
}
int keel_dequantise(thread_pool const* pool, int64_t row_count, int64_t columns, e4m3* codes, float* scales, bf16* y) {
    return !dequantize(cpu(*pool), blocks(codes, scales, row_count, columns), rows(y, row_count, columns)).ok();
}
int keel_rms_norm(thread_pool const* pool, int64_t row_count, int64_t columns, bf16 const* x, float const* delta, bf16* y, float epsilon) {
    return !rms_norm(cpu(*pool), rows(x, row_count, columns), vec(delta, columns), rows(y, row_count, columns), {}, {.epsilon = epsilon}).ok();
}
int keel_swiglu(thread_pool const* pool, int64_t row_count, int64_t columns, bf16 const* gate, bf16 const* up, bf16* y) {
    return !swiglu(cpu(*pool), rows(gate, row_count, columns), rows(up, row_count, columns), rows(y, row_count, columns)).ok();
}

} // extern "C"
