// The block-scaled product against the exact product of the decoded matrices, in all three forms that a linear layer uses.
#include <cmath>

#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/bf16.hpp>
#include <keel/quantize/quantize.hpp>
#include <keel/quantize/scaled_matmul.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

template <class Scale, int Rows, int Columns> struct quantised {
    using blocks = keel::block_scaled<keel::e4m3, Scale, Rows, Columns>;
    guarded_matrix<keel::e4m3> codes;
    guarded_matrix<typename Scale::storage> scales;
    explicit quantised(guarded_matrix<float>& x)
        : codes(x.rows(), x.columns(), 1), scales(blocks::scale_rows(x.rows()), blocks::scale_columns(x.columns())) {
        keel::quantize<keel::overflow::saturate>(keel::cpu{}, x.view(), view()).or_throw();
    }
    blocks view() { return {codes.view(), scales.view()}; }
    double at(int64_t i, int64_t j) const { return codes.at(i, j) * scales.at(i / Rows, j / Columns); }
};

/// (L + blocks + 2) * 2^-24 * sum|ab|, the bound of the header, plus half an ulp of C.
template <int L = 128, class C, class Left, class Right>
void check_product(guarded_matrix<C> const& c, int64_t k, Left left, Right right, double beta, double old) {
    for (int64_t i = 0; i < c.rows(); ++i)
        for (int64_t j = 0; j < c.columns(); ++j) {
            double exact = 0, size = 0;
            for (int64_t p = 0; p < k; ++p) exact += left(i, p) * right(p, j), size += std::abs(left(i, p) * right(p, j));
            exact += beta * old;
            double const bound = (L + std::ceil(static_cast<double>(k) / L) + 2) * 0x1p-24 * (size + std::abs(beta * old)) +
                                 std::ldexp(std::abs(exact), -keel::format_traits<C>::mantissa_bits - 1) * 1.001;
            if (!(std::abs(c.at(i, j) - exact) <= bound)) FAIL_CHECK(i << "," << j << ": " << c.at(i, j) << " for " << exact);
        }
}

template <class Scale, class Out, class Gradient> void check_layer(int64_t tokens, int64_t inputs, int64_t outputs) {
    INFO(tokens << " tokens, " << inputs << " inputs, " << outputs << " outputs");
    guarded_matrix<float> x(tokens, inputs, 0, floats(data_kind::normal, tokens * inputs, 1));
    guarded_matrix<float> w(outputs, inputs, 0, floats(data_kind::mixed_scales, outputs * inputs, 2));
    guarded_matrix<float> dy(tokens, outputs, 0, floats(data_kind::outlier, tokens * outputs, 3));
    quantised<Scale, 1, 128> xr(x), dyr(dy);
    quantised<Scale, 128, 1> xc(x), dyc(dy);
    quantised<Scale, 128, 128> wq(w);
    auto const run = [&](auto const& be, auto& y, auto& dx, auto& dw) {
        auto const most = std::max({keel::scaled_matmul_workspace(be, tokens, outputs, inputs), keel::scaled_matmul_workspace(be, tokens, inputs, outputs),
                                    keel::scaled_matmul_workspace(be, outputs, inputs, tokens)});
        scratch ws(most);
        keel::scaled_matmul(be, xr.view(), transposed(wq.view()), y.view(), {}, ws.get()).or_throw();
        keel::scaled_matmul(be, dyr.view(), wq.view(), dx.view(), {}, ws.get()).or_throw();
        keel::scaled_matmul(be, transposed(dyc.view()), xc.view(), dw.view(), {.beta = 1.0f}, ws.get()).or_throw();
    };
    guarded_matrix<Out> y(tokens, outputs, 3), dx(tokens, inputs);
    guarded_matrix<Gradient> dw(outputs, inputs, 1, std::vector<float>(static_cast<std::size_t>(outputs * inputs), 0.5f));
    run(keel::reference{}, y, dx, dw);
    check_product(y, inputs, [&](int64_t i, int64_t p) { return xr.at(i, p); }, [&](int64_t p, int64_t j) { return wq.at(j, p); }, 0, 0);
    check_product(dx, outputs, [&](int64_t i, int64_t p) { return dyr.at(i, p); }, [&](int64_t p, int64_t j) { return wq.at(p, j); }, 0, 0);
    check_product(dw, tokens, [&](int64_t i, int64_t p) { return dyc.at(p, i); }, [&](int64_t p, int64_t j) { return xc.at(p, j); }, 1, 0.5);
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<Out> y2(tokens, outputs), dx2(tokens, inputs, 2);
        guarded_matrix<Gradient> dw2(outputs, inputs, 0, std::vector<float>(static_cast<std::size_t>(outputs * inputs), 0.5f));
        run(be, y2, dx2, dw2);
        CHECK(y2.contents() == y.contents());
        CHECK(dx2.contents() == dx.contents());
        CHECK(dw2.contents() == dw.contents());
        CHECK((y2.untouched() && dx2.untouched() && dw2.untouched()));
    });
}

} // namespace

