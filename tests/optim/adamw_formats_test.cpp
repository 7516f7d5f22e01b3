// adamw_step with moments of 16 and of 8 bits and weights without a master: against the formula in scalar code, for its noise and for its gate.
#include <cmath>
#include <limits>

#include <keel/optim/adamw.hpp>
#include <keel/optim/kahan.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>
#include <support/data.hpp>

using namespace keel_test;
using keel::bf16;
using keel::e4m3;
using keel::e5m2;

namespace {

using codes_m = keel::row_blocks<e4m3>;
using codes_v = keel::block_scaled<e5m2, keel::e8m0_scale, 1, 32>;

constexpr keel::step_gate open{.apply = 1, .clip = 1.0f};

/// A moment kept in format S: `n` elements and their scales, each guarded.
template <class S> struct moment {
    guarded_matrix<S> values;
    explicit moment(int64_t n) : values(1, n) {}
    keel::view<S, 1> get() { return values.vec(); }
    float at(int64_t i) const { return static_cast<float>(values.at(0, i)); }
    void add_to(digest& d) const { d.add(values); }
    bool untouched() const { return values.untouched(); }
};
template <class Code, class Scale, int C> struct moment<keel::block_scaled<Code, Scale, 1, C>> {
    using blocks = keel::block_scaled<Code, Scale, 1, C>;
    guarded_matrix<Code> codes;
    guarded_matrix<typename Scale::storage> scales;
    explicit moment(int64_t n) : codes(1, n), scales(1, blocks::scale_columns(n)) {}
    blocks get() { return {codes.view(), scales.view()}; }
    float at(int64_t i) const { return keel::decode(codes.get(0, i)) * static_cast<float>(scales.at(0, i / C)); }
    void add_to(digest& d) const { d.add(codes), d.add(scales); }
    bool untouched() const { return codes.untouched() && scales.untouched(); }
};

/// Models: 8-bit moments, of unlike blocks and of like ones, under compensated weights, bf16 moments under weights rounded by chance.
struct compensated {
    using m_kind = codes_m;
    using v_kind = codes_v;
    static auto weights(guarded_matrix<bf16>& w, guarded_matrix<bf16>& c) { return keel::kahan_weights<>{w.vec(), c.vec()}; }
};
struct by_chance {
    using m_kind = bf16;
    using v_kind = bf16;
    static auto weights(guarded_matrix<bf16>& w, guarded_matrix<bf16>&) { return keel::stochastic_weights<>{w.vec()}; }
};
struct paired : compensated {
    using v_kind = keel::row_blocks<e5m2>;
};
template <class Model> struct problem {
    guarded_matrix<bf16> w, c;
    moment<typename Model::m_kind> m;
    moment<typename Model::v_kind> v;
    int64_t applied = 0;
    explicit problem(int64_t n) : w(1, n, 0, floats(data_kind::normal, n, 41)), c(1, n), m(n), v(n) {}
    auto state() { return keel::adamw_state_of<typename Model::m_kind, typename Model::v_kind>{m.get(), v.get(), &applied}; }
    auto weights() { return Model::weights(w, c); }
    template <class B> keel::step_change step(B const& be, guarded_matrix<float>& g, keel::step_gate const& gate, keel::adamw_options const& o) {
        scratch memory(keel::adamw_step_workspace(w.columns()));
        keel::step_change change;
        keel::adamw_step(be, g.vec(), weights(), state(), gate, o, &change, memory.get()).or_throw();
        return change;
    }
    uint64_t bits() const {
        digest d;
        d.add(w), d.add(c), m.add_to(d), v.add_to(d), d.add(&applied, sizeof applied);
        return d.value();
    }
    bool untouched() const { return w.untouched() && c.untouched() && m.untouched() && v.untouched(); }
};

/// What a moment must hold after a step of n elements, by scalar code: one rounding by chance.
template <class S> std::vector<float> kept(std::vector<float> const& x, std::vector<uint32_t> const& noise, bool) {
    std::vector<float> out;
    for (std::size_t i = 0; i < x.size(); ++i)
        out.push_back(keel::decode(keel::encode<S, keel::overflow::saturate_finite, keel::rounding::stochastic>(x[i], noise[i])));
    return out;
}
template <class Blocks> requires requires { typename Blocks::code; }
std::vector<float> kept(std::vector<float> const& x, std::vector<uint32_t> const& noise, bool positive) {
    using code = typename Blocks::code;
    auto const size = static_cast<std::size_t>(Blocks::block_columns);
    std::vector<float> out;
    for (std::size_t first = 0; first < x.size(); first += size) {
        float amax = 0;
        for (std::size_t i = first; i < std::min(x.size(), first + size); ++i) amax = std::max(amax, std::abs(x[i]));
        auto const s = keel::scale_rules::round_up::of<float, code, float>(typename Blocks::scale_kind{}, keel::bits(amax));
        for (std::size_t i = first; i < std::min(x.size(), first + size); ++i) {
            float const scaled = x[i] * s.multiplier;
            auto q = keel::encode<code, keel::overflow::saturate_finite, keel::rounding::stochastic>(scaled, noise[i]);
            if (std::abs(scaled) < keel::format_traits<code>::min_subnormal()) // to nearest, its tie away from 0
                q = keel::encode<code, keel::overflow::saturate_finite>(scaled * (std::abs(scaled) * 2 == keel::format_traits<code>::min_subnormal() ? 2.0f : 1.0f));
            if (positive && q.bits == 0 && x[i] > 0) q.bits = 1;
            out.push_back(keel::decode(q) * s.scale);
        }
    }
    return out;
}

} // namespace

