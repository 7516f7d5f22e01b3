// Newton-Schulz: a matrix's nearest orthogonal one (its polar factor U V^T), from products alone.
//
//     newton_schulz(be, u, o, {}, {}, ws)                                            fp32, Polar Express, 5 steps
//     newton_schulz(be, u, o, {}, {.coefficients = coefficients<keller>()}, ws)      another certified set
//     newton_schulz<bf16>(be, u, o, {}, {}, ws)                                      bf16 operands in the products; or f16
//     newton_schulz<bf16>(be, u, o, {}, {.coefficients = coefficients<keller, bf16>()}, ws)     their set is certified for bf16
//     newton_schulz(be, u, o, {}, {.coefficients = coefficients<deepseek_v4>(), .wanted_error = 0.01f}, ws)    stops when it is there
//
// Plan and forms: newton_schulz_plan.hpp; sets and their certificate: coefficients.hpp; mathematics: newton_schulz_iteration.hpp,
// newton_schulz_rows.hpp.
#pragma once

#include <keel/core/validate.hpp>
#include <keel/format/bf16.hpp>
#include <keel/format/f16.hpp>
#include <keel/format/float32.hpp>
#include <keel/optim/newton_schulz_iteration.hpp>

namespace keel {

/// T is the format of the products' operands: float, bf16 or f16.
template <scalar_format T = float> struct newton_schulz_options {
    newton_schulz_coefficients<T> coefficients = keel::coefficients<polar_express, T>();
    newton_schulz_form form = newton_schulz_form::automatic; ///< forcing one that the plan would not take changes bits
    /// 0: all steps are taken. Else a matrix takes no further step once ||X X^T - I|| / sqrt(short side), Frobenius, is below this: the
    /// X X^T that the next step begins with, in T where the plan is plain or symmetric. Of use with sets that converge.
    float wanted_error = 0.0f;
};

/// The plan that newton_schulz follows with these options.
template <scalar_format T = float>
KEEL_HOST constexpr newton_schulz_plan plan_newton_schulz(int64_t row_count, int64_t column_count, newton_schulz_options<T> const& options = {}) {
    return plan_newton_schulz<T>(row_count, column_count, options.coefficients, options.form);
}

/// Of each matrix of a batch [batch]; all optional. A zero matrix, or one without elements, has error 1 after 0 steps.
struct newton_schulz_measures {
    /// ||O O^T - I|| / sqrt(short side), Frobenius, of the result before it is rounded to o's format. Small only where the input has full
    /// rank. Costs one more product, X X^T into fp32, but nothing for a matrix that wanted_error has stopped.
    view<float, 1> orthogonality_error = {};
    /// The same of the last iterate whose X X^T the run made for itself: the one that entered the last step taken, or the result where
    /// wanted_error has stopped it. Free but for a look at those n^2 numbers.
    view<float, 1> entering_error = {};
    view<int64_t, 1> steps = {}; ///< taken
};

} // namespace keel

