// A Muon step as tasks: each logical matrix of each listed parameter is one, from its momentum to its weights.
#pragma once

#include <keel/optim/muon_parameter.hpp>
#include <keel/optim/normuon_rows.hpp>

namespace keel::inline KEEL_ABI {

/// Equal matrices: one part of one parameter, over its stack. Indices count all matrices of the call in the order of the lists.
struct muon_group {
    int64_t parameter, first_task, tasks;
    int64_t first_index, item_step; ///< of the part's first matrix, and from one item to the next
    int part;
    double cost;
};

/// The matrices of a call, costly groups first, so that dealing them out in turn balances threads. The order shows in no bit.
template <class Parameter> struct muon_schedule {
    view<Parameter const, 1> parameters;
    muon_group* groups;
    int64_t group_count = 0, matrices = 0;

    muon_schedule(view<Parameter const, 1> list, muon_group* memory) : parameters(list), groups(memory) {
        for (int64_t p = 0; p < list.extent[0]; ++p) {
            auto const& plan = list(p).plan;
            int64_t offset = matrices;
            for (int k = 0; k < plan.part_count; ++k) {
                insert({p, 0, plan.stack * plan.parts[k].matrices, offset, plan.matrices_a_item(), k, plan.iteration(k).flops()});
                offset += plan.parts[k].matrices;
            }
            matrices += plan.matrices();
        }
        int64_t task = 0;
        for (int64_t g = 0; g < group_count; ++g) groups[g].first_task = task, task += groups[g].tasks;
    }
    struct place {
        muon_group const* group;
        logical_matrix matrix;
        int64_t index;        ///< among all matrices of the call
        int64_t in_parameter; ///< among the parameter's
    };
    place at(int64_t task) const {
        int64_t g = 0;
        while (task >= groups[g].first_task + groups[g].tasks) ++g;
        auto const& plan = parameters(groups[g].parameter).plan;
        int64_t const here = task - groups[g].first_task, a_item = plan.parts[groups[g].part].matrices;
        int64_t const in_order = groups[g].first_index + here / a_item * groups[g].item_step + here % a_item;
        int64_t first = 0;
        for (int64_t p = 0; p < groups[g].parameter; ++p) first += parameters(p).plan.matrices();
        return {groups + g, plan.matrix(in_order - first), in_order, in_order - first};
    }

  private:
    void insert(muon_group const& group) {
        if (group.tasks == 0) return;
        int64_t at = group_count++;
        for (; at > 0 && groups[at - 1].cost < group.cost; --at) groups[at] = groups[at - 1];
        groups[at] = group;
    }
};

/// Views of one logical matrix, turned where its weight lies in columns. Rows at one distance have it in their strides; others a map.
template <class Parameter> struct muon_matrix;
template <class T, class Gradient, class Shadow, class Momentum, class Weight>
struct muon_matrix<muon_parameter<T, Gradient, Shadow, Momentum, Weight>> {
    using parameter = muon_parameter<T, Gradient, Shadow, Momentum, Weight>;
    parameter const& p;
    logical_matrix const& matrix;
    int64_t distance;
    bool turned;
    row_map map; ///< of what is not even

