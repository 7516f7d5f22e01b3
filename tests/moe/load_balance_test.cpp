// Load-balancing losses against their formula in double, their gradient against its finite differences, and what they refuse to be fed.
#include <cmath>
#include <limits>
#include <memory>

#include <keel/moe/load_balance.hpp>
#include <moe/router.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::score_function;

namespace {

template <class Counts>
concept balances = requires(Counts c, keel::view<float, 2> factors) { keel::load_balance_factors(keel::cpu{}, c, 1, factors); };
static_assert(balances<keel::demand_counts> && balances<keel::reduced_demand>);
static_assert(!balances<keel::served_counts>); // of these the loss would be least where most is dropped: Megatron #1617
static_assert(!balances<keel::view<int64_t, 1>>);

using matrix = std::vector<std::vector<double>>;

double score(score_function s, double z) {
    return s == score_function::softmax ? std::exp(z) : s == score_function::sigmoid ? 1 / (1 + std::exp(-z)) : std::sqrt(std::log1p(std::exp(z)));
}

/// The sum over documents of (its share of the tokens) * experts * sum of f_e P_e, f given; rows that are no token left out.
double loss_of(matrix const& z, std::vector<bool> const& valid, std::vector<int64_t> const& documents, matrix const& f, score_function s) {
    double total = 0, all = 0;
    for (bool v : valid) all += v ? 1 : 0;
    for (std::size_t q = 0; q + 1 < documents.size(); ++q)
        for (auto t = static_cast<std::size_t>(documents[q]); t < static_cast<std::size_t>(documents[q + 1]); ++t) {
            if (!valid[t]) continue;
            double sum = 0;
            for (double v : z[t]) sum += score(s, v);
            for (std::size_t e = 0; e < z[t].size(); ++e) total += static_cast<double>(z[t].size()) * f[q][e] * score(s, z[t][e]) / sum / all;
        }
    return total;
}

/// A routed batch of three documents, the second without a token, some tokens padding.
struct batch {
    int64_t tokens = 37, experts = 6, k = 2;
    std::vector<int64_t> documents{0, 20, 20, 37};
    guarded_matrix<float> z;
    std::unique_ptr<bool[]> mask;
    std::vector<bool> valid;
    routed<> r;

    explicit batch(score_function s) : z(37, 6, 1, floats(data_kind::normal, 37 * 6, 51)), mask(new bool[37]), r(37, 6, 2) {
        for (std::size_t t = 0; t < 37; ++t) valid.push_back(mask[t] = t % 9 != 4);
        guarded_matrix<float> bias(1, 6, 0, floats(data_kind::uniform, 6, 2));
        r.run(keel::cpu{}, z.view(), {.bias = bias.vec(), .valid = is_token()}, {.score = s}).or_throw();
    }
    keel::view<bool const, 1> is_token() const { return keel::vec<bool const>(mask.get(), 37); }
    keel::view<int64_t const, 1> offsets() const { return keel::vec(documents.data(), 4); }
    /// The share of each expert in a range of tokens, from the ids.
    std::vector<double> share(int64_t first, int64_t last) const {
        std::vector<double> f(6);
        double all = 0;
        for (int64_t t = first; t < last; ++t)
            for (int64_t j = 0; j < k; ++j)
                if (r.id(t, j) >= 0) ++f[static_cast<std::size_t>(r.id(t, j))], ++all;
        for (double& v : f) v = all > 0 ? v / all : 0;
        return f;
    }
    matrix logits() const {
        matrix m;
        for (int64_t t = 0; t < tokens; ++t) {
            m.emplace_back();
            for (int64_t e = 0; e < experts; ++e) m.back().push_back(z.at(t, e));
        }
        return m;
    }
};

float loss_by_keel(keel::view<float, 2> z, keel::view<float const, 2> factors, keel::balance_loss_inputs in, score_function s) {
    scratch ws(keel::load_balance_loss_workspace(z.extent[0]));
    float loss = -1;
    keel::load_balance_loss(keel::cpu{}, z, factors, in, &loss, {.score = s}, ws.get()).or_throw();
    return loss;
}

} // namespace

