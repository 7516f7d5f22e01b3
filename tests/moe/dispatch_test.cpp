// Dispatch and combine against plain loops in double, their gradients against finite differences, and the routed share.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include <keel/format/f16.hpp>
#include <keel/moe/dispatch.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

/// Routed, capped tokens: about a quarter of the assignments is dropped, token 2 is padding.
struct layout {
    int64_t tokens, experts, k;
    routed<> r;
    guarded_matrix<int64_t> slots, offsets;
    std::vector<int64_t> memory;
    keel::served_counts served;
    std::unique_ptr<bool[]> valid;

    layout(int64_t t, int64_t e, int64_t choices, int numerator = 3)
        : tokens(t), experts(e), k(choices), r(t, e, choices), slots(t, choices, 1), offsets(1, e + 1), memory(static_cast<std::size_t>(e)),
          served(keel::vec(memory.data(), e)), valid(new bool[static_cast<std::size_t>(t)]) {
        guarded_matrix<float> z(t, e, 0, floats(data_kind::normal, t * e, 13)), bias(1, e);
        bias.set(0, 0, 0.5f); // an expert that everyone wants
        for (int64_t i = 0; i < t; ++i) valid[static_cast<std::size_t>(i)] = i != 2;
        r.run(keel::cpu{}, z.view(), {.bias = bias.vec(), .valid = keel::vec(valid.get(), t)}).or_throw();
        scratch ws(keel::apply_capacity_workspace(t, e));
        auto const limit = numerator == 0 ? keel::capacity_limit::dropless() : keel::capacity_limit::factor(numerator, 4);
        keel::apply_capacity(keel::cpu{}, r.ids.view(), r.demand, where(), served, {.limit = limit}, ws.get()).or_throw();
    }
    keel::expert_slots where() { return {slots.view(), offsets.vec()}; }
    keel::view<bool const, 1> mask() const { return keel::vec<bool const>(valid.get(), tokens); }
    int64_t rows() const { return served.total(); }
};

} // namespace

TEST_CASE("dispatch puts each served token's row at its slot, and combine brings the outputs back by weight") {
    for (int64_t width : {1, 5, 64, 131}) {
        layout l(41, 5, 2);
        REQUIRE(l.served.total() < l.r.demand.total());
        guarded_matrix<float> x(41, width, 2, floats(data_kind::normal, 41 * width, 1)), rows(l.rows(), width, 1);
        keel::dispatch(keel::cpu{}, x.view(), l.where(), rows.view()).or_throw();
        std::vector<int> written(static_cast<std::size_t>(l.rows()));
        for (int64_t t = 0; t < 41; ++t)
            for (int64_t j = 0; j < 2; ++j) {
                int64_t const slot = l.slots.get(t, j);
                if (slot < 0) continue;
                ++written[static_cast<std::size_t>(slot)];
                CHECK(slot >= l.offsets.get(0, l.r.id(t, j)));
                CHECK(slot < l.offsets.get(0, l.r.id(t, j) + 1));
                for (int64_t c = 0; c < width; ++c) CHECK(rows.get(slot, c) == x.get(t, c));
            }
        CHECK(written == std::vector<int>(written.size(), 1)); // every row once
        CHECK(rows.untouched());

        guarded_matrix<float> out(l.rows(), width, 0, floats(data_kind::normal, l.rows() * width, 2)), y(41, width, 3), terms(41, 4);
        guarded_matrix<keel::bf16> shared(41, width, 1, floats(data_kind::normal, 41 * width, 3));
        keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), y.view(), {.share_terms = terms.view()}, l.mask()).or_throw();
        double ry = 0, yy = 0, rr = 0, hh = 0;
        for (int64_t t = 0; t < 41; ++t)
            for (int64_t c = 0; c < width; ++c) {
                double sum = 0;
                for (int64_t j = 0; j < 2; ++j)
                    if (int64_t const slot = l.slots.get(t, j); slot >= 0) sum += l.r.weights.at(t, j) * out.at(slot, c);
                double const h = shared.at(t, c), want = sum + h;
                CHECK(y.at(t, c) == Approx(want).margin(4e-7)); // three roundings of values up to 6
                if (t == 2) CHECK(y.at(t, c) == h);             // no expert: the shared part alone (HF #37017)
                if (t != 2) ry += sum * want, yy += want * want, rr += sum * sum, hh += h * h;
            }
        CHECK(y.untouched());
        CHECK(terms.untouched());
        keel::routed_share share;
        keel::measure_routed_share(keel::cpu{}, terms.view(), &share).or_throw();
        CHECK(static_cast<double>(share.projection()) == Approx(ry / yy).margin(1e-5)); // sums of O(1) products of fp32
        CHECK(static_cast<double>(share.norm()) == Approx(rr / (rr + hh)).margin(1e-5));
        // The same y without the terms, and without a shared part.
        guarded_matrix<float> plain(41, width), alone(41, width);
        keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), plain.view()).or_throw();
        CHECK(plain.contents() == y.contents());
        keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), keel::view<float, 2>{}, alone.view(), {.share_terms = terms.view()}).or_throw();
        keel::measure_routed_share(keel::cpu{}, terms.view(), &share).or_throw();
        CHECK(share.projection() == 1.0f);
        CHECK(share.norm() == 1.0f);
        for (int64_t c = 0; c < width; ++c) CHECK(alone.at(2, c) == 0.0);
    }
}