TEMPLATE_TEST_CASE("moments of fewer bits hold the formula's values, rounded by chance once", "", compensated, paired, by_chance) {
    keel::adamw_options const o{.learning_rate = 2e-3f, .beta1 = 0.9f, .beta2 = 0.95f, .weight_decay = 0.1f,
                                .decay = keel::decay_rule::cautious, .key = {.seed = 77, .step = 5, .tensor = 3}, .first_element = 256};
    int64_t const n = 8192 + 300; // two chunks, a last block that is not whole
    problem<TestType> p(n);
    int64_t decayed = 0;
    for (int t = 1; t <= 3; ++t) {
        guarded_matrix<float> g(1, n, 0, floats(t == 2 ? data_kind::mixed_scales : data_kind::normal, n, static_cast<uint64_t>(t)));
        auto const before = p;
        float const clip = t == 3 ? 0.25f : 1.0f;
        p.step(keel::reference{}, g, {.apply = 1, .clip = clip}, o);
        std::vector<float> m, v;
        std::vector<uint32_t> m_noise, v_noise;
        double const b1 = static_cast<double>(o.beta1), b2 = static_cast<double>(o.beta2);
        for (int64_t i = 0; i < n; ++i) {
            float const x = g.get(0, i) * clip;
            m.push_back(std::fma(o.beta1, before.m.at(i), static_cast<float>(1 - b1) * x));
            v.push_back(std::fma(o.beta2, before.v.at(i), static_cast<float>(1 - b2) * x * x));
            auto const words = keel::random_block_of<uint32_t>({77, static_cast<uint32_t>(5 + t - 1), 3}, 256, static_cast<uint32_t>(i));
            m_noise.push_back(words.word[0]), v_noise.push_back(words.word[1]);
            // The weight: from the moments as they are before they are stored.
            auto const k = static_cast<std::size_t>(i);
            float const root_scale = static_cast<float>(1 / std::sqrt(1 - std::pow(b2, t)));
            float const direction = m[k] / std::fma(std::sqrt(v[k]), root_scale, o.epsilon);
            double const rate = static_cast<double>(o.learning_rate);
            float const step = static_cast<float>(rate / (1 - std::pow(b1, t))), decay = static_cast<float>(rate * static_cast<double>(o.weight_decay));
            float const w = keel::decode(before.w.get(0, i));
            bool const decays = direction * w >= 0;
            decayed += decays;
            if constexpr (std::is_base_of_v<compensated, TestType>) {
                float const d = std::fma(-step, direction, decays ? -decay * w : 0.0f);
                bf16 expected_w = before.w.get(0, i), expected_c = before.c.get(0, i);
                keel::kahan_update<bf16>(keel::reference{}, keel::vec(&d, 1), {keel::vec(&expected_w, 1), keel::vec(&expected_c, 1)}, open).or_throw();
                REQUIRE(p.w.get(0, i).bits == expected_w.bits);
                REQUIRE(p.c.get(0, i).bits == expected_c.bits);
            } else {
                float const moved = std::fma(-step, direction, decays ? std::fma(-decay, w, w) : w);
                REQUIRE(p.w.get(0, i).bits == keel::encode<bf16, keel::overflow::saturate_finite, keel::rounding::stochastic>(moved, words.word[2]).bits);
            }
        }
        auto const want_m = kept<typename TestType::m_kind>(m, m_noise, false), want_v = kept<typename TestType::v_kind>(v, v_noise, true);
        for (int64_t i = 0; i < n; ++i) {
            REQUIRE(p.m.at(i) == want_m[static_cast<std::size_t>(i)]);
            REQUIRE(p.v.at(i) == want_v[static_cast<std::size_t>(i)]);
        }
    }
    CHECK(p.untouched());
    CHECK(decayed > n / 2);
    CHECK(decayed < 5 * n / 2);
}