TEST_CASE("batch, sequence and both: the loss is its formula and route_backward its derivative, beside all other terms") {
    for (score_function s : all_scores)
        for (int which : {1, 2, 3}) { // 1: batch, 2: sequence
            INFO("score " << static_cast<int>(s) << " losses " << which);
            batch b(s);
            guarded_matrix<float> factors(which == 1 ? 1 : 3, 6, 1), g(37, 2, 0, floats(data_kind::normal, 74, 6)), dz(37, 6, 2), without(37, 6);
            scratch ws(keel::sequence_balance_factors_workspace(3, 6));
            matrix f(3, std::vector<double>(6));
            if (which & 2) {
                keel::sequence_balance_factors(keel::cpu{}, b.r.ids.view(), b.offsets(), b.r.demand, factors.view(), {.coefficient = 3.0f}, ws.get()).or_throw();
                for (std::size_t q = 0; q < 3; ++q)
                    for (std::size_t e = 0; e < 6; ++e) f[q][e] = 3 * b.share(b.documents[q], b.documents[q + 1])[e];
            }
            if (which & 1) {
                keel::grad_mode const mode = which == 3 ? keel::accumulate : keel::overwrite;
                keel::load_balance_factors(keel::cpu{}, b.r.demand, b.r.demand.tokens(), factors.view(), {.coefficient = 0.5f, .mode = mode}).or_throw();
                for (auto& row : f)
                    for (std::size_t e = 0; e < 6; ++e) row[e] += 0.5 * b.share(0, 37)[e];
            }
            auto const documents = which == 1 ? keel::view<int64_t const, 1>{} : b.offsets();
            matrix z = b.logits();
            double const want = loss_of(z, b.valid, b.documents, f, s);
            CHECK(static_cast<double>(loss_by_keel(b.z.view(), factors.view(), {b.is_token(), documents}, s)) == Approx(want).epsilon(2e-6)); // 30 roundings
            CHECK(factors.untouched());

            keel::route_options const o{.score = s};
            keel::route_backward(keel::cpu{}, g.view(), b.z.view(), b.r.ids.view(), b.r.weights.view(), without.view(), o, {.z_loss = 0.01f}).or_throw();
            keel::route_backward(keel::cpu{}, g.view(), b.z.view(), b.r.ids.view(), b.r.weights.view(), dz.view(), o,
                                 {.z_loss = 0.01f, .factors = factors.view(), .documents = documents})
                .or_throw();
            for (std::size_t t = 0; t < 37; ++t)
                for (std::size_t e = 0; e < 6; ++e) {
                    double const keep = z[t][e], h = 1e-5;
                    z[t][e] = keep + h;
                    double const high = loss_of(z, b.valid, b.documents, f, s);
                    z[t][e] = keep - h;
                    double const low = loss_of(z, b.valid, b.documents, f, s);
                    z[t][e] = keep;
                    auto const row = static_cast<int64_t>(t), column = static_cast<int64_t>(e);
                    // Added to gradients of up to 2 in fp32: one rounding of 2^-24 of those.
                    CHECK(dz.at(row, column) - without.at(row, column) == Approx((high - low) / (2 * h)).margin(1e-6));
                }
            for (int64_t e = 0; e < 6; ++e) CHECK(dz.at(4, e) == 0.0); // padding
            CHECK(dz.untouched());
        }
}

