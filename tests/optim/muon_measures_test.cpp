// What muon_step says of each logical matrix, and steps that stop early: those of newton_schulz on the matrix alone.
#include <functional>
#include <limits>

#include <keel/backend/cpu/cpu.hpp>
#include <optim/matrices.hpp>
#include <optim/muon_problem.hpp>
#include <support/backends.hpp>
#include <support/catch.hpp>

using namespace keel_test;

namespace {

constexpr keel::step_gate open{.apply = 1, .clip = 1.0f}, closed{};
constexpr int64_t stack = 2, columns = 24, matrices_a_item = 3;

/// An item is a matrix of 20 rows, then two of 6.
keel::muon_plan<> fused(float wanted) {
    return keel::plan_muon(stack, 32, columns, {{"q", 20, 1}, {"kv", 12, 2}},
                           {.scale = keel::muon_scale::unit, .coefficients = keel::coefficients<keel::classic_quintic, float, 8>(), .wanted_error = wanted});
}
/// U is the gradient.
constexpr keel::muon_options plain_step{.learning_rate = 1.0f, .momentum = 0.0f, .nesterov = false};

struct measured {
    std::vector<float> error = std::vector<float>(stack * matrices_a_item, -1.0f), entering = error;
    std::vector<int64_t> steps = std::vector<int64_t>(stack * matrices_a_item, -1);
    keel::newton_schulz_measures views() {
        auto const n = static_cast<int64_t>(steps.size());
        return {keel::vec(error.data(), n), keel::vec(entering.data(), n), keel::vec(steps.data(), n)};
    }
    bool operator==(measured const&) const = default;
};

template <class B> keel::status step(B const& be, muon_problem<>& p, keel::newton_schulz_measures const& measures, keel::step_gate const& gate = open) {
    auto parameter = p.get();
    parameter.measures = measures;
    keel::muon_parameter<> const list[] = {parameter};
    scratch memory(keel::muon_step_workspace(be, keel::vec(list, 1)));
    return keel::muon_step(be, keel::vec(list, 1), gate, plain_step, memory.get());
}

} // namespace

TEST_CASE("each logical matrix has the measures, the steps and the bits of its own newton_schulz") {
    for (float const wanted : {0.0f, 0.05f}) {
        muon_problem<> p(fused(wanted));
        p.weight = guarded_matrix<float>(stack * 32, columns, 1);
        for (int64_t i = 26; i < 32; ++i) // the first item's last matrix
            for (int64_t j = 0; j < columns; ++j) p.gradient.set(i, j, 0.0f);
        measured want, got;
        guarded_matrix<float> o(stack * 32, columns);
        auto const views = want.views();
        for (int64_t k = 0, row = 0; k < stack * matrices_a_item; ++k) {
            int64_t const rows = k % matrices_a_item == 0 ? 20 : 6;
            keel::newton_schulz_options<> const options{.coefficients = p.plan.options.coefficients, .wanted_error = wanted};
            scratch memory(keel::newton_schulz_workspace(keel::cpu{}, rows, columns));
            keel::newton_schulz(keel::cpu{}, slice(p.gradient.view(), row, rows), slice(o.view(), row, rows),
                                {slice(views.orthogonality_error, k, 1), slice(views.entering_error, k, 1), slice(views.steps, k, 1)}, options, memory.get())
                .or_throw();
            row += rows;
        }
        REQUIRE(want.steps[2] == 0);
        REQUIRE(want.error[2] == 1.0f);
        REQUIRE((wanted == 0.0f) == (want.steps[0] == 8)); // some stop early
        muon_problem<> const before = p;
        for_each_cpu([&](std::string const& name, auto const& be) {
            INFO(name << ", wanted " << wanted);
            muon_problem<> q = before;
            measured m;
            CHECK(step(be, q, m.views(), closed).ok());
            CHECK(m == measured{}); // a closed gate: not written
            CHECK(step(be, q, m.views()).ok());
            CHECK(m == want);
            CHECK((to_matrix(q.weight) + to_matrix(o)).cwiseAbs().maxCoeff() == 0.0); // w = 0 - O
            muon_problem<> unmeasured = before;
            CHECK(step(be, unmeasured, {}).ok());
            CHECK(unmeasured.weight.contents() == q.weight.contents());
        });
    }
}

