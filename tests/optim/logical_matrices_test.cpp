// Matrices inside a fused weight: whatever lies between their rows, each steps as it would alone, bit for bit.
#include <keel/backend/cpu/cpu.hpp>
#include <keel/backend/cpu/thread_pool.hpp>
#include <optim/muon_problem.hpp>
#include <support/catch.hpp>

using namespace keel_test;
using keel::bf16;
using keel::e4m3;
using keel::muon_scale;

namespace {

keel::cpu<> const be;
constexpr keel::step_gate open{.apply = 1, .clip = 1.0f};
keel::muon_options const options{.learning_rate = 0.01f, .weight_decay = 0.1f};

/// Two steps of a fused weight and of each of its matrices alone; `rows` says where a matrix' rows lie in an item. A lone matrix whose rows are
/// even names its random numbers by place and distance.
template <class Problem> void steps_as_alone(keel::muon_plan<> const& plan, std::vector<std::vector<int64_t>> const& matrices, Problem const&) {
    Problem fused(plan);
    fused.balanced = true, fused.shadowed = Problem::has_master;
    std::vector<Problem> alone;
    for (int64_t item = 0; item < plan.stack; ++item)
        for (auto const& rows : matrices) {
            Problem p(keel::plan_muon(1, static_cast<int64_t>(rows.size()), plan.columns, {}, plan.options));
            p.balanced = true, p.shadowed = Problem::has_master;
            for (std::size_t i = 0; i < rows.size(); ++i) p.take_row(static_cast<int64_t>(i), fused, item * plan.rows + rows[i]);
            p.random.first = static_cast<uint64_t>((item * plan.rows + rows[0]) * plan.columns);
            p.random.pitch = static_cast<uint64_t>((rows.size() > 1 ? rows[1] - rows[0] : 1) * plan.columns);
            alone.push_back(p);
        }
    for (int t = 0; t < 2; ++t) {
        fused.step(be, open, options).or_throw();
        for (auto& p : alone) p.step(be, open, options).or_throw();
    }
    std::size_t k = 0;
    for (int64_t item = 0; item < plan.stack; ++item)
        for (auto const& rows : matrices) {
            INFO("item " << item << " matrix " << k);
            bool same = true;
            for (std::size_t i = 0; i < rows.size(); ++i)
                same = same && alone[k].same_row(static_cast<int64_t>(i), fused, item * plan.rows + rows[i], static_cast<int64_t>(i), rows[i]);
            CHECK(same);
            ++k;
        }
    CHECK(fused.untouched());
}
std::vector<int64_t> every(int64_t first, int64_t count, int64_t run, int64_t period) {
    std::vector<int64_t> rows;
    for (int64_t k = 0; k < count; ++k) rows.push_back(first + k / run * period + k % run);
    return rows;
}

} // namespace

TEST_CASE("gate and up row by row in turn, in a stack of experts, in every kind of state") { // 8-bit momentum of interleaved rows too
    auto const plan = keel::plan_muon(3, 24, 40, {{"gate", 12, 1, 0, 1, 2}, {"up", 12, 1, 1, 1, 2}});
    std::vector<std::vector<int64_t>> const matrices = {every(0, 12, 1, 2), every(1, 12, 1, 2)};
    steps_as_alone(plan, matrices, muon_problem<>(plan));
    steps_as_alone(plan, matrices, muon_problem<keel::row_blocks<e4m3>, bf16>(plan));
    // The default place of a part is after the first run of the one before.
    auto const same = keel::plan_muon(3, 24, 40, {{"gate", 12, 1, -1, 1, 2}, {"up", 12, 1, -1, 1, 2}});
    for (int64_t k = 0; k < 6; ++k) {
        CHECK(same.matrix(k).first_row == plan.matrix(k).first_row);
        CHECK(same.matrix(k).map(5) == 10);
    }
}

