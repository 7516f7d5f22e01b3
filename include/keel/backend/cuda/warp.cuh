// A CUDA warp as warp_group needs it: one thread's view, lanes beside each other.
#pragma once

#include <keel/backend/warp_group.hpp>

namespace keel::inline KEEL_ABI {

struct cuda_warp {
    static constexpr int width = 32;
    using value = float;
    using words = uint32_t;

    __device__ __forceinline__ static int lane_index() { return static_cast<int>(threadIdx.x) % width; }
    KEEL_FN static bool leader() {
#if defined(__CUDA_ARCH__)
        return lane_index() == 0;
#else
        return true;
#endif
    }
    KEEL_FN static void sync() {
#if defined(__CUDA_ARCH__)
        __syncwarp();
#endif
    }
    template <class Body> KEEL_FN static void each_lane(Body body) {
#if defined(__CUDA_ARCH__)
        body(lane_index());
#else
        body(0);
#endif
    }
    template <class V> KEEL_FN static V& of(V& v, int) { return v; }
    template <class V> KEEL_FN static V of(V const& v, int) { return v; }
    template <class V> KEEL_FN static V shuffle_xor(V v, int with) {
#if defined(__CUDA_ARCH__)
        return __shfl_xor_sync(0xffffffffu, v, with);
#else
        return v;
#endif
    }
    KEEL_FN static bool any(bool m) {
#if defined(__CUDA_ARCH__)
        return __any_sync(0xffffffffu, m) != 0;
#else
        return m;
#endif
    }
    KEEL_FN static float pick(int bit, float a, float b) {
#if defined(__CUDA_ARCH__)
        return (lane_index() & bit) != 0 ? a : b;
#else
        return bit != 0 ? a : b;
#endif
    }
    template <class V> KEEL_FN static V broadcast(V v, int lane) {
#if defined(__CUDA_ARCH__)
        return __shfl_sync(0xffffffffu, v, lane);
#else
        return v;
#endif
    }
};

} // namespace keel::inline KEEL_ABI