TEST_CASE("the routed share is honest about cancellation") {
    layout l(4, 2, 1, 0);
    guarded_matrix<float> out(l.rows(), 8, 0, std::vector<float>(static_cast<std::size_t>(l.rows() * 8), 3.0f)), y(4, 8), shared(4, 8), terms(4, 4), ones(4, 1, 0, {1, 1, 1, 1});
    for (int64_t i = 0; i < 32; ++i) shared.set(i / 8, i % 8, -2.0f); // r = 3, h = -2, y = 1
    keel::combine(keel::cpu{}, out.view(), l.where(), ones.view(), shared.view(), y.view(), {.share_terms = terms.view()}, l.mask()).or_throw();
    keel::routed_share share;
    keel::measure_routed_share(keel::cpu{}, terms.view(), &share).or_throw();
    CHECK(share.projection() == 3.0f);
    CHECK(static_cast<double>(share.norm()) == Approx(9.0 / 13).epsilon(1e-7));
    CHECK(keel::routed_share{.routed = 3e38f, .shared = 1e38f}.norm() == Approx(0.75)); // their sum is beyond FLT_MAX
    CHECK(keel::routed_share{.routed = 1e-45f, .shared = 0.0f}.norm() == 1.0f);
    keel::routed_share const nothing;
    CHECK(nothing.projection() == 0.0f);
    CHECK(nothing.norm() == 0.0f);
}

TEST_CASE("each expert's share of the output: the dot product of its part, adding up to the routed share") {
    for (int64_t k : {2, 20}) // and more than eight at a time, more than the sixteen rows that are found once
        for (int64_t width : {1, 70}) {
            int64_t const tokens = 30, experts = k == 2 ? 5 : 23;
            layout l(tokens, experts, k);
            guarded_matrix<keel::bf16> out(l.rows(), width, 1, floats(data_kind::normal, l.rows() * width, 2)), y(tokens, width), shared(tokens, width, 0, floats(data_kind::normal, tokens * width, 3));
            guarded_matrix<float> terms(tokens, 4), rows(1, l.rows()), shares(1, experts);
            keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), y.view(), {.share_terms = terms.view(), .row_terms = rows.vec()}, l.mask())
                .or_throw();
            keel::routed_share share;
            keel::measure_routed_share(keel::cpu{}, terms.view(), &share).or_throw();
            keel::measure_expert_shares(keel::cpu{}, rows.vec(), l.where().offsets, share, shares.vec()).or_throw();
            std::vector<double> want(static_cast<std::size_t>(experts));
            double output = 0, sum = 0;
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t c = 0; c < width; ++c) {
                    double whole = shared.at(t, c);
                    auto const each = [&](auto const& body) {
                        for (int64_t j = 0; j < l.k; ++j)
                            if (int64_t const slot = l.slots.get(t, j); slot >= 0) body(l.r.id(t, j), l.r.weights.at(t, j) * out.at(slot, c));
                    };
                    each([&](int64_t, double part) { whole += part; });
                    each([&](int64_t e, double part) { want[static_cast<std::size_t>(e)] += part * whole; });
                    if (t != 2) output += whole * whole; // padding
                }
            for (int64_t e = 0; e < experts; ++e) {
                CHECK(shares.at(0, e) == Approx(want[static_cast<std::size_t>(e)] / output).margin(2e-6)); // sums of O(1) products of fp32
                sum += shares.at(0, e);
                if (l.offsets.get(0, e) == l.offsets.get(0, e + 1)) CHECK(shares.at(0, e) == 0.0);
            }
            CHECK(sum == Approx(static_cast<double>(share.projection())).margin(2e-6));
            CHECK(rows.untouched());
            CHECK(shares.untouched());
            guarded_matrix<keel::bf16> plain(tokens, width); // what is measured changes nothing
            keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), plain.view()).or_throw();
            CHECK(plain.contents() == y.contents());
            // In place of the shared part the terms are those of the shared part still.
            guarded_matrix<float> again(1, l.rows());
            keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), shared.view(), {.row_terms = again.vec()}).or_throw();
            CHECK(again.contents() == rows.contents());
            l.offsets.set(0, experts, l.rows() + 1);
            CHECK(keel::measure_expert_shares(keel::cpu{}, rows.vec(), l.where().offsets, share, shares.vec()).code == keel::status_code::bad_option);
        }
}

