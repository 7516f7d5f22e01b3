// The command line. One table row states everything about an option: its name, its text form, its range, its help, and
// what becomes of it when a run is resumed.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "model_shape.hpp"

namespace tiny_lm {

enum class precision { fp32, bf16, fp8 };

struct options {
    std::vector<std::string> text; ///< files to learn
    precision mode = precision::bf16;
    std::int64_t steps = 360;    ///< of the whole run, resumed or not
    std::int64_t batch = 16;     ///< sequences a step
    std::int64_t sequence = 256; ///< tokens a sequence
    model_shape model;
    double learning_rate = 0.006;      ///< Muon's, for the matrices
    double adam_learning_rate = 0.003; ///< AdamW's, for everything else
    double weight_decay = 0.1;
    std::int64_t warmup = 50; ///< steps of linearly rising learning rates
    double clip = 1.0;        ///< largest global gradient norm; inf: never clip
    std::uint64_t seed = 1;   ///< of the initial weights and of the data order
    std::int64_t threads = 1;
    std::int64_t eval_every = 100; ///< steps between looks at the held-out text; 0: only at the end
    std::string save = "tiny_lm.safetensors";
    std::int64_t save_every = 0; ///< steps between checkpoints; 0: only at the end and on Ctrl-C
    std::string resume;          ///< checkpoint to continue from
    std::string log;             ///< JSON lines; empty: none
    std::int64_t sample = 500;   ///< bytes of text to generate at the end
    double temperature = 0.8;    ///< of the sample; 0: always the likeliest byte
    bool help = false;
};

/// What stood on the command line, before a checkpoint has had its say.
struct command_line {
    options values;
    std::set<std::string> given; ///< names of the options that stood there, without dashes
};

/// An option's text by its name: the part of a run that a checkpoint keeps.
using run_settings = std::map<std::string, std::string>;

/// Reads the command line; user_error names the first argument that is unknown, incomplete, not a number, out of
/// range or given twice. Every option is written --name VALUE or --name=VALUE; --text takes several values.
command_line parse_command_line(int argc, char const* const* argv);

/// The options of a run: what was given, else what the resumed checkpoint keeps, else the defaults. user_error if an
/// option that shapes the model or the data order differs from the checkpoint's, or if the options contradict each
/// other. Where they are not given, --head-dim is width / heads and --rotary-dims half of that, rounded down to an
/// even number; a warmup that the command line does not give ends with the run.
options settle(command_line const& line, run_settings const& checkpoint = {});

/// What a checkpoint keeps of the options: all that shapes the model, the data order and the learning rates.
run_settings settings_of(options const& run);

/// The text of --help, made from the same table.
std::string help_text();

} // namespace tiny_lm