TEST_CASE("the three products of an FP8 layer are within the stated bound of the exact ones, with the same bits everywhere") {
    using keel::bf16;
    check_layer<keel::fp32_scale, bf16, float>(130, 257, 67);
    check_layer<keel::fp32_scale, bf16, float>(1, 1, 1);
    check_layer<keel::fp32_scale, bf16, float>(3, 128, 300);
    check_layer<keel::fp32_scale, float, bf16>(130, 257, 67);
    check_layer<keel::power_of_two_scale, bf16, float>(35, 129, 140);
    check_layer<keel::e8m0_scale, float, bf16>(35, 129, 140);
}

namespace {
/// Both operands in blocks of L along k, in the three forms: A B^T, A B and A^T B.
template <class Scale, int L, class C> void check_both_along_k(int64_t tokens, int64_t inputs, int64_t outputs) {
    INFO("blocks of " << L << ": " << tokens << " tokens, " << inputs << " inputs, " << outputs << " outputs");
    guarded_matrix<float> x(tokens, inputs, 0, floats(data_kind::normal, tokens * inputs, 1));
    guarded_matrix<float> w(outputs, inputs, 0, floats(data_kind::mixed_scales, outputs * inputs, 2));
    guarded_matrix<float> dy(tokens, outputs, 0, floats(data_kind::outlier, tokens * outputs, 3));
    quantised<Scale, 1, L> xr(x), wr(w), dyr(dy);
    quantised<Scale, L, 1> xc(x), wc(w), dyc(dy);
    guarded_matrix<C> y(tokens, outputs), dx(tokens, inputs), dw(outputs, inputs);
    keel::scaled_matmul(keel::reference{}, xr.view(), transposed(wr.view()), y.view()).or_throw();
    keel::scaled_matmul(keel::reference{}, dyr.view(), wc.view(), dx.view()).or_throw();
    keel::scaled_matmul(keel::reference{}, transposed(dyc.view()), xc.view(), dw.view()).or_throw();
    check_product<L>(y, inputs, [&](int64_t i, int64_t p) { return xr.at(i, p); }, [&](int64_t p, int64_t j) { return wr.at(j, p); }, 0, 0);
    check_product<L>(dx, outputs, [&](int64_t i, int64_t p) { return dyr.at(i, p); }, [&](int64_t p, int64_t j) { return wc.at(p, j); }, 0, 0);
    check_product<L>(dw, tokens, [&](int64_t i, int64_t p) { return dyc.at(p, i); }, [&](int64_t p, int64_t j) { return xc.at(p, j); }, 0, 0);
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<C> y2(tokens, outputs, 1), dx2(tokens, inputs), dw2(outputs, inputs, 2);
        scratch ys(keel::scaled_matmul_workspace(be, tokens, outputs, inputs, L)), xs(keel::scaled_matmul_workspace(be, tokens, inputs, outputs, L)),
            ws(keel::scaled_matmul_workspace(be, outputs, inputs, tokens, L));
        keel::scaled_matmul(be, xr.view(), transposed(wr.view()), y2.view(), {}, ys.get()).or_throw();
        keel::scaled_matmul(be, dyr.view(), wc.view(), dx2.view(), {}, xs.get()).or_throw();
        keel::scaled_matmul(be, transposed(dyc.view()), xc.view(), dw2.view(), {}, ws.get()).or_throw();
        CHECK((y2.contents() == y.contents() && dx2.contents() == dx.contents() && dw2.contents() == dw.contents()));
        CHECK((y2.untouched() && dx2.untouched() && dw2.untouched()));
    });
}
} // namespace