    muon_matrix(parameter const& of, logical_matrix const& m) : p(of), matrix(m), distance(m.map.distance(m.rows)), turned(false) {
        if (!m.map.is_even(m.rows)) map = m.map, distance = 1;
        turned = map.gap == 0 && !is_block_state<Momentum> && column_major(cut(p.weight));
    }
    int64_t row_count() const { return turned ? p.plan.columns : matrix.rows; }
    int64_t width() const { return turned ? matrix.rows : p.plan.columns; }
    template <class E> view<E, 2> lay(view<E, 3> const& v) const {
        if (v.absent()) return {};
        return turned ? transposed(cut(v)) : cut(v);
    }
    view<float, 1> second_moment() const {
        view<float, 1> v = part(p.second_moment, matrix.item);
        v.data += matrix.first_row * v.stride[0];
        return {v.data, {matrix.rows}, {v.stride[0] * distance}};
    }
    matrix_numbers numbers() const {
        uint64_t const pitch = p.random.pitch != 0 ? p.random.pitch : static_cast<uint64_t>(p.plan.columns);
        uint64_t const first = p.random.first + static_cast<uint64_t>(matrix.item * p.plan.rows + matrix.first_row) * pitch;
        uint64_t const along = pitch * static_cast<uint64_t>(distance);
        random_key key = p.random.key;
        if (p.applied != nullptr) key.step += static_cast<uint32_t>(*p.applied);
        return {key, first, turned ? 1 : along, turned ? static_cast<uint32_t>(along) : 1, map};
    }
    auto momentum() const {
        if constexpr (is_block_state<Momentum>) {
            state_view<Momentum, 2> q = slice(p.momentum, matrix.item * p.plan.rows + matrix.first_row, matrix.rows);
            q.codes.stride[0] *= distance, q.scales.stride[0] *= distance;
            return q;
        } else {
            return lay(p.momentum);
        }
    }
    momentum_source<Gradient, Momentum> source(step_gate const* gate, muon_options const& o) const {
        float const add = o.rule == momentum_rule::ema ? static_cast<float>(1.0 - static_cast<double>(o.momentum)) : 1.0f;
        return {lay(p.gradient), momentum(), map, gate, o.momentum, add, o.nesterov, numbers()};
    }

private:
    template <class E> view<E, 2> cut(view<E, 3> const& v) const {
        view<E, 2> m = slice(part(v, matrix.item), matrix.first_row, matrix.rows);
        m.stride[0] *= distance;
        return m;
    }
};

/// Everything a task needs; B is the backend inside the task.
template <matmul_backend B, class Parameter> struct muon_call {
    using parameter = Parameter;
    B be;
    muon_schedule<parameter> schedule;
    step_gate const* gate;
    muon_options options;
    uint32_t* tops;       ///< largest magnitude of each direction; infinity_bits where it was not finite afterwards
    float* inverses;      ///< 1 / the norm of each, its largest brought into [2, 4)
    step_change* changes; ///< of each matrix
    workspace scratch;    ///< of all workers
    int64_t scratch_each;

    muon_matrix<parameter> matrix_of(typename muon_schedule<parameter>::place const& at) const {
        return {schedule.parameters(at.group->parameter), at.matrix};
    }
    workspace scratch_of(int64_t worker) const { return {scratch.data + worker * scratch_each, scratch_each}; }
};

/// Norms of a direction, of which nothing is written yet.
template <class Call> struct muon_norm_task {
    Call const& call;
    void operator()(int64_t task, int64_t worker) const {
        auto const at = call.schedule.at(task);
        auto const matrix = call.matrix_of(at);
        auto const source = matrix.source(call.gate, call.options);
        int64_t const row_count = matrix.row_count(), width = matrix.width();
        workspace ws = call.scratch_of(worker);
        auto* const norms = ws.template take<row_norm>(row_count);
        call.be.for_rows(row_count, width, row_norm_row<std::remove_const_t<decltype(source)>>{source, width, norms});
        call.be.for_rows(1, row_count, matrix_norm_row{norms, row_count, call.tops + at.index, call.inverses + at.index});
    }
};

/// A direction made, and the weights moved along it.
template <class Call, class T> struct muon_update_task {
    Call const& call;
    void operator()(int64_t task, int64_t worker) const {
        auto const at = call.schedule.at(task);
        auto const matrix = call.matrix_of(at);
        auto const& p = matrix.p;
        auto const source = matrix.source(call.gate, call.options);
        using source_type = std::remove_const_t<decltype(source)>;
        int64_t const row_count = matrix.row_count(), width = matrix.width();
        workspace ws = call.scratch_of(worker);
        auto* const parts = ws.template take<step_change_part>(row_count);
        auto* const means = ws.template take<float>(matrix.matrix.rows);
        auto* const factors = ws.template take<float>(matrix.matrix.rows);
        newton_schulz_notes const notes{p.measures};
        view<T, 2> direction = {};
        bool finite = true;
        if (call.tops[at.index] == 0) {
            notes.of_zero(at.in_parameter);
            call.be.for_rows(row_count, width, direction_row<source_type, T>{source, {}, nullptr, {}, width});
        } else {
            newton_schulz_plan plan = p.plan.iteration(at.group->part);
            plan.rows = row_count, plan.columns = width;
            auto s = newton_schulz_carve<T>(call.be, plan, ws);
            call.be.for_rows(row_count, width,
                             direction_row<source_type, T>{source, scale_to_two(call.tops[at.index]), call.inverses + at.index, s.x, width});
            newton_schulz_iteration iteration(call.be, plan, p.plan.options.coefficients, s);
            finite = iteration.run(p.plan.options.wanted_error, !p.measures.entering_error.absent());
            if (finite) notes.of_run(at.in_parameter, iteration);
            direction = s.x;
        }
        if constexpr (is_block_state<typename source_type::momentum_kind>)
            call.be.for_rows(row_count, width, store_momentum_row<source_type>{source, width});
        if (!finite) { // an unsafe set's work
            call.tops[at.index] = infinity_bits;
            call.changes[at.index] = {};
            return;
        }
        direction_factors factor;
        if (!p.second_moment.absent()) {
            balance_rows(matrix, direction, means, factors);
            factor = {factors, matrix.turned};
        }
        move(at, matrix, direction, factor, parts);
    }

private:
    template <class Matrix>
    void balance_rows(Matrix const& matrix, view<T, 2> const& direction, float* means, float* factors) const {
        int64_t const rows = matrix.matrix.rows, columns = matrix.p.plan.columns;
        auto const keep = static_cast<float>(1.0 - static_cast<double>(call.options.beta2));
        view<T, 2> const o = direction.absent() || !matrix.turned ? direction : transposed(direction);
        view<float, 1> const moment = matrix.second_moment();
        call.be.for_rows(rows, columns, second_moment_row<T>{o, columns, call.options.beta2, keep, moment, matrix.map, means});
        call.be.for_rows(1, rows, row_factor_row{moment, matrix.map, means, rows, factors});
    }
    template <class Place, class Matrix>
    void move(Place const& at, Matrix const& matrix, view<T, 2> const& direction, direction_factors factor, step_change_part* parts) const {
        auto const& p = matrix.p;
        double const rate = static_cast<double>(call.options.learning_rate);
        weight_factors const step{static_cast<float>(rate * static_cast<double>(p.plan.scale(at.group->part))),
                                  static_cast<float>(rate * static_cast<double>(call.options.weight_decay)),
                                  call.options.decay == decay_rule::cautious};
        bool const measured = p.change != nullptr;
        int64_t const row_count = matrix.row_count(), width = matrix.width();
        auto const with = [&](auto const& weights) {
            using weights_type = std::remove_cvref_t<decltype(weights)>;
            call.be.for_rows(row_count, width,
                             muon_update_row<T, weights_type>{direction, factor, weights, matrix.map, width, step, matrix.numbers(),
                                                              measured ? parts : nullptr});
        };
        using weight = std::remove_cvref_t<decltype(p.weight(0, 0, 0))>;
        using shadow = std::remove_cvref_t<decltype(p.shadow(0, 0, 0))>;
        if constexpr (std::is_same_v<weight, float>) with(master_weight_matrix<shadow>{matrix.lay(p.weight), matrix.lay(p.shadow)});
        else if (p.compensation.absent()) with(stochastic_weight_matrix<weight>{matrix.lay(p.weight)});
        else with(kahan_weight_matrix<weight>{matrix.lay(p.weight), matrix.lay(p.compensation)});
        if (measured) call.be.for_rows(1, row_count, step_change_row{parts, row_count, call.gate, call.changes + at.index});
    }
};

/// Sizes of one call, from its plans alone (and the backend's threads).
struct muon_sizes {
    int64_t groups = 0, matrices = 0, scratch = 0;

