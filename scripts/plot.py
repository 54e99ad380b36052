#!/usr/bin/env python3
"""Plots training runs from their log.jsonl: the loss with validation and floor, the gradient norm,
the learning rate and the speed. The plot is a PNG, SVG or PDF, as the end of its name says.

python3 scripts/plot.py run1                          # writes run1/plot.png
python3 scripts/plot.py run1 run2 -o compare.svg      # several runs in one plot
"""

import math
import os
import pathlib

import results

# Okabe and Ito's palette, then three of Tol's: distinct for colour-blind eyes too.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #882255 #999933 #332288".split()
INK, GREY, GRID = "#222222", "#777777", "#e4e4e4"
STYLE = {
    "font.size": 9,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.xmargin": 0.01,
    "svg.hashsalt": "plot",
    "svg.fonttype": "none",  # none: text stays text
    "text.parse_math": False,  # the name of a run may hold dollars
}
PANELS = {
    "loss": ("loss_nats", "Loss"),
    "norm": ("grad_norm", "Gradient norm"),
    "lr": ("lr", "Learning rate"),
    "speed": ("tokens_per_s", "Tokens per second"),
}


def pyplot():
    """matplotlib.pyplot in the project's style, for files only."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        results.fail("needs matplotlib: pip install -r scripts/requirements.txt")
    plt.rcParams.update(STYLE)
    return plt


def smooth(values, width):
    """The mean of `width` neighbours, of fewer at the start, where a loss is steep; without NaN."""
    means = []
    for i in range(len(values)):
        half = min(width // 2, i)
        near = [v for v in values[i - half : i + half + 1] if not math.isnan(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def plot(runs, names, out):
    plt = pyplot()
    from matplotlib.ticker import EngFormatter

    figure = plt.figure(figsize=(10, 8.5), layout="constrained")
    panels = figure.subplot_mosaic(
        [["loss", "loss"], ["loss", "loss"], ["norm", "lr"], ["speed", "speed"]]
    )
    loss, handles, floors, settled = panels["loss"], [], {}, []
    width = max(1, max(len(rows["train"]) for rows in runs) // 100)

    def column(rows, field):
        return [r["step"] for r in rows], [r[field] for r in rows]

    for rows, run, colour in zip(runs, names, COLOURS * len(runs)):
        for name, (field, _) in PANELS.items():
            steps, values = column(rows["train"], field)
            if width > 1 and name != "lr":
                panels[name].plot(steps, values, color=colour, lw=0.6, alpha=0.25)
                values = smooth(values, width)
            panels[name].plot(steps, values, color=colour, lw=1.6)
        if rows["val"]:
            steps, values = column(rows["val"], "loss_nats")
            loss.plot(
                steps,
                values,
                color=colour,
                ls="none",
                marker="o",
                ms=6,
                mec="white",
                mew=0.9,
                zorder=5,
            )
            run += f", validation {values[-1]:.4f}"
        handles.append(plt.Line2D([], [], color=colour, lw=3, label=run))
        both = rows["train"] + rows["val"]
        settled += [r["loss_nats"] for r in both if r["step"] > max(r["step"] for r in both) / 20]
        found = [row.get("floor_nats") for row in rows["run"] + rows["val"]]
        floors |= {f"{floor:.4f}": floor for floor in found if floor is not None}

    for text, floor in floors.items():
        loss.axhline(floor, color=INK, lw=1.1, ls=(0, (5, 3)))
        loss.annotate(
            f"floor {text}",
            (0, floor),
            xycoords=("axes fraction", "data"),
            xytext=(4, 4),
            textcoords="offset points",
        )
    for name, axes in panels.items():
        axes.set_title(PANELS[name][1])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(bottom=0)
    # The drop from ln V in the first steps would leave no room for the rest, so the curve may start
    # above its panel.
    loss.set_ylim(top=1.1 * max((x for x in settled if not math.isnan(x)), default=1))
    loss.set_ylabel("nats per token")
    panels["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels["lr"].yaxis.set_major_formatter(lambda x, _: f"{x:.3g}")

    if width > 1:
        handles.append(
            plt.Line2D([], [], color=GREY, lw=1.6, label=f"training, mean of {width} steps")
        )
    handles.append(
        plt.Line2D([], [], color=GREY, ls="none", marker="o", ms=6, mec="white", label="validation")
    )
    loss.legend(handles=handles, loc="upper right", framealpha=0.9, edgecolor=GRID)
    with results.whole(out) as part:
        figure.savefig(part, dpi=150, format=out.suffix[1:])
    plt.close(figure)


@results.check_stdout()
def main():
    arg = results.arguments(__doc__)
    arg.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        type=pathlib.Path,
        help="a folder with log.jsonl, or that file",
    )
    arg.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        help="the plot (default: plot.png in the first run's folder)",
    )
    a = arg.parse_args()
    runs = [results.read_log(run) for run in a.runs]
    folders = [results.folder_of(run) for run in a.runs]
    names = [os.fsencode(folder.resolve().name).decode("utf-8", "replace") for folder in folders]
    out = a.out or folders[0] / "plot.png"
    if out.suffix not in (".png", ".svg", ".pdf"):
        results.fail(f"--out {out}: expected a name that ends in .png, .svg or .pdf")
    plot(runs, names, out)
    print(out)


if __name__ == "__main__":
    main()