TEST_CASE("both operands in row blocks of 128 or OCP's 32, in all three forms") {
    check_both_along_k<keel::fp32_scale, 128, keel::bf16>(131, 300, 37);
    check_both_along_k<keel::fp32_scale, 128, float>(131, 300, 37);
    check_both_along_k<keel::e8m0_scale, 32, keel::bf16>(67, 131, 45);
    check_both_along_k<keel::e8m0_scale, 32, float>(67, 131, 45);
}

namespace {
/// Blocks of L along k, each with scales of their own, in a k that they do not divide.
template <int L> void check_block_length() {
    INFO("blocks of " << L);
    int64_t const m = 7, n = 37, k = 700;
    guarded_matrix<float> x(m, k, 0, floats(data_kind::mixed_scales, m * k, 5)), w(k, n, 0, floats(data_kind::mixed_scales, k * n, 6));
    quantised<keel::fp32_scale, 1, L> a(x);
    quantised<keel::fp32_scale, L, 1> b(w);
    guarded_matrix<float> c(m, n), slow(m, n);
    keel::scaled_matmul(keel::reference{}, a.view(), b.view(), slow.view()).or_throw();
    scratch ws(keel::scaled_matmul_workspace(keel::cpu{}, m, n, k, L));
    keel::scaled_matmul(keel::cpu{}, a.view(), b.view(), c.view(), {}, ws.get()).or_throw();
    CHECK(c.contents() == slow.contents());
    check_product<L>(c, k, [&](int64_t i, int64_t p) { return a.at(i, p); }, [&](int64_t p, int64_t j) { return b.at(p, j); }, 0, 0);
}
} // namespace

TEST_CASE("blocks of any length along k, longer than the service's own blocks and not dividing them") {
    check_block_length<1>();
    check_block_length<3>();
    check_block_length<16>();
    check_block_length<48>();
    check_block_length<96>();
    check_block_length<136>();
    check_block_length<256>();
    check_block_length<640>();
    check_block_length<1000>();
}

TEST_CASE("codes and scales that are only read may be const") {
    guarded_matrix<float> x(3, 130, 0, floats(data_kind::normal, 390, 1)), y(3, 130), z(3, 130), c(3, 3), d(3, 3);
    quantised<keel::fp32_scale, 1, 128> q(x);
    keel::block_scaled<keel::e4m3 const, keel::fp32_scale, 1, 128> const read_only = q.view();
    keel::dequantize(keel::cpu{}, q.view(), y.view()).or_throw();
    keel::dequantize(keel::cpu{}, read_only, z.view()).or_throw();
    CHECK(y.contents() == z.contents());
    scratch ws(keel::scaled_matmul_workspace(keel::cpu{}, 3, 3, 130));
    keel::scaled_matmul(keel::cpu{}, q.view(), transposed(q.view()), c.view(), {}, ws.get()).or_throw();
    keel::scaled_matmul(keel::cpu{}, read_only, transposed(read_only), d.view(), {}, ws.get()).or_throw();
    CHECK(c.contents() == d.contents());
}

