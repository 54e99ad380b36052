#!/usr/bin/env python3
"""Plots training runs from their log.jsonl: loss with validation and floor, gradient norm, learning rate, speed, MFU.

    python3 scripts/plot.py run1                          # writes run1/plot.png
    python3 scripts/plot.py run1 run2 -o compare.svg      # several runs in one plot; PNG, SVG or PDF by the name's end
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import sys

# Okabe and Ito's palette: distinct for colour-blind eyes too.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
INK, GREY, GRID = "#222222", "#777777", "#e4e4e4"
STYLE = {"font.size": 9, "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK, "xtick.color": GREY,
         "ytick.color": GREY, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.spines.top": False,
         "axes.spines.right": False, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
         "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.xmargin": 0.01,
         "svg.hashsalt": "plot"}
FIELDS = {"run": ["tokens_per_step"], "train": ["step", "loss_nats", "grad_norm", "lr", "tokens_per_s", "mfu_percent"],
          "val": ["step", "loss_nats"], "sample": ["step", "text"], "hellaswag": ["step", "correct", "examples"]}


class LogError(Exception):
    pass


def read_log(run):
    """The rows of a log by kind: {"run": […], "train": […], "val": […], …}; null becomes NaN."""
    path = pathlib.Path(run)
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as e:
        raise LogError(f"{path}: cannot be read: {e}; give a folder that ./train_gpt2cu -o wrote") from None
    rows = {kind: [] for kind in FIELDS}
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break  # a run that goes on is writing it
        try:
            row = json.loads(line)
            kind = row["kind"]
        except (ValueError, KeyError, TypeError):
            what = f'expected a JSON object with "kind", found {line.strip()[:60]!r}'
            raise LogError(f"{path}:{number}: {what}") from None
        for field in FIELDS.get(kind, []):
            if field not in row:
                raise LogError(f'{path}:{number}: a row of kind "{kind}" without "{field}"')
            if row[field] is None:
                row[field] = math.nan
            if isinstance(row[field], str) != (field == "text"):
                raise LogError(f'{path}:{number}: "{field}" is {row[field]!r}')
        rows.setdefault(kind, []).append(row)
    if not rows["train"] and not rows["val"]:
        raise LogError(f"{path}: no steps yet")
    return rows


@contextlib.contextmanager
def whole(path):
    """Gives a temporary name beside `path`: it becomes `path` when the block ends well, and is removed otherwise."""
    part = path.with_name(f"{path.name[:3]}.{os.getpid()}.part")  # nothing that TensorBoard would read
    try:
        yield part
        os.replace(part, path)
    except OSError as e:
        raise LogError(f"{path}: cannot write: {e.strerror or e}; make room or choose another place") from None
    finally:
        part.unlink(missing_ok=True)


def smooth(values, width):
    """The mean of `width` neighbours, at the start, where a loss is steep, of fewer; NaN is left out."""
    sums, counts, out = [0.0], [0], []
    for v in values:
        sums.append(sums[-1] + (0 if math.isnan(v) else v))
        counts.append(counts[-1] + (not math.isnan(v)))
    for i in range(len(values)):
        half = min(width // 2, i)
        begin, end = i - half, min(i + half + 1, len(values))
        n = counts[end] - counts[begin]
        out.append((sums[end] - sums[begin]) / n if n else math.nan)
    return out


def settled(steps, values):
    """The values after the first twentieth, in which a loss falls from ln V and a GPU warms up."""
    return [v for s, v in zip(steps, values) if s > steps[-1] / 20 and not math.isnan(v)]


def plot(runs, names, out, width, title):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter

    plt.rcParams.update(STYLE)
    figure = plt.figure(figsize=(10, 8.5), layout="constrained")
    panels = figure.subplot_mosaic([["loss", "loss"], ["loss", "loss"], ["norm", "lr"], ["speed", "mfu"]])
    loss, norm, lr, speed, mfu = (panels[name] for name in ("loss", "norm", "lr", "speed", "mfu"))
    width = width or max(1, max(len(rows["train"]) for rows in runs) // 100)
    seen, floors = {axes: [] for axes in panels.values()}, {}

    for rows, colour in zip(runs, COLOURS * len(runs)):
        steps = [r["step"] for r in rows["train"]]
        for axes, field in ((loss, "loss_nats"), (norm, "grad_norm"), (lr, "lr"), (speed, "tokens_per_s"),
                            (mfu, "mfu_percent")):
            values = [r[field] for r in rows["train"]]
            if width > 1 and axes is not lr:
                axes.plot(steps, values, color=colour, lw=0.6, alpha=0.25)
                values = smooth(values, width)
            axes.plot(steps, values, color=colour, lw=1.6)
            seen[axes] += settled(steps, values)
        if rows["val"]:
            steps, values = [r["step"] for r in rows["val"]], [r["loss_nats"] for r in rows["val"]]
            loss.plot(steps, values, color=colour, ls="none", marker="o", ms=6, mec="white", mew=0.9, zorder=5)
            seen[loss] += settled(steps, values)
        for row in rows["run"] + rows["val"]:
            if row.get("floor_nats") is not None:
                floors[f"{row['floor_nats']:.4f}"] = row["floor_nats"]

    for text, floor in floors.items():
        loss.axhline(floor, color=INK, lw=1.1, ls=(0, (5, 3)))
        loss.annotate(f"floor {text}", (0, floor), xycoords=("axes fraction", "data"), xytext=(4, -4),
                      textcoords="offset points", va="top")
        seen[loss].append(floor)

    # The fall of the first steps would leave no room for the rest, so it may start above its panel.
    for axes, values in seen.items():
        low, high = min(values, default=0), max(values, default=1)
        low = low if axes is loss else 0
        pad = 0.1 * (high - low) or 0.1 * high or 1
        axes.set_ylim(low - pad if axes is loss else 0, high + pad)
    if not seen[mfu]:
        mfu.text(0.5, 0.5, "n/a: no peak is known for this GPU", transform=mfu.transAxes, ha="center", color=GREY)
        mfu.set_yticks([])

    loss.set_ylabel("nats per token")
    for axes, text in ((loss, "Loss"), (norm, "Gradient norm"), (lr, "Learning rate"), (speed, "Tokens per second"),
                       (mfu, "MFU, %")):
        axes.set_title(text)
        if axes is not loss:
            axes.sharex(loss)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlabel("step" if axes in (speed, mfu) else "")
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    lr.yaxis.set_major_formatter(lambda x, _: f"{x:.3g}")

    handles = []
    for rows, name, colour in zip(runs, names, COLOURS * len(runs)):
        last = f", validation {rows['val'][-1]['loss_nats']:.4f}" if rows["val"] else ""
        handles.append(Line2D([], [], color=colour, lw=3, label=name + last))
    if width > 1:
        handles += [Line2D([], [], color=GREY, lw=1.6, label=f"training, mean of {width} steps"),
                    Line2D([], [], color=GREY, lw=0.6, alpha=0.5, label="training, each step")]
    if any(rows["val"] for rows in runs):
        handles.append(Line2D([], [], color=GREY, ls="none", marker="o", ms=6, mec="white", label="validation"))
    loss.legend(handles=handles, loc="upper right", framealpha=0.9, edgecolor=GRID)
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)
    with whole(out) as part:
        figure.savefig(part, dpi=150, format=out.suffix[1:])
    plt.close(figure)


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("runs", nargs="+", metavar="RUN", help="a folder with log.jsonl, or such a file")
    arg.add_argument("-o", "--out", help="the plot to write (default: plot.png in the first run's folder)")
    arg.add_argument("--smooth", type=int, default=0, metavar="STEPS",
                     help="the mean of so many steps; 1: none (default: a hundredth)")
    arg.add_argument("--title", default="")
    a = arg.parse_args()
    paths = [pathlib.Path(run) for run in a.runs]
    folders = [path if path.is_dir() else path.parent for path in paths]
    try:
        runs = [read_log(run) for run in a.runs]
        out = pathlib.Path(a.out) if a.out else folders[0] / "plot.png"
        if out.suffix not in (".png", ".svg", ".pdf"):
            raise LogError(f"--out {out}: expected a name that ends in .png, .svg or .pdf")
        plot(runs, [folder.resolve().name for folder in folders], out, a.smooth, a.title)
    except ImportError as e:
        sys.exit(f"plot.py needs matplotlib ({e}): pip install -r scripts/requirements.txt")
    except (LogError, OSError) as e:
        sys.exit(f"plot.py: {e}")
    print(out)


if __name__ == "__main__":
    main()
