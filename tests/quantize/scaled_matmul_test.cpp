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
template <class C, class Left, class Right>
void check_product(guarded_matrix<C> const& c, int64_t k, Left left, Right right, double beta, double old) {
    for (int64_t i = 0; i < c.rows(); ++i)
        for (int64_t j = 0; j < c.columns(); ++j) {
            double exact = 0, size = 0;
            for (int64_t p = 0; p < k; ++p) exact += left(i, p) * right(p, j), size += std::abs(left(i, p) * right(p, j));
            exact += beta * old;
            double const bound = (128.0 + std::ceil(static_cast<double>(k) / 128) + 2) * 0x1p-24 * (size + std::abs(beta * old)) +
                                 std::ldexp(std::abs(exact), -keel::format_traits<C>::mantissa_bits - 1) * 1.001;
            if (!(std::abs(c.at(i, j) - exact) <= bound)) FAIL_CHECK(i << "," << j << ": " << c.at(i, j) << " for " << exact);
        }
}

template <class Scale> void check_layer(int64_t tokens, int64_t inputs, int64_t outputs) {
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
    guarded_matrix<keel::bf16> y(tokens, outputs, 3), dx(tokens, inputs);
    guarded_matrix<float> dw(outputs, inputs, 1, std::vector<float>(static_cast<std::size_t>(outputs * inputs), 0.5f));
    run(keel::reference{}, y, dx, dw);
    check_product(y, inputs, [&](int64_t i, int64_t p) { return xr.at(i, p); }, [&](int64_t p, int64_t j) { return wq.at(j, p); }, 0, 0);
    check_product(dx, outputs, [&](int64_t i, int64_t p) { return dyr.at(i, p); }, [&](int64_t p, int64_t j) { return wq.at(p, j); }, 0, 0);
    check_product(dw, tokens, [&](int64_t i, int64_t p) { return dyc.at(p, i); }, [&](int64_t p, int64_t j) { return xc.at(p, j); }, 1, 0.5);
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        guarded_matrix<keel::bf16> y2(tokens, outputs), dx2(tokens, inputs, 2);
        guarded_matrix<float> dw2(outputs, inputs, 0, std::vector<float>(static_cast<std::size_t>(outputs * inputs), 0.5f));
        run(be, y2, dx2, dw2);
        CHECK(y2.contents() == y.contents());
        CHECK(dx2.contents() == dx.contents());
        CHECK(dw2.contents() == dw.contents());
        CHECK((y2.untouched() && dx2.untouched() && dw2.untouched()));
    });
}

} // namespace

TEST_CASE("the three products of an FP8 layer are within the stated bound of the exact ones, with the same bits everywhere") {
    check_layer<keel::fp32_scale>(130, 257, 67);
    check_layer<keel::fp32_scale>(1, 1, 1);
    check_layer<keel::fp32_scale>(3, 128, 300);
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
    double const blocks = std::ceil(static_cast<double>(k) / L);
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            double exact = 0, size = 0;
            for (int64_t p = 0; p < k; ++p) exact += a.at(i, p) * b.at(p, j), size += std::abs(a.at(i, p) * b.at(p, j));
            if (!(std::abs(c.at(i, j) - exact) <= (L + blocks + 2) * 0x1p-24 * size)) FAIL_CHECK(i << "," << j);
        }
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
    CHECK(c.at(0, 0) == 3.0);
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
