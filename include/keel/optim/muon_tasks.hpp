// A Muon step as tasks: each logical matrix of each listed parameter is one, from its momentum to its weights.
#pragma once

#include <keel/optim/muon_plan.hpp>
#include <keel/optim/muon_rows.hpp>
#include <keel/optim/newton_schulz.hpp>

namespace keel {

struct muon_options {
    float learning_rate = 1e-3f; ///< of this step; 0 or more. The plan's scale multiplies it
    float momentum = 0.95f;      ///< mu, in [0, 1)
    momentum_rule rule = momentum_rule::ema;
    bool nesterov = true;
    float weight_decay = 0.0f; ///< decoupled: w loses learning_rate * weight_decay of itself, unscaled; 0 or more
};

/// A parameter [stack, rows, columns] as its plan cuts it. A dense layer's weight is [1, out, in]: stacked(w).
template <class T = float, class Gradient = float, class Shadow = bf16> struct muon_parameter {
    muon_plan<T> plan;
    view<Gradient const, 3> gradient = {};
    view<float, 3> weight = {};   ///< fp32 master, updated in place
    view<float, 3> momentum = {}; ///< state, zero at first
    view<Shadow, 3> shadow = {};  ///< optional: receives each new weight, rounded once
    step_change* change = nullptr; ///< optional: how far this step moved the parameter
};

/// A matrix as a stack of one.
template <class T> KEEL_HOST view<T, 3> stacked(view<T, 2> v) { return {v.data, {1, v.extent[0], v.extent[1]}, {0, v.stride[0], v.stride[1]}}; }

} // namespace keel

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
        int64_t index;
    };
    place at(int64_t task) const {
        int64_t g = 0;
        while (task >= groups[g].first_task + groups[g].tasks) ++g;
        auto const& plan = parameters(groups[g].parameter).plan;
        int64_t const here = task - groups[g].first_task, a_item = plan.parts[groups[g].part].matrices;
        int64_t const in_order = groups[g].first_index + here / a_item * groups[g].item_step + here % a_item;
        int64_t first = 0;
        for (int64_t p = 0; p < groups[g].parameter; ++p) first += parameters(p).plan.matrices();
        return {groups + g, plan.matrix(in_order - first), in_order};
    }

  private:
    void insert(muon_group const& group) {
        if (group.tasks == 0) return;
        int64_t at = group_count++;
        for (; at > 0 && groups[at - 1].cost < group.cost; --at) groups[at] = groups[at - 1];
        groups[at] = group;
    }
};