TEST_CASE("scaled_matmul refuses what does not fit") {
    guarded_matrix<float> x(4, 130), w(5, 131), c(4, 5, 0, std::vector<float>(20, 3.0f));
    quantised<keel::e8m0_scale, 1, 128> a(x);
    quantised<keel::e8m0_scale, 128, 128> b(w);
    scratch ws(keel::scaled_matmul_workspace(keel::cpu{}, 4, 5, 131));
    CHECK(keel::scaled_matmul(keel::cpu{}, a.view(), transposed(b.view()), c.view(), {}, ws.get()).message() ==
          "scaled_matmul: b.codes has rows = 131, wanted 130 (bad_shape)");
    scratch fits(keel::scaled_matmul_workspace(keel::cpu{}, 4, 5, 130));
    guarded_matrix<float> u(5, 130);
    quantised<keel::e8m0_scale, 128, 128> d(u);
    auto const call = [&](keel::view<float, 2> to, keel::product_form form = keel::product_form::full) {
        return keel::scaled_matmul(keel::cpu{}, a.view(), transposed(d.view()), to, {.form = form}, fits.get()).code;
    };
    using keel::status_code;
    auto const C = c.view();
    CHECK(call(C, keel::product_form::symmetric) == status_code::bad_option);
    CHECK(call({C.data, {4, 5}, {0, 1}}) == status_code::bad_stride);
    CHECK(call({nullptr, {4, 5}, {5, 1}}) == status_code::bad_pointer);
    auto over = a.view();
    over.codes.data = reinterpret_cast<keel::e4m3*>(C.data + 19);
    CHECK(keel::scaled_matmul(keel::cpu{}, over, transposed(d.view()), C, {}, fits.get()).code == status_code::overlap);
    CHECK(c.at(0, 0) == 3.0);
    CHECK(call(C) == status_code::ok);
    CHECK(c.at(0, 0) == 0.0);
}

TEST_CASE("alpha and beta are one fma at the end; a product over nothing is zero, and beta = 0 does not read C") {
    int64_t const m = 5, n = 37, k = 200;
    guarded_matrix<float> x(m, k, 0, floats(data_kind::normal, m * k, 5)), w(n, k, 0, floats(data_kind::normal, n * k, 6));
    quantised<keel::e8m0_scale, 1, 32> a(x), b(w);
    auto const old = floats(data_kind::normal, m * n, 7);
    guarded_matrix<float> total(m, n, 0, floats(data_kind::with_nan, m * n, 8));
    keel::scaled_matmul(keel::reference{}, a.view(), transposed(b.view()), total.view()).or_throw();
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        scratch ws(keel::scaled_matmul_workspace(be, m, n, k, 32));
        guarded_matrix<float> c(m, n, 2, old), none(m, n, 0, floats(data_kind::with_nan, m * n, 8)), kept(m, n, 0, old);
        keel::scaled_matmul(be, a.view(), transposed(b.view()), c.view(), {.alpha = -1.5f, .beta = 0.3f}, ws.get()).or_throw();
        int64_t wrong = 0;
        for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j) {
                float const before = old[static_cast<std::size_t>(i * n + j)];
                wrong += c.get(i, j) != std::fma(-1.5f, total.get(i, j), 0.3f * before) ? 1 : 0;
            }
        CHECK(wrong == 0);
        guarded_matrix<float> nothing(m, 0), of_w(n, 0);
        quantised<keel::e8m0_scale, 1, 32> p(nothing), q(of_w);
        keel::scaled_matmul(be, p.view(), transposed(q.view()), none.view(), {}, ws.get()).or_throw();
        CHECK(none.contents() == guarded_matrix<float>(m, n).contents());
        keel::scaled_matmul(be, p.view(), transposed(q.view()), kept.view(), {.beta = 1.0f}, ws.get()).or_throw();
        CHECK(kept.contents() == guarded_matrix<float>(m, n, 0, old).contents());
        guarded_matrix<float> no_rows(0, k), c0(0, n);
        quantised<keel::e8m0_scale, 1, 32> r(no_rows);
        CHECK(keel::scaled_matmul(be, r.view(), transposed(b.view()), c0.view(), {}, ws.get()).ok());
    });
}

