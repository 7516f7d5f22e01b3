// The iteration itself, on one normalised matrix that lies in a worker's scratch: what newton_schulz and muon_step share.
#pragma once

#include <keel/backend/matmul.hpp>
#include <keel/core/workspace.hpp>
#include <keel/optim/newton_schulz_plan.hpp>
#include <keel/optim/newton_schulz_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Scratch of one worker for one matrix of a plan. `x` holds the normalised matrix as it lies in memory, wide or tall.
template <class T> struct newton_schulz_buffers {
    view<T, 2> x, y;
    view<T, 2> square[4];          ///< n x n; plain and symmetric use two
    float *squares, *scalar;       ///< one a row, and one
    workspace products;
};

/// A = X X^T is summed in slices of the long side, each from zero, and slice by slice: in one chain of m terms that are all alike every
/// rounding of a binade goes the same way, and A's eigenvalues drift by up to m 2^-26 of the largest, below 0 too, where no set is
/// certified. Of slices of about sqrt(m) the drift is 2 sqrt(m) 2^-26.
KEEL_HOST constexpr int64_t gram_slice(int64_t long_side) {
    int64_t slice = 128;
    while (slice * slice < long_side) slice += 128;
    return slice;
}
/// A scale of 1 for every block.
struct unit_scale {
    KEEL_FN float operator()(int64_t, int64_t, int64_t) const { return 1.0f; }
};

template <matmul_backend B> int64_t newton_schulz_product_bytes(B const& be, newton_schulz_plan const& plan) {
    int64_t const n = plan.short_side(), m = plan.long_side();
    int64_t const gram = matmul_promoted_workspace(be, n, n, m, gram_slice(m)), square = matmul_workspace(be, n, n, n);
    int64_t const wide = matmul_workspace(be, n, m, n), tall = matmul_workspace(be, m, n, n);
    int64_t most = gram > square ? gram : square;
    most = most > wide ? most : wide;
    return most > tall ? most : tall;
}
KEEL_HOST constexpr int newton_schulz_squares(newton_schulz_plan const& plan) { return plan.form == newton_schulz_form::gram ? 4 : 2; }

/// Bytes of newton_schulz_buffers; the same for a matrix and its transpose.
template <class T, matmul_backend B> int64_t newton_schulz_scratch(B const& be, newton_schulz_plan const& plan) {
    int64_t const n = plan.short_side();
    return workspace_total(2 * workspace_bytes<T>(plan.rows * plan.columns) + newton_schulz_squares(plan) * workspace_bytes<T>(n * n) +
                           workspace_bytes<float>(plan.long_side()) + workspace_bytes<float>(1) +
                           newton_schulz_product_bytes(be, plan));
}
template <class T, matmul_backend B>
newton_schulz_buffers<T> newton_schulz_carve(B const& be, newton_schulz_plan const& plan, workspace ws) {
    int64_t const n = plan.short_side();
    newton_schulz_buffers<T> s{};
    s.x = rows(ws.take<T>(plan.rows * plan.columns), plan.rows, plan.columns);
    s.y = rows(ws.take<T>(plan.rows * plan.columns), plan.rows, plan.columns);
    for (int i = 0; i < newton_schulz_squares(plan); ++i) s.square[i] = rows(ws.take<T>(n * n), n, n);
    s.squares = ws.take<float>(plan.long_side());
    s.scalar = ws.take<float>(1);
    s.products = ws.part(newton_schulz_product_bytes(be, plan));
    return s;
}

