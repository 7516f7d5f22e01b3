// Host memory and its copy on a device, so that one call runs on both and the results are compared bit for bit.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include <keel/backend/reference.hpp>
#include <keel/cuda.hpp>

namespace keel_test {

/// CUDA's kernels behind calls that read results on the host: each launch is waited for, and memory is seen by both.
struct unified {
    template <class Kernel> void for_rows(int64_t row_count, int64_t width, Kernel const& kernel) const {
        keel::cuda{}.for_rows(row_count, width, kernel);
        cudaDeviceSynchronize();
    }
};

/// Host memory, and device memory that starts as its copy; with `Managed` a host call may read that too.
template <class T, bool Managed = false> struct twins {
    std::vector<T> host;
    T* device = nullptr;
    explicit twins(std::vector<T> values) : host(std::move(values)) {
        if constexpr (Managed) cudaMallocManaged(&device, host.size() * sizeof(T) + 1);
        else cudaMalloc(&device, host.size() * sizeof(T) + 1);
        cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice);
    }
    explicit twins(int64_t n) : twins(std::vector<T>(static_cast<std::size_t>(n))) {}
    twins(twins const&) = delete;
    ~twins() { cudaFree(device); }
    T* on(keel::reference) { return host.data(); }
    T* on(keel::cuda) { return device; }
    T* on(unified)
        requires Managed
    {
        return device;
    }
    bool equal() const {
        std::vector<T> got(host.size());
        cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost);
        return std::memcmp(got.data(), host.data(), got.size() * sizeof(T)) == 0;
    }
};

template <class T> using unified_twins = twins<T, true>;

/// Numbers from -1 to 1, one in seven of them tiny.
template <class X> std::vector<X> values(int64_t n, unsigned state) {
    std::vector<X> v(static_cast<std::size_t>(n));
    for (auto& x : v) {
        state = state * 1664525u + 1013904223u;
        float const f = (static_cast<float>(state >> 8) * 0x1p-23f - 1.0f) * (state % 7 == 0 ? 0x1p-14f : 1.0f);
        if constexpr (std::is_same_v<X, float>) x = f;
        else x = keel::encode<X>(f);
    }
    return v;
}

/// fn(backend) for the reference and the device; whether the device came to its end.
template <class Device = keel::cuda, class Fn> bool on_both(Fn fn) {
    fn(keel::reference{});
    fn(Device{});
    return cudaDeviceSynchronize() == cudaSuccess;
}

} // namespace keel_test

template <> struct keel::backend_traits<keel_test::unified> {
    static constexpr bool is_backend = true;
    static constexpr bool asynchronous = false;
    static constexpr memory_space space = memory_space::host;
};
