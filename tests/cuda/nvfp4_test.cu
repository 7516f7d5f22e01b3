// NVFP4 and compensated updates instantiated for CUDA: compiled wherever nvcc is; where there is a GPU they run against the reference,
// bit for bit.
#include <limits>

#include <keel/format/bf16.hpp>
#include <keel/optim/kahan.hpp>
#include <keel/quantize/nvfp4.hpp>
#include <support/catch.hpp>
#include <support/device_twins.hpp>

using namespace keel_test;

namespace {

template <class Rule, class X> void check_nvfp4(int64_t rows, int64_t columns, float bad) {
    using matrix = keel::nvfp4_matrix<>;
    auto data = values<X>(rows * columns, 77);
    if constexpr (std::is_same_v<X, float>) data[data.size() / 2] += bad;
    twins<X> x(data), y(rows * columns);
    twins<keel::e2m1x2> codes(rows * matrix::pairs(columns));
    twins<keel::e4m3> scales(rows * matrix::blocks(columns));
    twins<float> tensor(1);
    twins<keel::report> report(1);
    auto const run = [&](auto be) {
        matrix const q{columns, keel::rows(codes.on(be), rows, matrix::pairs(columns)),
                       keel::rows(scales.on(be), rows, matrix::blocks(columns)), keel::vec(tensor.on(be), 1)};
        keel::quantize_nvfp4<Rule>(be, keel::rows(x.on(be), rows, columns), q, {}, report.on(be)).or_throw();
        keel::dequantize_nvfp4(be, q, keel::rows(y.on(be), rows, columns)).or_throw();
    };
    CHECK(on_both(run));
    CHECK(codes.equal());
    CHECK(scales.equal());
    CHECK(tensor.equal());
    CHECK(y.equal());
    CHECK(report.equal());
}

float const infinity = std::numeric_limits<float>::infinity();

} // namespace

TEST_CASE("CUDA gives the reference's bits: NVFP4") {
    for (int64_t columns : {1, 127, 1000, 4099})
        for (float bad : {0.0f, infinity}) {
            check_nvfp4<keel::nvfp4_rules::nearest, float>(70, columns, bad);
            check_nvfp4<keel::nvfp4_rules::round_up, keel::bf16>(70, columns, bad);
            check_nvfp4<keel::nvfp4_rules::transformer_engine, float>(70, columns, bad);
        }
}

TEST_CASE("CUDA gives the reference's bits: kahan_update") {
    int64_t const n = 20011;
    twins<float> d(values<float>(n, 5));
    twins<keel::bf16> w(values<keel::bf16>(n, 6)), c(n);
    twins<keel::step_gate> gate(std::vector<keel::step_gate>{keel::open_gate()});
    auto const run = [&](auto be) {
        for (int t = 0; t < 3; ++t)
            keel::kahan_update<keel::bf16>(be, keel::vec(d.on(be), n), {keel::vec(w.on(be), n), keel::vec(c.on(be), n)}, *gate.on(be)).or_throw();
    };
    CHECK(on_both(run));
    CHECK(w.equal());
    CHECK(c.equal());
}
