// The row primitives instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the
// reference, bit for bit.
#include <cstring>
#include <vector>

#include <keel/backend/reference.hpp>
#include <keel/cuda.hpp>
#include <keel/format/bf16.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/quantize/quantize.hpp>
#include <support/catch.hpp>

namespace {

/// Device memory with a host copy.
template <class T> struct mirrored {
    std::vector<T> host;
    T* device = nullptr;
    explicit mirrored(std::size_t n) : host(n) { cudaMalloc(&device, n * sizeof(T)); }
    ~mirrored() { cudaFree(device); }
    void up() { cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice); }
    bool equals(std::vector<T> const& want) {
        std::vector<T> got(host.size());
        cudaMemcpy(got.data(), device, got.size() * sizeof(T), cudaMemcpyDeviceToHost);
        return std::memcmp(got.data(), want.data(), got.size() * sizeof(T)) == 0;
    }
};

template <class T> T value(float x) {
    if constexpr (std::is_same_v<T, float>) return x;
    else return keel::encode<T>(x);
}

template <class X> void check(int64_t rows, int64_t width) {
    auto const count = static_cast<std::size_t>(rows * width);
    mirrored<X> x(count), y(count), dy(count), dx(count);
    mirrored<float> delta(static_cast<std::size_t>(width)), ddelta(static_cast<std::size_t>(width)), rrms(static_cast<std::size_t>(rows));
    unsigned state = 12345;
    auto const next = [&] { return static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) * 0x1p-23f - 1.0f; };
    for (auto& v : x.host) v = value<X>(next());
    for (auto& v : dy.host) v = value<X>(next());
    for (auto& v : delta.host) v = next();
    x.up(), dy.up(), delta.up();

    int64_t const bytes = keel::rms_norm_backward_workspace(rows, width);
    std::vector<std::byte> host_memory(static_cast<std::size_t>(bytes));
    std::byte* device_memory = nullptr;
    cudaMalloc(&device_memory, static_cast<std::size_t>(bytes));

    keel::reference const host;
    keel::cuda const device;
    auto const run = [&](auto const& be, X* x_, float* delta_, X* y_, X* dy_, X* dx_, float* ddelta_, float* rrms_, std::byte* memory) {
        auto const X_ = keel::rows(x_, rows, width), DY = keel::rows(dy_, rows, width);
        keel::rms_norm_saved const saved{keel::vec(rrms_, rows)};
        keel::rms_norm(be, X_, keel::vec(delta_, width), keel::rows(y_, rows, width), saved).or_throw();
        keel::rms_norm_backward(be, DY, X_, keel::vec(delta_, width), saved, {keel::rows(dx_, rows, width), keel::vec(ddelta_, width)}, {},
                                {memory, bytes}).or_throw();
    };
    run(host, x.host.data(), delta.host.data(), y.host.data(), dy.host.data(), dx.host.data(), ddelta.host.data(), rrms.host.data(), host_memory.data());
    run(device, x.device, delta.device, y.device, dy.device, dx.device, ddelta.device, rrms.device, device_memory);

    using blocks = keel::block_scaled<keel::e4m3, keel::e8m0_scale, 1, 128>;
    auto const scale_columns = blocks::scale_columns(width);
    mirrored<keel::e4m3> codes(count);
    mirrored<keel::e8m0> scales(static_cast<std::size_t>(rows * scale_columns));
    keel::quantize<keel::overflow::saturate>(host, keel::rows(x.host.data(), rows, width),
                                             blocks{keel::rows(codes.host.data(), rows, width), keel::rows(scales.host.data(), rows, scale_columns)}).or_throw();
    keel::quantize<keel::overflow::saturate>(device, keel::rows(x.device, rows, width),
                                             blocks{keel::rows(codes.device, rows, width), keel::rows(scales.device, rows, scale_columns)}).or_throw();
    CHECK(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(y.equals(y.host));
    CHECK(rrms.equals(rrms.host));
    CHECK(dx.equals(dx.host));
    CHECK(ddelta.equals(ddelta.host));
    CHECK(codes.equals(codes.host));
    CHECK(scales.equals(scales.host));
    cudaFree(device_memory);
}

} // namespace

TEST_CASE("CUDA gives the reference's bits: rms_norm, its backward, quantise") {
    for (int64_t width : {1, 127, 1000, 4099}) check<float>(70, width), check<keel::bf16>(70, width);
}