TEST_CASE("dispatch copies bits, past the caches too: NaN with what it carries, any start and width") {
    for (int64_t width : {33, 200, 4096}) {
        layout l(width == 4096 ? 700 : 40, 9, 6, 0); // 700 * 6 rows of 8 KB are more than what stays in the caches
        std::vector<uint16_t> x(static_cast<std::size_t>(l.tokens * (width + 3) + 1)), rows(static_cast<std::size_t>(l.rows() * width + 5), 0x7777);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<uint16_t>(i * 40503u); // NaNs of all kinds among them
        auto const as_view = [](std::vector<uint16_t>& v, int64_t start, int64_t row_count, int64_t columns, int64_t stride) {
            return keel::rows(reinterpret_cast<keel::bf16*>(v.data() + start), row_count, columns, stride);
        };
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " width " << width);
            for (auto& v : rows) v = 0x7777;
            keel::dispatch(be, as_view(x, 1, l.tokens, width, width + 3), l.where(), as_view(rows, 2, l.rows(), width, width)).or_throw();
            int64_t wrong = 0;
            for (int64_t t = 0; t < l.tokens; ++t)
                for (int64_t j = 0; j < l.k; ++j)
                    if (int64_t const slot = l.slots.get(t, j); slot >= 0)
                        for (int64_t c = 0; c < width; ++c)
                            wrong += rows[static_cast<std::size_t>(2 + slot * width + c)] != x[static_cast<std::size_t>(1 + t * (width + 3) + c)] ? 1 : 0;
            CHECK(wrong == 0);
            for (std::size_t i : {std::size_t{0}, std::size_t{1}, rows.size() - 3, rows.size() - 2, rows.size() - 1}) CHECK(rows[i] == 0x7777);
        });
    }
}