/// Everything a task needs; B is the backend inside the task.
template <matmul_backend B, class T, class Gradient, class Shadow> struct muon_call {
    using parameter = muon_parameter<T, Gradient, Shadow>;
    B be;
    muon_schedule<parameter> schedule;
    step_gate const* gate;
    muon_options options;
    uint32_t* tops;       ///< largest magnitude of each direction; infinity_bits where it was not finite afterwards
    step_change* changes; ///< of each matrix
    workspace scratch;    ///< of all workers
    int64_t scratch_each;

    /// The views of one logical matrix, turned where its weight lies in columns.
    struct views {
        momentum_source<Gradient> source;
        view<float, 2> weight;
        view<Shadow, 2> shadow;
    };
    views of(typename muon_schedule<parameter>::place const& at) const {
        parameter const& p = schedule.parameters(at.group->parameter);
        auto const cut = [&](auto const& v) { return slice(part(v, at.matrix.item), at.matrix.first_row, at.matrix.rows); };
        bool const turned = column_major(cut(p.weight));
        auto const lay = [&](auto const& v) { return turned ? transposed(cut(v)) : cut(v); };
        bool const ema = options.rule == momentum_rule::ema;
        float const add = ema ? static_cast<float>(1.0 - static_cast<double>(options.momentum)) : 1.0f;
        views v{{lay(p.gradient), lay(p.momentum), gate, options.momentum, add, options.nesterov}, lay(p.weight), {}};
        if (!p.shadow.absent()) v.shadow = lay(p.shadow);
        return v;
    }
};
template <class Call> struct muon_largest_task {
    Call const& call;
    void operator()(int64_t task, int64_t) const {
        auto const at = call.schedule.at(task);
        auto const v = call.of(at);
        int64_t const width = v.weight.extent[1];
        call.tops[at.index] = 0;
        call.be.for_rows(v.weight.extent[0], width, matrix_largest_row<decltype(v.source)>{v.source, width, call.tops + at.index});
    }
};
template <class Call, class T, class Shadow> struct muon_update_task {
    Call const& call;
    void operator()(int64_t task, int64_t worker) const {
        auto const at = call.schedule.at(task);
        auto const v = call.of(at);
        auto const& parameter_plan = call.schedule.parameters(at.group->parameter).plan;
        int64_t const row_count = v.weight.extent[0], width = v.weight.extent[1];
        using source = std::remove_const_t<decltype(v.source)>;
        workspace ws{call.scratch.data + worker * call.scratch_each, call.scratch_each};
        auto* const parts = ws.template take<step_change_part>(row_count);
        view<T, 2> direction = {};
        if (call.tops[at.index] == 0) {
            call.be.for_rows(row_count, width, take_row<source>{v.source, width});
        } else {
            newton_schulz_plan plan = parameter_plan.iteration(at.group->part);
            plan.rows = row_count, plan.columns = width;
            auto s = newton_schulz_carve<T>(call.be, plan, ws);
            newton_schulz_iteration iteration(call.be, plan, parameter_plan.options.coefficients, s);
            iteration.normalise(v.source, call.tops[at.index]);
            if (!iteration.run()) { // an unsafe set's work
                call.tops[at.index] = infinity_bits;
                call.changes[at.index] = {};
                return;
            }
            direction = s.x;
        }
        double const rate = static_cast<double>(call.options.learning_rate);
        auto const step = static_cast<float>(rate * static_cast<double>(parameter_plan.scale(at.group->part)));
        auto const decay = static_cast<float>(rate * static_cast<double>(call.options.weight_decay));
        bool const measured = call.schedule.parameters(at.group->parameter).change != nullptr;
        call.be.for_rows(row_count, width,
                         muon_update_row<T, Shadow>{direction, v.weight, v.shadow, step, decay, measured ? parts : nullptr});
        if (measured) call.be.for_rows(1, row_count, step_change_row{parts, row_count, call.gate, call.changes + at.index});
    }
};

/// Sizes of one call, from its plans alone (and the backend's threads).
struct muon_sizes {
    int64_t groups = 0, matrices = 0, scratch = 0;

    template <matmul_backend B, class T, class Gradient, class Shadow>
    static muon_sizes of(B const& be, view<muon_parameter<T, Gradient, Shadow> const, 1> parameters) {
        muon_sizes s;
        for (int64_t p = 0; p < parameters.extent[0]; ++p) {
            auto const& plan = parameters(p).plan;
            s.groups += plan.part_count;
            s.matrices += plan.valid() ? plan.matrices() : 0;
            for (int k = 0; k < (plan.valid() ? plan.part_count : 0); ++k) {
                newton_schulz_plan const one = plan.iteration(k);
                int64_t const bytes = newton_schulz_scratch<T>(be, one) + workspace_bytes<step_change_part>(one.long_side());
                if (bytes > s.scratch) s.scratch = bytes;
            }
        }
        s.scratch = workspace_bytes<std::byte>(s.scratch);
        return s;
    }
    int64_t workers(int64_t concurrency) const { return matrices >= concurrency ? concurrency : 1; }
    int64_t bytes(int64_t concurrency) const {
        return workspace_total(workspace_bytes<muon_group>(groups) + workspace_bytes<uint32_t>(matrices) +
                               workspace_bytes<step_change>(matrices) + workers(concurrency) * scratch);
    }
};

} // namespace keel::inline KEEL_ABI