TEMPLATE_TEST_CASE("moments of fewer bits are the same on every backend, for threads, and in shards", "", compensated, by_chance) {
    keel::adamw_options const o{.weight_decay = 0.1f, .key = {.seed = 9}, .first_element = uint64_t{0xfffffff0u} * 4096};
    int64_t const n = 3 * 8192 + 77, cut = 8192 + 128;
    for (data_kind kind : {data_kind::normal, data_kind::tiny, data_kind::any_bits}) {
        INFO(name_of(kind));
        guarded_matrix<float> g(1, n, 0, floats(kind, n, 3));
        problem<TestType> want(n);
        keel::step_change change;
        for (int t = 0; t < 2; ++t) change = want.step(keel::reference{}, g, open, o);
        keel::thread_pool const three(3);
        auto const same = [&](auto const& be) {
            problem<TestType> p(n);
            keel::step_change c;
            for (int t = 0; t < 2; ++t) c = p.step(be, g, open, o);
            CHECK(p.bits() == want.bits());
            CHECK(std::memcmp(&c, &change, sizeof c) == 0);
            CHECK(p.untouched());
        };
        for_main_backends([&](std::string const& name, auto const& be) {
            INFO(name);
            same(be);
        });
        same(keel::cpu(three));

        problem<TestType> whole(n), low(cut), high(n - cut);
        guarded_matrix<float> g_low(1, cut), g_high(1, n - cut);
        for (int64_t i = 0; i < n; ++i) {
            bool const is_low = i < cut;
            (is_low ? low : high).w.set(0, is_low ? i : i - cut, whole.w.get(0, i));
            (is_low ? g_low : g_high).set(0, is_low ? i : i - cut, g.get(0, i));
        }
        keel::adamw_options upper = o;
        upper.first_element += static_cast<uint64_t>(cut);
        for (int t = 0; t < 2; ++t) {
            whole.step(keel::cpu{}, g, open, o);
            low.step(keel::cpu{}, g_low, open, o);
            high.step(keel::cpu{}, g_high, open, upper);
        }
        int64_t differing = 0;
        for (int64_t i = 0; i < n; ++i) {
            auto const& shard = i < cut ? low : high;
            int64_t const k = i < cut ? i : i - cut;
            differing += whole.w.get(0, i).bits != shard.w.get(0, k).bits || keel::bits(whole.m.at(i)) != keel::bits(shard.m.at(k)) ||
                         keel::bits(whole.v.at(i)) != keel::bits(shard.v.at(k));
        }
        CHECK(differing == 0);
    }
}

