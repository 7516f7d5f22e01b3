// Kinds of faults that users of other Newton-Schulz optimisers have reported, as far as they concern the iteration, and what answers each:
//
//     Emerging-Optimizers #229, #238     an epsilon or a lost norm wrecks small gradients     here; newton_schulz_test, ..._properties_test: scale
//     Emerging-Optimizers #254           0 / 0 for a zero gradient                            newton_schulz_test: zero in, zero out
//     dion #121, maxtext #4798,          a stack orthogonalised as one matrix, or along       here
//       PaddleFleet #1703                  its experts' axis
//     HeavyBall (batched norm)           a stack's norms mixed up where batch = rows          newton_schulz_test: a batch is its matrices
//     dion #102, #103; xtuner #2029      offsets past 2^31                                    here
//     dion #74                           shards without a row                                 here
//     HeavyBall #73                      NaN for small random gradients                       here
//     DeepSpeed #8533                    the norm taken in half precision overflows           here
//     Gram Newton-Schulz (blog)          Gram in half precision, ten steps: explodes          newton_schulz_types_test; newton_schulz_test: long runs
//     DeepSpeed #8441                    Newton-Schulz is never run                           here
//     DeepSpeed #8437                    a shard orthogonalised for a matrix                  here: halves are not the whole
//     not reported: TransformerEngine's and Emerging-Optimizers' "aol" ascends, CANS overflows at 1 + 2^-8, the relaxed cubic turns in bf16,
//       norms past FLT_MAX make the step a silent no-op, the caller's gradient is written     here; coefficients_test; house/refusals.py
#include <cmath>
#include <cstring>
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/matmul.hpp>
#include <keel/optim/newton_schulz.hpp>
#include <optim/matrices.hpp>
#include <support/catch.hpp>
#include <support/fenced.hpp>

using namespace keel_test;
using keel::bf16;
using keel::f16;

namespace {

keel::cpu<> const be;

template <class T = float, class U, class O>
keel::status orthogonalise(keel::view<U, 2> u, keel::view<O, 2> o, keel::newton_schulz_options<T> options = {}) {
    scratch memory(keel::newton_schulz_workspace<T>(be, u.extent[0], u.extent[1], 1, options));
    return keel::newton_schulz<T>(be, u, o, {}, options, memory.get());
}
template <class T = float> matrix orthogonalised(matrix const& u, keel::newton_schulz_options<T> options = {}) {
    auto in = to_storage<float>(u);
    guarded_matrix<float> out(u.rows(), u.cols());
    orthogonalise<T>(in.view(), out.view(), options).or_throw();
    return to_matrix(out);
}
double gain(matrix const& o, matrix const& u) { return o.cwiseProduct(u).sum() / u.norm(); }

} // namespace

// dion #121: a stack [layers, out, in, k, k] flattened to one matrix. maxtext #4798: the experts' axis reduced. PaddleFleet #1703: one slab.
TEST_CASE("a stack of convolutions or experts is its matrices, not the slab that they lie in") {
    int64_t const layers = 3, out = 6, in = 4, kernel = 3 * 3;
    std::vector<float> const u = floats(data_kind::normal, layers * out * in * kernel, 7);
    std::vector<float> o(u.size()), slab(u.size());
    scratch memory(keel::newton_schulz_workspace(be, out, in * kernel, layers));
    keel::newton_schulz(be, keel::cube(u.data(), layers, out, in * kernel), keel::cube(o.data(), layers, out, in * kernel), {}, {}, memory.get()).or_throw();
    for (int64_t i = 0; i < layers; ++i) {
        guarded_matrix<float> one(out, in * kernel);
        orthogonalise(keel::rows(u.data() + i * out * in * kernel, out, in * kernel), one.view()).or_throw();
        CHECK(std::memcmp(one.contents().data(), o.data() + i * out * in * kernel, one.contents().size()) == 0);
    }
    orthogonalise(keel::rows(u.data(), layers * out, in * kernel), keel::rows(slab.data(), layers * out, in * kernel)).or_throw();
    CHECK(slab != o);
}

