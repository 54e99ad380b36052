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
from operator import itemgetter

import results
from plot import COLOURS, GREY, INK, pyplot
from readme_tables import TENSORS, VEHICLES
from results import matching, values

INPUTS = {"normal": ("N(0,1)", "-"), "large_q": ("q ×5", "--"), "shifted": ("mean +0.5", ":")}
DTYPES = dict(zip(("fp16", "bf16"), COLOURS))
COOL = {"marker": "o", "ms": 4, "mec": "white", "mew": 0.6}
SETTINGS = ["model", "dtype", "attention", "recompute"]


def panels_of(plt, rows, columns, width, height, **options):
    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False, layout="constrained", **options)


def finish(figure, title, handles, columns):
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def looks(rows):
    """Kernel → line: naive grey, peers dashed, ours solid and thick."""
    found, colours = {}, iter(COLOURS * len(rows))
    for kernel in results.kernels_of(rows)[::-1]:
        if kernel.startswith("naive"):
            found[kernel] = {"color": GREY, "lw": 1.3, "ls": ":" if kernel == "naive_tf32" else "-"}
        elif kernel.startswith("flash"):
            found[kernel] = {"color": next(colours), "lw": 2.4, "ls": "-"}
        else:
            found[kernel] = {"color": next(colours), "lw": 1.3, "ls": "--"}
    return found


def axis_of_lengths(axes, lengths, labels):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()


def plot_attention(plt, rows):
    """A panel a pass and head size. Of the batches at a T the largest, which fills the GPU best."""
    rows = sorted((r for r in rows if r["causal"] and r["ms"]), key=itemgetter("T", "B"))
    sizes, style = sorted({r["HS"] for r in rows}), looks(rows)
    if not rows:
        return None
    figure, panels = panels_of(plt, len(sizes), 2, 10, 0.6 + 3.4 * len(sizes))
    for line, HS in zip(panels, sizes):
        batch = {r["T"]: r["B"] for r in matching(rows, HS=HS)}  # the largest comes last
        for axes, way, text in zip(line, ("fwd", "bwd"), ("forward", "backward")):
            for kernel, look in style.items():
                points = [r for r in matching(rows, HS=HS, kernel=kernel, **{"pass": way}) if r["B"] == batch[r["T"]]]
                if points:
                    lengths, sustained = [r["T"] for r in points], [r["tflops_sustained"] or math.nan for r in points]
                    axes.plot(lengths, [r["tflops"] for r in points], **COOL, **look)
                    axes.plot(lengths, sustained, ls="none", marker="_", ms=8, color=look["color"])
            axis_of_lengths(axes, list(batch), [f"{T}\nB {B}" for T, B in batch.items()])
            axes.set_title(f"{rows[0]['dtype']} {text}, head size {HS}")
            axes.set_ylim(bottom=0)
            axes.set(xlabel="T", ylabel="TFLOP/s")
    marks = [plt.Line2D([], [], label=kernel, **COOL, **look) for kernel, look in style.items()]
    return finish(figure, f"Causal attention, {rows[0]['gpu']}: cool (lines) and sustained (dashes)", marks, 4)


def plot_accuracy(plt, rows):
    from matplotlib.ticker import LogLocator
    rows = sorted((r for r in rows if r["causal"] and r["kernel"].startswith("flash") and r["ratio_l2"]),
                  key=itemgetter("T"))
    dtypes, style = sorted({r["dtype"] for r in rows}, reverse=True), looks(rows)
    lengths = sorted({r["T"] for r in rows})
    if not rows:
        return None
    figure, panels = panels_of(plt, len(dtypes), len(TENSORS), 12, 0.6 + 2.6 * len(dtypes), sharex=True)
    for line, dtype in zip(panels, dtypes):
        for axes, tensor in zip(line, TENSORS):
            for kernel, look in style.items():
                for name, (_, ls) in INPUTS.items():
                    worst = {}  # of the head sizes
                    for r in matching(rows, dtype=dtype, tensor=tensor, kernel=kernel, input=name):
                        worst[r["T"]] = max(worst.get(r["T"], 0), r["ratio_l2"])
                    axes.plot(list(worst), list(worst.values()), marker="o", ms=3, color=look["color"], ls=ls, lw=1.4)
            axes.axhline(1, color=INK, lw=0.8)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.4), max(high, 2.5))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            axis_of_lengths(axes, lengths, lengths)
            axes.tick_params(axis="x", rotation=60)
            axes.set_title(f"{dtype} {tensor}")
        line[0].set_ylabel("multiple of naive's L2 error")
    marks = [plt.Line2D([], [], color=look["color"], lw=3, label=kernel) for kernel, look in style.items()]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, label=text) for text, ls in INPUTS.values()]
    return finish(figure, f"Error against fp64 by T, {rows[0]['gpu']}", marks, len(marks))