TEMPLATE_TEST_CASE("a skipped step leaves every byte of codes, scales, compensation and weights", "", compensated, by_chance) {
    int64_t const n = 1000;
    guarded_matrix<float> g(1, n, 0, floats(data_kind::normal, n)), poison(1, n, 0, floats(data_kind::with_nan, n));
    problem<TestType> p(n);
    p.step(keel::cpu{}, g, open, {});
    auto const bits = p.bits();
    CHECK(p.step(keel::cpu{}, poison, keel::step_gate{}, {.weight_decay = 0.5f}).update_squares == 0.0);
    CHECK(p.bits() == bits);
    // Past an open gate a NaN stays in its element, and its block is not lost.
    poison = g;
    poison.set(0, 5, std::numeric_limits<float>::quiet_NaN());
    p.step(keel::cpu{}, poison, open, {});
    for (int64_t i = 0; i < n; ++i) {
        CHECK(std::isnan(p.m.at(i)) == (i == 5));
        CHECK(std::isnan(p.v.at(i)) == (i == 5));
        CHECK(std::isnan(p.w.at(0, i)) == (i == 5));
    }
}

TEST_CASE("rounded by chance, a slow average arrives where nearest rounding would leave it, with the noise that is stated") {
    // v's average of 1 with beta2 0.999: each step moves it by less than half a code of bf16 or e5m2 long before it is there.
    int64_t const n = 4096;
    auto const average = [&](auto kind, float beta2, int steps) {
        using S = decltype(kind);
        std::vector<float> sizes(static_cast<std::size_t>(n), 1.0f);
        for (std::size_t i = 0; i < sizes.size(); i += 32) sizes[i] = 1.03f; // rules its block's scale, so that the others are no code
        guarded_matrix<float> g(1, n, 0, sizes), w(1, n), m(1, n);
        moment<S> v(n);
        int64_t applied = 0;
        for (int t = 0; t < steps; ++t)
            keel::adamw_step(keel::cpu{}, g.vec(), keel::adamw_weights<>{.master = w.vec()}, keel::adamw_state_of<float, S>{m.vec(), v.get(), &applied},
                             open, {.beta2 = beta2})
                .or_throw();
        double mean = 0, square = 0;
        double const others = static_cast<double>(n) * 31 / 32;
        for (int64_t i = 0; i < n; ++i) {
            if (i % 32 == 0) continue;
            mean += static_cast<double>(v.at(i)) / others;
            square += std::pow(static_cast<double>(v.at(i)), 2) / others;
        }
        return std::pair{mean, std::sqrt(square - mean * mean)};
    };
    auto const [mean, deviation] = average(bf16{}, 0.999f, 2000);
    double const exact = 1 - std::pow(static_cast<double>(0.999f), 2000);
    CHECK(std::abs(mean - exact) < 5 * deviation / std::sqrt(static_cast<double>(n))); // five standard errors
    CHECK(deviation < 1.3 * 0x1p-8 / std::sqrt(6 * (1 - 0.998)));                      // below 1 codes are 2^-8 apart
    CHECK(deviation > 0.5 * 0x1p-8 / std::sqrt(6 * (1 - 0.998)));
    auto const [mean8, deviation8] = average(keel::block_scaled<e5m2, keel::fp32_scale, 1, 128>{}, 0.95f, 200);
    CHECK(std::abs(mean8 - 1) < 5 * deviation8 / std::sqrt(static_cast<double>(n)) + 0.01);
    CHECK(deviation8 < 1.3 * 0.25 / std::sqrt(6 * (1 - 0.9025)));
    CHECK(deviation8 > 0.3 * 0.125 / std::sqrt(6 * (1 - 0.9025)));
}

