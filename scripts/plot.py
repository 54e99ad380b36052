#!/usr/bin/env python3
"""Plots training runs from their log.jsonl: the loss with validation and floor, the gradient norm,
the learning rate and the speed. The format follows from the file's suffix: .png, .svg or .pdf.

    python3 scripts/plot.py run1                          # writes run1/plot.png
    python3 scripts/plot.py run1 run2 -o compare.svg      # several runs in one plot
"""

import itertools
import math
import os
import pathlib

import results

# Okabe and Ito's palette, then three of Tol's: colour-blind readers can tell them apart.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #882255 #999933 #332288".split()
INK = "#222222"
GREY = "#777777"
GRID = "#e4e4e4"
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
    "svg.fonttype": "none",  # text stays text, instead of outlines
    "text.parse_math": False,  # the name of a run may contain dollar signs
}
DOTS = {"ls": "none", "marker": "o", "ms": 6, "mec": "white", "mew": 0.9}  # validation losses
# Field of the log and title of each panel.
PANELS = {
    "loss": ("loss_nats", "Loss"),
    "norm": ("grad_norm", "Gradient norm"),
    "lr": ("lr", "Learning rate"),
    "speed": ("tokens_per_s", "Tokens per second"),
}


def pyplot():
    """matplotlib.pyplot in the project's style, for writing files."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        results.fail("needs matplotlib: pip install -r scripts/requirements.txt")
    plt.rcParams.update(STYLE)
    return plt


def smooth(values, width):
    """The mean of `width` neighbours each, NaN left out. At the start, where a loss falls steeply,
    fewer neighbours are used."""
    means = []
    for i in range(len(values)):
        half = min(width // 2, i)
        near = [v for v in values[i - half : i + half + 1] if not math.isnan(v)]
        means.append(sum(near) / len(near) if near else math.nan)
    return means


def curve(rows, field):
    """The steps, and the field's value at each."""
    return [row["step"] for row in rows], [row[field] for row in rows]


def draw_run(panels, log, colour, width):
    """Draws the curves of a run; `width` is how many steps are averaged."""
    for name, (field, _) in PANELS.items():
        steps, values = curve(log["train"], field)
        if width > 1 and name != "lr":
            panels[name].plot(steps, values, color=colour, lw=0.6, alpha=0.25)
            values = smooth(values, width)
        panels[name].plot(steps, values, color=colour, lw=1.6)
    if log["val"]:
        steps, losses = curve(log["val"], "loss_nats")
        panels["loss"].plot(steps, losses, color=colour, zorder=5, **DOTS)


def draw_floors(axes, logs):
    """Draws a line at each floor that the runs name, the loss that no model can go below."""
    rows = [row for log in logs for row in log["run"] + log["val"]]
    floors = [row["floor_nats"] for row in rows if row.get("floor_nats") is not None]
    by_text = {f"{floor:.4f}": floor for floor in floors}
    for text, floor in by_text.items():
        axes.axhline(floor, color=INK, lw=1.1, ls=(0, (5, 3)))
        axes.annotate(
            f"floor {text}",
            (0, floor),
            xycoords=("axes fraction", "data"),
            xytext=(4, 4),
            textcoords="offset points",
        )


def top_of_losses(logs):
    """Where the loss's panel ends. The drop from ln V in the first steps would leave no room for
    the rest, so the first twentieth of a run may start above the panel."""
    losses = []
    for log in logs:
        rows = log["train"] + log["val"]
        last = max(row["step"] for row in rows)
        losses += [row["loss_nats"] for row in rows if row["step"] > last / 20]
    return 1.1 * max((loss for loss in losses if not math.isnan(loss)), default=1)


def plot(logs, names, out):
    """Writes a plot of these runs."""
    plt = pyplot()
    from matplotlib.ticker import EngFormatter

    figure = plt.figure(figsize=(10, 8.5), layout="constrained")
    panels = figure.subplot_mosaic(
        [["loss", "loss"], ["loss", "loss"], ["norm", "lr"], ["speed", "speed"]]
    )
    width = max(1, max(len(log["train"]) for log in logs) // 100)
    marks = []
    for log, name, colour in zip(logs, names, itertools.cycle(COLOURS)):
        draw_run(panels, log, colour, width)
        if log["val"]:
            name += f", validation {log['val'][-1]['loss_nats']:.4f}"
        marks.append(plt.Line2D([], [], color=colour, lw=3, label=name))
    draw_floors(panels["loss"], logs)

    for name, axes in panels.items():
        axes.set_title(PANELS[name][1])
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_ylim(bottom=0)
    panels["loss"].set_ylim(top=top_of_losses(logs))
    panels["loss"].set_ylabel("nats per token")
    panels["speed"].yaxis.set_major_formatter(EngFormatter(sep=""))
    panels["lr"].yaxis.set_major_formatter(lambda x, _: f"{x:.3g}")

    if width > 1:
        label = f"training, mean of {width} steps"
        marks.append(plt.Line2D([], [], color=GREY, lw=1.6, label=label))
    marks.append(plt.Line2D([], [], color=GREY, label="validation", **DOTS))
    panels["loss"].legend(handles=marks, loc="upper right", framealpha=0.9, edgecolor=GRID)

    with results.write_atomically(out) as part:
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
        help="the -o directory of a run, or the log.jsonl in it",
    )
    arg.add_argument(
        "-o",
        "--out",
        type=pathlib.Path,
        help="file to write (default: plot.png in the first run's folder)",
    )
    a = arg.parse_args()
    logs = [results.read_log(run) for run in a.runs]
    folders = [results.folder_of(run) for run in a.runs]
    # A folder's name may be any bytes; matplotlib needs valid text.
    names = [os.fsencode(folder.resolve().name).decode("utf-8", "replace") for folder in folders]
    out = a.out or folders[0] / "plot.png"
    if out.suffix not in (".png", ".svg", ".pdf"):
        results.fail(f"--out {out}: expected a name that ends in .png, .svg or .pdf")
    plot(logs, names, out)
    print(out)


if __name__ == "__main__":
    main()
