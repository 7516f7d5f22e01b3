#include "run.hpp"

bool tiny_lm::run_in_bf16(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint) {
    return run_training<keel::bf16>(run, text, checkpoint);
}