TEST_CASE("the gradients of dispatch and combine are the derivatives") {
    // Linear in every argument, so a central difference with a large step is exact but for fp32's rounding: checked in double here.
    int64_t const tokens = 9, width = 7;
    layout l(tokens, 3, 2);
    guarded_matrix<float> dy(tokens, width, 1, floats(data_kind::normal, tokens * width, 4)), out(l.rows(), width, 0, floats(data_kind::normal, l.rows() * width, 5));
    guarded_matrix<float> drows(l.rows(), width, 2), dw(tokens, 2, 1), dx(tokens, width);
    keel::combine_backward(keel::cpu{}, dy.view(), out.view(), l.where(), l.r.weights.view(), {.dexpert_rows = drows.view(), .dweights = dw.view()}).or_throw();
    auto const loss = [&](auto const& output, auto const& weight) { // <dy, combine(...)>
        double total = 0;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t j = 0; j < 2; ++j)
                if (int64_t const slot = l.slots.get(t, j); slot >= 0)
                    for (int64_t c = 0; c < width; ++c) total += dy.at(t, c) * weight(t, j) * output(slot, c);
        return total;
    };
    auto const o = [&](int64_t s, int64_t c) { return out.at(s, c); };
    auto const w = [&](int64_t t, int64_t j) { return l.r.weights.at(t, j); };
    for (int64_t s = 0; s < l.rows(); ++s)
        for (int64_t c = 0; c < width; ++c) {
            auto const moved = [&](double h) { return loss([&](int64_t a, int64_t b) { return o(a, b) + (a == s && b == c ? h : 0); }, w); };
            CHECK(drows.at(s, c) == Approx((moved(1) - moved(-1)) / 2).margin(1e-6));
        }
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t j = 0; j < 2; ++j) {
            auto const moved = [&](double h) { return loss(o, [&](int64_t a, int64_t b) { return w(a, b) + (a == t && b == j ? h : 0); }); };
            CHECK(dw.at(t, j) == Approx((moved(1) - moved(-1)) / 2).margin(1e-6));
            if (l.slots.get(t, j) < 0) CHECK(dw.at(t, j) == 0.0);
        }
    CHECK(drows.untouched());
    CHECK(dw.untouched());
    // dispatch: <drows, dispatch(x)> by x.
    keel::dispatch_backward(keel::cpu{}, drows.view(), l.where(), dx.view()).or_throw();
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < width; ++c) {
            double want = 0;
            for (int64_t j = 0; j < 2; ++j)
                if (int64_t const slot = l.slots.get(t, j); slot >= 0) want += drows.at(slot, c);
            CHECK(dx.at(t, c) == Approx(want).margin(1e-6));
        }
    for (int64_t c = 0; c < width; ++c) CHECK(dx.at(2, c) == 0.0); // padding
}

TEST_CASE("dispatch and combine keep their bits on every backend, any data") {
    for (data_kind kind : {data_kind::normal, data_kind::any_bits, data_kind::with_inf, data_kind::tiny})
        for (int64_t width : {19, 133}) {
            layout l(37, 5, 3);
            if (kind == data_kind::with_inf) l.r.weights.set(0, 1, std::numeric_limits<float>::infinity()); // meets no padded lane
            guarded_matrix<keel::bf16> x(37, width, 1, floats(kind, 37 * width, 1)), dy(37, width, 0, floats(kind, 37 * width, 6));
            guarded_matrix<keel::bf16> out(l.rows(), width, 0, floats(kind, l.rows() * width, 2));
            auto const all = [&](auto const& be) {
                guarded_matrix<keel::bf16> rows(l.rows(), width, 1), y(37, width, 1), drows(l.rows(), width), dx(37, width);
                guarded_matrix<float> terms(37, 4), dw(37, 3), sums(1, 4);
                keel::dispatch(be, x.view(), l.where(), rows.view()).or_throw();
                keel::combine(be, out.view(), l.where(), l.r.weights.view(), x.view(), y.view(), {.share_terms = terms.view()}).or_throw();
                keel::combine_backward(be, dy.view(), out.view(), l.where(), l.r.weights.view(), {.dexpert_rows = drows.view(), .dweights = dw.view()}).or_throw();
                keel::dispatch_backward(be, drows.view(), l.where(), dx.view()).or_throw();
                keel::routed_share share;
                keel::measure_routed_share(be, terms.view(), &share).or_throw();
                sums.set(0, 0, share.routed_output), sums.set(0, 1, share.output), sums.set(0, 2, share.routed), sums.set(0, 3, share.shared);
                std::vector<unsigned char> bytes;
                auto const append = [&](auto const& m) {
                    auto const c = m.contents();
                    bytes.insert(bytes.end(), c.begin(), c.end());
                };
                append(rows), append(y), append(drows), append(dx), append(terms), append(dw), append(sums);
                return bytes;
            };
            auto const want = all(keel::reference{});
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name << " " << name_of(kind) << " width " << width);
                CHECK(all(be) == want);
            });
        }
}

TEST_CASE("an infinite weight makes infinite terms, not NaN from lanes beyond the end") {
    layout l(4, 2, 1, 0);
    for (int64_t width : {1, 3, 8, 13}) {
        guarded_matrix<float> out(l.rows(), width, 0, std::vector<float>(static_cast<std::size_t>(l.rows() * width), 1.0f)), y(4, width), terms(4, 4);
        guarded_matrix<float> weights(4, 1, 0, std::vector<float>(4, std::numeric_limits<float>::infinity()));
        for_each_backend([&](std::string const& name, auto const& be) {
            INFO(name << " " << width);
            keel::combine(be, out.view(), l.where(), weights.view(), keel::view<float, 2>{}, y.view(), {.share_terms = terms.view()}).or_throw();
            for (int64_t q = 0; q < 3; ++q) CHECK(terms.get(0, q) == std::numeric_limits<float>::infinity());
        });
    }
}