def plot_accumulation(plt, rows):
    for r in rows:  # the shift is a number in the exponent: its kernel is the one without it
        r["timed_as"] = "+".join(part for part in r["variant"].split("+") if part != "shift") or "base"
    errors, case = [r for r in rows if "input" in r], ["kernel", "dtype", "timed_as", "T"]
    speed = {values(r, case): r["tflops"] for r in rows if "ms" in r}
    lengths = {T for *_, T in speed} & {r["T"] for r in errors if r["T"] <= 4096}
    if not lengths:
        return None
    T = max(lengths)
    vehicles = [v for v in VEHICLES if any(kernel == v for kernel, *_ in speed)]
    figure, panels = panels_of(plt, 1, len(vehicles), 6 * len(vehicles), 5.5, sharey=True)
    for axes, vehicle in zip(panels[0], vehicles):
        points = [r for r in matching(errors, kernel=vehicle, input="normal", T=T)
                  if r["relative_l2"] and values(r, case) in speed]
        points.sort(key=lambda r: (r["relative_l2"], speed[values(r, case)], r["dtype"], r["variant"]))
        left, label = False, []
        for r, following in zip(points, [*points[1:], None]):
            x, y, colour = speed[values(r, case)], r["relative_l2"], DTYPES[r["dtype"]]
            inputs = matching(errors, kernel=vehicle, dtype=r["dtype"], variant=r["variant"])
            overflown = any(e["not_finite"] for e in inputs)
            axes.plot(x, y, "o", ms=6, color=colour, mfc="white" if overflown else colour)
            label.append(r["variant"])
            if following and (speed[values(following, case)], following["dtype"]) == (x, r["dtype"]) and \
                    following["relative_l2"] < 1.01 * y:
                continue  # the same point: one label
            left = not left  # neighbours' labels go to different sides
            axes.annotate(", ".join(label), (x, y), (-6 if left else 6, -2), textcoords="offset points", fontsize=7,
                          color=colour, ha="right" if left else "left")
            label = []
        axes.set_yscale("log")
        axes.margins(x=0.3)
        axes.set(xlabel="TFLOP/s")
        axes.set_title(vehicle)
    panels[0][0].set_ylabel("relative L2 error of out")
    marks = [plt.Line2D([], [], ls="none", marker="o", color=colour, label=dtype) for dtype, colour in DTYPES.items()]
    marks.append(plt.Line2D([], [], ls="none", marker="o", color=GREY, mfc="white", label="not finite for some inputs"))
    return finish(figure, f"fp16 in the forward, T {T}, {rows[0]['gpu']}: right is faster, down is better", marks, 3)


def plot_memory(plt, rows):
    rows.sort(key=itemgetter(*SETTINGS, "T"))
    same, varying = results.shared(rows, SETTINGS)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    lines = dict.fromkeys(values(r, SETTINGS) for r in rows)
    for settings, colour in zip(lines, COLOURS * len(lines)):
        points = [(r["T"], r["mem_gib"]) for r in rows if values(r, SETTINGS) == settings]
        (first, low), (last, high) = points[0], points[-1]
        name = ", ".join(f"{f} {r}" if f == "recompute" else r for f, r in zip(SETTINGS, settings) if f in varying)
        if len(points) > 1:
            axes.plot([first, last], [low, high], color=colour, lw=1.3, ls="--")
            name += f"{': ' if name else ''}{(high - low) / (last - first) * 1024:.2f} GiB per 1024 tokens"
        axes.plot(*zip(*points), ls="none", marker="o", ms=6, mec="white", mew=0.8, color=colour, label=name)
    lengths = sorted({r["T"] for r in rows})
    axes.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="T", ylabel="GiB in use")
    axes.legend(loc="lower right", frameon=False)
    axes.set_title(f"Training with B 1, {same + ', ' if same else ''}{rows[0]['gpu']}")
    return figure