// dion #102, #103; xtuner #2029: [320, 2560, 3072] has offsets past 2^31.
TEST_CASE("rows and matrices that no 32-bit offset reaches") {
    int64_t const batch = 2, rows = 3, columns = 5;
    sparse<float> far(batch * rows * far_stride), results(batch * rows * far_stride);
    if (far.data() == nullptr || results.data() == nullptr) {
        WARN("no address space: skipped");
        return;
    }
    std::vector<float> const near = floats(data_kind::normal, batch * rows * columns, 9);
    std::vector<float> want(near.size());
    keel::view<float, 3> const u{far.data(), {batch, rows, columns}, {rows * far_stride, far_stride, 1}};
    keel::view<float, 3> const o{results.data(), {batch, rows, columns}, {rows * far_stride, far_stride, 1}};
    auto const each = [&](auto const& fn) {
        for (int64_t b = 0; b < batch; ++b)
            for (int64_t i = 0; i < rows; ++i)
                for (int64_t j = 0; j < columns; ++j) fn(b, i, j, static_cast<std::size_t>((b * rows + i) * columns + j));
    };
    each([&](int64_t b, int64_t i, int64_t j, std::size_t k) { u(b, i, j) = near[k]; });
    scratch memory(keel::newton_schulz_workspace(be, rows, columns, batch));
    keel::newton_schulz(be, u, o, {}, {}, memory.get()).or_throw();
    keel::newton_schulz(be, keel::cube(near.data(), batch, rows, columns), keel::cube(want.data(), batch, rows, columns), {}, {}, memory.get()).or_throw();
    each([&](int64_t b, int64_t i, int64_t j, std::size_t k) { CHECK(o(b, i, j) == want[k]); });
}

// dion #74: 18 rows over 8 ranks left some without one, and they hung.
TEST_CASE("no rows, no columns and no matrices are no work and no fault") {
    float nothing = 0;
    for (auto [batch, rows, columns] : {std::tuple<int64_t, int64_t, int64_t>{0, 3, 4}, {2, 0, 4}, {2, 3, 0}}) {
        float error[2] = {-1, -1}, entering[2] = {-1, -1};
        int64_t steps[2] = {-1, -1};
        CHECK(keel::newton_schulz(be, keel::cube(&nothing, batch, rows, columns), keel::cube(static_cast<float*>(nullptr), batch, rows, columns),
                                  {keel::vec(error, batch), keel::vec(entering, batch), keel::vec(steps, batch)})
                  .ok());
        for (int64_t i = 0; i < 2; ++i) // as of a zero matrix
            CHECK((i < batch ? error[i] == 1 && entering[i] == 1 && steps[i] == 0 : error[i] == -1 && entering[i] == -1 && steps[i] == -1));
    }
    // 2^64 elements are not none.
    constexpr int64_t half = int64_t{1} << 32;
    keel::view<float, 2> const wrapped{&nothing, {half, half}, {half, 1}};
    CHECK(keel::newton_schulz(be, wrapped, wrapped).code == keel::status_code::bad_shape);
    // A padded row of zeros changes no other row's direction.
    matrix const u = random_matrix(5, 9, 3);
    matrix padded = matrix::Zero(6, 9);
    padded.topRows(5) = u;
    matrix const o = orthogonalised(padded);
    CHECK((o.topRows(5) - orthogonalised(u)).cwiseAbs().maxCoeff() < 1e-5);
    CHECK(o.row(5).cwiseAbs().maxCoeff() == 0);
}

// HeavyBall #73: NaN for small random gradients. EO #229: an epsilon of 1e-7 shrinks them. EO #238: their squares are 0 in fp32.
TEST_CASE("small random gradients keep their direction, down to the last subnormal") {
    matrix const u = random_matrix(8, 13, 5);
    for (double size : {1e-7, 1e-20, 1e-30, 1e-37}) {
        INFO(size);
        CHECK((orthogonalised(u * size) - orthogonalised(u)).cwiseAbs().maxCoeff() < 1e-4);
        CHECK((orthogonalised<bf16>(u * size) - orthogonalised<bf16>(u)).cwiseAbs().maxCoeff() < 0.1); // other roundings of the input
    }
    for (double size : {1e-40, 1e-43}) { // a few bits are left of each element
        auto in = to_storage<float>(u * size);
        matrix const left = to_matrix(in), o = orthogonalised(left);
        CHECK(o.allFinite());
        CHECK((o - mapped(left / left.norm(), keel::coefficients<keel::polar_express>())).cwiseAbs().maxCoeff() < 1e-3);
    }
}