namespace keel::inline KEEL_ABI {

/// True where a column's elements lie closer together than a row's. Such a matrix is worked on transposed, as it lies in memory, so
/// that a view and its transpose are one computation.
template <class T> KEEL_HOST bool column_major(view<T, 2> const& v) {
    auto const size = [](int64_t stride) { return stride < 0 ? -stride : stride; };
    return v.extent[0] > 1 && (v.extent[1] == 1 || size(v.stride[0]) < size(v.stride[1]));
}

/// task(i, worker) for each matrix: spread over the backend's threads, or in order on the calling one.
template <class B, class Task> void for_matrices(B const& be, int64_t n, bool spread, Task const& task) {
    if (spread) be.for_tasks(n, task);
    else
        for (int64_t i = 0; i < n; ++i) task(i, 0);
}

/// What a run, or the lack of one, has to say of matrix i of a batch.
struct newton_schulz_notes {
    newton_schulz_measures measures;
    void of_zero(int64_t i) const {
        note(i, {0, 1.0f});
        if (!measures.orthogonality_error.absent()) measures.orthogonality_error(i) = 1.0f;
    }
    template <class Iteration> void of_run(int64_t i, Iteration& iteration) const {
        note(i, iteration.outcome());
        if (measures.orthogonality_error.absent()) return;
        if (iteration.outcome().stopped) measures.orthogonality_error(i) = iteration.outcome().error;
        else iteration.measure_error(&measures.orthogonality_error(i));
    }

private:
    void note(int64_t i, newton_schulz_outcome const& outcome) const {
        if (!measures.entering_error.absent()) measures.entering_error(i) = outcome.error;
        if (!measures.steps.absent()) measures.steps(i) = outcome.steps;
    }
};
/// That each measure is [count] and shares memory with no other.
KEEL_HOST void check_measures(validation& check, newton_schulz_measures const& m, int64_t count) {
    auto const measure = [&](char const* name, auto const& v) {
        if (!v.absent()) check.shape(name, v, count).distinct(name, v);
    };
    measure("measures.orthogonality_error", m.orthogonality_error);
    measure("measures.entering_error", m.entering_error);
    measure("measures.steps", m.steps);
    check.disjoint("measures.entering_error", m.entering_error, m.orthogonality_error);
    check.disjoint("measures.steps", m.steps, m.orthogonality_error, m.entering_error);
}
/// ... and none with v.
template <class V> KEEL_HOST void check_measures_apart(validation& check, newton_schulz_measures const& m, V const& v) {
    check.disjoint("measures.orthogonality_error", m.orthogonality_error, v).disjoint("measures.entering_error", m.entering_error, v);
    check.disjoint("measures.steps", m.steps, v);
}

/// The largest magnitude of a matrix.
template <class U, matmul_backend B> struct newton_schulz_largest_task {
    B be;
    view<U const, 3> u;
    uint32_t* tops;
    void operator()(int64_t i, int64_t) const {
        view<U const, 2> const m = part(u, i);
        tops[i] = 0;
        be.for_rows(m.extent[0], m.extent[1], matrix_largest_row<matrix_source<U>>{{m}, m.extent[1], tops + i});
    }
};

/// One matrix of a batch.
template <class T, class U, class O, matmul_backend B> struct newton_schulz_task {
    B be;
    newton_schulz_plan plan;
    newton_schulz_coefficients<T> set;
    view<U const, 3> u;
    view<O, 3> o;
    newton_schulz_notes notes;
    float wanted_error;
    uint32_t* tops; ///< of u; of a result that is not finite, infinity_bits
    workspace scratch; ///< of all workers
    int64_t scratch_each;

    void operator()(int64_t i, int64_t worker) const {
        view<U const, 2> const from = part(u, i);
        view<O, 2> const to = part(o, i);
        if (tops[i] == 0) {
            be.for_rows(plan.rows, plan.columns, zero_row<O>{to});
            return notes.of_zero(i);
        }
        auto s = newton_schulz_carve<T>(be, plan, {scratch.data + worker * scratch_each, scratch_each});
        newton_schulz_iteration<T, B> iteration(be, plan, set, s);
        iteration.normalise(matrix_source<U>{from}, tops[i]);
        if (!iteration.run(wanted_error, !notes.measures.entering_error.absent())) {
            tops[i] = infinity_bits;
            return;
        }
        be.for_rows(plan.rows, plan.columns, copy_row<T, O>{s.x, to});
        notes.of_run(i, iteration);
    }
};

/// Bytes for newton_schulz over `batch` matrices of this shape. Each of the backend's threads that takes matrices of its own has its
/// own scratch, so the size, but no result, depends on be.concurrency().
template <scalar_format T = float, matmul_backend B>
int64_t newton_schulz_workspace(B const& be, int64_t row_count, int64_t column_count, int64_t batch = 1,
                                std::type_identity_t<newton_schulz_options<T>> options = {}) {
    auto const plan = plan_newton_schulz<T>(row_count, column_count, options.coefficients, options.form);
    int64_t const each = workspace_bytes<std::byte>(newton_schulz_scratch<T>(be, plan));
    int64_t const workers = batch < be.concurrency() ? 1 : be.concurrency();
    return workspace_total(workspace_bytes<uint32_t>(batch) + workers * each);
}

/// Orthogonalises each matrix of a batch: singular values to about 1, singular vectors kept.
///
/// Formula        X = U / ||U||: U times the power of two that brings its largest element to [2, 4), then times
///                1 / sqrt(sum of squares), rows in THE order in fp32, then in double. Then `steps` times
///                X = a X + (b A + c A^2) X, A = X X^T on the short side, in the form that the plan names; fewer with wanted_error.
/// Shapes         u, o [batch, rows, columns] or [rows, columns]; any strides, fast where rows or columns are adjacent.
/// Formats        u, o any of float, bf16, f16; T, the operands of the products, float, bf16 or f16 (fp32 accumulators). One rounding to
///                T a product, one to o; in gram the n x n matrices stay fp32 whatever T, and only X is rounded to T.
/// Status         bad_shape, bad_stride, bad_pointer, overlap, bad_option (no coefficients; more than 64 steps of gram; a wanted error
///                that is negative or no number), small_workspace; non_finite (u; got: the first matrix that has a NaN or Inf): found before anything is written.
///                An unsafe set may overflow: non_finite (options.coefficients; got: the first such matrix), of which nothing is written.
/// Scale          O(c U) = O(U) bit for bit for every power of two c that neither overflows nor rounds an element of U: no epsilon.
///                Norms beyond FLT_MAX and below FLT_MIN are fine. A zero matrix gives +0. Odd: O(-U) = -O(U), bit for bit but for
///                zeros, which are +0 either way where a product sums to 0.
/// Order          matrices as a batch or one by one, on any number of threads: the same bits, measures and steps. A transposed view of the same memory
///                gives the transposed result, bit for bit, whatever the strides (elements that share memory aside); a transposed
///                copy may differ in the norm's last bit.
/// Aliasing       o may be u itself.
/// Workspace      newton_schulz_workspace<T>(be, rows, columns, batch, options).
/// Cost           plan_newton_schulz(rows, columns, options).flops() a matrix; its text() says the form.
/// Source         Jordan 2024; Gram form after Gram Newton-Schulz; the sets name theirs. Deviations: no epsilon, fp32 before bf16.
/// Example        auto const bytes = newton_schulz_workspace(be, rows, columns); newton_schulz(be, g, o, {}, {}, ws).or_throw();
template <scalar_format T = float, matmul_backend B, class U, class O>
status newton_schulz(B const& be, view<U, 3> u, view<O, 3> o, newton_schulz_measures measures = {},
                     std::type_identity_t<newton_schulz_options<T>> options = {}, workspace ws = {}) {
    static_assert(backend_traits<B>::space == memory_space::host, "the host looks at the largest element before it goes on");
    static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>, "operands are float, bf16 or f16");
    using U_format = std::remove_const_t<U>;
    int64_t const batch = u.extent[0];
    validation check("newton_schulz");
    check.present("u", u).shape("o", o, u.extent[0], u.extent[1], u.extent[2]).distinct("o", o).disjoint_or_same("o", o, u);
    check_measures(check, measures, batch);
    check_measures_apart(check, measures, o);
    check_measures_apart(check, measures, u);
    check.require(options.coefficients.count > 0, status_code::bad_option, "options.coefficients", "a set of at least one step");
    check.require(options.wanted_error >= 0.0f, status_code::bad_option, "options.wanted_error", "a number of 0 or more");
    check.require(plan_newton_schulz<T>(u.extent[1], u.extent[2], options.coefficients, options.form).valid(), status_code::bad_option,
                  "options.coefficients", "steps", options.coefficients.count, "at most 64 in form gram: it restarts no later");
    if (!check.ok()) return check.result;
    if (u.empty()) {
        for (int64_t i = 0; i < batch; ++i) newton_schulz_notes{measures}.of_zero(i);
        return check.result;
    }
    check.enough(ws, newton_schulz_workspace<T>(be, u.extent[1], u.extent[2], batch, options));
    if (!check.ok()) return check.result;

