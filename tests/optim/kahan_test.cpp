// Compensated updates against sums in double, their bound, and the same bits on every backend.
#include <cmath>
#include <cstring>
#include <limits>

#include <keel/format/f16.hpp>
#include <keel/optim/kahan.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;

namespace {

/// Weights and compensation of one tensor, each guarded.
template <class W> struct problem {
    guarded_matrix<W> w, c;
    explicit problem(int64_t n, data_kind kind = data_kind::normal) : w(1, n, 0, floats(kind, n, 41)), c(1, n) {}
    keel::kahan_weights<W> weights() { return {w.vec(), c.vec()}; }
    template <class B, class Update> void add(B const& be, guarded_matrix<Update>& d, keel::step_gate const& gate = keel::open_gate()) {
        keel::kahan_update<W>(be, d.vec(), weights(), gate).or_throw();
    }
    bool operator==(problem const& o) const { return w.contents() == o.w.contents() && c.contents() == o.c.contents(); }
    bool untouched() const { return w.untouched() && c.untouched(); }
    double sum(int64_t i) const { return w.at(0, i) + c.at(0, i); } // exact in double
};

template <class W> constexpr double unit = 0;
template <> constexpr double unit<keel::bf16> = 0x1p-8;
template <> constexpr double unit<keel::f16> = 0x1p-11;
template <class W> constexpr double smallest = 0;
template <> constexpr double smallest<keel::bf16> = 0x1p-133;
template <> constexpr double smallest<keel::f16> = 0x1p-24;

/// The header's bound on one call.
template <class W> double bound(double w_after, double c_before, double d) {
    return 0x1p-24 * std::abs(d + c_before) + 1.01 * unit<W> * unit<W> * std::abs(w_after) + smallest<W>;
}

} // namespace

TEST_CASE("ten thousand steps that bf16 alone ignores all arrive") {
    guarded_matrix<float> d(1, 1, 0, {0x1p-12f});
    problem<keel::bf16> p(1);
    p.w.set(0, 0, keel::encode<keel::bf16>(1.0f));
    auto plain = keel::encode<keel::bf16>(1.0f);
    for (int step = 0; step < 10000; ++step) {
        p.add(keel::cpu{}, d);
        plain = keel::encode<keel::bf16>(keel::decode(plain) + 0x1p-12f);
    }
    CHECK(keel::decode(plain) == 1.0f);
    CHECK(p.sum(0) == 1.0 + 10000 * 0x1p-12); // all of it has at most 16 digits, so nothing is lost
    CHECK(std::abs(p.w.at(0, 0) - p.sum(0)) <= 0x1p-8 * p.sum(0));
}

TEMPLATE_TEST_CASE("a compensated sum stays within its bound of the sum in double", "", keel::bf16, keel::f16) {
    int64_t const n = 37;
    problem<TestType> p(n);
    std::vector<double> exact, allowed(static_cast<std::size_t>(n));
    for (int64_t i = 0; i < n; ++i) exact.push_back(p.w.at(0, i));
    double furthest_plain = 0;
    auto plain = p.w;
    for (int step = 0; step < 10000; ++step) {
        auto values = floats(data_kind::normal, n, static_cast<uint64_t>(step));
        for (auto& v : values) v = (v + 0.5f) * 0x1.8p-13f; // a drift below what the format can hold
        guarded_matrix<float> d(1, n, 0, values);
        auto const before = p;
        p.add(keel::cpu{}, d);
        for (int64_t i = 0; i < n; ++i) {
            auto const k = static_cast<std::size_t>(i);
            double const b = bound<TestType>(p.w.at(0, i), before.c.at(0, i), d.at(0, i));
            if (!(std::abs(p.sum(i) - (before.sum(i) + d.at(0, i))) <= b)) FAIL_CHECK("step " << step << " element " << i);
            exact[k] += d.at(0, i);
            allowed[k] += b;
            plain.set(0, i, keel::encode<TestType>(static_cast<float>(plain.at(0, i) + d.at(0, i))));
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        auto const k = static_cast<std::size_t>(i);
        INFO(i << ": " << p.sum(i) << " for " << exact[k] << ", plain " << plain.at(0, i));
        CHECK(std::abs(p.sum(i) - exact[k]) <= allowed[k]);
        CHECK(std::abs(p.sum(i) - exact[k]) <= 0x1p-7 * std::max(1.0, std::abs(exact[k]))); // errors of either sign: far below their bound
        furthest_plain = std::max(furthest_plain, std::abs(plain.at(0, i) - exact[k]));
    }
    CHECK(furthest_plain > 0.1);
    CHECK(p.untouched());
}

TEMPLATE_TEST_CASE("one update follows its formula for any sizes of w, c and d", "", keel::bf16, keel::f16) {
    int64_t const n = 20000;
    for (data_kind w_kind : {data_kind::normal, data_kind::mixed_scales, data_kind::tiny, data_kind::subnormal})
        for (data_kind d_kind : {data_kind::normal, data_kind::mixed_scales, data_kind::tiny, data_kind::subnormal, data_kind::zeros}) {
            INFO(name_of(w_kind) << " + " << name_of(d_kind));
            problem<TestType> p(n, w_kind);
            for (int64_t i = 0; i < n; ++i) p.c.set(0, i, keel::encode<TestType>(static_cast<float>(p.w.at(0, (i * 7) % n)) * 0.003f));
            auto const before = p;
            guarded_matrix<float> d(1, n, 0, floats(d_kind, n, 5));
            p.add(keel::reference{}, d);
            int64_t wrong = 0, loose = 0;
            for (int64_t i = 0; i < n; ++i) {
                float const w = static_cast<float>(before.w.at(0, i)), y = d.get(0, i) + static_cast<float>(before.c.at(0, i));
                float const s = w + y; // rounded once; double holds w + y exactly unless they are 2^29 apart
                TestType const want = keel::encode<TestType>(s);
                wrong += p.w.get(0, i).bits != want.bits;
                loose += !(std::abs(p.sum(i) - (before.sum(i) + d.at(0, i))) <=
                           bound<TestType>(p.w.at(0, i), before.c.at(0, i), d.at(0, i)));
                loose += !(std::abs(p.c.at(0, i)) <= 1.01 * unit<TestType> * std::abs(p.w.at(0, i)) + smallest<TestType>);
            }
            CHECK(wrong == 0);
            CHECK(loose == 0);
        }
}

TEST_CASE("kahan_update gives the same bits on every backend") {
    for (data_kind kind : all_kinds)
        for (int64_t n : {0, 1, 7, 16, 33, 8191, 8193}) {
            INFO(name_of(kind) << " " << n);
            guarded_matrix<float> d(1, n, 0, floats(kind, n, 31));
            problem<keel::bf16> want(n, kind);
            problem<keel::f16> want16(n);
            for (int t = 0; t < 3; ++t) want.add(keel::reference{}, d), want16.add(keel::reference{}, d);
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name);
                problem<keel::bf16> p(n, kind);
                problem<keel::f16> q(n);
                for (int t = 0; t < 3; ++t) p.add(be, d), q.add(be, d);
                CHECK(p == want);
                CHECK(q == want16);
                CHECK(p.untouched());
                CHECK(q.untouched());
            });
        }
}

