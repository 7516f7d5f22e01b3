// tiny_lm: a byte-level language model that learns a text on the CPU, made of keel's primitives.
//
//     tiny_lm --text book.txt                          trains, prints a line a step, saves, writes some text
//     tiny_lm --text book.txt --precision fp8          the same with FP8 linear layers
//     tiny_lm --resume tiny_lm.safetensors             goes on where a run stopped, to the last bit
//
// Where to look: model.hpp (the layers in order), attention_layer.hpp and expert_layer.hpp (one layer's calls),
// projection.hpp (what fp32, bf16 and fp8 are), train.hpp (one step), optimiser.hpp (who updates what), health.hpp (what
// the line says), run.hpp (the whole run), outputs.hpp (where it may write).
#include <cstdio>
#include <exception>
#include <optional>

#include "corpus.hpp"
#include "error.hpp"
#include "memory_need.hpp"
#include "options.hpp"
#include "outputs.hpp"
#include "run.hpp"
#include "safetensors.hpp"
#include "standard_output.hpp"

namespace tiny_lm {
namespace {

/// The run that was asked for. False if some of its output could not be written.
bool train(options const& run, std::optional<safetensors> const& checkpoint) {
    check_outputs(run);
    corpus const text = read_corpus(run.text, run.sequence);
    require_memory(run, machine_memory());
    return (run.mode == precision::fp32 ? run_in_fp32 : run_in_bf16)(run, text, checkpoint);
}

bool main_program(int argc, char** argv) {
    command_line const line = parse_command_line(argc, argv);
    if (line.values.help) {
        std::fputs(help_text().c_str(), stdout);
        return flush_standard_output();
    }
    std::optional<safetensors> checkpoint;
    if (!line.values.resume.empty()) checkpoint = safetensors::read(line.values.resume);
    return train(settle(line, checkpoint ? settings_in(*checkpoint) : run_settings{}), checkpoint);
}

} // namespace
} // namespace tiny_lm

/// 0: all is well. 1: something that was computed could not be written, or a fault of the program. 2: refused, and
/// nothing was changed. Whatever is not 0 is explained on stderr.
int main(int argc, char** argv) {
    tiny_lm::prepare_standard_output();
    try {
        return tiny_lm::main_program(argc, argv) ? 0 : 1;
    } catch (tiny_lm::user_error const& error) {
        std::fprintf(stderr, "tiny_lm: %s\n", error.what());
        return 2;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "tiny_lm: %s\n", error.what());
        return 1;
    }
}
