// The model's parameters: fp32 masters and gradients, the operand that products read, and what the optimiser remembers.
#pragma once

#include <cmath>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include <keel/core/random.hpp>
#include <keel/core/view.hpp>
#include <keel/format/bf16.hpp>

namespace tiny_lm {

enum class updated_by { muon, adamw };

/// What a parameter is to the model. One row does not make a vector of a matrix: a single expert's router has one too.
enum class parameter_kind {
    matrix,
    gain, ///< a norm's, stored as delta = gain - 1: a vector that no product reads
};

/// `copies` matrices of [rows, columns] under one name (the experts of a layer), end to end. A gain has one row.
struct parameter {
    std::string name;
    std::int64_t copies = 1, rows = 1, columns = 0;
    updated_by optimiser = updated_by::adamw;
    parameter_kind kind = parameter_kind::matrix;
    std::vector<std::int64_t> parts = {}; ///< rows of the logical matrices in a fused one, e.g. query, key, value, gate

    std::vector<float> master = {}, gradient = {};
    std::vector<float> momentum = {}; ///< Muon's, or AdamW's m
    std::vector<float> second = {};   ///< AdamW's v; Muon has none
    std::vector<keel::bf16> shadow = {}; ///< the masters in bf16, where products read bf16
    std::int64_t applied = 0;            ///< steps that AdamW has taken

    std::int64_t size() const { return copies * rows * columns; }
    keel::view<float, 2> weights() { return keel::rows(master.data(), copies * rows, columns); }
    keel::view<float, 2> gradients() { return keel::rows(gradient.data(), copies * rows, columns); }
    keel::view<float, 1> vector() { return keel::vec(master.data(), size()); }
    keel::view<float, 1> vector_gradient() { return keel::vec(gradient.data(), size()); }

    /// Normals of that standard deviation, a function of the seed and of the parameter's number in the model.
    void randomise(std::uint64_t seed, std::uint32_t number, double deviation) {
        keel::random_key const key{seed, 0, number};
        for (std::size_t i = 0; i < master.size(); ++i)
            master[i] = static_cast<float>(deviation) * keel::random_normal(key, i);
    }
    /// After the masters were set from outside.
    void refresh_shadow() {
        for (std::size_t i = 0; i < shadow.size(); ++i) shadow[i] = keel::encode<keel::bf16>(master[i]);
    }
};

/// All parameters in a fixed order: the order of checkpoints and of the step gate's list. References stay valid.
class parameter_list {
public:
    explicit parameter_list(bool shadows) : shadows_(shadows) {}

    parameter& add(parameter p) {
        auto const n = static_cast<std::size_t>(p.size());
        p.master.resize(n);
        p.gradient.resize(n);
        p.momentum.resize(n);
        if (p.optimiser == updated_by::adamw) p.second.resize(n);
        if (shadows_ && p.kind == parameter_kind::matrix) p.shadow.resize(n);
        all_.push_back(std::move(p));
        return all_.back();
    }
    auto begin() { return all_.begin(); }
    auto end() { return all_.end(); }
    std::size_t size() const { return all_.size(); }
    /// Position of a parameter in the list.
    std::uint32_t number(parameter const& p) const {
        for (std::size_t i = 0; i < all_.size(); ++i)
            if (&all_[i] == &p) return static_cast<std::uint32_t>(i);
        return static_cast<std::uint32_t>(all_.size());
    }

private:
    bool shadows_;
    std::deque<parameter> all_;
};

} // namespace tiny_lm