/// Newton-Schulz over the matrix in s.x. Each function leaves its result in s.x.
template <class T, matmul_backend B> class newton_schulz_iteration {
  public:
    newton_schulz_iteration(B const& be, newton_schulz_plan const& plan, newton_schulz_coefficients<T> const& set,
                            newton_schulz_buffers<T>& s)
        : be_(be), plan_(plan), set_(set), s_(s) {}

    /// X = U / ||U||, for a largest magnitude that is neither 0 nor infinite.
    template <class Source> void normalise(Source const& source, uint32_t largest) {
        exact_scale const scale = scale_to_two(largest);
        be_.for_rows(plan_.rows, plan_.columns, squares_row<Source>{source, plan_.columns, scale, s_.squares});
        be_.for_rows(1, plan_.rows, inverse_norm_row{s_.squares, plan_.rows, s_.scalar});
        be_.for_rows(plan_.rows, plan_.columns, normalised_row<Source, T>{source, scale, s_.scalar, s_.x});
    }
    /// Whether the result is finite: of a certified set it is.
    bool run() {
        if (plan_.form != newton_schulz_form::gram) run_plain();
        else if constexpr (std::is_same_v<T, float>) run_gram();
        uint32_t largest = 0;
        be_.for_rows(plan_.rows, plan_.columns, matrix_largest_row<matrix_source<T>>{{s_.x}, plan_.columns, &largest});
        return largest < infinity_bits;
    }
    /// ||O O^T - I|| / sqrt(n) of the result, on its short side.
    void measure_error(float* error) {
        int64_t const n = plan_.short_side();
        gram_of(s_.x, s_.square[0]);
        be_.for_rows(n, n, identity_error_row<T>{s_.square[0], s_.squares});
        be_.for_rows(1, n, root_mean_row{s_.squares, n, error});
    }

  private:
    /// A = X X^T; B = c A A + b A; X = B X + a X.
    void run_plain() {
        view<T, 2> const a = s_.square[0], b = s_.square[1];
        for (int t = 0; t < set_.count; ++t) {
            newton_schulz_step const& p = set_.step[t];
            gram_of(s_.x, a);
            square_product(a, a, b, a, p.c, p.b);
            apply(b, p.a);
        }
    }
    /// Q is kept as `diagonal` I + P, and the identity never stored: rounding to P's size would lose it.
    void run_gram() {
        view<T, 2> r = s_.square[0], z = s_.square[1], p = s_.square[2], spare = s_.square[3];
        bool fresh = true;
        float diagonal = 1.0f;
        gram_of(s_.x, r);
        for (int t = 0; t < set_.count; ++t) {
            newton_schulz_step const& step = set_.step[t];
            bool const last = t + 1 == set_.count;
            square_product(r, r, z, r, step.c, step.b);
            if (fresh) {
                copy(z, p);
                diagonal = step.a;
                fresh = false;
            } else { // Q Z + a Q = P Z + diagonal Z + a P, and a diagonal beside it
                be_.for_rows(p.extent[0], p.extent[1], polynomial_row{step.a, p, diagonal, z, spare});
                product(p, z, spare, spare, {.alpha = 1.0f, .beta = 1.0f, .form = product_form::symmetric});
                exchange(p, spare);
                diagonal *= step.a;
            }
            if (last) break;
            if (plan_.restarts_after(t)) {
                apply(p, diagonal);
                gram_of(s_.x, r);
                fresh = true;
                continue;
            }
            square_product(r, z, spare, r, 1.0f, step.a);
            square_product(z, spare, r, spare, 1.0f, step.a);
        }
        apply(p, diagonal);
    }

    /// g = x x^T on the short side, in slices of the long one.
    void gram_of(view<T, 2> x, view<T, 2> g) {
        view<T, 2> const wide = plan_.rows <= plan_.columns ? x : transposed(x);
        int64_t const n = wide.extent[0], m = wide.extent[1];
        product_set const set{layout_of(wide), layout_of(transposed(wide)), layout_of(g), 1, n, n, m, nullptr, ragged::none,
                              {.form = form_of_squares()}};
        [[maybe_unused]] status const s = matmul_promoted<T, T, T>(be_, set, promotion<unit_scale, unit_scale>{gram_slice(m), {}, {}}, s_.products);
        KEEL_ASSERT(s.ok());
    }
    /// out = alpha a b + beta c, all n x n polynomials of one symmetric matrix. out shares no memory with them.
    void square_product(view<T, 2> a, view<T, 2> b, view<T, 2> out, view<T, 2> c, float alpha, float beta) {
        product(a, b, c, out, {.alpha = alpha, .beta = beta, .form = form_of_squares()});
    }
    /// X = q X + diagonal X.
    void apply(view<T, 2> q, float diagonal) {
        bool const wide = plan_.rows <= plan_.columns;
        product(wide ? q : s_.x, wide ? s_.x : q, s_.x, s_.y, {.alpha = 1.0f, .beta = diagonal});
        exchange(s_.x, s_.y);
    }
    void product(view<T, 2> a, view<T, 2> b, view<T, 2> d, view<T, 2> c, matmul_options options) {
        [[maybe_unused]] status const s = matmul(be_, a, b, d, c, options, s_.products);
        KEEL_ASSERT(s.ok());
    }
    void copy(view<T, 2> from, view<T, 2> to) { be_.for_rows(from.extent[0], from.extent[1], copy_row<T, T>{from, to}); }
    product_form form_of_squares() const {
        return plan_.form == newton_schulz_form::plain ? product_form::full : product_form::symmetric;
    }
    static void exchange(view<T, 2>& a, view<T, 2>& b) {
        view<T, 2> const t = a;
        a = b, b = t;
    }

    B const& be_;
    newton_schulz_plan const& plan_;
    newton_schulz_coefficients<T> const& set_;
    newton_schulz_buffers<T>& s_;
};

} // namespace keel::inline KEEL_ABI
