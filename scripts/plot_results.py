#!/usr/bin/env python3
"""Plots what was measured, beside the rows it was measured in, dev/results/<gpu>/:

    attention_bf16.svg, attention_fp32.svg   TFLOP/s by T, forward and backward, ours and every peer
    accuracy.svg       attention's L2 error against fp64, as a multiple of naive's, by T
    accumulation.svg   what fp16 inside attention's forward buys and costs, a panel for each kernel of
                       dev/study_accumulation: TFLOP/s against L2 error, a point a variant. Speed and errors on N(0,1)
                       are those of the longest T up to 4096 that was timed. Hollow: for some magnitude of q, k, v
                       some element was not finite.
    ring.svg           bf16: mean and largest error of out, dq, dk, dv against fp64 by number of ranks, as multiples of
                       one rank's: partial results carried in fp32, in bf16, and fp64's result rounded once
    ring_timeline.svg  one layer's attention on each GPU: the blocks, and what travels meanwhile (trace_ring.py)
    memory.svg         GiB in use when training one sequence, by its length T. Each dashed line goes through the first
                       and the last point. Where memory is linear in T every point lies on its line. A T×T matrix
                       anywhere would lift the last one far above.

    python3 scripts/plot_results.py              # all that there are rows for, of every GPU
    python3 scripts/plot_results.py ring memory  # only those; then scripts/readme_tables.py shows them in README
"""
import argparse
import math
import pathlib
import sys

import results
from plot import COLOURS, GREY, INK, pyplot
from readme_tables import TENSORS, VEHICLES

INPUTS = {"normal": ("N(0,1)", "-"), "large_q": ("q ×5", "--"), "shifted": ("mean +0.5", ":")}
DTYPES = dict(zip(("fp16", "bf16"), COLOURS))
SETTINGS = ["model", "dtype", "attention", "recompute"]


def finish(figure, title, handles, columns):
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def looks(found):
    """Kernel → line: naive grey, peers dashed, ours solid and thick."""
    kernels = results.kernels_of(found)[::-1]
    colours = iter(COLOURS * len(kernels))
    return {k: {"color": GREY, "lw": 1.3, "ls": ":" if k == "naive_tf32" else "-"} if k.startswith("naive") else
            {"color": next(colours), "lw": 2.4 if k.startswith("flash") else 1.3,
             "ls": "-" if k.startswith("flash") else "--"} for k in kernels}


def axis_of_lengths(axes, lengths, labels):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()


def plot_attention(plt, found):
    """A panel a pass and head size. Of the batches at a T the largest, which fills the GPU best."""
    found = [r for r in found if r["causal"] and r["ms"]]
    if not found:
        return None
    sizes, style = sorted({r["HS"] for r in found}), looks(found)
    figure, panels = plt.subplots(len(sizes), 2, figsize=(10, 0.6 + 3.4 * len(sizes)), squeeze=False,
                                  layout="constrained")
    handles = {}
    for row, HS in zip(panels, sizes):
        of_size = [r for r in found if r["HS"] == HS]
        batch = {T: max(r["B"] for r in of_size if r["T"] == T) for T in sorted({r["T"] for r in of_size})}
        for axes, pas, text in zip(row, ("fwd", "bwd"), ("forward", "backward")):
            for kernel, look in style.items():
                points = sorted((r["T"], r["tflops"], r["tflops_sustained"] or math.nan) for r in of_size
                                if (r["kernel"], r["pass"], r["B"]) == (kernel, pas, batch[r["T"]]))
                if points:
                    lengths, cool, sustained = zip(*points)
                    line = axes.plot(lengths, cool, marker="o", ms=4, mec="white", mew=0.6, label=kernel, **look)
                    handles[kernel] = line[0]
                    axes.plot(lengths, sustained, ls="none", marker="_", ms=8, color=look["color"])
            axis_of_lengths(axes, list(batch), [f"{T}\nB {B}" for T, B in batch.items()])
            axes.set_title(f"{found[0]['dtype']} {text}, head size {HS}")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("TFLOP/s")
            axes.set_xlabel("T")
    return finish(figure, f"Causal attention, {found[0]['gpu']}: cool (lines) and sustained (dashes)",
                  [handles[kernel] for kernel in style if kernel in handles], 4)