TEST_CASE("other formats: one rounding each") {
    layout l(20, 4, 2);
    guarded_matrix<keel::f16> out(l.rows(), 33, 0, floats(data_kind::normal, l.rows() * 33, 2)), y(20, 33);
    guarded_matrix<float> exact(20, 33), shared(20, 33, 0, floats(data_kind::normal, 20 * 33, 3));
    keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), y.view()).or_throw();
    keel::combine(keel::reference{}, out.view(), l.where(), l.r.weights.view(), shared.view(), exact.view()).or_throw();
    for (int64_t i = 0; i < 20 * 33; ++i) CHECK(y.at(i / 33, i % 33) == to_double(to_format<keel::f16>(exact.get(i / 33, i % 33))));
    // In place of the shared part.
    keel::combine(keel::cpu{}, out.view(), l.where(), l.r.weights.view(), shared.view(), shared.view()).or_throw();
    CHECK(shared.contents() == exact.contents());
}

TEST_CASE("empty experts, no tokens, everything dropped: defined zeros") { // torchtitan #1166, HF #48205
    layout l(3, 40, 1, 0);
    guarded_matrix<float> none(0, 6), y(3, 6, 0, std::vector<float>(18, 7.0f)), weights(3, 1, 0, {1, 1, 1}), dw(3, 1, 0, {5, 5, 5});
    for (int64_t t = 0; t < 3; ++t) l.slots.set(t, 0, -1);
    for (int64_t e = 0; e <= 40; ++e) l.offsets.set(0, e, 0);
    keel::combine(keel::cpu{}, none.view(), l.where(), weights.view(), {}, y.view()).or_throw();
    keel::combine_backward(keel::cpu{}, y.view(), none.view(), l.where(), weights.view(), {.dweights = dw.view()}).or_throw();
    for (int64_t t = 0; t < 3; ++t) {
        CHECK(y.at(t, 0) == 0.0);
        CHECK(dw.at(t, 0) == 0.0);
    }
    keel::expert_slots const empty{keel::rows(static_cast<int64_t*>(nullptr), 0, 2), l.offsets.vec()};
    guarded_matrix<float> no_tokens(0, 6);
    CHECK(keel::dispatch(keel::cpu{}, no_tokens.view(), empty, none.view()).ok());
}

