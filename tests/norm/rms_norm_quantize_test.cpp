// A quantised norm is a norm and then a quantisation: the same bits as the two calls, by any rounding point, on every backend.
#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/norm/rms_norm_quantize.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::overflow;
using keel::whole;

namespace {

template <class Code, class Scale, int Columns> struct owned_blocks {
    using blocks = keel::block_scaled<Code, Scale, 1, Columns>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    owned_blocks(int64_t rows, int64_t columns) : codes(rows, columns, 3), scales(rows, blocks::scale_columns(columns), 1) {}
    blocks view() { return {codes.view(), scales.view()}; }
    bool operator==(owned_blocks const& o) const { return codes.contents() == o.codes.contents() && scales.contents() == o.scales.contents(); }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

template <class Via, class X, class Scale, int Columns>
void check_fused(int64_t rows, int64_t columns, data_kind kind, keel::cast_order order, keel::non_finite_policy policy = keel::non_finite_policy::isolate) {
    INFO("1x" << Columns << " on " << rows << "x" << columns << " " << name_of(kind));
    guarded_matrix<X> x(rows, columns, 1, floats(kind, rows * columns, 1)), residual(rows, columns, 2, floats(data_kind::normal, rows * columns, 4));
    guarded_matrix<float> delta(1, columns, 0, floats(data_kind::uniform, columns, 2));
    guarded_matrix<Via> y(rows, columns), added(rows, columns);
    guarded_matrix<X> sum(rows, columns), own_sum(rows, columns);
    guarded_matrix<float> r(1, rows), own_r(1, rows);
    owned_blocks<keel::e4m3, Scale, Columns> want(rows, columns), want_added(rows, columns);
    keel::report seen, seen_added;
    keel::reference const ref;
    keel::rms_norm_options const options{.order = order};
    keel::rms_norm(ref, x.view(), delta.vec(), y.view(), {r.vec()}, options).or_throw();
    keel::quantize<overflow::saturate_finite>(ref, y.view(), want.view(), {.policy = policy}, &seen).or_throw();
    for (auto rounding : {keel::residual_rounding::from_stored, keel::residual_rounding::from_sum}) {
        keel::add_rms_norm(ref, x.view(), residual.view(), delta.vec(), sum.view(), added.view(), {}, {.order = order, .rounding = rounding}).or_throw();
        seen_added = {};
        keel::quantize<overflow::saturate_finite>(ref, added.view(), want_added.view(), {.policy = policy}, &seen_added).or_throw();
        for_main_backends([&](std::string const& name, auto const& be) {
            INFO(name);
            owned_blocks<keel::e4m3, Scale, Columns> q(rows, columns), silent(rows, columns);
            keel::report here;
            keel::rms_norm_quantize<Via, overflow::saturate_finite>(be, x.view(), delta.vec(), q.view(), {own_r.vec()}, options, {.policy = policy}, &here)
                .or_throw();
            CHECK(q == want);
            CHECK(own_r.contents() == r.contents());
            CHECK(std::memcmp(&here, &seen, sizeof here) == 0);
            keel::rms_norm_quantize<Via, overflow::saturate_finite>(be, x.view(), delta.vec(), silent.view(), {}, options, {.policy = policy}).or_throw();
            CHECK(silent == want);
            here = {};
            keel::add_rms_norm_quantize<Via, overflow::saturate_finite>(be, x.view(), residual.view(), delta.vec(), own_sum.view(), q.view(), {},
                                                                        {.order = order, .rounding = rounding}, {.policy = policy}, &here)
                .or_throw();
            CHECK(q == want_added);
            CHECK(own_sum.contents() == sum.contents());
            CHECK(std::memcmp(&here, &seen_added, sizeof here) == 0);
            CHECK((q.untouched() && own_sum.untouched()));
        });
    }
}

} // namespace

TEST_CASE("a quantised norm has the bits of norm and quantise, by each rounding point") { // flashinfer #4480, vllm #53540
    using keel::cast_order;
    check_fused<float, keel::bf16, keel::fp32_scale, 128>(3, 300, data_kind::normal, cast_order::gain_then_cast);
    check_fused<keel::bf16, keel::bf16, keel::fp32_scale, 128>(3, 300, data_kind::normal, cast_order::gain_then_cast);
    check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, 32>(2, 1100, data_kind::mixed_scales, cast_order::cast_then_gain);
    check_fused<keel::f16, float, keel::power_of_two_scale, 64>(2, 131, data_kind::outlier, cast_order::cast_then_gain);
    for (int64_t columns : {37, 2100}) check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, whole>(3, columns, data_kind::normal, cast_order::gain_then_cast);
    for (int64_t columns : {0, 1, 31, 32, 33, 127, 128, 129, 1023, 1024, 1025})
        check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, 32>(2, columns, data_kind::normal, cast_order::gain_then_cast);
    check_fused<float, keel::bf16, keel::fp32_scale, 128>(0, 128, data_kind::normal, cast_order::gain_then_cast);
    for (auto policy : {keel::non_finite_policy::isolate, keel::non_finite_policy::poison})
        for (data_kind kind : {data_kind::with_inf, data_kind::any_bits, data_kind::zeros, data_kind::tiny, data_kind::huge}) {
            check_fused<float, keel::bf16, keel::fp32_scale, 128>(3, 200, kind, cast_order::gain_then_cast, policy);
            check_fused<keel::bf16, keel::bf16, keel::e8m0_scale, whole>(3, 200, kind, cast_order::gain_then_cast, policy);
        }
}

TEST_CASE("the rounding point shows: codes from fp32 and from bf16 differ") { // so a caller must name one
    guarded_matrix<keel::bf16> x(16, 512, 0, floats(data_kind::normal, 16 * 512, 8));
    guarded_matrix<float> delta(1, 512, 0, floats(data_kind::uniform, 512, 2));
    owned_blocks<keel::e4m3, keel::fp32_scale, 128> a(16, 512), b(16, 512);
    keel::rms_norm_quantize<float, overflow::saturate>(keel::cpu{}, x.view(), delta.vec(), a.view()).or_throw();
    keel::rms_norm_quantize<keel::bf16, overflow::saturate>(keel::cpu{}, x.view(), delta.vec(), b.view()).or_throw();
    CHECK(!(a == b));
}

TEST_CASE("a quantised norm refuses what norm and quantise refuse, and writes nothing") {
    guarded_matrix<keel::bf16> x(2, 130, 0, floats(data_kind::normal, 260)), sum(2, 130);
    guarded_matrix<float> delta(1, 130), narrow(1, 129);
    owned_blocks<keel::e4m3, keel::fp32_scale, 128> q(2, 130), wide(2, 131);
    keel::cpu be;
    auto const refused = [&](auto d, auto out, keel::rms_norm_options o = {}) {
        return keel::rms_norm_quantize<float, overflow::saturate>(be, x.view(), d, out, {}, o).message();
    };
    CHECK(refused(narrow.vec(), q.view()) == "rms_norm_quantize: delta has length = 129, wanted 130 (bad_shape)");
    CHECK(refused(delta.vec(), wide.view()) == "rms_norm_quantize: out.codes has columns = 131, wanted 130 (bad_shape)");
    CHECK(refused(delta.vec(), q.view(), {.epsilon = 0}) == "rms_norm_quantize: options.epsilon, wanted a finite number of at least 2^-126 (bad_option)");
    auto over = q.view();
    over.scales.data = delta.view().data, over.scales.stride[0] = 2;
    CHECK(refused(delta.vec(), over) == "rms_norm_quantize: out.scales, wanted memory of its own (overlap)");
    over = q.view();
    over.codes.data = reinterpret_cast<keel::e4m3*>(x.view().data);
    CHECK(refused(delta.vec(), over) == "rms_norm_quantize: out.codes, wanted memory of its own (overlap)");
    CHECK(keel::add_rms_norm_quantize<float, overflow::saturate>(be, x.view(), keel::slice(x.view(), 0, 1), delta.vec(), sum.view(), q.view()).message() ==
          "add_rms_norm_quantize: residual has rows = 1, wanted 2 (bad_shape)");
    over.codes.data = reinterpret_cast<keel::e4m3*>(sum.view().data);
    CHECK(keel::add_rms_norm_quantize<float, overflow::saturate>(be, x.view(), x.view(), delta.vec(), sum.view(), over).message() ==
          "add_rms_norm_quantize: out.codes, wanted memory of its own (overlap)");
    CHECK(q.codes.at(0, 0) == 0.0);
    CHECK(sum.at(0, 0) == 0.0);
}
