// Same bits: matrix products, plain, batched, grouped, symmetric and promoted.
#include <keel/backend/cpu/matmul.hpp>
#include <keel/backend/matmul.hpp>
#include <keel/backend/reference_matmul.hpp>
#include <keel/format/fp8.hpp>
#include <support/bits.hpp>

using namespace keel_test;

namespace {

struct block_scale {
    KEEL_FN float operator()(int64_t, int64_t line, int64_t block) const {
        return 0.01f * static_cast<float>(line % 7 + 1) * static_cast<float>(block + 1);
    }
};

template <class T> void products(std::string const& name, data_kind kind, int64_t m, int64_t n, int64_t k) {
    same_bits("matmul " + name + " " + name_of(kind) + " " + std::to_string(k), [&](auto const& be, digest& d) {
        guarded_matrix<T> a(m, k, 1, floats(kind, m * k, 1)), w(n, k, 0, floats(data_kind::normal, n * k, 2));
        guarded_matrix<float> c(m, n, 3), gradient(n, k, 0, floats(data_kind::normal, n * k, 3)), square(m, m, 1);
        guarded_matrix<keel::bf16> stored(m, n);
        scratch ws(keel::matmul_workspace(be, m, n, k) + keel::matmul_workspace(be, n, k, m) +
                   keel::matmul_workspace(be, m, m, k));
        auto const x = a.view();
        auto const right = transposed(w.view());
        keel::matmul(be, x, right, c.view(), {.alpha = 0.3f}, ws.get()).or_throw();
        keel::matmul(be, x, right, stored.view(), {}, ws.get()).or_throw();
        keel::matmul(be, transposed(c.view()), x, gradient.view(), {.beta = 1.0f}, ws.get()).or_throw();
        keel::matmul(be, x, transposed(x), square.view(), {.form = keel::product_form::symmetric}, ws.get()).or_throw();
        d.add(c), d.add(stored), d.add(gradient), d.add(square);
    });
}

} // namespace

int main() {
    for (data_kind kind : {data_kind::normal, data_kind::mixed_scales, data_kind::subnormal, data_kind::with_nan,
                           data_kind::with_inf, data_kind::any_bits})
        for (int64_t k : {1, 77, 600}) {
            products<float>("float", kind, 37, 50, k);
            products<keel::bf16>("bf16", kind, 37, 50, k);
        }
    same_bits("grouped_matmul", [](auto const& be, digest& d) {
        int64_t const tokens = 90, k = 33, n = 40, experts = 4;
        std::vector<int64_t> const offsets = {0, 13, 13, 70, 90};
        guarded_matrix<keel::bf16> x(tokens, k, 0, floats(data_kind::normal, tokens * k, 1));
        auto w = floats(data_kind::normal, experts * k * n, 2);
        std::vector<float> dw(w.size());
        guarded_matrix<float> y(tokens, n);
        guarded_matrix<keel::bf16> dy(tokens, n, 0, floats(data_kind::normal, tokens * n, 3));
        auto const cuts = keel::vec(offsets.data(), experts + 1);
        scratch ws(keel::matmul_workspace(be, tokens, n, k, experts) +
                   keel::matmul_workspace(be, k, n, tokens, experts));
        keel::grouped_matmul(be, x.view(), keel::cube(w.data(), experts, k, n), y.view(), cuts, {}, ws.get())
            .or_throw();
        keel::grouped_matmul(be, transposed(x.view()), dy.view(), keel::cube(dw.data(), experts, k, n), cuts, {},
                             ws.get())
            .or_throw();
        d.add(y), d.add(dw.data(), dw.size() * sizeof(float));
    });
    same_bits("promoted products", [](auto const& be, digest& d) {
        int64_t const m = 30, n = 45, k = 700;
        guarded_matrix<keel::e4m3> a(m, k, 0, floats(data_kind::normal, m * k, 1)),
            b(n, k, 0, floats(data_kind::normal, n * k, 2));
        guarded_matrix<float> c(m, n);
        scratch ws(keel::matmul_promoted_workspace(be, m, n, k, 128));
        keel::product_set const set{
            keel::layout_of(a.view()), keel::layout_of(transposed(b.view())), keel::layout_of(c.view()), 1, m, n, k};
        keel::matmul_promoted<keel::e4m3, keel::e4m3, float>(
            be, set, keel::promotion<block_scale, block_scale>{128, {}, {}}, ws.get())
            .or_throw();
        d.add(c);
    });
    same_bits("slices of a Gram matrix", [](auto const& be, digest& d) {
        int64_t const n = 45, k = 700;
        guarded_matrix<keel::bf16> a(n, k, 0, floats(data_kind::normal, n * k, 1));
        guarded_matrix<float> c(n, n);
        scratch ws(keel::matmul_promoted_workspace(be, n, n, k, 128));
        keel::product_set set{
            keel::layout_of(a.view()), keel::layout_of(transposed(a.view())), keel::layout_of(c.view()), 1, n, n, k};
        set.options.form = keel::product_form::symmetric;
        keel::matmul_promoted<keel::bf16, keel::bf16, float>(
            be, set, keel::promotion<keel::unit_scale, keel::unit_scale>{128, {}, {}}, ws.get())
            .or_throw();
        d.add(c);
    });
    return disagreements != 0;
}