TEST_CASE("a bad call of dispatch or combine names the argument and writes nothing") {
    layout l(10, 3, 2);
    guarded_matrix<float> x(10, 4), rows(l.rows() + 1, 4, 0, std::vector<float>(static_cast<std::size_t>(4 * (l.rows() + 1)), 2.0f)), y(10, 4);
    auto const before = rows.contents();
    CHECK(keel::dispatch(keel::cpu{}, x.view(), l.where(), rows.view()).code == keel::status_code::bad_shape); // one row too many
    CHECK(keel::dispatch(keel::cpu{}, keel::slice(x.view(), 0, 9), l.where(), keel::slice(rows.view(), 0, l.rows())).code == keel::status_code::bad_shape);
    CHECK(keel::combine(keel::cpu{}, keel::slice(rows.view(), 0, l.rows()), l.where(), keel::columns(l.r.weights.view(), 0, 1), keel::view<float, 2>{}, y.view()).code ==
          keel::status_code::bad_shape);
    CHECK(keel::dispatch_backward(keel::cpu{}, keel::slice(rows.view(), 0, l.rows()), l.where(), keel::columns(x.view(), 0, 3)).code == keel::status_code::bad_shape);
    // Slots that are no rows, and rows that no slot names.
    auto const served = keel::slice(rows.view(), 0, l.rows());
    auto const slots = l.where().slots;
    std::vector<int64_t> changed;
    for (int64_t t = 0; t < 10; ++t)
        for (int64_t j = 0; j < slots.extent[1]; ++j) changed.push_back(slots(t, j));
    auto const used = std::find_if(changed.begin(), changed.end(), [](int64_t slot) { return slot >= 0; });
    REQUIRE(used != changed.end());
    keel::expert_slots where{keel::rows(changed.data(), 10, slots.extent[1]), l.where().offsets};
    for (int64_t const wrong : {l.rows(), int64_t{77}, int64_t{-2}, int64_t{-1}}) {
        int64_t const right = std::exchange(*used, wrong);
        CHECK(keel::dispatch(keel::cpu{}, x.view(), where, served).code == keel::status_code::bad_option);
        CHECK(keel::dispatch_backward(keel::cpu{}, served, where, x.view()).code == keel::status_code::bad_option);
        CHECK(keel::combine(keel::cpu{}, served, where, l.r.weights.view(), keel::view<float, 2>{}, y.view()).code ==
              keel::status_code::bad_option);
        *used = right;
    }
    // Two assignments in one row, so that another has none: as many rows as there should be.
    auto const twin = std::find_if(used + 1, changed.end(), [](int64_t slot) { return slot >= 0; });
    REQUIRE(twin != changed.end());
    int64_t const own = std::exchange(*twin, *used);
    CHECK(keel::dispatch(keel::cpu{}, x.view(), where, served).message() == "dispatch: where.slots, wanted each row named once (bad_option)");
    *twin = own;
    std::swap(*twin, *used); // another order is as good
    guarded_matrix<float> elsewhere(l.rows(), 4);
    CHECK(keel::dispatch(keel::cpu{}, x.view(), where, elsewhere.view()).ok());
    std::swap(*twin, *used);
    CHECK(rows.contents() == before);

    // Outputs over anything that the call reads.
    using keel::status_code;
    std::vector<float> memory(400);
    auto const as_floats = [](auto* p) { return reinterpret_cast<float*>(p); };
    auto const weights = l.r.weights.view();
    std::vector<int64_t> offsets;
    for (int64_t e = 0; e <= 3; ++e) offsets.push_back(l.offsets.get(0, e));
    keel::expert_slots const plain{where.slots, keel::vec(offsets.data(), 4)};
    for (float* p : {served.data, weights.data, as_floats(changed.data()), as_floats(offsets.data())}) {
        auto const over = keel::rows(p, 10, 4);
        if (p != weights.data) CHECK(keel::dispatch_backward(keel::cpu{}, served, plain, over).code == status_code::overlap);
        if (p != weights.data && p != served.data) {
            CHECK(keel::dispatch(keel::cpu{}, x.view(), plain, keel::rows(p, l.rows(), 4)).code == status_code::overlap);
        }
        CHECK(keel::combine(keel::cpu{}, served, plain, weights, keel::view<float, 2>{}, over).code == status_code::overlap);
        CHECK(keel::combine(keel::cpu{}, served, plain, weights, keel::view<float, 2>{}, y.view(), {.share_terms = over}).code == status_code::overlap);
        CHECK(keel::combine_backward(keel::cpu{}, y.view(), served, plain, weights, {.dexpert_rows = keel::rows(p, l.rows(), 4)}).code ==
              status_code::overlap);
        CHECK(keel::combine_backward(keel::cpu{}, y.view(), served, plain, weights, {.dweights = keel::rows(p, 10, 2)}).code == status_code::overlap);
    }
    CHECK(keel::dispatch(keel::cpu{}, x.view(), plain, keel::rows(x.view().data + 4, l.rows(), 4)).code == status_code::overlap);
    CHECK(keel::combine(keel::cpu{}, served, plain, weights, x.view(), keel::rows(x.view().data + 4, 10, 4)).code == status_code::overlap);
    auto valid = std::make_unique<bool[]>(160);
    CHECK(keel::combine(keel::cpu{}, served, plain, weights, keel::view<float, 2>{}, y.view(), {}, keel::vec<bool const>(valid.get(), 9)).code ==
          status_code::bad_shape);
    CHECK(keel::combine(keel::cpu{}, served, plain, weights, keel::view<float, 2>{}, y.view(), {}, keel::vec<bool const>(valid.get(), 11)).code ==
          status_code::bad_shape);
    CHECK(keel::combine(keel::cpu{}, served, plain, weights, keel::view<float, 2>{}, y.view(), {},
                        keel::vec<bool const>(reinterpret_cast<bool*>(y.view().data), 10)).code == status_code::overlap);
    CHECK(rows.contents() == before);
    CHECK(keel::dispatch(keel::cpu{}, x.view(), l.where(), served).ok());
}
