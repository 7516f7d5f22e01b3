// A whole run: train, look at the held-out text now and then, save, and write some text at the end.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <new>
#include <optional>
#include <string>
#include <system_error>

#include <keel/keel.hpp>

#include "checkpoint.hpp"
#include "corpus.hpp"
#include "error.hpp"
#include "evaluate.hpp"
#include "generate.hpp"
#include "gzip.hpp"
#include "health.hpp"
#include "measure_peak.hpp"
#include "memory_need.hpp"
#include "options.hpp"
#include "pace.hpp"
#include "printable.hpp"
#include "run_log.hpp"
#include "signals.hpp"
#include "standard_output.hpp"
#include "train.hpp"

namespace tiny_lm {

template <class Activation> class training_run {
    using backend = keel::cpu<keel::native_arch, keel::thread_pool>;

public:
    training_run(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint)
        : run_(run), text_(text), log_(run.log), pool_(run.threads, keel::worker_placement::away_from_caller),
          trainer_(backend(pool_), run, text) {
        if (checkpoint) trainer_.go_on_from(load_checkpoint(*checkpoint, trainer_.network(), text.digest));
        else trainer_.initialise();
        first_step_ = trainer_.at().step;
        if (first_step_ > run.steps)
            throw complaint("--steps", shortest(run.steps),
                            "at least " + shortest(first_step_) + ", which the checkpoint has behind it");
    }

    /// False if some of what it computed could not be written, which it has said on stderr.
    bool operator()() {
        introduce();
        bool stopped = false, saved = true;
        {
            stop_request const stop;
            while (trainer_.at().step < run_.steps && !stop) {
                one_step();
                std::int64_t const step = trainer_.at().step;
                if (run_.eval_every > 0 && step % run_.eval_every == 0 && step < run_.steps) look(quick_windows);
                if (run_.save_every > 0 && step % run_.save_every == 0 && step < run_.steps) save();
            }
            bool const anything_new = trainer_.at().step > first_step_ || run_.save != run_.resume;
            if (anything_new) saved = save();
            stopped = static_cast<bool>(stop);
        } // from here on an interrupt ends the program at once: it can lose nothing any more
        if (stopped) {
            std::printf("stopped at step %s%s\n", shortest(trainer_.at().step).c_str(),
                        saved ? ("; go on with --resume " + quote(run_.save)).c_str() : "");
        } else {
            look(0);
            write_text();
        }
        return flush_standard_output() && saved && log_.complete();
    }

private:
    static constexpr std::int64_t quick_windows = 64; ///< contexts of the looks in between; the last look takes all

    void introduce() {
        auto const& ledger = trainer_.ledger();
        gzip_ = gzip_bits_per_byte(text_.held_out);
        peak_ = measure_peak(run_.threads);
        std::printf("text     %s bytes to learn, %s held out; gzip -9 needs %s bits a byte for these\n", metric(static_cast<double>(text_.train.size())).c_str(),
                    metric(static_cast<double>(text_.held_out.size())).c_str(), gzip_ ? fixed(*gzip_, 3).c_str() : "(no gzip here)");
        std::printf("model    %s parameters, %s of them met by a token; %s flops a token to train\n", metric(static_cast<double>(ledger.parameters())).c_str(),
                    metric(static_cast<double>(ledger.active_parameters())).c_str(), metric(ledger.training_flops()).c_str());
        std::printf("run      %s in %s, %s tokens a step, %s threads of %s, peak %s flop/s\n\n",
                    trainer_.at().step > 0 ? ("from step " + shortest(trainer_.at().step)).c_str() : "from scratch", precision_name(),
                    shortest(run_.batch * run_.sequence).c_str(), shortest(run_.threads).c_str(), keel::native_arch::name(), metric(peak_).c_str());
        std::printf("%s\n%s\n", health_legend().c_str(), health_header().c_str());
        log_record start = log_.record("start", trainer_.at().step);
        for (auto const& [name, value] : settings_of(run_)) start.add(name, value);
        start.add("parameters", ledger.parameters()).add("peak_flops", peak_).add("threads", run_.threads);
        start.add("gzip_bits_per_byte", gzip_ ? *gzip_ : unknown);
        log_.write(start);
    }

    void one_step() {
        using clock = std::chrono::steady_clock;
        auto const start = clock::now();
        health h = trainer_.step();
        double const seconds = std::chrono::duration<double>(clock::now() - start).count();
        pace_.add(seconds);
        auto const tokens = static_cast<double>(run_.batch * run_.sequence);
        h.tokens_per_second = tokens / seconds;
        h.share_of_peak = trainer_.ledger().training_flops(h.dropped_share) * tokens / seconds / peak_;
        h.seconds_left = pace_.seconds_left(run_.steps - h.step);
        std::printf("%s\n", health_line(h).c_str());
        flush_standard_output();
        log_.write(h);
    }

    void look(std::int64_t windows) {
        auto const score = evaluate(trainer_.network(), text_, run_.sequence, run_.batch, windows);
        std::printf("held out, step %s: %s bits a byte over %s contexts%s", shortest(trainer_.at().step).c_str(), fixed(score.bits_per_byte, 4).c_str(),
                    shortest(score.windows).c_str(), windows == 0 ? ", all there are" : "");
        if (gzip_) std::printf("; gzip -9: %s", fixed(*gzip_, 3).c_str());
        std::printf("\n");
        flush_standard_output();
        log_record record = log_.record("held_out", trainer_.at().step);
        record.add("bits_per_byte", score.bits_per_byte).add("contexts", score.windows);
        log_.write(record);
        show_balance();
    }

    /// The balance line of each layer at the last step: the table above has only the worst of each figure.
    void show_balance() {
        std::int64_t layer = 0;
        for (auto const& [line, least, largest] : trainer_.balance()) {
            keel::balance_text const text(line);
            std::printf("  experts of layer %s: %s, an expert %s%% to %s%%\n", shortest(layer).c_str(), text.c_str(),
                        fixed(100 * least, 1).c_str(), fixed(100 * largest, 1).c_str());
            log_record record = log_.record("balance", trainer_.at().step);
            record.add("layer", layer).add("demand_max_over_mean", line.demand_max).add("served_max_over_mean", line.served_max);
            record.add("demand_min_over_mean", line.demand_min).add("served_min_over_mean", line.served_min);
            record.add("demand_entropy", line.demand_entropy).add("served_entropy", line.served_entropy);
            record.add("dropped_share", line.dropped).add("dead_experts", line.dead).add("bias_spread", static_cast<double>(line.bias_spread));
            record.add("sign_flips", line.sign_flips).add("routed_output_share", line.shares.output).add("routed_norm_share", line.shares.norm);
            record.add("least_expert_share", least).add("largest_expert_share", largest);
            record.add("routed_parameter_share", line.shares.parameters).add("concealed", line.concealed() ? 1 : 0);
            log_.write(record);
            ++layer;
        }
        flush_standard_output();
    }

    /// False, said on stderr, if the system refuses. The run goes on: by the next time the disk may have room again.
    bool save() {
        try {
            save_checkpoint(run_.save, trainer_.network(), run_, trainer_.at(), text_.digest);
            return true;
        } catch (write_error const& error) {
            std::fprintf(stderr, "tiny_lm: %s\n", error.what());
            return false;
        }
    }

    /// A continuation of the first words that were held out.
    void write_text() {
        if (run_.sample == 0) return;
        auto const prompt = byte_span(text_.held_out).first(static_cast<std::size_t>(std::min<std::int64_t>(64, run_.sequence)));
        auto const written = generate(trainer_.network(), prompt, run_.sample, run_.sequence, run_.temperature, run_.seed);
        std::printf("\nheld-out text, and how the model goes on from there at temperature %s:\n%s\n  =>\n%s\n", shortest(run_.temperature).c_str(),
                    printable(prompt).c_str(), printable(written).c_str());
    }

    char const* precision_name() const { return run_.mode == precision::fp32 ? "fp32" : run_.mode == precision::bf16 ? "bf16" : "fp8"; }

    options run_;
    corpus const& text_;
    run_log log_; // before what takes long to make: a refusal comes at once
    keel::thread_pool pool_;
    trainer<backend, Activation> trainer_;
    std::int64_t first_step_ = 0; ///< steps done when this process began
    pace pace_;
    std::optional<double> gzip_;
    double peak_ = 0;
};

/// Makes the run, then runs it. What the machine does not have for making it is told as a refusal: nothing has been written yet.
template <class Activation>
bool run_training(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint) {
    std::optional<training_run<Activation>> training;
    try {
        training.emplace(run, text, checkpoint);
    } catch (std::bad_alloc const&) {
        throw complaint("memory", size_of_run(run), "no more than this machine lets a program have");
    } catch (std::system_error const&) {
        throw complaint("--threads", shortest(run.threads), "no more than this machine can start");
    }
    return (*training)();
}

/// One function for each storage of activations, each compiled in a file of its own. They return what the run returns.
bool run_in_fp32(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint);
bool run_in_bf16(options const& run, corpus const& text, std::optional<safetensors> const& checkpoint); ///< and fp8

} // namespace tiny_lm