TEST_CASE("what is not finite shows in its weight alone, and stays") {
    float const nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
    guarded_matrix<float> d(1, 5, 0, {nan, infinity, -infinity, 3.4e38f, 1.0f}), zero(1, 5);
    problem<keel::bf16> p(5);
    for (int64_t i = 0; i < 5; ++i) p.w.set(0, i, keel::encode<keel::bf16>(1.0f)), p.c.set(0, i, keel::encode<keel::bf16>(0x1p-10f));
    p.w.set(0, 3, keel::bf16{0x7f7f});
    for (int t = 0; t < 2; ++t) {
        p.add(keel::cpu{}, t == 0 ? d : zero);
        CHECK(p.w.get(0, 0).bits == 0x7fff);
        CHECK(p.w.get(0, 1).bits == 0x7f80);
        CHECK(p.w.get(0, 2).bits == 0xff80);
        CHECK(p.w.get(0, 3).bits == 0x7f80);
        for (int64_t i = 0; i < 4; ++i) CHECK(p.c.get(0, i).bits == 0);
        CHECK(p.sum(4) == 2.0 + 0x1p-10);
    }
}

TEST_CASE("a closed gate leaves every byte, and bad arguments too") {
    guarded_matrix<float> d(1, 100, 0, floats(data_kind::with_nan, 100));
    problem<keel::bf16> p(100);
    auto const before = p;
    p.add(keel::cpu{}, d, keel::step_gate{});
    CHECK(p == before);

    auto const refused = [&](keel::view<float, 1> update, auto change) {
        auto weights = p.weights();
        change(weights);
        return keel::kahan_update(keel::cpu{}, update, weights, keel::open_gate());
    };
    auto const as_is = [](auto&) {};
    CHECK(refused(keel::vec(d.view().data, 99), as_is).message() == "kahan_update: update has length = 99, wanted 100 (bad_shape)");
    CHECK(refused(keel::vec(d.view().data, 100, 2), as_is).code == keel::status_code::bad_stride);
    CHECK(refused(keel::view<float, 1>{nullptr, {100}, {1}}, as_is).code == keel::status_code::bad_pointer);
    CHECK(refused(d.vec(), [](auto& w) { w.compensation.extent[0] = 101; }).code == keel::status_code::bad_shape);
    CHECK(refused(d.vec(), [](auto& w) { w.compensation = w.weight; }).code == keel::status_code::overlap);
    CHECK(refused(d.vec(), [&](auto& w) { w.weight.data = reinterpret_cast<keel::bf16*>(d.view().data); }).code == keel::status_code::overlap);
    CHECK(refused(d.vec(), [](auto& w) { w.weight.data = nullptr; }).code == keel::status_code::bad_pointer);
    CHECK(p == before);
}