TEST_CASE("a second moment in blocks never falls to zero under a momentum that is not") {
    // Element 0 rules its block's scale; its neighbours' squares lie below the smallest code. In the momentum's block they are more, and what
    // chance made of them was many times what their own second moment knows.
    int64_t const n = 128;
    std::vector<float> values(static_cast<std::size_t>(n), 1e-6f);
    values[0] = 100.0f;
    guarded_matrix<float> g(1, n, 0, values);
    problem<compensated> p(n);
    for (int t = 0; t < 30; ++t) {
        auto const before = p;
        p.step(keel::cpu{}, g, open, {.learning_rate = 1e-3f, .beta2 = 0.95f});
        for (int64_t i = 0; i < n; ++i) {
            INFO("step " << t << " element " << i << " w " << before.w.at(0, i) << " m " << before.m.at(i) << " -> " << p.m.at(i) << " v " << before.v.at(i) << " -> " << p.v.at(i));
            CHECK(p.v.at(i) > 0.0f);
            CHECK(std::abs(p.w.at(0, i) + p.c.at(0, i) - before.w.at(0, i) - before.c.at(0, i)) < 2e-3); // lr times at most a little over 1, as AdamW does
        }
    }
}

TEST_CASE("state named by its members is fp32, whatever the weights") {
    guarded_matrix<keel::bf16> named(1, 300), typed(1, 300);
    guarded_matrix<float> gradient(1, 300, 0, floats(data_kind::normal, 300)), m(1, 300), v(1, 300), other_m(1, 300), other_v(1, 300);
    int64_t applied = 0, other_applied = 0;
    keel::adamw_state const state{other_m.vec(), other_v.vec(), &other_applied};
    keel::adamw_step(keel::cpu{}, gradient.vec(), keel::stochastic_weights<>{named.vec()}, {.m = m.vec(), .v = v.vec(), .applied = &applied}, keel::open_gate()).or_throw();
    keel::adamw_step(keel::cpu{}, gradient.vec(), keel::stochastic_weights<>{typed.vec()}, state, keel::open_gate()).or_throw();
    CHECK(named.contents() == typed.contents());
    CHECK(m.contents() == other_m.contents());
    CHECK(applied == 1);
}

TEST_CASE("adamw_step says what is wrong with state and weights of fewer bits") {
    problem<compensated> p(300);
    guarded_matrix<float> g(1, 300);
    auto const bits = p.bits();
    auto const refused = [&](auto change) {
        auto weights = p.weights();
        auto state = p.state();
        change(weights, state);
        return keel::adamw_step(keel::cpu{}, g.vec(), weights, state, open);
    };
    using keel::status_code;
    CHECK(refused([](auto&, auto& s) { s.m.scales.extent[1] = 2; }).message() == "adamw_step: state.m.scales has columns = 2, wanted 3 (bad_shape)");
    CHECK(refused([](auto&, auto& s) { s.v.codes.extent[1] = 299; }).message() == "adamw_step: state.v has columns = 299, wanted 300 (bad_shape)");
    CHECK(refused([](auto&, auto& s) { s.m.codes.data = nullptr; }).code == status_code::bad_pointer);
    CHECK(refused([](auto&, auto& s) { s.v.codes.data = reinterpret_cast<e5m2*>(s.m.codes.data); }).code == status_code::overlap);
    CHECK(refused([](auto&, auto& s) { s.m.scales.data = reinterpret_cast<float*>(s.m.codes.data); }).code == status_code::overlap);
    CHECK(refused([](auto& w, auto&) { w.compensation = w.weight; }).code == status_code::overlap);
    CHECK(refused([](auto& w, auto&) { w.compensation.extent[0] = 7; }).message() == "adamw_step: weights.compensation has length = 7, wanted 300 (bad_shape)");
    CHECK(refused([](auto& w, auto&) { w.weight.stride[0] = 2; }).code == status_code::bad_stride);
    CHECK(p.bits() == bits);
}
