// All that a run needs to go on bit for bit: masters, what the optimisers and the balancing bias remember, and where it stood.
// Shadows and FP8 codes are made again from the masters; the data order is a function of the seed and the step.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model.hpp"
#include "options.hpp"
#include "safetensors.hpp"

namespace tiny_lm {

/// Where a run stands.
struct progress {
    std::int64_t step = 0;    ///< steps done, skipped ones included
    std::int64_t skipped = 0; ///< of these
};

namespace detail {

/// visit(name, shape, values) for every tensor of a checkpoint.
template <class Model, class Visit> void for_each_tensor(Model& m, Visit const& visit) {
    for (auto& p : m.parameters()) {
        tensor_shape const shape = p.kind == parameter_kind::gain ? tensor_shape{p.columns}
                                   : p.copies > 1                 ? tensor_shape{p.copies, p.rows, p.columns}
                                                                  : tensor_shape{p.rows, p.columns};
        visit(p.name, shape, std::span(p.master));
        visit(p.name + ".momentum", shape, std::span(p.momentum));
        if (p.second.empty()) continue;
        visit(p.name + ".second", shape, std::span(p.second));
        visit(p.name + ".applied", tensor_shape{1}, std::span(&p.applied, 1));
    }
    for (std::int64_t l = 0; l < m.layers(); ++l) {
        auto const balance = m.experts(l).balance();
        auto const flat = [&](char const* name, auto v) {
            visit("layer_" + std::to_string(l) + ".balance_" + name, tensor_shape{v.extent[0]},
                  std::span(v.data, static_cast<std::size_t>(v.extent[0])));
        };
        flat("bias", balance.bias);
        flat("pending", balance.pending);
        flat("ledger", balance.ledger);
        flat("signs", balance.signs);
    }
}

} // namespace detail

/// Writes the file as a whole or, with a write_error, not at all.
template <class Model>
void save_checkpoint(std::string const& path, Model& m, options const& run, progress const& at, std::uint64_t text_digest) {
    std::vector<tensor_source> tensors;
    detail::for_each_tensor(m, [&](std::string const& name, tensor_shape const& shape, auto values) {
        using element = typename decltype(values)::value_type;
        tensors.push_back(source_of(name, shape, std::span<element const>(values)));
    });
    file_metadata metadata;
    for (auto const& [name, value] : settings_of(run)) metadata["setting " + name] = value;
    metadata["step"] = shortest(at.step);
    metadata["skipped"] = shortest(at.skipped);
    metadata["text"] = hexadecimal(text_digest);
    write_safetensors(path, std::move(tensors), metadata);
}

/// The settings that a checkpoint keeps.
inline run_settings settings_in(safetensors const& file) {
    run_settings settings;
    std::string const prefix = "setting ";
    for (auto const& [key, value] : file.metadata())
        if (key.starts_with(prefix)) settings[key.substr(prefix.size())] = value;
    return settings;
}

/// Restores the model. user_error, with nothing changed, if the file is of another model or was trained on another text.
template <class Model> progress load_checkpoint(safetensors const& file, Model& m, std::uint64_t text_digest) {
    if (file.text("text") != hexadecimal(text_digest)) throw complaint("--text", "a text that the checkpoint was not trained on", "the same files");
    auto const step = parse_number<std::int64_t>(file.text("step")), skipped = parse_number<std::int64_t>(file.text("skipped"));
    if (!step || !skipped) throw complaint("--resume", "a checkpoint without a step", "one of this program");
    detail::for_each_tensor(m, [&](std::string const& name, tensor_shape const& shape, auto values) {
        file.template require<typename decltype(values)::value_type>(name, shape);
    });
    detail::for_each_tensor(m, [&](std::string const& name, tensor_shape const& shape, auto values) { file.copy(name, shape, values); });
    for (auto& p : m.parameters()) p.refresh_shadow();
    m.refresh();
    return {*step, *skipped};
}

} // namespace tiny_lm
