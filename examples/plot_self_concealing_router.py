#!/usr/bin/env python3
"""Draws what the example self_concealing_router wrote: plot_self_concealing_router.py numbers.csv [page.png]. Needs matplotlib."""
import csv
import pathlib
import sys

COLUMNS = ("step", "shown", "true", "dropped")


def read(path):
    """{(capacity, deadband): {told: {column: [values]}}} of the example's CSV file."""
    runs = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            told = runs.setdefault((float(row["capacity"]), float(row["deadband"])), {})
            lines = told.setdefault(row["told"], {name: [] for name in COLUMNS})
            for name in COLUMNS:
                lines[name].append(float(row[name]))
    if not runs:
        raise ValueError("no steps")
    return runs


def draw(runs, page):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(2, len(runs), figsize=(4.2 * len(runs), 7), squeeze=False, sharex=True, sharey="row")
    for (capacity, deadband), (load, dropped) in zip(runs, grid.T):
        for (told, line), colour in zip(runs[capacity, deadband].items(), ("tab:green", "tab:orange", "tab:red")):
            load.plot(line["step"], line["true"], color=colour, label=f"told {told}: true")
            load.plot(line["step"], line["shown"], color=colour, linestyle=":", linewidth=2.5, label=f"told {told}: its log")
            dropped.plot(line["step"], [100 * share for share in line["dropped"]], color=colour, label=f"told {told}")
        load.set_title(f"capacity {capacity:.2f}, deadband {100 * deadband:.0f} %")
        dropped.set_xlabel("step")
    grid[0][0].set_ylabel("busiest expert over the mean")
    grid[1][0].set_ylabel("assignments dropped, %")
    grid[0][0].legend(fontsize="small")
    grid[1][0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(page, dpi=110)


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 2
    page = sys.argv[2] if len(sys.argv) == 3 else str(pathlib.Path(sys.argv[1]).with_suffix(".png"))
    try:
        draw(read(sys.argv[1]), page)
    except (OSError, KeyError, ValueError) as error:
        print(f"plot_self_concealing_router.py: {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("plot_self_concealing_router.py: needs matplotlib", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