// Jordan's and DeepSpeed's grad.lerp_ writes the gradient.
TEST_CASE("what is read is not written: const input, and not a byte of it or around it changes") {
    guarded_matrix<float> u(9, 6, 2, floats(data_kind::normal, 54, 3)), o(9, 6, 1);
    auto const before = u.contents();
    for (int kind = 0; kind < 3; ++kind) {
        keel::view<float const, 2> const read = u.view();
        (kind == 0 ? orthogonalise<float>(read, o.view()) : kind == 1 ? orthogonalise<bf16>(read, o.view()) : orthogonalise<f16>(read, o.view())).or_throw();
        CHECK(u.contents() == before);
        CHECK(u.untouched());
        CHECK(o.untouched());
    }
}

// DeepSpeed #8533: the norm of fp16 gradients taken in fp16 is infinite from 65504 on, and the step zero.
TEST_CASE("half-precision gradients whose norm no half can hold") {
    for (float size : {60000.0f, 0x1p-24f}) { // near the largest and the smallest number of f16
        guarded_matrix<f16> u(16, 16), o(16, 16);
        for (int64_t i = 0; i < 16; ++i)
            for (int64_t j = 0; j < 16; ++j) u.set(i, j, to_format<f16>(i == j ? size : 0.0f));
        orthogonalise<f16>(u.view(), o.view()).or_throw();
        for (int64_t i = 0; i < 16; ++i) CHECK(o.at(i, i) == Approx(scalar_map(keel::coefficients<keel::polar_express>(), 0.25)).margin(5e-3));
    }
}

// DeepSpeed #8441: the default path scaled the gradient and called it Muon. #8437: every shard of a matrix orthogonalised by itself.
TEST_CASE("the result is not the gradient scaled, nor its halves made orthogonal") {
    matrix const u = with_singular_values(16, 24, log_spaced(16, 0.01), 3), o = orthogonalised(u);
    double const scale = gain(o, u) / u.norm();
    CHECK((o - scale * u).norm() > 0.5 * o.norm());
    matrix halves(16, 24);
    halves << orthogonalised(u.leftCols(12)), orthogonalised(u.rightCols(12));
    CHECK((o - halves).norm() > 0.3 * o.norm());
}

// Rank one is the singular value 1 + rounding exactly. Of 200 draws with the norm in the storage type, CANS was infinite in 25 (bf16) and 67
// (f16), and the relaxed cubic turned 5 round; "aol" turns all.
TEST_CASE("200 gradients of rank one go downhill by about as much as the certificate says, in every type") {
    auto const draws = [](auto const& set, auto type) {
        using T = decltype(type);
        for (uint64_t draw = 0; draw < 200; ++draw) {
            matrix const u = random_matrix(6, 1, 1000 + draw) * random_matrix(1, 10, 2000 + draw), o = orthogonalised<T>(u, {.coefficients = set});
            INFO(set.name << " " << draw);
            CHECK(gain(o, u) > 0.6);
            CHECK(gain(o, u) <= set.bounds.upper + 2e-3);
        }
    };
    draws(keel::coefficients<keel::polar_express, bf16>(), bf16{});
    draws(keel::coefficients<keel::polar_express, f16>(), f16{});
    draws(keel::coefficients<keel::turbo_aol, bf16>(), bf16{});
    draws(keel::coefficients<keel::cubic_relaxed, f16>(), f16{});
    // And what a certificate keeps out, by name alone: ascent, and growth that another step count turns into Inf.
    matrix const u = random_matrix(6, 1, 1) * random_matrix(1, 10, 2);
    CHECK(gain(orthogonalised<float>(u, {.coefficients = keel::unsafe_coefficients<keel::turbo_aol_early>()}), u) < -0.9);
    double most = 0;
    for (uint64_t draw = 0; draw < 50; ++draw) {
        matrix const v = random_matrix(6, 1, 1000 + draw) * random_matrix(1, 10, 2000 + draw);
        auto in = to_storage<float>(v);
        guarded_matrix<float> out(6, 10);
        auto const s = orthogonalise<bf16>(in.view(), out.view(), {.coefficients = keel::unsafe_coefficients<keel::cans, bf16>()});
        CHECK((s.ok() || s.code == keel::status_code::non_finite)); // told, where it overflows
        most = std::max(most, s.ok() ? to_matrix(out).norm() : 1e30);
    }
    CHECK(most > 10);
}

// 4096 elements of 1e18: an infinite norm makes X = 0, and nobody is told.
TEST_CASE("norms past FLT_MAX are a step like any other") {
    matrix const u = random_matrix(12, 20, 9);
    for (double size : {1e18, 1e30, 1e37})
        CHECK((orthogonalised(u * size) - orthogonalised(u)).cwiseAbs().maxCoeff() < 1e-4);
}