    view<U const, 3> from = u;
    if (column_major(part(u, 0))) {
        from = {u.data, {batch, u.extent[2], u.extent[1]}, {u.stride[0], u.stride[2], u.stride[1]}};
        o = {o.data, {batch, o.extent[2], o.extent[1]}, {o.stride[0], o.stride[2], o.stride[1]}};
    }
    auto const plan = plan_newton_schulz<T>(from.extent[1], from.extent[2], options.coefficients, options.form);
    auto* const tops = ws.take<uint32_t>(batch);
    int64_t const each = workspace_bytes<std::byte>(newton_schulz_scratch<T>(be, plan));
    // Enough matrices: a thread each. Few: all threads inside the products.
    bool const spread = batch >= be.concurrency();
    workspace const scratch = ws.part((spread ? be.concurrency() : 1) * each);
    auto const run = [&](auto const& inner) {
        using inner_backend = std::remove_cvref_t<decltype(inner)>;
        for_matrices(be, batch, spread, newton_schulz_largest_task<U_format, inner_backend>{inner, from, tops});
        for (int64_t i = 0; i < batch; ++i)
            check.require(tops[i] < infinity_bits, status_code::non_finite, "u", "NaN or Inf in matrix", i, "finite elements");
        if (!check.ok()) return;
        for_matrices(be, batch, spread, newton_schulz_task<T, U_format, O, inner_backend>{
                                            inner, plan, options.coefficients, from, o, {measures}, options.wanted_error, tops, scratch, each});
        for (int64_t i = 0; i < batch; ++i)
            check.require(tops[i] < infinity_bits, status_code::non_finite, "options.coefficients", "NaN or Inf in matrix", i, "a set that keeps it finite");
    };
    if (spread) run(be.alone());
    else run(be);
    return check.result;
}
template <scalar_format T = float, matmul_backend B, class U, class O>
status newton_schulz(B const& be, view<U, 2> u, view<O, 2> o, newton_schulz_measures measures = {},
                     std::type_identity_t<newton_schulz_options<T>> options = {}, workspace ws = {}) {
    return newton_schulz<T>(be, view<U, 3>{u.data, {1, u.extent[0], u.extent[1]}, {0, u.stride[0], u.stride[1]}},
                            view<O, 3>{o.data, {1, o.extent[0], o.extent[1]}, {0, o.stride[0], o.stride[1]}}, measures, options, ws);
}

} // namespace keel::inline KEEL_ABI
