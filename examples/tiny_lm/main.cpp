// tiny_lm: a byte-level language model that learns a text on the CPU, made of keel's primitives.
//
//     tiny_lm --text book.txt                          trains, prints a line a step, saves, writes some text
//     tiny_lm --text book.txt --precision fp8          the same with FP8 linear layers
//     tiny_lm --resume tiny_lm.safetensors             goes on where a run stopped, to the last bit
//
// Where to look: model.hpp (the layers in order), attention_layer.hpp and expert_layer.hpp (one layer's calls), projection.hpp (what
// fp32, bf16 and fp8 are), train.hpp (one step), optimiser.hpp (who updates what), health.hpp (what the line says).
#include <cstdio>
#include <exception>
#include <optional>

#include "corpus.hpp"
#include "error.hpp"
#include "files.hpp"
#include "options.hpp"
#include "run.hpp"
#include "safetensors.hpp"

int main(int argc, char** argv) {
    using namespace tiny_lm;
    try {
        command_line const line = parse_command_line(argc, argv);
        if (line.values.help) {
            std::fputs(help_text().c_str(), stdout);
            return 0;
        }
        std::optional<safetensors> checkpoint;
        if (!line.values.resume.empty()) checkpoint = safetensors::read(line.values.resume);
        options const run = settle(line, checkpoint ? settings_in(*checkpoint) : run_settings{});
        corpus const text = read_corpus(run.text, run.sequence);
        require_writable("--save", run.save);
        (run.mode == precision::fp32 ? run_in_fp32 : run_in_bf16)(run, text, checkpoint);
        return 0;
    } catch (user_error const& error) {
        std::fprintf(stderr, "tiny_lm: %s\n", error.what());
        return 2;
    } catch (std::exception const& error) {
        std::fprintf(stderr, "tiny_lm: %s\n", error.what());
        return 1;
    }
}
