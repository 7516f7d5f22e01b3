#include "run.hpp"

bool tiny_lm::run_in_fp32(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint) {
    return run_training<float>(run, text, checkpoint);
}
