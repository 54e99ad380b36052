#!/usr/bin/env python3
"""Plots what was measured, beside the rows it was measured in: dev/results/<gpu>/<plot>.svg.

    python3 scripts/plot_results.py              # all that there are rows for, of every GPU
    python3 scripts/plot_results.py ring memory  # only those; then scripts/readme_tables.py shows them in README
"""
import math
import sys
from operator import itemgetter

import results
from plot import COLOURS, GREY, INK, pyplot
from results import TENSORS, kind_of, matching, values

INPUTS = {"normal": ("N(0,1)", "-"), "large_q": ("q ×5", "--"), "shifted": ("mean +0.5", ":")}
SETTINGS = ["attention", "dtype", "model", "recompute"]
SQUARES = {"d12": 13 * 12, "d24": 25 * 16, "d36": 37 * 20, "d48": 49 * 25}  # T×T of naive: P by layer and head, and dP


def panels_of(plt, rows, columns, width, height, **options):
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def finish(figure, title, handles, columns, place="lower center"):
    figure.legend(handles=handles, loc=f"outside {place}", ncols=columns, frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def looks(rows):
    """Kernel → line: naive grey, ours solid and thick, peers dashed, with marks and gaps of their own."""
    found, colours, marks = {}, iter(COLOURS * len(rows)), iter("sD^vPX" * len(rows))
    for kernel in results.kernels_of(rows)[::-1]:
        kind = kind_of(kernel)
        found[kernel] = {"color": GREY if kind == "naive" else next(colours), "lw": 2.4 if kind == "ours" else 1.3,
                         "ls": ":" if kernel == "naive_tf32" else "-", "marker": "o", "ms": 5, "mec": "white",
                         "mew": 0.6}
        if kind == "peer":  # where it lies on another it shows between its dashes
            found[kernel] |= {"marker": next(marks), "mew": 0, "ls": (4 * (len(found) % 2), (4, 4))}
    return found


def axis_of_lengths(axes, lengths, labels):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()


def plot_attention(plt, rows):
    """A panel a pass and head size. Of the batches at a T the largest, which fills the GPU best."""
    rows = sorted((r for r in rows if r["ms"]), key=itemgetter("T", "B"))
    sizes, style = sorted({r["HS"] for r in rows}), looks(rows)
    figure, panels = panels_of(plt, len(sizes), 2, 10, 0.6 + 3.4 * len(sizes))
    last = {r["kernel"]: r["tflops"] for r in matching(rows, HS=sizes[0], **{"pass": "fwd"})}
    style = dict(sorted(style.items(), key=lambda kernel: -last.get(kernel[0], 0)))  # as curves end in the first panel
    for line, HS in zip(panels, sizes):
        batch = {r["T"]: r["B"] for r in matching(rows, HS=HS)}  # the largest comes last
        for axes, way, text in zip(line, ("fwd", "bwd"), ("forward", "backward")):
            for i, (kernel, look) in enumerate(style.items()):
                points = [r for r in matching(rows, HS=HS, kernel=kernel, **{"pass": way}) if r["B"] == batch[r["T"]]]
                lengths = [r["T"] * 2 ** ((i - len(style) // 2) / 32) for r in points]  # side by side at a T
                cool, sustained = ([r[rate] or math.nan for r in points] for rate in ("tflops", "tflops_sustained"))
                axes.plot(lengths, cool, **look)
                axes.vlines(lengths, sustained, cool, look["color"])
            axis_of_lengths(axes, list(batch), [f"{T}\nB {B}" for T, B in batch.items()])
            axes.set_title(f"{rows[0]['dtype']} {text}, head size {HS}")
            axes.set_ylim(bottom=0)
            axes.set(xlabel="T", ylabel="TFLOP/s")
    marks = [plt.Line2D([], [], label=kernel, **look) for kernel, look in style.items()]
    title = f"Causal attention, {rows[0]['gpu']}: cool at the marks, sustained where a line down from them ends"
    return finish(figure, title, marks, 1, "right upper")


def plot_accuracy(plt, rows):
    from matplotlib.ticker import LogLocator
    rows = [r for r in rows if kind_of(r["kernel"]) == "ours" and r["ratio_l2"]]
    rows.sort(key=itemgetter("T"))
    dtypes, style = sorted({r["dtype"] for r in rows}, reverse=True), looks(rows)
    for dtype in dtypes:  # of points that coincide the first kernel's is the ring around the others'
        for i, look in enumerate(look for kernel, look in style.items() if matching(rows, dtype=dtype, kernel=kernel)):
            look |= {"lw": 1.4, "mec": look["color"], "ms": 3 if i else 7, "mfc": look["color"] if i else "white"}
    lengths = sorted({r["T"] for r in rows})
    figure, panels = panels_of(plt, len(dtypes), len(TENSORS), 10, 0.6 + 2.6 * len(dtypes), sharex=True)
    for line, dtype in zip(panels, dtypes):
        for axes, tensor in zip(line, TENSORS):
            for kernel, look in style.items():
                for name, (_, ls) in INPUTS.items():
                    worst = {}  # of the head sizes
                    for r in matching(rows, dtype=dtype, tensor=tensor, kernel=kernel, input=name):
                        worst[r["T"]] = max(worst.get(r["T"], 0), r["ratio_l2"])
                    axes.plot(list(worst), list(worst.values()), **{**look, "ls": ls})
            axes.axhline(1, color=INK, lw=0.8)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.4), max(high, 2.5))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if low > 0.01 else (1,)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis_of_lengths(axes, lengths, [f"{T // 1024}k" if T % 1024 == 0 else T for T in lengths])
            axes.set_title(f"{dtype} {tensor}")
        line[0].set_ylabel("multiple of naive's L2 error")
    marks = [plt.Line2D([], [], label=kernel, **look) for kernel, look in style.items()]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, label=text) for text, ls in INPUTS.values()]
    return finish(figure, f"Error against fp64 by T, {rows[0]['gpu']}", marks, len(marks))