TEST_CASE("the loss of a reduced demand, averaged over ranks, is the loss of all ranks' tokens together") {
    score_function const s = score_function::sigmoid;
    guarded_matrix<float> z(40, 5, 0, floats(data_kind::normal, 200, 8)), factors(1, 5), whole(1, 5);
    routed<> all(40, 5, 2), first(20, 5, 2);
    all.run(keel::cpu{}, z.view()).or_throw();
    auto const lower = keel::slice(z.view(), 0, 20), upper = keel::slice(z.view(), 20, 20);
    keel::load_balance_factors(keel::cpu{}, all.demand, 40, whole.view()).or_throw();
    keel::load_balance_factors(keel::cpu{}, keel::reduced_over_ranks(all.demand), 20, factors.view()).or_throw();
    double const by_ranks = (static_cast<double>(loss_by_keel(lower, factors.view(), {}, s)) + static_cast<double>(loss_by_keel(upper, factors.view(), {}, s))) / 2;
    CHECK(static_cast<double>(loss_by_keel(z.view(), whole.view(), {}, s)) == Approx(by_ranks).epsilon(1e-6));
    // The two ranks' own losses are another thing: each sees its own demand.
    first.run(keel::cpu{}, lower).or_throw();
    keel::load_balance_factors(keel::cpu{}, first.demand, 20, factors.view()).or_throw();
    CHECK(static_cast<double>(loss_by_keel(lower, factors.view(), {}, s)) != Approx(by_ranks).epsilon(1e-6));
}

TEST_CASE("balance costs the coefficient, collapse `experts` times as much, and vanishing scores are shares like others") {
    for (score_function s : all_scores) {
        guarded_matrix<float> z(8, 4), factors(1, 4);
        std::vector<int64_t> even{4, 4, 4, 4}, one{8, 8, 0, 0};
        keel::demand_counts demand;
        keel::demand_from_counts(keel::vec(even.data(), 4), 8, 2, demand).or_throw();
        keel::load_balance_factors(keel::cpu{}, demand, 8, factors.view(), {.coefficient = 2.0f}).or_throw();
        for (float level : {0.0f, -200.0f, 60.0f}) {
            for (int64_t i = 0; i < 32; ++i) z.set(i / 4, i % 4, level);
            CHECK(loss_by_keel(z.view(), factors.view(), {}, s) == 2.0f);
        }
        keel::demand_from_counts(keel::vec(one.data(), 4), 8, 2, demand).or_throw();
        keel::load_balance_factors(keel::cpu{}, demand, 8, factors.view(), {.coefficient = 2.0f}).or_throw();
        for (int64_t i = 0; i < 32; ++i) z.set(i / 4, i % 4, i % 4 < 2 ? 0.0f : -std::numeric_limits<float>::infinity());
        CHECK(loss_by_keel(z.view(), factors.view(), {}, s) == 4.0f); // all on half of the experts
        z.set(3, 1, std::numeric_limits<float>::quiet_NaN());
        CHECK(std::isnan(loss_by_keel(z.view(), factors.view(), {}, s)));
    }
}

TEST_CASE("no tokens, or none but padding: losses and gradients of 0") { // SGLang #22455, HF #28505
    guarded_matrix<float> factors(1, 5), z(3, 5, 0, floats(data_kind::normal, 15));
    routed<> none(0, 5, 2), padded(3, 5, 2);
    bool const mask[] = {false, false, false};
    none.run(keel::cpu{}, keel::slice(z.view(), 0, 0)).or_throw();
    padded.run(keel::cpu{}, z.view(), {.valid = keel::vec(&mask[0], 3)}).or_throw();
    for (auto* d : {&none.demand, &padded.demand}) {
        keel::load_balance_factors(keel::cpu{}, *d, d->tokens(), factors.view()).or_throw();
        CHECK(factors.at(0, 3) == 0.0);
    }
    CHECK(loss_by_keel(keel::slice(z.view(), 0, 0), factors.view(), {}, score_function::softmax) == 0.0f);
    factors.set(0, 1, 1.0f);
    CHECK(loss_by_keel(z.view(), factors.view(), {.valid = keel::vec(&mask[0], 3)}, score_function::softmax) == 0.0f);
}

