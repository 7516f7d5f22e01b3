#include "options.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "error.hpp"
#include "numbers.hpp"

namespace tiny_lm {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

/// What a resumed run does with an option of its checkpoint.
enum class on_resume {
    must_match, ///< it shapes the weights or the data order
    inherited,  ///< the checkpoint's value holds until the command line gives another
    forgotten,  ///< it concerns this process only
};

struct option {
    std::string name;
    std::string placeholder;
    std::string help;
    on_resume rule;
    std::function<std::string(options const&)> get;
    std::function<void(options&, std::string_view)> set;     ///< from the command line
    std::function<void(options&, std::string_view)> restore; ///< from what `get` gave, where that is not `set`
};

// --- the kinds of options --------------------------------------------------------------------------------------------

/// A member of the options or of the model's shape within them.
template <class T> class field {
public:
    field(T options::*member) : member_(member) {}
    field(T model_shape::*member) : model_member_(member) {}
    T& in(options& run) const { return member_ ? run.*member_ : run.model.*model_member_; }
    T const& in(options const& run) const { return member_ ? run.*member_ : run.model.*model_member_; }

private:
    T options::*member_ = nullptr;
    T model_shape::*model_member_ = nullptr;
};

std::string dashed(std::string_view name) { return "--" + std::string(name); }

template <class Whole>
option whole(std::string name, field<Whole> at, Whole smallest, Whole largest, on_resume rule, std::string help) {
    auto const set = [=](options& run, std::string_view text) {
        auto const value = parse_number<Whole>(text);
        if (!value || *value < smallest || *value > largest)
            throw complaint(dashed(name), quote(text),
                            "a whole number from " + shortest(smallest) + " to " + shortest(largest));
        at.in(run) = *value;
    };
    return {name, "N", std::move(help), rule, [=](options const& run) { return shortest(at.in(run)); }, set, {}};
}
option count(std::string name, field<std::int64_t> at, std::int64_t smallest, std::int64_t largest, on_resume rule,
             std::string help) {
    return whole<std::int64_t>(std::move(name), at, smallest, largest, rule, std::move(help));
}

/// Both ends allowed.
struct interval {
    double smallest, largest;
};
option real(std::string name, field<double> at, interval range, on_resume rule, std::string help) {
    auto const set = [=](options& run, std::string_view text) {
        auto const value = parse_number<double>(text);
        if (!value || !(*value >= range.smallest && *value <= range.largest))
            throw complaint(dashed(name), quote(text),
                            "a number from " + shortest(range.smallest) + " to " + shortest(range.largest));
        at.in(run) = *value + 0.0; // -0 becomes 0
    };
    return {name, "X", std::move(help), rule, [=](options const& run) { return shortest(at.in(run)); }, set, {}};
}

option file(std::string name, field<std::string> at, std::string help) {
    auto const set = [=](options& run, std::string_view text) {
        if (text.empty()) throw complaint(dashed(name), "nothing", "a file name");
        at.in(run) = text;
    };
    return {name, "FILE", std::move(help), on_resume::forgotten, [=](options const& run) { return at.in(run); }, set, {}};
}

template <class Enum> option choice(std::string name, field<Enum> at,
                                    std::vector<std::pair<std::string, Enum>> const& choices, on_resume rule,
                                    std::string help) {
    std::string names;
    for (auto const& [text, value] : choices) names += (names.empty() ? "" : "|") + text;
    auto const get = [=](options const& run) {
        for (auto const& [text, value] : choices)
            if (value == at.in(run)) return text;
        return std::string();
    };
    auto const set = [=](options& run, std::string_view given) {
        for (auto const& [text, value] : choices)
            if (text == given) return void(at.in(run) = value);
        throw complaint(dashed(name), quote(given), names);
    };
    return {name, names, std::move(help), rule, get, set, {}};
}

option capacity(std::string help) {
    auto const get = [](options const& run) {
        auto const& capacity = run.model.capacity;
        return capacity.dropless() ? "dropless" : shortest(capacity.numerator) + "/" + shortest(capacity.denominator);
    };
    auto const set = [](options& run, std::string_view text) {
        if (text == "dropless") return void(run.model.capacity = {1, 0});
        auto const slash = text.find('/');
        auto const numerator = parse_number<std::int64_t>(text.substr(0, slash));
        auto const denominator =
            slash == std::string_view::npos ? std::int64_t{1} : parse_number<std::int64_t>(text.substr(slash + 1));
        constexpr std::int64_t limit = 1000;
        if (!numerator || !denominator || *numerator < 1 || *denominator < 1 || *numerator > limit ||
            *denominator > limit)
            throw complaint("--capacity", quote(text), "a ratio of whole numbers up to 1000, such as 5/4, or dropless");
        run.model.capacity = {*numerator, *denominator};
    };
    return {"capacity", "RATIO", std::move(help), on_resume::must_match, get, set, {}};
}

/// File names, one a line in their text form and escaped: a name may hold a newline, or bytes that are no text.
option texts(std::string help) {
    auto const get = [](options const& run) {
        std::string names;
        for (auto const& name : run.text) names += (names.empty() ? "" : "\n") + escaped(name);
        return names;
    };
    auto const set = [](options& run, std::string_view name) {
        if (name.empty()) throw complaint("--text", "nothing", "a file name");
        run.text.emplace_back(name);
    };
    auto const restore = [=](options& run, std::string_view text) {
        for (std::size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1))
            set(run, unescaped(text.substr(0, end)));
        set(run, unescaped(text));
    };
    return {"text", "FILE...", std::move(help), on_resume::inherited, get, set, restore};
}