def plot_memory(plt, rows):
    """Each line goes through the first and the last point. If memory is linear in T, every point lies on its line."""
    rows.sort(key=itemgetter(*SETTINGS, "T"))
    same, varying = results.shared(rows, SETTINGS[2:])
    figure, axes = plt.subplots(figsize=(10, 4.6), layout="constrained")
    lines, top = dict.fromkeys(values(r, SETTINGS) for r in rows), 3 * max(r["mem_gib"] for r in rows)
    dotted, measured = [], []  # as the legend shows them
    for settings, colour in zip([*lines][::-1], COLOURS * len(lines)):
        attention, dtype, model, _ = settings
        points = [(r["T"], r["mem_gib"]) for r in rows if values(r, SETTINGS) == settings]
        (first, low), (last, high) = points[0], points[-1]
        name = " ".join([attention, dtype, *(f"{f} {r}" for f, r in zip(SETTINGS, settings) if f in varying)])
        if len(points) > 1:
            slope = (high - low) / (last - first)
            axes.plot([first, last], [low, high], color=colour, lw=1.3)
            name += f": {1024 * slope:.2f} GiB per 1024 tokens"
            if attention == "flash":
                more = SQUARES[model] * (4 if dtype == "fp32" else 2) / 2**30
                curve = [(T, low + slope * (T - first) + more * T * T) for T in range(1024, last, 64)]
                dotted += axes.plot(*zip(*(at for at in curve if at[1] < top)), color=colour, lw=1.8, ls=":",
                                    label=f"naive {dtype}, computed: flash and the T×T matrices")
        measured += axes.plot(*zip(*points), "o", ms=6, mec="white", mew=0.8, color=colour, label=name)
    lengths = sorted({r["T"] for r in rows})
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else T for T in lengths])
    axes.set(xlabel="T", ylabel="GiB in use", xlim=(0, None), ylim=(0, top))
    axes.legend(handles=dotted + measured, loc="upper right", frameon=False)
    axes.set_title(f"Training with B 1, {same + ', ' if same else ''}{rows[0]['gpu']}")
    return figure