TEST_CASE("a NaN code or scale makes its elements of C NaN and no others; scales past fp32 are seen") {
    int64_t const m = 5, n = 37, k = 200;
    guarded_matrix<float> x(m, k, 0, floats(data_kind::normal, m * k, 5)), w(n, k, 0, floats(data_kind::normal, n * k, 6)), want(m, n);
    quantised<keel::e8m0_scale, 1, 32> a(x), b(w);
    keel::scaled_matmul(keel::reference{}, a.view(), transposed(b.view()), want.view()).or_throw();
    a.codes.set(2, 199, keel::e4m3{0x7f});
    a.scales.set(4, 3, keel::e8m0{0xff});
    b.scales.set(31, 0, keel::e8m0{0xff});
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        scratch ws(keel::scaled_matmul_workspace(be, m, n, k, 32));
        guarded_matrix<float> c(m, n);
        keel::scaled_matmul(be, a.view(), transposed(b.view()), c.view(), {}, ws.get()).or_throw();
        int64_t wrong = 0;
        for (int64_t i = 0; i < m; ++i)
            for (int64_t j = 0; j < n; ++j) {
                bool const bad = i == 2 || i == 4 || j == 31;
                wrong += bad ? !std::isnan(c.at(i, j)) : c.get(i, j) != want.get(i, j);
            }
        CHECK(wrong == 0);
    });
    guarded_matrix<keel::e4m3> zero(1, 1), one(1, 1);
    guarded_matrix<float> large(1, 1, 0, {0x1p100f}), c(1, 1);
    one.set(0, 0, keel::e4m3{0x38});
    auto const product = [&](guarded_matrix<keel::e4m3>& left) {
        keel::row_blocks<> const p{left.view(), large.view()}, q{one.view(), large.view()};
        keel::scaled_matmul(keel::reference{}, p, transposed(q), c.view()).or_throw();
        return c.at(0, 0);
    };
    CHECK(std::isinf(product(one)));
    CHECK(std::isnan(product(zero)));
}

TEST_CASE("e5m2 codes, alone and beside e4m3, within the bound; a workspace one byte short is refused") {
    int64_t const m = 7, n = 33, k = 300;
    guarded_matrix<float> x(m, k, 0, floats(data_kind::mixed_scales, m * k, 5)), w(n, k, 0, floats(data_kind::normal, n * k, 6));
    guarded_matrix<keel::e5m2> xc(m, k), wc(n, k);
    guarded_matrix<float> xs(m, 3), ws(1, 3);
    quantised<keel::fp32_scale, 128, 128> w4(w);
    keel::row_blocks<keel::e5m2> const a{xc.view(), xs.view()};
    keel::tile_blocks<keel::e5m2> const b{wc.view(), ws.view()};
    keel::quantize<keel::overflow::saturate>(keel::cpu{}, x.view(), a).or_throw();
    keel::quantize<keel::overflow::saturate>(keel::cpu{}, w.view(), b).or_throw();
    scratch memory(keel::scaled_matmul_workspace(keel::cpu{}, m, n, k)), less(keel::scaled_matmul_workspace(keel::cpu{}, m, n, k) - 1);
    guarded_matrix<float> c(m, n), slow(m, n), mixed(m, n), mixed_slow(m, n);
    CHECK(keel::scaled_matmul(keel::cpu{}, a, transposed(b), c.view(), {}, less.get()).code == keel::status_code::small_workspace);
    CHECK(c.contents() == slow.contents());
    keel::scaled_matmul(keel::cpu{}, a, transposed(b), c.view(), {}, memory.get()).or_throw();
    keel::scaled_matmul(keel::reference{}, a, transposed(b), slow.view()).or_throw();
    keel::scaled_matmul(keel::cpu{}, a, transposed(w4.view()), mixed.view(), {}, memory.get()).or_throw();
    keel::scaled_matmul(keel::reference{}, a, transposed(w4.view()), mixed_slow.view()).or_throw();
    CHECK((c.contents() == slow.contents() && mixed.contents() == mixed_slow.contents()));
    auto const left = [&](int64_t i, int64_t p) { return xc.at(i, p) * xs.at(i, p / 128); };
    check_product(c, k, left, [&](int64_t p, int64_t j) { return wc.at(j, p) * ws.at(0, p / 128); }, 0, 0);
    check_product(mixed, k, left, [&](int64_t p, int64_t j) { return w4.at(j, p); }, 0, 0);
    xc.set(2, 5, keel::e5m2{0x7c}); // Inf stays visible in its row
    keel::scaled_matmul(keel::cpu{}, a, transposed(b), c.view(), {}, memory.get()).or_throw();
    CHECK(!std::isfinite(c.at(2, 3)));
    CHECK(c.get(1, 3) == slow.get(1, 3));
}