def plot_accuracy(plt, found):
    from matplotlib.ticker import LogLocator
    found = [r for r in found if r["causal"] and r["kernel"].startswith("flash") and r["ratio_l2"]]
    if not found:
        return None
    dtypes, style = sorted({r["dtype"] for r in found}, reverse=True), looks(found)
    figure, panels = plt.subplots(len(dtypes), len(TENSORS), figsize=(12, 0.6 + 2.6 * len(dtypes)), squeeze=False,
                                  sharex=True, layout="constrained")
    lengths = sorted({r["T"] for r in found})
    for row, dtype in zip(panels, dtypes):
        for axes, tensor in zip(row, TENSORS):
            for kernel, look in style.items():
                for name, (_, ls) in INPUTS.items():
                    worst = {}  # of the head sizes
                    for r in sorted(found, key=lambda r: r["T"]):
                        if (r["dtype"], r["tensor"], r["kernel"], r["input"]) == (dtype, tensor, kernel, name):
                            worst[r["T"]] = max(worst.get(r["T"], 0), r["ratio_l2"])
                    axes.plot(list(worst), list(worst.values()), marker="o", ms=3, color=look["color"], ls=ls, lw=1.4)
            axes.axhline(1, color=INK, lw=0.8)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.4), max(high, 2.5))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis_of_lengths(axes, lengths, [str(T) for T in lengths])
            axes.tick_params(axis="x", rotation=60)
            axes.set_title(f"{dtype} {tensor}")
        row[0].set_ylabel("multiple of naive's L2 error")
    marks = [plt.Line2D([], [], color=look["color"], lw=3, label=kernel) for kernel, look in style.items()]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, label=text) for text, ls in INPUTS.values()]
    return finish(figure, f"Error against fp64 by T, {found[0]['gpu']}", marks, len(marks))


def plot_accumulation(plt, found):
    def timed_as(r):
        """The shift is a number in the exponent: its kernel is the one without it."""
        return r["kernel"], r["dtype"], "+".join(p for p in r["variant"].split("+") if p != "shift") or "base"
    speeds = {(*timed_as(r), r["T"]): r["tflops"] for r in found if "ms" in r}
    errors = [r for r in found if "input" in r]
    lengths = {key[3] for key in speeds} & {r["T"] for r in errors if r["T"] <= 4096}
    if not lengths:
        return None
    T = max(lengths)
    overflown = {(r["kernel"], r["dtype"], r["variant"]) for r in errors if r["not_finite"]}
    vehicles = [v for v in VEHICLES if any(key[0] == v for key in speeds)]
    figure, panels = plt.subplots(1, len(vehicles), figsize=(6 * len(vehicles), 5.5), squeeze=False, sharey=True,
                                  layout="constrained")
    for axes, vehicle in zip(panels[0], vehicles):
        points = sorted((r["relative_l2"], speeds[(*timed_as(r), T)], r["dtype"], r["variant"]) for r in errors
                        if (r["kernel"], r["input"], r["T"]) == (vehicle, "normal", T) and r["relative_l2"] and
                        (*timed_as(r), T) in speeds)
        left, label = False, ""
        for i, (error, speed, dtype, variant) in enumerate(points):
            colour = DTYPES[dtype]
            hollow = (vehicle, dtype, variant) in overflown
            axes.plot(speed, error, "o", ms=6, color=colour, mfc="white" if hollow else colour)
            label += (", " if label else "") + variant
            if i + 1 < len(points) and points[i + 1][1:3] == (speed, dtype) and points[i + 1][0] < 1.01 * error:
                continue  # the same point: one label
            left = not left  # neighbours' labels go to different sides
            axes.annotate(label, (speed, error), (-6 if left else 6, -2), textcoords="offset points", fontsize=7,
                          color=colour, ha="right" if left else "left")
            label = ""
        axes.set_yscale("log")
        axes.margins(x=0.3)
        axes.set_xlabel("TFLOP/s")
        axes.set_title(vehicle)
    panels[0][0].set_ylabel("relative L2 error of out")
    marks = [plt.Line2D([], [], ls="none", marker="o", color=colour, label=dtype) for dtype, colour in DTYPES.items()]
    marks.append(plt.Line2D([], [], ls="none", marker="o", color=GREY, mfc="white", label="not finite for some inputs"))
    return finish(figure, f"fp16 in the forward, T {T}, {found[0]['gpu']}: right is faster, down is better", marks, 3)


def plot_memory(plt, found):
    found = [{**results.DEFAULTS, **r} for r in found]
    same, varying = results.shared(found, SETTINGS)
    lines = {}
    for r in found:
        lines.setdefault(tuple(r[field] for field in SETTINGS), []).append((r["T"], r["mem_gib"]))
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (settings, points), colour in zip(sorted(lines.items()), COLOURS * len(lines)):
        points.sort()
        (first, low), (last, high) = points[0], points[-1]
        name = ", ".join(f"{f} {r}" if f == "recompute" else r for f, r in zip(SETTINGS, settings) if f in varying)
        if len(points) > 1:
            axes.plot([first, last], [low, high], color=colour, lw=1.3, ls="--")
            name += f"{': ' if name else ''}{(high - low) / (last - first) * 1024:.2f} GiB per 1024 tokens"
        axes.plot(*zip(*points), ls="none", marker="o", ms=6, mec="white", mew=0.8, color=colour, label=name)
    lengths = sorted({r["T"] for r in found})
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("T")
    axes.set_ylabel("GiB in use")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(f"Training with B 1, {same + ', ' if same else ''}{found[0]['gpu']}")
    return figure


