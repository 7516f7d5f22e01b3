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
    view<T, 2> square[2];       ///< n x n, of plain and symmetric
    view<float, 2> polynomial[4]; ///< n x n, of gram; of plain and symmetric one, in the memory of `square`, when all steps are done
    float *squares, *scalar;    ///< one a row, and one
    workspace products;
};

/// What one run did.
struct newton_schulz_outcome {
    int64_t steps = 0;    ///< taken
    float error = 0.0f;   ///< ||X X^T - I|| / sqrt(n) of the last iterate whose Gram matrix was looked at
    bool stopped = false; ///< before its last step, since `error`, then the result's own, was small enough
};

/// A = X X^T is summed in slices of the long side, each from zero, and slice by slice: in one chain of m terms that are all alike every
/// rounding of a binade goes the same way, and A's eigenvalues drift by up to m 2^-26 of the largest, below 0 too, where no set is
/// certified. Of slices of about sqrt(m) the drift is 2 sqrt(m) 2^-26. An A that is rounded to 16 bits anyway takes slices of at least 1024:
/// 2^-16 and 2^-26 for each of them is little of its own half unit, 2^-9 or 2^-12.
template <class S> KEEL_HOST constexpr int64_t gram_slice(int64_t long_side) {
    int64_t slice = std::is_same_v<S, float> ? 128 : 1024;
    while (slice * slice < long_side) slice += 128;
    return slice;
}

template <class T, matmul_backend B> int64_t newton_schulz_product_bytes(B const& be, newton_schulz_plan const& plan) {
    int64_t const n = plan.short_side(), m = plan.long_side();
    int64_t most = 0;
    for (int64_t const bytes : {matmul_promoted_workspace(be, n, n, m, gram_slice<T>(m)), matmul_promoted_workspace(be, n, n, m, gram_slice<float>(m)),
                                matmul_workspace(be, n, n, n), matmul_workspace(be, n, m, n), matmul_workspace(be, m, n, n)})
        most = most > bytes ? most : bytes;
    return most;
}
/// Bytes of the squares: four of float in gram, else two of T in which one of float has room.
template <class T> KEEL_HOST constexpr int64_t newton_schulz_square_bytes(newton_schulz_plan const& plan) {
    int64_t const n = plan.short_side(), wide = workspace_bytes<float>(n * n);
    if (plan.form == newton_schulz_form::gram) return 4 * wide;
    return 2 * workspace_bytes<T>(n * n) > wide ? 2 * workspace_bytes<T>(n * n) : wide;
}