TEST_CASE("query, key and value by groups, whole and a matrix a head, with and without gate blocks") { // Megatron #4731: 4 blocks split as 3
    // 3 groups of 2 query heads of 4 rows, then gates of 8, then k and v of 4.
    auto const whole = keel::plan_muon(2, 72, 20, {{"q", 24, 1, 0, 8, 24}, {"gate", 24, 1, 8, 8, 24}, {"k", 12, 1, 16, 4, 24}, {"v", 12, 1, 20, 4, 24}});
    REQUIRE(whole.valid());
    steps_as_alone(whole, {every(0, 24, 8, 24), every(8, 24, 8, 24), every(16, 12, 4, 24), every(20, 12, 4, 24)}, muon_problem<>(whole));
    auto const heads = keel::plan_muon(1, 48, 20, {{"q", 24, 6, 0, 8, 16}, {"k", 12, 3, 8, 4, 16}, {"v", 12, 3, 12, 4, 16}});
    REQUIRE(heads.valid());
    std::vector<std::vector<int64_t>> matrices;
    for (int64_t h = 0; h < 6; ++h) matrices.push_back(every(h / 2 * 16 + h % 2 * 4, 4, 4, 16));
    for (int64_t part = 0; part < 2; ++part)
        for (int64_t group = 0; group < 3; ++group) matrices.push_back(every(group * 16 + 8 + part * 4, 4, 4, 16));
    steps_as_alone(heads, matrices, muon_problem<bf16, float>(heads));
    // A matrix that takes half a run, and one and a half.
    auto const uneven = keel::plan_muon(1, 24, 9, {{"a", 12, 2, 0, 4, 8}, {"b", 12, 1, 4, 4, 8}});
    steps_as_alone(uneven, {{0, 1, 2, 3, 8, 9}, {10, 11, 16, 17, 18, 19}, every(4, 12, 4, 8)}, muon_problem<>(uneven));
}

TEST_CASE("a stack of convolutions is a matrix a layer; a batch is the loop, in every kind of state") { // dion #121, maxtext #4798, PaddleFleet #1703
    int64_t const layers = 3, out = 6, in = 2, side = 3;
    auto const plan = keel::plan_muon(layers, out, in * side * side);
    std::vector<std::vector<int64_t>> const filters = {{0, 1, 2, 3, 4, 5}};
    steps_as_alone(plan, filters, muon_problem<>(plan));
    steps_as_alone(plan, filters, muon_problem<keel::row_blocks<e4m3>, bf16>(plan));
    CHECK(plan.scale(0) == keel::muon_scale_of(muon_scale::match_rms_adamw, out, in * side * side));
}

