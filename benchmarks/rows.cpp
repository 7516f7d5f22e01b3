// Row primitives beside a copy of the same bytes: 64 KB and half of the second-level cache stay there, 256 MB come from memory.
// The sizes count all bytes that a call moves, read and written, each once.
#include "support/in_turns.hpp"

#include <cmath>

#include <keel/format/bf16.hpp>
#include <keel/format/float32.hpp>
#include <keel/nn/cross_entropy.hpp>
#include <keel/nn/swiglu.hpp>
#include <keel/nn/swiglu_quantize.hpp>
#include <keel/norm/rms_norm.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <keel/quantize/quantize.hpp>

namespace {

using namespace keel;
using keel_bench::add;

/// A matrix of numbers from -2 to 2, of codes other than NaN, or of e8m0 scales of 1.
template <class T> struct buffer {
    keel_bench::aligned_vector<T> memory;
    int64_t width;
    buffer(int64_t row_count, int64_t columns) : memory(static_cast<std::size_t>(row_count * columns)), width(columns) {
        constexpr std::size_t period = 2048;
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = i < period ? number(static_cast<uint32_t>(i)) : memory[i - period];
    }
    static T number(uint32_t i) {
        float const x = static_cast<float>(static_cast<int>(i * 7919u % 2048u) - 1024) * 0x1p-9f;
        if constexpr (std::is_same_v<T, float>) return x;
        else if constexpr (std::is_same_v<T, e8m0>) return from_word<T>(127);
        else if constexpr (sizeof(T) == 1) return from_word<T>(i * 7919u % 120u | (i & 1u) << 7);
        else return encode<T>(x);
    }
    view<T, 2> all() { return rows(memory.data(), static_cast<int64_t>(memory.size()) / width, width); }
    view<T, 1> vec() { return keel::vec(memory.data(), static_cast<int64_t>(memory.size())); }
};

/// Rows of 4096, or fewer columns where they would be fewer than least_rows.
struct shape {
    int64_t width = 4096, rows;
    shape(int64_t bytes, int64_t bytes_an_element, int64_t least_rows = 1) : rows(bytes / (bytes_an_element * width)) {
        if (rows >= least_rows) return;
        rows = least_rows;
        width = std::max<int64_t>(128, bytes / (bytes_an_element * rows) / 128 * 128);
    }
    int64_t elements() const { return rows * width; }
};

template <class Blocks> constexpr int64_t least_rows = Blocks::block_rows == whole ? 1 : Blocks::block_rows;

/// Codes and scales of one matrix.
template <class Blocks> struct coded {
    buffer<typename Blocks::code> codes;
    buffer<typename Blocks::scale_storage> scales;
    explicit coded(shape s) : codes(s.rows, s.width), scales(Blocks::scale_rows(s.rows), Blocks::scale_columns(s.width)) {
        if constexpr (std::is_same_v<typename Blocks::scale_storage, float>)
            for (float& scale : scales.memory) scale = std::abs(scale) + 0x1p-9f;
    }
    Blocks all() { return {codes.all(), scales.all()}; }
    int64_t bytes() const { return static_cast<int64_t>(codes.memory.size() + scales.memory.size() * sizeof(typename Blocks::scale_storage)); }
};

/// The report is taken too.
template <class X, class Blocks> struct quantising {
    shape s;
    buffer<X> x;
    coded<Blocks> q;
    report counts;
    explicit quantising(int64_t size) : s(size, sizeof(X) + 1, least_rows<Blocks>), x(s.rows, s.width), q(s) {}
    int64_t bytes() const { return s.elements() * static_cast<int64_t>(sizeof(X)) + q.bytes(); }
    void operator()(auto const& be) { quantize<overflow::saturate>(be, x.all(), q.all(), {}, &counts).or_throw(); }
};

/// Along the rows and along the columns, in one pass.
template <class X> struct quantising_pair {
    shape s;
    buffer<X> x;
    coded<row_blocks<>> a;
    coded<column_blocks<>> b;
    report counts;
    explicit quantising_pair(int64_t size) : s(size, sizeof(X) + 2, 128), x(s.rows, s.width), a(s), b(s) {}
    int64_t bytes() const { return s.elements() * static_cast<int64_t>(sizeof(X)) + a.bytes() + b.bytes(); }
    void operator()(auto const& be) { quantize_pair<overflow::saturate>(be, x.all(), a.all(), b.all(), {}, &counts).or_throw(); }
};

/// The normalised row, rounded to bf16, leaves as codes.
struct norm_to_codes {
    shape s;
    buffer<bf16> x;
    buffer<float> delta;
    coded<row_blocks<>> q;
    explicit norm_to_codes(int64_t size) : s(size, 3), x(s.rows, s.width), delta(1, s.width), q(s) {}
    int64_t bytes() const { return s.elements() * 2 + q.bytes(); }
    void operator()(auto const& be) { rms_norm_quantize<bf16, overflow::saturate>(be, x.all(), delta.vec(), q.all()).or_throw(); }
};

struct swiglu_to_codes {
    shape s;
    buffer<bf16> gate, up;
    coded<row_blocks<>> q;
    explicit swiglu_to_codes(int64_t size) : s(size, 5), gate(s.rows, s.width), up(s.rows, s.width), q(s) {}
    int64_t bytes() const { return s.elements() * 4 + q.bytes(); }
    void operator()(auto const& be) { swiglu_quantize<bf16, overflow::saturate>(be, gate.all(), up.all(), q.all()).or_throw(); }
};

template <class Y, class Blocks> struct dequantising {
    shape s;
    coded<Blocks> q;
    buffer<Y> y;
    explicit dequantising(int64_t size) : s(size, sizeof(Y) + 1, least_rows<Blocks>), q(s), y(s.rows, s.width) {}
    int64_t bytes() const { return s.elements() * static_cast<int64_t>(sizeof(Y)) + q.bytes(); }
    void operator()(auto const& be) { dequantize(be, q.all(), y.all()).or_throw(); }
};

struct norm_forward {
    shape s;
    buffer<bf16> x, y;
    buffer<float> delta, r;
    explicit norm_forward(int64_t size) : s(size, 4), x(s.rows, s.width), y(s.rows, s.width), delta(1, s.width), r(1, s.rows) {}
    int64_t bytes() const { return s.elements() * 4; }
    void operator()(auto const& be) { rms_norm(be, x.all(), delta.vec(), y.all(), {.rrms = r.vec()}).or_throw(); }
};

struct norm_backward {
    shape s;
    buffer<bf16> x, dy, dx;
    buffer<float> delta, r, ddelta;
    std::vector<std::byte> scratch;
    explicit norm_backward(int64_t size)
        : s(size, 6), x(s.rows, s.width), dy(s.rows, s.width), dx(s.rows, s.width), delta(1, s.width), r(1, s.rows), ddelta(1, s.width),
          scratch(static_cast<std::size_t>(rms_norm_backward_workspace(s.rows, s.width))) {}
    int64_t bytes() const { return s.elements() * 6; }
    void operator()(auto const& be) {
        rms_norm_backward(be, dy.all(), x.all(), delta.vec(), {.rrms = r.vec()}, {.dx = dx.all(), .ddelta = ddelta.vec()}, {},
                          {scratch.data(), static_cast<int64_t>(scratch.size())})
            .or_throw();
    }
};

struct swiglu_forward {
    shape s;
    buffer<bf16> gate, up, y;
    explicit swiglu_forward(int64_t size) : s(size, 6), gate(s.rows, s.width), up(s.rows, s.width), y(s.rows, s.width) {}
    int64_t bytes() const { return s.elements() * 6; }
    void operator()(auto const& be) { swiglu(be, gate.all(), up.all(), y.all()).or_throw(); }
};

struct loss_forward {
    shape s;
    buffer<bf16> logits;
    buffer<float> loss, lse;
    std::vector<int32_t> targets;
    explicit loss_forward(int64_t size)
        : s(size, 2), logits(s.rows, s.width), loss(1, s.rows), lse(1, s.rows), targets(static_cast<std::size_t>(s.rows), 7) {}
    int64_t bytes() const { return s.elements() * 2; }
    void operator()(auto const& be) {
        cross_entropy(be, logits.all(), vec(targets.data(), s.rows), loss.vec(), {.lse = lse.vec()}).or_throw();
    }
};

[[maybe_unused]] int const added = //
    add<quantising<bf16, row_blocks<e4m3, fp32_scale>>>("quantise_bf16_fp32_scale") +
    add<quantising<bf16, row_blocks<e4m3, e8m0_scale>>>("quantise_bf16_e8m0_scale") +
    add<quantising<float, row_blocks<e4m3, fp32_scale>>>("quantise_float_fp32_scale") +
    add<quantising<float, row_blocks<e4m3, e8m0_scale>>>("quantise_float_e8m0_scale") +
    add<dequantising<bf16, row_blocks<e4m3, fp32_scale>>>("dequantise_to_bf16") +
    add<dequantising<float, row_blocks<e4m3, fp32_scale>>>("dequantise_to_float") +
    add<quantising_pair<bf16>>("quantise_rows_and_columns") +
    add<quantising<bf16, column_blocks<e4m3, fp32_scale>>>("quantise_columns") +
    add<quantising<bf16, block_scaled<e4m3, fp32_scale, whole, whole>>>("quantise_tensor") +
    add<norm_to_codes>("norm_to_codes") + add<swiglu_to_codes>("swiglu_to_codes") + //
    add<norm_forward>("norm_forward") + add<norm_backward>("norm_backward") + add<swiglu_forward>("swiglu_forward") +
    add<loss_forward>("loss_forward");

} // namespace