/// Bytes of newton_schulz_buffers; the same for a matrix and its transpose.
template <class T, matmul_backend B> int64_t newton_schulz_scratch(B const& be, newton_schulz_plan const& plan) {
    return workspace_total(2 * workspace_bytes<T>(plan.rows * plan.columns) + newton_schulz_square_bytes<T>(plan) +
                           workspace_bytes<float>(plan.long_side()) + workspace_bytes<float>(1) +
                           newton_schulz_product_bytes<T>(be, plan));
}
template <class T, matmul_backend B>
newton_schulz_buffers<T> newton_schulz_carve(B const& be, newton_schulz_plan const& plan, workspace ws) {
    int64_t const n = plan.short_side();
    newton_schulz_buffers<T> s{};
    s.x = rows(ws.take<T>(plan.rows * plan.columns), plan.rows, plan.columns);
    s.y = rows(ws.take<T>(plan.rows * plan.columns), plan.rows, plan.columns);
    bool const gram = plan.form == newton_schulz_form::gram;
    workspace const squares = ws.part(newton_schulz_square_bytes<T>(plan));
    workspace narrow = squares, wide = squares;
    for (int i = 0; i < 2 && !gram; ++i) s.square[i] = rows(narrow.take<T>(n * n), n, n);
    for (int i = 0; i < (gram ? 4 : 1); ++i) s.polynomial[i] = rows(wide.take<float>(n * n), n, n);
    s.squares = ws.take<float>(plan.long_side());
    s.scalar = ws.take<float>(1);
    s.products = ws.part(newton_schulz_product_bytes<T>(be, plan));
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
    /// Takes the plan's steps, or those until the error is below `wanted`; 0 takes them all. With `watched`, or a wanted error, looks at
    /// the Gram matrix of every iterate that a step makes anyway. Returns whether the result is finite: of a certified set it is.
    bool run(float wanted = 0.0f, bool watched = false) {
        wanted_ = wanted, watched_ = watched || wanted > 0.0f;
        if (plan_.form == newton_schulz_form::gram) run_gram();
        else run_plain();
        uint32_t largest = 0;
        be_.for_rows(plan_.rows, plan_.columns, matrix_largest_row<matrix_source<T>>{{s_.x}, plan_.columns, &largest});
        return largest < infinity_bits;
    }
    newton_schulz_outcome const& outcome() const { return outcome_; }
    /// ||O O^T - I|| / sqrt(n) of the result, on its short side; X X^T stays in fp32.
    void measure_error(float* error) {
        gram_of(s_.x, s_.polynomial[0]);
        error_of(s_.polynomial[0], error);
    }

  private:
    /// A = X X^T; B = c A A + b A; X = B X + a X.
    void run_plain() {
        view<T, 2> const a = s_.square[0], b = s_.square[1];
        for (int t = 0; t < set_.count; ++t) {
            newton_schulz_step const& p = set_.step[t];
            gram_of(s_.x, a);
            if (close_enough(a)) return;
            square_product(a, a, b, a, p.c, p.b);
            apply(b, p.a);
            ++outcome_.steps;
        }
    }
    /// Q is kept as `diagonal` I + P, and the identity never stored: rounding to P's size would lose it.
    void run_gram() {
        view<float, 2> r = s_.polynomial[0], z = s_.polynomial[1], p = s_.polynomial[2], spare = s_.polynomial[3];
        bool fresh = true; // Q = I
        float diagonal = 1.0f;
        gram_of(s_.x, r);
        for (int t = 0; t < set_.count; ++t) {
            if (close_enough(r)) break;
            newton_schulz_step const& step = set_.step[t];
            bool const last = t + 1 == set_.count;
            ++outcome_.steps;
            square_product(r, r, z, r, step.c, step.b);
            if (fresh) {
                be_.for_rows(z.extent[0], z.extent[1], copy_row<float, float>{z, p});
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
        if (!fresh) apply(p, diagonal);
    }

    /// Whether the iterate with this Gram matrix is the result.
    template <class S> bool close_enough(view<S, 2> gram) {
        if (!watched_) return false;
        error_of(gram, &outcome_.error);
        outcome_.stopped = outcome_.error < wanted_;
        return outcome_.stopped;
    }
    template <class S> void error_of(view<S, 2> gram, float* error) {
        int64_t const n = plan_.short_side();
        be_.for_rows(n, n, identity_error_row<S>{gram, s_.squares});
        be_.for_rows(1, n, root_mean_row{s_.squares, n, error});
    }

    /// g = x x^T on the short side, in slices of the long one.
    template <class S> void gram_of(view<T, 2> x, view<S, 2> g) {
        view<T, 2> const wide = plan_.rows <= plan_.columns ? x : transposed(x);
        int64_t const n = wide.extent[0], m = wide.extent[1];
        product_set const set{layout_of(wide), layout_of(transposed(wide)), layout_of(g), 1, n, n, m, nullptr, ragged::none,
                              {.form = form_of_squares()}};
        [[maybe_unused]] status const s = matmul_promoted<T, T, S>(be_, set, promotion<unit_scale, unit_scale>{gram_slice<S>(m), {}, {}}, s_.products);
        KEEL_ASSERT(s.ok());
    }
    /// out = alpha a b + beta c, all n x n polynomials of one symmetric matrix. out shares no memory with them.
    template <class S> void square_product(view<S, 2> a, view<S, 2> b, view<S, 2> out, view<S, 2> c, float alpha, float beta) {
        product(a, b, c, out, {.alpha = alpha, .beta = beta, .form = form_of_squares()});
    }
    /// X = q X + diagonal X.
    template <class S> void apply(view<S, 2> q, float diagonal) {
        matmul_options const options{.alpha = 1.0f, .beta = diagonal};
        if (plan_.rows <= plan_.columns) product(q, s_.x, s_.x, s_.y, options);
        else product(s_.x, q, s_.x, s_.y, options);
        exchange(s_.x, s_.y);
    }
    template <class A, class C, class D>
    void product(view<A, 2> a, view<C, 2> b, view<D, 2> d, view<D, 2> c, matmul_options options) {
        [[maybe_unused]] status const s = matmul(be_, a, b, d, c, options, s_.products);
        KEEL_ASSERT(s.ok());
    }
    product_form form_of_squares() const {
        return plan_.form == newton_schulz_form::plain ? product_form::full : product_form::symmetric;
    }
    template <class S> static void exchange(view<S, 2>& a, view<S, 2>& b) {
        view<S, 2> const t = a;
        a = b, b = t;
    }

    B const& be_;
    newton_schulz_plan const& plan_;
    newton_schulz_coefficients<T> const& set_;
    newton_schulz_buffers<T>& s_;
    newton_schulz_outcome outcome_ = {};
    float wanted_ = 0.0f;
    bool watched_ = false;
};

} // namespace keel::inline KEEL_ABI