def plot_ring(plt, rows):
    at = {values(r, ["carry", "ranks", "tensor"]): r for r in rows}
    ranks = sorted({r["ranks"] for r in matching(rows, carry="fp32")})
    colours = dict(zip(("out", "dq", "dk", "dv"), COLOURS))
    figure, (panels,) = panels_of(plt, 1, 2, 11, 4.2)
    for axes, field, title in zip(panels, ("mean_error", "max_error"), ("mean error", "largest error")):
        for tensor, colour in colours.items():
            one = at["fp32", 1, tensor][field]
            for carry, style in (("fp32", "o-"), ("bf16", "s--")):
                ys = [at[carry, n, tensor][field] / one for n in ranks if (carry, n, tensor) in at]
                axes.plot(range(len(ys)), ys, style, ms=4, color=colour)
            if field == "mean_error":
                axes.axhline(at["floor", 1, tensor][field] / one, ls=":", lw=1, color=colour)
        axes.set_xticks(range(len(ranks)), ranks)
        axes.set_ylim(bottom=0)
        axes.set(xlabel="ranks")
        axes.set_title(f"{title}, multiples of one rank's")
    marks = [plt.Line2D([], [], label=tensor, color=colour) for tensor, colour in colours.items()]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, marker=m, ms=4, label=label) for ls, m, label in
              (("-", "o", "carried in fp32"), ("--", "s", "carried in bf16"), (":", "", "fp64, rounded once"))]
    return finish(figure, f"Ring attention, T {rows[0]['T']}, bf16, {rows[0]['gpu']}: flat is better", marks, 7)


def plot_timeline(plt, rows):
    most = max(r["gpus"] for r in rows)
    rows = matching(rows, gpus=most)
    figure, panels = panels_of(plt, 2, 1, 11, 1.6 + 1.1 * most)
    for (axes,), way in zip(panels, ("forward", "backward")):
        for r in matching(rows, **{"pass": way}):
            for e in r["events"]:
                copy, block = e["what"] == "copy", e["name"].startswith(f"{way}_kernel")
                axes.broken_barh([(e["start_ms"], e["ms"])], (2 * r["rank"] + copy - 0.4, 0.8), lw=0.5,
                                 edgecolor="white", facecolors=COLOURS[1] if copy else COLOURS[0] if block else GREY)
        axes.set_yticks(range(2 * most), [f"GPU {rank}{what}" for rank in range(most) for what in ("", ", travel")])
        axes.invert_yaxis()
        axes.set(xlabel=f"{way}: ms")
    marks = [plt.Rectangle((0, 0), 1, 1, color=colour, label=text) for colour, text in
             ((COLOURS[0], "attention, a block"), (GREY, "other kernels"), (COLOURS[1], "copies to the next GPU"))]
    title = "Ring of {gpus}, {tokens_per_gpu} tokens each, one layer of GPT-2 124M, {gpu}".format_map(rows[0])
    return finish(figure, title, marks, 3)


# Each plot's function, the file of its rows, what read_rows() is asked for, and the command that measures them. No plot
# is made without rows, or where the function gives None.
PLOTS = {
    "attention_bf16": (plot_attention, "attention", {"dtype": "bf16"}, "./dev/bench_attention --json"),
    "attention_fp32": (plot_attention, "attention", {"dtype": "fp32"}, "./dev/bench_attention --json"),
    "accuracy": (plot_accuracy, "accuracy", {"apart": ["HS"]}, "./dev/accuracy --json"),
    "accumulation": (plot_accumulation, "accumulation", {}, "./dev/study_accumulation --json"),
    "ring": (plot_ring, "ring", {"study": "ring", "dtype": "bf16"}, "./dev/study_ring --json"),
    "ring_timeline": (plot_timeline, "ring_timeline", {"apart": ["gpus"]}, "scripts/trace_ring.py --json"),
    "memory": (plot_memory, "train", {"apart": ["dtype"], "kernel": "train_gpt2cu", "B": 1},
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
    folder, drawn = a.root / "dev" / "results", set()
    for name in a.plots or PLOTS:
        draw, bench, query, _ = PLOTS[name]
        for path in sorted(folder.glob(f"*/{bench}.jsonl")):
            rows, svg = results.read_rows(path, **query), path.with_name(f"{name}.svg")
            if rows and (figure := draw(plt, rows)):
                # Neither date nor version: the same rows give the same file.
                figure.savefig(svg, metadata={"Date": None, "Creator": None})
                plt.close(figure)
                drawn.add(name)
                print(svg)
    missing = [f"no rows for {name}.svg: run {PLOTS[name][3]} first" for name in a.plots or PLOTS if name not in drawn]
    if missing and (a.plots or not drawn):
        results.fail(f"{folder}: {'; '.join(missing)}")
    for text in missing:
        print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