TEST_CASE("weights that lie in columns: parts with rows in turn step as alone, with the same random numbers") {
    // [rows, columns] stored column by column; bf16 weights rounded by chance.
    int64_t const r = 20, c = 11;
    auto const fused_plan = keel::plan_muon(1, r, c, {{"a", 10, 1, 0, 1, 2}, {"b", 10, 1, 1, 1, 2}});
    guarded_matrix<float> g(c, r, 0, floats(data_kind::normal, r * c, 3));
    guarded_matrix<bf16> w(c, r, 0, floats(data_kind::uniform, r * c, 4)), m(c, r);
    auto lone_w = w, lone_m = m;
    int64_t applied = 0, lone_applied = 0;
    using kind = keel::muon_parameter<float, float, bf16, bf16, bf16>;
    auto const run = [&](kind const& p) {
        kind const list[] = {p};
        scratch memory(keel::muon_step_workspace(be, keel::vec(list, 1)));
        keel::muon_step(be, keel::vec(list, 1), open, options, memory.get()).or_throw();
    };
    auto const turned = [](auto& x, int64_t first, int64_t step, int64_t count) {
        auto v = transposed(x.view());
        v.data += first * v.stride[0];
        v.stride[0] *= step, v.extent[0] = count;
        return keel::stacked(v);
    };
    for (int t = 0; t < 2; ++t) {
        run({.plan = fused_plan, .gradient = turned(g, 0, 1, r), .weight = turned(w, 0, 1, r), .momentum = turned(m, 0, 1, r), .applied = &applied,
             .random = {.key = {.seed = 3}}});
        for (int64_t k = 0; k < 2; ++k) {
            int64_t count = lone_applied;
            run({.plan = keel::plan_muon(1, 10, c), .gradient = turned(g, k, 2, 10), .weight = turned(lone_w, k, 2, 10),
                 .momentum = turned(lone_m, k, 2, 10), .applied = &count,
                 .random = {.key = {.seed = 3}, .first = static_cast<uint64_t>(k * c), .pitch = static_cast<uint64_t>(2 * c)}});
        }
        ++lone_applied;
    }
    CHECK(w.contents() == lone_w.contents());
    CHECK(m.contents() == lone_m.contents());
    // Rows with gaps of their own are walked as rows: right, if slowly.
    auto const runs = keel::plan_muon(1, r, c, {{"a", 12, 1, 0, 6, 10}, {"b", 8, 1, 6, 4, 10}});
    guarded_matrix<float> const start(c, r, 0, floats(data_kind::uniform, r * c, 4));
    guarded_matrix<float> w32 = start, m32(c, r);
    keel::muon_parameter<> const list[] = {{.plan = runs, .gradient = turned(g, 0, 1, r), .weight = turned(w32, 0, 1, r), .momentum = turned(m32, 0, 1, r)}};
    scratch memory(keel::muon_step_workspace(be, keel::vec(list, 1)));
    keel::muon_step(be, keel::vec(list, 1), open, options, memory.get()).or_throw();
    muon_problem<> rows(runs);
    for (int64_t i = 0; i < r; ++i)
        for (int64_t j = 0; j < c; ++j) rows.gradient.set(i, j, g.get(j, i)), rows.weight.set(i, j, start.get(j, i));
    rows.step(be, open, options).or_throw();
    int64_t differing = 0;
    for (int64_t i = 0; i < r; ++i)
        for (int64_t j = 0; j < c; ++j) differing += w32.get(j, i) != rows.weight.get(i, j) || m32.get(j, i) != rows.momentum.values.get(i, j);
    CHECK(differing == 0);
}

TEST_CASE("the scale is that of the logical matrix, whatever lies between its rows") { // EO #80; a fused weight's shape is nobody's shape
    auto const plan = keel::plan_muon(1, 192, 64, {{"q", 128, 2, 0, 2, 3}, {"k", 64, 1, 2, 1, 3}}, {.scale = muon_scale::spectral});
    REQUIRE(plan.valid());
    CHECK(plan.scale(0) == 1.0f); // of the slab it would be sqrt(3), of both heads sqrt(2)
    CHECK(plan.scale(1) == 1.0f);
    CHECK_THAT(plan.text(), Catch::Matchers::ContainsSubstring("q: 2 of 64 x 64"));
    CHECK_THAT(plan.text(), Catch::Matchers::ContainsSubstring(", 2 of every 3 rows from 0\n"));
    CHECK_THAT(plan.text(), Catch::Matchers::ContainsSubstring(", 1 of every 3 rows from 2\n"));
}