// --- the table -------------------------------------------------------------------------------------------------------

std::vector<option> make_table() {
    using enum on_resume;
    constexpr std::int64_t many = 1'000'000'000;
    return {
        texts("plain text files to learn from; the last sixteenth of each is held out"),
        choice<precision>("precision", &options::mode,
                          {{"fp32", precision::fp32}, {"bf16", precision::bf16}, {"fp8", precision::fp8}}, must_match,
                          "storage of the operands of matrix products"),
        count("steps", &options::steps, 1, many, inherited, "training steps in all"),
        count("batch", &options::batch, 1, 65536, must_match, "sequences a step"),
        count("sequence", &options::sequence, 2, 65536, must_match, "bytes of context"),
        count("layers", &model_shape::layers, 1, 256, must_match, "layers of the model"),
        count("width", &model_shape::width, 1, 65536, must_match, "width of the residual stream"),
        count("heads", &model_shape::heads, 1, 1024, must_match, "query heads"),
        count("kv-heads", &model_shape::kv_heads, 1, 1024, must_match, "key and value heads; divides --heads"),
        count("head-dim", &model_shape::head_dim, 2, 1024, must_match,
              "elements of a head; width / heads if not given"),
        count("rotary-dims", &model_shape::rotary_dims, 0, 1024, must_match,
              "elements of a head that carry the position, an even number; half of --head-dim if not given"),
        choice<gate_kind>("gate", &model_shape::gate, {{"head", gate_kind::head}, {"element", gate_kind::element}},
                          must_match, "one attention gate a head or an element"),
        count("experts", &model_shape::experts, 1, 4096, must_match, "routed experts"),
        count("top-k", &model_shape::top_k, 1, 64, must_match, "routed experts a token visits"),
        count("expert-width", &model_shape::expert_width, 1, 65536, must_match, "hidden width of a routed expert"),
        count("shared-width", &model_shape::shared_width, 1, 65536, must_match, "hidden width of the shared expert"),
        capacity("what an expert may take, in fair shares, or dropless"),
        real("learning-rate", &options::learning_rate, {0, 10}, inherited, "Muon's, for the matrices"),
        real("adam-learning-rate", &options::adam_learning_rate, {0, 10}, inherited,
             "AdamW's, for everything else"),
        real("weight-decay", &options::weight_decay, {0, 10}, inherited,
             "decoupled; norm gains decay towards 1"),
        count("warmup", &options::warmup, 0, many, inherited, "first steps, with rising learning rates"),
        // The least one is well inside float, in which the gate computes: 1e-60 would be no norm at all.
        real("clip", &options::clip, {1e-30, infinity}, inherited, "largest global gradient norm; inf never clips"),
        whole<std::uint64_t>("seed", &options::seed, 0, std::numeric_limits<std::uint64_t>::max(), must_match,
                             "of the initial weights and the data order"),
        count("threads", &options::threads, 1, 1024, forgotten,
              "the results do not depend on it; all cores if not given"),
        count("eval-every", &options::eval_every, 0, many, forgotten,
              "steps between looks at the held-out text; 0: only at the end"),
        file("save", &options::save, "checkpoint, replaced in one step; the resumed file if not given"),
        count("save-every", &options::save_every, 0, many, forgotten,
              "steps between checkpoints; 0: at the end and on Ctrl-C"),
        file("resume", &options::resume, "checkpoint to continue from"),
        file("log", &options::log, "JSON lines, appended; plot_run.py draws them"),
        count("sample", &options::sample, 0, 1'000'000, forgotten, "bytes of text to generate at the end"),
        real("temperature", &options::temperature, {0, 100}, forgotten,
             "of that text; 0 takes the likeliest byte each time"),
    };
}

std::vector<option> const& table() {
    static std::vector<option> const rows = make_table();
    return rows;
}

option const* find(std::string_view name) {
    for (auto const& row : table())
        if (row.name == name) return &row;
    return nullptr;
}

// --- checks between options ------------------------------------------------------------------------------------------

