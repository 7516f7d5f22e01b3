#!/usr/bin/env python3
"""Draws what the example outlier wrote: plot_outlier.py numbers.csv [page.png]. Needs matplotlib."""
import csv
import pathlib
import sys


def read(path):
    """{what: {kept: ([x], [y])}} of the example's CSV file."""
    curves = {}
    with open(path, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            x, y = curves.setdefault(row["what"], {}).setdefault(row["kept"], ([], []))
            x.append(float(row["x"]))
            y.append(float(row["y"]))
    return curves


def draw(curves, page):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for name, (x, y) in curves["outlier"].items():
        left.loglog(x, [100 * value for value in y], marker="o", label=f"a scale for {name}" if name[1] == " " else name)
    left.set_xlabel("size of the one outlier (the others: normal, 1)")
    left.set_ylabel("error of the others, %")
    left.set_title("e4m3 under one outlier")
    left.legend()
    for name, (x, y) in curves["weight"].items():
        right.plot(x, y, label=name, linestyle="--" if name == "exact" else "-")
    right.set_xlabel("steps of 0.001")
    right.set_ylabel("weight")
    right.set_title("big plus small in bf16")
    right.legend()
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
        print(f"plot_outlier.py: {sys.argv[1]}: {error}", file=sys.stderr)
        return 2
    except ImportError:
        print("plot_outlier.py: needs matplotlib", file=sys.stderr)
        return 2
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