TEST_CASE("a plan takes each row once, or is refused") {
    auto const valid = [](int64_t rows, std::initializer_list<keel::row_part> parts) { return keel::plan_muon(1, rows, 4, parts).valid(); };
    CHECK(valid(12, {{"a", 8, 1, 0, 2, 3}, {"b", 4, 1, 2, 1, 3}}));
    CHECK(valid(12, {{"a", 8, 1, 4}, {"b", 4, 1, 0}}));                       // parts in any order
    CHECK(!valid(12, {{"a", 8, 1, 0, 2, 3}, {"b", 4, 1, 1, 1, 3}}));          // row 1 twice, row 2 never
    CHECK(!valid(12, {{"a", 8, 1, 0, 2, 3}, {"b", 4}}));                      // the first run's end is followed by 4 rows
    CHECK(!valid(12, {{"a", 6, 1, 0, 2, 4}, {"b", 6, 1, 1, 2, 4}}));          // half of a run shared
    CHECK(valid(12, {{"a", 8, 1, 1, 2, 3}, {"b", 4, 1, 0, 1, 3}, {"none", 0}}));
    CHECK(!valid(11, {{"a", 8, 1, 1, 2, 3}, {"b", 3, 1, 0, 1, 3}}));          // the last run ends past the weight
    CHECK(!valid(12, {{"a", 8, 1, 0, 3, 4}, {"b", 4, 1, 3, 1, 4}}));          // not whole runs
    CHECK(!valid(12, {{"a", 12, 1, 0, 2, 1}}));                               // runs upon each other
    CHECK(!valid(12, {{"a", 12, 1, 0, 2, int64_t{1} << 62}}));
    CHECK(!valid(12, {{"a", 12, 1, int64_t{1} << 62}}));
    CHECK(!valid(12, {{"a", 6, 1, 0}, {"b", 6, 1, 0}}));
    CHECK(!valid(12, {{"a", 12, 1, 1}}));
    // Numbers whose products and sums do not fit 64 bits.
    constexpr int64_t most = (int64_t{1} << 62) - 1, half = int64_t{1} << 32;
    CHECK(!valid(most, {{"a", most - 1, 1, 0}, {"b", most, 1, 0}, {"c", 1, 1, 0}}));
    CHECK(!valid(int64_t{1} << 60, {{"a", int64_t{1} << 60, 1, 0, 1, int64_t{1} << 60}}));
    CHECK(!valid(0, {{"a", 0, most}, {"b", 0, most}, {"c", 0, most}, {"d", 0, most}}));
    CHECK(!keel::plan_muon(4 * half, 0, 4, {{"a", 0, half / 4}}).valid());
    CHECK(valid(12, {{"a", 12, 1}, {"none", 0, 4}}));
    // Random maps against a count of rows.
    uint64_t state = 1;
    auto const draw = [&](int64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<int64_t>(state >> 33) % below;
    };
    int64_t accepted = 0;
    for (int trial = 0; trial < 20000; ++trial) {
        int64_t const period = 1 + draw(4), count = 1 + draw(3), rows = period * count, cut = 1 + draw(period);
        int64_t const other = trial % 2 == 0 ? period - cut : draw(period + 1), first = trial % 3 == 0 ? draw(period + 1) : cut;
        keel::row_part const parts[] = {{"a", cut * count, 1, 0, cut, period}, {"b", other * count, 1, first, other, period}};
        int64_t const n = other > 0 ? 2 : 1;
        auto const plan = keel::plan_muon(1, rows, 4, parts, n);
        std::vector<int> taken(64);
        bool inside = true;
        for (int64_t p = 0; p < n; ++p)
            for (int64_t k = 0; k < parts[p].rows; ++k) {
                int64_t const row = parts[p].first + k / parts[p].run * period + k % parts[p].run;
                if (row >= rows) inside = false;
                else taken[static_cast<std::size_t>(row)] += 1;
            }
        for (int64_t i = 0; i < rows; ++i) inside = inside && taken[static_cast<std::size_t>(i)] == 1;
        if (plan.valid() != inside) FAIL_CHECK("trial " << trial);
        accepted += inside;
        for (int64_t m = 0; inside && m < plan.matrices(); ++m)
            for (int64_t i = 0; i < plan.matrix(m).rows; ++i) {
                auto const matrix = plan.matrix(m);
                auto const& part = parts[matrix.part];
                if (matrix.first_row + matrix.map(i) != part.first + i / part.run * period + i % part.run) FAIL_CHECK("trial " << trial << " row " << i);
            }
    }
    CHECK(accepted > 1000);
    CHECK(accepted < 15000);
}