def plot_ring(plt, found):
    at = {(r["carry"], r["ranks"], r["tensor"]): r for r in found}
    ranks = sorted({r["ranks"] for r in found if r["carry"] == "fp32"})
    tensors = {t: {"color": colour} for t, colour in zip(("out", "dq", "dk", "dv"), COLOURS)}
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, field, title in zip(panels, ("mean_error", "max_error"), ("mean error", "largest error")):
        for tensor, look in tensors.items():
            one = at["fp32", 1, tensor][field]
            for carry, style in (("fp32", "o-"), ("bf16", "s--")):
                ys = [at[carry, n, tensor][field] / one for n in ranks if (carry, n, tensor) in at]
                axes.plot(range(len(ys)), ys, style, ms=4, label=f"{tensor}, {carry}", **look)
            if field == "mean_error":
                axes.axhline(at["floor", 1, tensor][field] / one, ls=":", lw=1, **look)
        axes.set_xticks(range(len(ranks)), ranks)
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0)
        axes.set_title(f"{title}, multiples of one rank's")
    marks = [plt.Line2D([], [], label=tensor, **look) for tensor, look in tensors.items()]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, marker=m, ms=4, label=label) for ls, m, label in
              (("-", "o", "carried in fp32"), ("--", "s", "carried in bf16"), (":", "", "fp64, rounded once"))]
    title = f"Ring attention, T {found[0]['T']}, bf16, {found[0]['gpu']}: flat is better"
    return finish(figure, title, marks, 7)


def plot_timeline(plt, found):
    most = max(r["gpus"] for r in found)
    found = [r for r in found if r["gpus"] == most]
    figure, panels = plt.subplots(2, 1, figsize=(11, 1.6 + 1.1 * most), layout="constrained")
    for axes, way in zip(panels, ("forward", "backward")):
        for rank, e in ((r["rank"], e) for r in found if r["pass"] == way for e in r["events"]):
            copy, block = e["what"] == "copy", e["name"].startswith(f"{way}_kernel")
            axes.broken_barh([(e["start_ms"], e["ms"])], (2 * rank + copy - 0.4, 0.8), edgecolor="white", lw=0.5,
                             facecolors=COLOURS[1] if copy else COLOURS[0] if block else GREY)
        axes.set_yticks(range(2 * most), [f"GPU {rank}{what}" for rank in range(most) for what in ("", ", travel")])
        axes.invert_yaxis()
        axes.set_xlabel(f"{way}: ms")
    marks = [plt.Rectangle((0, 0), 1, 1, color=c, label=t) for c, t in
             ((COLOURS[0], "attention, a block"), (GREY, "other kernels"), (COLOURS[1], "copies to the next GPU"))]
    title = "Ring of {gpus}, {tokens_per_gpu} tokens each, one layer of GPT-2 124M, {gpu}".format(**found[0])
    return finish(figure, title, marks, 3)


# Each plot's rows, as read_rows() is asked for them, its function, and the command that measures them. No plot is made
# without rows, or where the function gives None.
PLOTS = {"attention_bf16": ("attention", {"dtype": "bf16"}, plot_attention, "./dev/bench_attention --json"),
         "attention_fp32": ("attention", {"dtype": "fp32"}, plot_attention, "./dev/bench_attention --json"),
         "accuracy": ("accuracy", {"apart": ["HS"]}, plot_accuracy, "./dev/accuracy --json"),
         "accumulation": ("accumulation", {}, plot_accumulation, "./dev/study_accumulation --json"),
         "ring": ("ring", {"study": "ring", "dtype": "bf16"}, plot_ring, "./dev/study_ring --json"),
         "ring_timeline": ("ring_timeline", {"apart": ["gpus"]}, plot_timeline, "scripts/trace_ring.py --json"),
         "memory": ("train", {"apart": ["dtype"], "kernel": "train_gpt2cu", "B": 1}, plot_memory,
                    "./dev/bench_train --json --shapes 1x16384,1x32768")}


def main():
    arg = results.arguments(__doc__)
    arg.add_argument("plots", nargs="*", metavar="PLOT", help=f"some of {', '.join(PLOTS)} (default: all)")
    arg.add_argument("--root", type=pathlib.Path, default=results.ROOT, help=argparse.SUPPRESS)  # for tests
    a = arg.parse_args()
    for name in set(a.plots) - set(PLOTS):
        arg.error(f'"{name}": expected some of {", ".join(PLOTS)}')
    plt = pyplot()
    plt.rcParams.update({"axes.xmargin": 0.05})
    folder, missing = a.root / "dev" / "results", []
    for name in a.plots or PLOTS:
        bench, query, draw, measure = PLOTS[name]
        written = []
        for path in sorted(folder.glob(f"*/{bench}.jsonl")):
            found = results.read_rows(path, **query)
            if found and (figure := draw(plt, found)):
                written.append(path.with_name(f"{name}.svg"))
                # Neither date nor version: the same rows give the same file.
                figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
                plt.close(figure)
                print(written[-1])
        if not written:
            missing.append(f"no rows for {name}.svg: run {measure} first")
    if a.plots and missing or len(missing) == len(PLOTS):
        results.fail(f"{folder}: {'; '.join(missing)}")
    for what in missing:
        print(what, file=sys.stderr)


if __name__ == "__main__":
    main()
