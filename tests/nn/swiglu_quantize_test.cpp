// Quantised SwiGLU is SwiGLU and then a quantisation: the same bits as the two calls, by any rounding point, on every backend.
#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/nn/swiglu_quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;
using keel::whole;

namespace {

template <class Via, class X, class Scale, int Columns>
void check_fused(int64_t rows, int64_t columns, data_kind kind, keel::non_finite_policy policy = keel::non_finite_policy::isolate) {
    using blocks = keel::block_scaled<keel::e4m3, Scale, 1, Columns>;
    INFO("1x" << Columns << " on " << rows << "x" << columns << " " << name_of(kind));
    guarded_matrix<X> both(rows, 2 * columns, 1, floats(kind, rows * 2 * columns, 1)); // a fused projection's halves
    auto const gate = keel::columns(both.view(), 0, columns), up = keel::columns(both.view(), columns, columns);
    guarded_matrix<Via> y(rows, columns);
    guarded_matrix<keel::e4m3> want(rows, columns);
    guarded_matrix<typename Scale::storage> scales(rows, blocks::scale_columns(columns));
    keel::report seen;
    keel::swiglu(keel::reference{}, gate, up, y.view()).or_throw();
    keel::quantize<overflow::saturate_finite>(keel::reference{}, y.view(), blocks{want.view(), scales.view()}, {.policy = policy}, &seen).or_throw();
    for_main_backends([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::e4m3> codes(rows, columns, 2);
        guarded_matrix<typename Scale::storage> own(rows, blocks::scale_columns(columns), 1);
        keel::report here;
        keel::swiglu_quantize<Via, overflow::saturate_finite>(be, gate, up, blocks{codes.view(), own.view()}, {.policy = policy}, &here).or_throw();
        CHECK(codes.contents() == want.contents());
        CHECK(own.contents() == scales.contents());
        CHECK(std::memcmp(&here, &seen, sizeof here) == 0);
        CHECK((codes.untouched() && own.untouched()));
    });
}

} // namespace

TEST_CASE("quantised swiglu has the bits of swiglu and quantise, by each rounding point") {
    check_fused<float, keel::bf16, keel::fp32_scale, 128>(3, 300, data_kind::normal);
    check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, 32>(2, 1100, data_kind::mixed_scales);
    check_fused<keel::f16, float, keel::power_of_two_scale, 64>(2, 131, data_kind::outlier);
    check_fused<keel::bf16, keel::bf16, keel::fp32_scale, whole>(3, 2100, data_kind::normal);
    for (int64_t columns : {0, 1, 127, 128, 129}) check_fused<keel::bf16, keel::bf16, keel::fp32_scale, 128>(2, columns, data_kind::normal);
    check_fused<float, float, keel::fp32_scale, 128>(0, 128, data_kind::normal);
    for (auto policy : {keel::non_finite_policy::isolate, keel::non_finite_policy::poison})
        for (data_kind kind : {data_kind::with_inf, data_kind::any_bits, data_kind::zeros, data_kind::tiny}) {
            check_fused<float, keel::bf16, keel::fp32_scale, 128>(3, 200, kind, policy);
            check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, whole>(3, 200, kind, policy);
            check_fused<float, keel::bf16, keel::e8m0_scale, 32>(1, 2500, kind, policy); // more than one piece, not all of them finite
        }
}

TEST_CASE("quantised swiglu refuses bad arguments and writes nothing") {
    guarded_matrix<float> gate(2, 130, 0, floats(data_kind::normal, 260)), up(2, 130, 0, floats(data_kind::normal, 260, 2));
    guarded_matrix<keel::e4m3> codes(2, 130);
    guarded_matrix<float> scales(2, 2);
    keel::row_blocks<> const q{codes.view(), scales.view()};
    auto const refused = [&](auto u, auto out) { return keel::swiglu_quantize<float, overflow::saturate>(keel::cpu{}, gate.view(), u, out).message(); };
    CHECK(refused(keel::columns(up.view(), 0, 129), q) == "swiglu_quantize: up has columns = 129, wanted 130 (bad_shape)");
    auto over = q;
    over.scales.data = up.view().data;
    CHECK(refused(up.view(), over) == "swiglu_quantize: out.scales, wanted memory of its own (overlap)");
    over = q;
    over.codes.stride[1] = 2, over.codes.stride[0] = 260;
    CHECK(refused(up.view(), over) == "swiglu_quantize: out.codes has last stride = 2, wanted 1 (bad_stride)");
    CHECK(codes.at(0, 0) == 0.0);
}
