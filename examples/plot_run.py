#!/usr/bin/env python3
"""Draws the log of a tiny_lm run as one page: plot_run.py run.jsonl [page.png]

The log may still be growing. A resumed run is drawn as one: the steps after the checkpoint replace those that were
lost. Dotted lines mark the resumptions, crosses the steps that were skipped. Needs matplotlib.
"""
import json
import math
import pathlib
import sys


class UserError(Exception):
    """A mistake that the user can mend, told in one line."""


# --- the log ---------------------------------------------------------------------------------------------------------

def number(value):
    """A figure of the log; settings and what JSON cannot hold are strings. Odd or missing ones are NaN."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_records(path):
    """The records of a log, without lines that a crash tore."""
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}")
    records, torn = [], 0
    for line in filter(str.strip, lines):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and math.isfinite(number(record.get("step"))):
            records.append(record)
        else:
            torn += 1
    if not records or records[0].get("record") != "start":
        raise UserError(f"{path} is no log of tiny_lm")
    if torn:
        print(f"plot_run: {torn} damaged lines of {path} are left out", file=sys.stderr)
    return records


class Run:
    """The last run of a log: its facts, its steps and its looks at the held-out text, each in order and once."""

    def __init__(self, records):
        starts = [i for i, r in enumerate(records) if r.get("record") == "start"]
        first = max((i for i in starts if number(records[i]["step"]) == 0), default=starts[0])
        steps, held_out = {}, {}
        self.facts, self.resumed_at = {}, []
        for record in records[first:]:
            step = number(record["step"])
            if record.get("record") == "start":
                self.facts.update(record)
                steps = {s: r for s, r in steps.items() if s <= step}
                held_out = {s: r for s, r in held_out.items() if s <= step}
                self.resumed_at = [s for s in self.resumed_at if s < step] + ([step] if step > 0 else [])
            elif record.get("record") == "step":
                steps[step] = record
            elif record.get("record") == "held_out":
                held_out[step] = record
        self.steps = sorted(steps)
        self.records = [steps[s] for s in self.steps]
        self.held_out = [(s, number(held_out[s].get("bits_per_byte"))) for s in sorted(held_out)]
        if not self.steps:
            raise UserError("the log holds no step yet")

    def figure(self, name, scale=1.0):
        """A figure at every step; infinite ones are NaN, which leaves a gap."""
        values = (number(r.get(name)) * scale for r in self.records)
        return [v if math.isfinite(v) else math.nan for v in values]

    def skipped(self):
        """The steps at which the count of skipped ones rose."""
        counts = [number(r.get("skipped_steps")) for r in self.records]
        return [s for s, before, now in zip(self.steps[1:], counts, counts[1:]) if now > before]


def smooth(values, reach):
    """The mean over the steps up to `reach` before and after each; gaps stay gaps."""
    sums, counts = [0.0], [0]
    for value in values:
        gap = math.isnan(value)
        sums.append(sums[-1] + (0.0 if gap else value))
        counts.append(counts[-1] + (not gap))
    out = []
    for i, value in enumerate(values):
        near = min(reach, i, len(values) - 1 - i)  # as far on both sides, so that a slope is not bent at the ends
        low, high = i - near, i + near + 1
        out.append(math.nan if math.isnan(value) else (sums[high] - sums[low]) / (counts[high] - counts[low]))
    return out


# --- the page --------------------------------------------------------------------------------------------------------

BLUE, ORANGE, GREEN, RED, GREY = "#3465a4", "#d9730d", "#3a8f4d", "#c0392b", "#8a8f98"

STYLE = {
    "font.size": 9, "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa0a6", "axes.grid": True,
    "grid.color": "#e6e8eb", "grid.linewidth": 0.8, "axes.axisbelow": True, "xtick.color": "#5f6368",
    "ytick.color": "#5f6368", "axes.labelcolor": "#5f6368", "legend.frameon": False, "legend.fontsize": 8.5,
    "lines.linewidth": 1.4, "lines.solid_capstyle": "round", "figure.facecolor": "white",
}


def quantile(values, share):
    finite = sorted(v for v in values if not math.isnan(v))
    return finite[min(len(finite) - 1, int(share * len(finite)))] if finite else math.nan


class Page:
    """Nine panels over the same steps."""

    def __init__(self, run, plt, ticker):
        self.run, self.ticker = run, ticker
        self.figure, axes = plt.subplots(3, 3, figsize=(16, 10.5), sharex=True, constrained_layout=True)
        self.axes = list(axes.flat)
        self.reach = len(run.steps) // 60

    def panel(self, title, unit, log=False):
        axis = self.axes.pop(0)
        axis.set_title(title)
        axis.set_ylabel(unit)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(self.ticker.LogLocator(subs=(1, 2, 5), numticks=5))
            axis.yaxis.set_major_formatter(self.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_formatter(self.ticker.NullFormatter())
        for step in self.run.resumed_at:
            axis.axvline(step, color=GREY, linewidth=1, linestyle=":")
        return axis

    def line(self, axis, values, color, label, **style):
        if axis.get_yscale() == "log":
            values = [v if v > 0 else math.nan for v in values]
        if not all(map(math.isnan, values)):
            axis.plot(self.run.steps, values, color=color, label=label, **style)

    def noisy(self, axis, values, color, label):
        """Every step, pale, and a running mean, strong."""
        self.line(axis, values, color, None, alpha=0.28, linewidth=0.8)
        self.line(axis, smooth(values, self.reach), color, label)

    def legend(self, axis, **where):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(**where)

    def draw(self):
        run = self.run
        x = run.figure

        axis = self.panel("Loss", "bits per byte")
        loss = x("bits_per_byte")
        self.noisy(axis, loss, BLUE, "training batch")
        shown = [(s, v) for s, v in run.held_out if math.isfinite(v)]
        if shown:
            label = f"held out, last {shown[-1][1]:.3f}"
            axis.plot(*zip(*shown), color=ORANGE, label=label, marker="o", markersize=3.5)
        gzip = number(run.facts.get("gzip_bits_per_byte"))
        if math.isfinite(gzip):
            axis.axhline(gzip, color=GREEN, linestyle="--", linewidth=1.2, label=f"gzip -9 on held out, {gzip:.3f}")
        others = [v for _, v in shown] + [gzip] * math.isfinite(gzip)
        low = min([v for v in loss if not math.isnan(v)] + others, default=0)
        high = max([quantile(loss, 0.95)] + others[-1:])  # all of the first steps would flatten the rest
        if high > low:
            axis.set_ylim(low - 0.06 * (high - low), high + 0.1 * (high - low))
        self.legend(axis)

        axis = self.panel("Gradient norm, before clipping", "norm", log=True)
        norms = x("gradient_norm")
        self.noisy(axis, norms, BLUE, "whole model")
        clip = number(run.facts.get("clip"))
        if math.isfinite(clip):
            axis.axhline(clip, color=GREY, linestyle="--", linewidth=1.2, label=f"clipped above {clip:g}")
        skipped = run.skipped()
        if skipped:
            axis.plot(skipped, [0.04] * len(skipped), "x", color=RED, transform=axis.get_xaxis_transform(),
                      label=f"skipped steps ({len(skipped)})")
        self.legend(axis)

        axis = self.panel("Update over weight, and learning rate", "ratio", log=True)
        self.noisy(axis, x("update_to_weight"), BLUE, "rms update / rms weight")
        self.line(axis, x("learning_rate"), GREY, "learning rate (Muon)", linestyle="--")
        self.legend(axis)

        axis = self.panel("Largest values", "magnitude", log=True)
        self.noisy(axis, x("largest_activation"), BLUE, "residual activation")
        self.noisy(axis, x("largest_logit"), ORANGE, "attention logit")
        self.noisy(axis, x("largest_gain"), GREEN, "norm gain")
        self.legend(axis)

        axis = self.panel("Attention on the first token", "% of attention")
        self.noisy(axis, x("first_token_share", 100), BLUE, "measured")
        self.line(axis, x("first_token_uniform", 100), GREY, "if attention were even", linestyle="--")
        axis.set_ylim(bottom=0)
        self.legend(axis)

        axis = self.panel("Busiest expert", "tokens over the mean")
        self.noisy(axis, x("demand_max_over_mean"), ORANGE, "demand, before capacity")
        self.noisy(axis, x("served_max_over_mean"), BLUE, "served, after it")
        axis.axhline(1, color=GREY, linestyle="--", linewidth=1.2, label="perfect balance")
        top = quantile(x("demand_max_over_mean"), 0.99)
        if top > 1:
            axis.set_ylim(0.95, 1 + 1.15 * (top - 1))
        self.legend(axis)

        axis = self.panel("Refused and unused", "% of expert visits")
        self.noisy(axis, x("dropped_share", 100), BLUE, "dropped for want of capacity")
        axis.set_ylim(bottom=0)
        dead = x("dead_experts")
        if any(v > 0 for v in dead):
            right = axis.twinx()
            right.grid(False)
            right.spines["right"].set_visible(True)
            right.set_ylabel("experts", color=RED)
            right.plot(run.steps, dead, color=RED, alpha=0.7, linewidth=1, drawstyle="steps-post")
            right.set_ylim(0, max(dead) * 2 + 1)
            axis.plot([], [], color=RED, alpha=0.7, linewidth=1, label="dead experts (right)")
        self.legend(axis)

        axis = self.panel("Share of the routed experts", "%")
        self.noisy(axis, x("routed_output_share", 100), BLUE, "of the feed-forward output")
        self.line(axis, x("routed_parameter_share", 100), GREY, "of all parameters", linestyle="--")
        axis.set_ylim(bottom=min([0] + [v for v in x("routed_output_share", 100) if not math.isnan(v)]))
        self.legend(axis)

        axis = self.panel("Speed", "thousand tokens a second")
        speed, peak = x("tokens_per_second", 1e-3), x("share_of_peak", 100)
        self.noisy(axis, speed, BLUE, "tokens")
        axis.set_ylim(bottom=0)
        if not all(map(math.isnan, peak)):
            right = axis.twinx()
            right.grid(False)
            right.spines["right"].set_visible(True)
            right.set_ylabel("% of peak flop/s", color=ORANGE)
            right.plot(run.steps, smooth(peak, self.reach), color=ORANGE)
            right.set_ylim(bottom=0)
            axis.plot([], [], color=ORANGE, label="share of peak (right)")
        self.legend(axis, loc="lower right")

        for axis in self.figure.axes[6:9]:
            axis.set_xlabel("step")
            axis.set_xlim(run.steps[0], max(run.steps[-1], run.steps[0] + 1))
        self.figure.suptitle(self.title(), fontsize=13, x=0.008, ha="left")
        return self.figure

    def title(self):
        facts, run = self.run.facts, self.run
        parts = [f"tiny_lm, {facts['precision']}" if "precision" in facts else "tiny_lm"]
        if math.isfinite(number(facts.get("parameters"))):
            parts.append(f"{number(facts['parameters']) / 1e6:.2f}M parameters")
        texts = {"layers": "{} layers", "width": "width {}", "experts": "{} experts", "top-k": "top {}"}
        parts += [text.format(facts[name]) for name, text in texts.items() if name in facts]
        total = number(run.records[-1].get("steps"))
        parts.append(f"step {run.steps[-1]:.0f}" + (f" of {total:.0f}" if math.isfinite(total) else ""))
        return "  ·  ".join(parts)


def main(arguments):
    if "-h" in arguments or "--help" in arguments:
        print(__doc__.strip())
        return 0
    if len(arguments) not in (1, 2):
        raise UserError("wanted a log and, if you like, a page: plot_run.py run.jsonl [page.png]")
    log = pathlib.Path(arguments[0])
    page = pathlib.Path(arguments[1]) if len(arguments) == 2 else log.with_suffix(".png")
    if page == log:
        raise UserError(f"{page} is the log itself; name another file for the page")
    run = Run(read_records(log))
    try:
        import matplotlib
    except ImportError:
        raise UserError("matplotlib is missing (Debian: python3-matplotlib; elsewhere: pip install matplotlib)")
    matplotlib.use("Agg")  # draws without a screen
    from matplotlib import pyplot as plt, ticker
    with plt.rc_context(STYLE):
        figure = Page(run, plt, ticker).draw()
        try:
            figure.savefig(page, dpi=110)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot write {page}: {getattr(error, 'strerror', None) or error}")
    print(page)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        sys.exit(2)