TEST_CASE("parameters of a list have the measures that each has alone") {
    muon_problem<> const small(fused(0.0f), 3), large(keel::plan_muon(1, 40, columns, {}, small.plan.options), 4);
    measured want[2], got[2];
    muon_problem<> alone[] = {small, large}, listed[] = {small, large};
    for (int64_t row = 20; row < 26; ++row) // a matrix of zeros in the first
        for (int64_t j = 0; j < columns; ++j) alone[0].gradient.set(row, j, 0.0f), listed[0].gradient.set(row, j, 0.0f);
    auto const views = [](measured& m, int64_t n) {
        keel::newton_schulz_measures const v = m.views();
        return keel::newton_schulz_measures{slice(v.orthogonality_error, 0, n), slice(v.entering_error, 0, n), slice(v.steps, 0, n)};
    };
    int64_t const count[] = {stack * matrices_a_item, 1};
    for (int i = 0; i < 2; ++i) CHECK(step(keel::cpu{}, alone[i], views(want[i], count[i])).ok());
    for_each_cpu([&](std::string const& name, auto const& be) {
        INFO(name);
        keel::muon_parameter<> list[] = {listed[1].get(), listed[0].get()}; // the costly one first, and last
        for (bool const turned : {false, true}) {
            muon_problem<> again[] = {listed[0], listed[1]};
            int const first = turned ? 0 : 1;
            for (int k = 0; k < 2; ++k) {
                int const i = k == 0 ? first : 1 - first;
                list[k] = again[i].get();
                got[i] = {};
                list[k].measures = views(got[i], count[i]);
            }
            scratch memory(keel::muon_step_workspace(be, keel::vec(list, 2)));
            CHECK(keel::muon_step(be, keel::vec(list, 2), open, plain_step, memory.get()).ok());
            for (int i = 0; i < 2; ++i) CHECK(got[i] == want[i]);
        }
    });
    CHECK(want[0].steps[1] == 0);
    CHECK(want[1].steps[0] == 8);
}

namespace {

/// One view of a parameter: where its data is, and may be put.
template <class P> struct place {
    std::string name;
    std::function<void*(P&)> data;
    std::function<void(P&, void*)> move;
};
#define KEEL_TEST_PLACE(P, member)                                                                                                         \
    place<P> {                                                                                                                             \
        #member, [](P& of) { return const_cast<void*>(static_cast<void const*>(of.member.data)); },                                      \
            [](P& of, void* to) { of.member.data = static_cast<decltype(of.member.data)>(to); }                                            \
    }

/// Every two of the places laid upon each other are refused.
template <class P> void every_pair_is_refused(P const& good, std::vector<place<P>> const& places) {
    auto const checked = [](P const& p) {
        keel::validation check("f");
        keel::check_parameter(check, p, 0);
        return check.result;
    };
    REQUIRE(checked(good).ok());
    for (auto const& x : places)
        for (auto const& y : places) {
            if (&x == &y) continue;
            INFO(y.name << " upon " << x.name);
            P p = good;
            y.move(p, x.data(p));
            CHECK(checked(p).code == keel::status_code::overlap);
        }
}

} // namespace

TEST_CASE("no two views of a parameter may share memory, whichever they are") {
    measured m;
    {
        muon_problem<> p(fused(0.0f));
        p.balanced = p.shadowed = true;
        using P = muon_problem<>::parameter_type;
        P good = p.get();
        good.measures = m.views();
        every_pair_is_refused<P>(good, {KEEL_TEST_PLACE(P, weight), KEEL_TEST_PLACE(P, gradient), KEEL_TEST_PLACE(P, momentum), KEEL_TEST_PLACE(P, shadow),
                                        KEEL_TEST_PLACE(P, second_moment), KEEL_TEST_PLACE(P, measures.orthogonality_error),
                                        KEEL_TEST_PLACE(P, measures.entering_error), KEEL_TEST_PLACE(P, measures.steps)});
    }
    using problem = muon_problem<keel::row_blocks<keel::e4m3>, keel::bf16>;
    problem p(fused(0.0f));
    p.balanced = p.compensated = true;
    using P = problem::parameter_type;
    P good = p.get();
    good.measures = m.views();
    every_pair_is_refused<P>(good, {KEEL_TEST_PLACE(P, weight), KEEL_TEST_PLACE(P, gradient), KEEL_TEST_PLACE(P, momentum.codes),
                                    KEEL_TEST_PLACE(P, momentum.scales), KEEL_TEST_PLACE(P, compensation), KEEL_TEST_PLACE(P, second_moment),
                                    KEEL_TEST_PLACE(P, measures.orthogonality_error), KEEL_TEST_PLACE(P, measures.entering_error),
                                    KEEL_TEST_PLACE(P, measures.steps)});
}

TEST_CASE("bad measures and wanted errors are named, and nothing is written") {
    muon_problem<> p(fused(0.0f));
    auto const weight = p.weight.contents();
    measured m;
    auto const refused = [&](keel::newton_schulz_measures const& measures, keel::status_code code, char const* argument) {
        keel::status const s = step(keel::cpu{}, p, measures);
        CHECK(s.code == code);
        CHECK(std::string(s.argument) == argument);
        CHECK(p.weight.contents() == weight);
        CHECK(m == measured{});
    };
    auto const views = m.views();
    using keel::status_code;
    refused({.steps = slice(views.steps, 0, 5)}, status_code::bad_shape, "measures.steps");
    refused({.orthogonality_error = views.orthogonality_error, .entering_error = views.orthogonality_error}, status_code::overlap, "measures.entering_error");
    refused({.orthogonality_error = keel::vec(p.weight.view().data, 6)}, status_code::overlap, "measures.orthogonality_error");
    for (float const wanted : {-1.0f, std::numeric_limits<float>::quiet_NaN()}) {
        p.plan.options.wanted_error = wanted;
        refused({}, status_code::bad_option, "plan.options.wanted_error");
    }
}