void check(options const& run) {
    auto const& model = run.model;
    auto const number = [](std::string_view name, std::int64_t value) { return dashed(name) + " " + shortest(value); };
    if (run.text.empty()) throw complaint("--text", "nothing", "at least one file");
    if (model.heads % model.kv_heads != 0)
        throw complaint("--kv-heads", shortest(model.kv_heads), "a divisor of " + number("heads", model.heads));
    if (model.rotary_dims % 2 != 0 || model.rotary_dims > model.head_dim)
        throw complaint("--rotary-dims", shortest(model.rotary_dims),
                        "an even number up to " + number("head-dim", model.head_dim));
    if (model.top_k > model.experts)
        throw complaint("--top-k", shortest(model.top_k), "at most " + number("experts", model.experts));
    if (run.warmup > run.steps)
        throw complaint("--warmup", shortest(run.warmup), "at most " + number("steps", run.steps));
    constexpr std::int64_t tokens_limit = std::int64_t{1} << 24;
    if (run.batch * run.sequence > tokens_limit)
        throw complaint("--batch", shortest(run.batch),
                        "at most " + shortest(tokens_limit) + " tokens a step with " +
                            number("sequence", run.sequence));
}

} // namespace

command_line parse_command_line(int argc, char const* const* argv) {
    command_line line;
    for (int at = 1; at < argc;) {
        std::string_view const argument = argv[at++];
        if (argument == "--help" || argument == "-h") {
            line.values.help = true;
            return line;
        }
        if (!argument.starts_with("--"))
            throw complaint(quote(argument), "a stray argument", "--name VALUE; see --help");
        auto const equals = argument.find('=');
        std::string_view const name = argument.substr(2, equals == std::string_view::npos ? equals : equals - 2);
        option const* const row = find(name);
        if (!row) throw complaint(quote(argument), "an unknown option", "one that --help lists");
        if (!line.given.insert(row->name).second) throw complaint(dashed(name), "two of them", "one");
        auto const at_value = [&] { return at < argc && !std::string_view(argv[at]).starts_with("--"); };
        if (equals != std::string_view::npos) {
            row->set(line.values, argument.substr(equals + 1));
        } else {
            if (!at_value()) throw complaint(dashed(name), "nothing", row->placeholder);
            row->set(line.values, argv[at++]);
        }
        while (name == "text" && at_value()) row->set(line.values, argv[at++]);
    }
    return line;
}

options settle(command_line const& line, run_settings const& checkpoint) {
    options run = line.values;
    auto known = line.given;
    for (auto const& [name, text] : checkpoint) {
        option const* const row = find(name);
        if (!row) throw complaint("--resume", "a checkpoint with the setting " + quote(name), "one of this program");
        if (!line.given.contains(name)) {
            (row->restore ? row->restore : row->set)(run, text);
            known.insert(name);
        } else if (row->rule == on_resume::must_match && row->get(run) != text) {
            throw complaint(dashed(name), row->get(run), text + ", with which the checkpoint was trained");
        }
    }
    auto& model = run.model;
    if (!known.contains("head-dim")) {
        if (model.width % model.heads != 0 || model.width / model.heads < 2)
            throw complaint("--width", shortest(model.width),
                            "a multiple of --heads " + shortest(model.heads) + ", at least twice it, or a --head-dim");
        model.head_dim = model.width / model.heads;
    }
    if (!known.contains("rotary-dims")) model.rotary_dims = model.head_dim / 4 * 2;
    if (!known.contains("threads")) run.threads = std::max<std::int64_t>(1, std::thread::hardware_concurrency());
    if (!line.given.contains("warmup")) run.warmup = std::min(run.warmup, run.steps);
    if (!run.resume.empty() && !known.contains("save")) run.save = run.resume;
    check(run);
    return run;
}

run_settings settings_of(options const& run) {
    run_settings kept;
    for (auto const& row : table())
        if (row.rule != on_resume::forgotten) kept[row.name] = row.get(run);
    return kept;
}

std::string help_text() {
    std::string out = "tiny_lm --text FILE... [--name VALUE]...\n"
                      "Learns plain text, byte by byte, and writes some of its own.\n\n";
    options const defaults;
    std::set<std::string> const derived = {"text", "head-dim", "rotary-dims", "threads", "resume", "log"};
    for (auto const& row : table()) {
        std::string left = "  --" + row.name + " " + row.placeholder;
        left.resize(std::max<std::size_t>(left.size() + 2, 30), ' ');
        out += left + row.help;
        if (!derived.contains(row.name)) out += " [" + row.get(defaults) + "]";
        out += '\n';
    }
    return out + "  --help                      this text\n"
                 "\nExit code 0: all is well. 1: something could not be written; the run went on without it. 2: refused, and\n"
                 "nothing was changed. Ctrl-C ends a run after the step at hand, saves, and counts as 0.\n";
}

} // namespace tiny_lm
