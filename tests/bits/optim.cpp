// Same bits: the step gate, adamw_step, newton_schulz in each form, and muon_step over fused and stacked weights.
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/guard/step_gate.hpp>
#include <keel/optim/adamw.hpp>
#include <keel/optim/muon.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

keel::step_gate const gate = {.apply = 1, .clip = 0.7f};

void gates(data_kind kind) {
    same_bits(std::string("make_gate ") + name_of(kind), [&](auto const& be, digest& d) {
        guarded_matrix<float> a(1, 20000, 0, floats(kind, 20000, 1));
        guarded_matrix<keel::bf16> b(3, 100, 0, floats(kind, 300, 2));
        keel::gradient_tensor const list[] = {a.view(), b.view()};
        scratch ws(keel::make_gate_workspace(keel::vec(list, 2)));
        keel::step_gate g;
        keel::make_gate(be, keel::vec(list, 2), {.max_norm = 1.0f}, &g, ws.get()).or_throw();
        d.add(&g.apply, sizeof(g.apply)), d.add(&g.clip, sizeof(g.clip)), d.add(&g.pre_clip_norm, sizeof(g.pre_clip_norm));
        d.add(&g.nan, sizeof(g.nan)), d.add(&g.inf, sizeof(g.inf)), d.add(&g.first_non_finite, sizeof(g.first_non_finite));
    });
}

void adamw(data_kind kind) {
    same_bits(std::string("adamw_step ") + name_of(kind), [&](auto const& be, digest& d) {
        int64_t const n = 9001;
        guarded_matrix<float> g(1, n, 0, floats(kind, n, 3)), w(1, n, 0, floats(data_kind::normal, n, 4)), m(1, n), v(1, n);
        guarded_matrix<keel::bf16> shadow(1, n);
        int64_t applied = 0;
        scratch ws(keel::adamw_step_workspace(n));
        keel::step_change change;
        for (int t = 0; t < 2; ++t)
            keel::adamw_step(be, g.vec(), {.master = w.vec(), .shadow = shadow.vec()}, {.m = m.vec(), .v = v.vec(), .applied = &applied}, gate,
                             {.weight_decay = 0.1f}, &change, ws.get())
                .or_throw();
        d.add(w), d.add(m), d.add(v), d.add(shadow), d.add(&change, sizeof(change));
    });
}

template <class T> void orthogonal(char const* type, int64_t rows, int64_t columns, keel::newton_schulz_form form) {
    same_bits(std::string("newton_schulz ") + type + name_of(form) + " " + std::to_string(rows) + "x" + std::to_string(columns),
              [&](auto const& be, digest& d) {
                  guarded_matrix<float> u(rows, columns, 1, floats(data_kind::normal, rows * columns, 5)), o(rows, columns);
                  scratch ws(keel::newton_schulz_workspace<T>(be, rows, columns, 1, {.form = form}));
                  float error = 0;
                  keel::newton_schulz<T>(be, u.view(), o.view(), {.orthogonality_error = keel::vec(&error, 1)}, {.form = form}, ws.get()).or_throw();
                  d.add(o), d.add(&error, sizeof(error));
              });
}

void muon() {
    same_bits("muon_step", [&](auto const& be, digest& d) {
        guarded_matrix<float> g(60, 24, 0, floats(data_kind::normal, 60 * 24, 6)), w(60, 24, 0, floats(data_kind::normal, 60 * 24, 7)), m(60, 24);
        guarded_matrix<keel::bf16> shadow(60, 24);
        keel::step_change change;
        auto const cube = [](auto view) { return keel::cube(view.data, 3, 20, 24); };
        keel::muon_parameter<> const p[] = {{.plan = keel::plan_muon(3, 20, 24, {{"q", 12, 2}, {"k", 8}}), .gradient = cube(g.view()), .weight = cube(w.view()),
                                             .momentum = cube(m.view()), .shadow = cube(shadow.view()), .change = &change}};
        scratch ws(keel::muon_step_workspace(be, keel::vec(p, 1)));
        for (int t = 0; t < 2; ++t) keel::muon_step(be, keel::vec(p, 1), gate, {.weight_decay = 0.1f}, ws.get()).or_throw();
        d.add(w), d.add(m), d.add(shadow), d.add(&change, sizeof(change));
    });
}

} // namespace

int main() {
    for (data_kind kind : all_kinds) gates(kind), adamw(kind);
    for (auto [r, c] : {std::pair<int64_t, int64_t>{1, 1}, {7, 13}, {33, 20}, {24, 70}}) {
        orthogonal<float>("", r, c, keel::newton_schulz_form::symmetric);
        orthogonal<float>("", r, c, keel::newton_schulz_form::gram);
        orthogonal<keel::bf16>("bf16 ", r, c, keel::newton_schulz_form::symmetric);
        orthogonal<keel::bf16>("bf16 ", r, c, keel::newton_schulz_form::gram);
    }
    muon();
    return disagreements != 0;
}
