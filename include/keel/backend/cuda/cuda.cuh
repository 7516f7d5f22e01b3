// The CUDA backend: a row to a warp, enqueued on the caller's stream. Never synchronises, never allocates.
//
// State: compiled for sm_90a with nvcc 13.0; the same group source runs as simt<32> on the host in every test. No GPU has run it yet.
#pragma once

#include <cuda_runtime.h>

#include <keel/backend/concepts.hpp>
#include <keel/backend/cuda/warp.cuh>

namespace keel::inline KEEL_ABI {

inline constexpr int cuda_warps_per_block = 4;

/// The one entry of every row kernel: warps stride over the rows.
template <class Kernel>
__global__ void __launch_bounds__(32 * cuda_warps_per_block) row_entry(Kernel kernel, int64_t row_count) {
    warp_group<cuda_warp> const group{};
    int64_t const first = static_cast<int64_t>(blockIdx.x) * cuda_warps_per_block + threadIdx.x / 32;
    int64_t const step = static_cast<int64_t>(gridDim.x) * cuda_warps_per_block;
    for (int64_t row = first; row < row_count; row += step) kernel(group, row);
}

} // namespace keel::inline KEEL_ABI

namespace keel {

/// Borrows a stream. for_rows enqueues; errors of a launch wait in cudaGetLastError() as CUDA keeps them.
struct cuda {
    cudaStream_t stream = nullptr;

    template <class Kernel> void for_rows(int64_t row_count, int64_t, Kernel const& kernel) const {
        static_assert(std::is_trivially_copyable_v<Kernel>, "a kernel crosses to the device as bytes");
        if (row_count <= 0) return;
        int64_t const blocks = (row_count + cuda_warps_per_block - 1) / cuda_warps_per_block;
        int64_t const most = 1 << 20;
        row_entry<<<static_cast<unsigned>(blocks < most ? blocks : most), 32 * cuda_warps_per_block, 0, stream>>>(kernel, row_count);
    }
};

template <> struct backend_traits<cuda> {
    static constexpr bool is_backend = true;
    static constexpr bool asynchronous = true;
    static constexpr memory_space space = memory_space::device;
};

} // namespace keel