TEST_CASE("losses and gradients keep their bits on every backend") {
    for (data_kind kind : {data_kind::normal, data_kind::any_bits, data_kind::with_inf})
        for (score_function s : all_scores) {
            int64_t const tokens = 70, experts = 37, k = 3;
            guarded_matrix<keel::bf16> z(tokens, experts, 1, floats(kind, tokens * experts, 9));
            guarded_matrix<float> g(tokens, k, 0, floats(data_kind::normal, tokens * k, 2));
            std::vector<int64_t> const documents{0, 11, 70};
            auto const all = [&](auto const& be) {
                routed<> r(tokens, experts, k);
                r.run(be, z.view(), {}, {.score = s}).or_throw();
                guarded_matrix<float> factors(2, experts), dz(tokens, experts), loss(1, 1);
                scratch ws(keel::sequence_balance_factors_workspace(2, experts)), own(keel::load_balance_loss_workspace(tokens));
                auto const offsets = keel::vec(documents.data(), 3);
                keel::sequence_balance_factors(be, r.ids.view(), offsets, r.demand, factors.view(), {}, ws.get()).or_throw();
                keel::load_balance_loss(be, z.view(), factors.view(), {.documents = offsets}, loss.view().data, {.score = s}, own.get()).or_throw();
                keel::route_backward(be, g.view(), z.view(), r.ids.view(), r.weights.view(), dz.view(), {.score = s},
                                     {.factors = factors.view(), .documents = offsets})
                    .or_throw();
                auto bytes = factors.contents();
                auto const more = dz.contents(), last = loss.contents();
                bytes.insert(bytes.end(), more.begin(), more.end()), bytes.insert(bytes.end(), last.begin(), last.end());
                return bytes;
            };
            auto const want = all(keel::reference{});
            for_each_backend([&](std::string const& name, auto const& be) {
                INFO(name << " " << name_of(kind) << " score " << static_cast<int>(s));
                CHECK(all(be) == want);
            });
        }
}

TEST_CASE("a bad call of a loss names the argument and writes nothing") {
    batch b(score_function::sigmoid);
    guarded_matrix<float> factors(3, 6, 0, std::vector<float>(18, 5.0f)), dz(37, 6), g(37, 2);
    auto const before = factors.contents();
    scratch ws(keel::sequence_balance_factors_workspace(3, 6)), own(keel::load_balance_loss_workspace(37));
    using keel::status_code;
    auto const sequence = [&](std::vector<int64_t> const& documents) {
        return keel::sequence_balance_factors(keel::cpu{}, b.r.ids.view(), keel::vec(documents.data(), static_cast<int64_t>(documents.size())), b.r.demand,
                                              factors.view(), {}, ws.get())
            .code;
    };
    CHECK(sequence({0, 20, 19, 37}) == status_code::bad_option);
    CHECK(sequence({0, 20, 20, 36}) == status_code::bad_option);
    CHECK(sequence({0, 20, 37}) == status_code::bad_shape);
    int32_t const id = b.r.ids.get(0, 0);
    b.r.ids.set(0, 0, id == 0 ? 1 : 0); // as rerouting would
    CHECK(sequence(b.documents) == status_code::bad_state);
    b.r.ids.set(0, 0, id);
    for (float bad : {-1.0f, std::nanf("")})
        CHECK(keel::load_balance_factors(keel::cpu{}, b.r.demand, 37, factors.view(), {.coefficient = bad}).code == status_code::bad_option);
    CHECK(keel::load_balance_factors(keel::cpu{}, b.r.demand, -1, factors.view()).code == status_code::bad_option);
    CHECK(keel::load_balance_factors(keel::cpu{}, keel::demand_counts(keel::vec(b.r.counts.data(), 6)), 1, factors.view()).code == status_code::bad_state);
    float loss = 7;
    auto const run = [&](keel::balance_loss_inputs in, float* out) {
        return keel::load_balance_loss(keel::cpu{}, b.z.view(), factors.view(), in, out, {}, own.get()).code;
    };
    CHECK(run({}, &loss) == status_code::bad_shape); // three rows of factors, no documents
    CHECK(run({.documents = b.offsets()}, nullptr) == status_code::bad_pointer);
    CHECK(run({.documents = b.offsets()}, factors.view().data + 2) == status_code::overlap);
    CHECK(keel::route_backward(keel::cpu{}, g.view(), b.z.view(), b.r.ids.view(), b.r.weights.view(), dz.view(), {}, {.factors = factors.view()}).code ==
          status_code::bad_shape);
    CHECK(loss == 7);
    CHECK(factors.contents() == before);
    CHECK(sequence(b.documents) == status_code::ok);
}