    template <matmul_backend B, class T, class... Kinds> static muon_sizes of(B const& be, view<muon_parameter<T, Kinds...> const, 1> parameters) {
        muon_sizes s;
        for (int64_t p = 0; p < parameters.extent[0]; ++p) {
            auto const& plan = parameters(p).plan;
            bool const valid = plan.valid();
            s.groups += plan.part_count;
            s.matrices += valid ? plan.matrices() : 0;
            for (int k = 0; k < (valid ? plan.part_count : 0); ++k) {
                newton_schulz_plan const one = plan.iteration(k);
                int64_t const elements = one.long_side(), rows = workspace_bytes<row_norm>(elements);
                int64_t bytes = newton_schulz_scratch<T>(be, one) + workspace_bytes<step_change_part>(elements) + 2 * workspace_bytes<float>(elements);
                if (bytes < rows) bytes = rows;
                if (bytes > s.scratch) s.scratch = bytes;
            }
        }
        s.scratch = workspace_bytes<std::byte>(s.scratch);
        return s;
    }
    int64_t workers(int64_t concurrency) const { return matrices >= concurrency ? concurrency : 1; }
    int64_t bytes(int64_t concurrency) const {
        return workspace_total(workspace_bytes<muon_group>(groups) + workspace_bytes<uint32_t>(matrices) + workspace_bytes<float>(matrices) +
                               workspace_bytes<step_change>(matrices) + workers(concurrency) * scratch);
    }
};

} // namespace keel::inline KEEL_ABI