def plot_ring(plt, rows):
    at = {values(r, ["carry", "ranks", "tensor"]): r for r in rows}
    ranks, tensors = sorted({r["ranks"] for r in matching(rows, carry="fp32")}), ("out", "dq", "dk", "dv")
    styles = {"bf16": {"color": COLOURS[1], "ls": "--", "marker": "s", "ms": 7, "mfc": "white"},  # seen around a dot
              "fp32": {"color": COLOURS[0], "ls": "-", "marker": "o", "ms": 4}}
    figure, panels = panels_of(plt, 2, len(tensors), 10, 5, sharex=True, sharey="row")
    for line, field, text in zip(panels, ("mean_error", "max_error"), ("mean", "largest")):
        for axes, tensor in zip(line, tensors):
            one = at["fp32", 1, tensor][field]
            for carry, style in styles.items():
                ys = [at[carry, n, tensor][field] / one for n in ranks if (carry, n, tensor) in at]
                axes.plot(range(len(ys)), ys, **style)
            axes.set_xticks(range(len(ranks)), ranks)
            axes.set(title=f"{tensor}: {text} error", xlabel="ranks" if axes in panels[-1] else "")
        line[0].set(ylabel="multiple of one rank's", ylim=(0, 1.1 * line[0].get_ylim()[1]))
    marks = [plt.Line2D([], [], label=f"carried in {carry}", **style) for carry, style in styles.items()]
    return finish(figure, f"Ring attention, T {rows[0]['T']}, bf16, {rows[0]['gpu']}: flat is better", marks, 2)


# Each plot has a function, a file of rows, and what read_rows() is asked for. Then come the part of scripts/measure.sh
# that measures the rows, and words for those who cannot see the plot.
PLOTS = {
    "attention_bf16": (plot_attention, "attention", {"dtype": "bf16", "causal": True}, "bf16",
                       "TFLOP/s by T of the bf16 kernels, ours thick, peers dashed"),
    "attention_fp32": (plot_attention, "attention", {"dtype": "fp32", "causal": True}, "fp32",
                       "TFLOP/s by T of the fp32 kernels, ours thick, peers dashed"),
    "accuracy": (plot_accuracy, "accuracy", {"apart": ["HS"], "causal": True}, "accuracy",
                 "L2 errors by T as multiples of naive's, a panel for each tensor in fp32 and in bf16"),
    "ring": (plot_ring, "ring", {"study": "ring", "dtype": "bf16"}, "ring",
             "Errors by number of ranks, flat with partial results in fp32 and mostly larger in bf16"),
    "memory": (plot_memory, "train", {"apart": ["dtype"], "kernel": "train_gpt2cu", "B": 1}, "memory",
               "GiB by T, straight lines with flash, parabolas with naive")}


@results.check_stdout()
def main():
    arg = results.arguments(__doc__)
    arg.add_argument("plots", nargs="*", metavar="PLOT", help=f"some of {', '.join(PLOTS)} (default: all)")
    names = arg.parse_args().plots or PLOTS
    for name in set(names) - set(PLOTS):
        arg.error(f'"{name}": expected some of {", ".join(PLOTS)}')
    plt = pyplot()
    plt.rcParams["axes.xmargin"] = 0.05
    for name in names:
        draw, bench, query, part, _ = PLOTS[name]
        found = {path: results.read_rows(path, **query) for path in sorted(results.RESULTS.glob(f"*/{bench}.jsonl"))}
        if not any(found.values()):
            print(f"no rows for {name}.svg: scripts/measure.sh {part}", file=sys.stderr)
        for path, rows in found.items():
            if rows:
                svg = path.with_name(f"{name}.svg")
                # Neither date nor version: the same rows give the same file.
                draw(plt, rows).savefig(svg, metadata={"Date": None, "Creator": None})
                print(svg)


if __name__ == "__main__":
    main()
