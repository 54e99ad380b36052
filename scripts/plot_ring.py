#!/usr/bin/env python3
"""Plots how a ring's errors depend on the number of ranks, beside the rows it was measured in: dev/results/<gpu>/

    ring.svg   bf16: mean and largest error of out, dq, dk, dv against fp64, partial results carried in fp32 and in bf16,
               and fp64's result rounded once, as multiples of the error of one rank
    ring_timeline.svg   one layer's attention on each GPU: the blocks, and what travels meanwhile (scripts/trace_ring.py)

    python3 scripts/plot_ring.py   # every GPU that has rows; then scripts/readme_tables.py shows it
"""
import result_plots
from plot import COLOURS, GREY

TENSORS = ["out", "dq", "dk", "dv"]


def plot_ring(plt, found):
    found = [r for r in found if r.get("study") == "ring" and r["dtype"] == "bf16"]
    if not found:
        return None
    at = {(r["carry"], r["ranks"], r["tensor"]): r for r in found}
    ranks = sorted({r["ranks"] for r in found if r["carry"] == "fp32"})
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axes, what in zip(panels, ("mean", "max")):
        for tensor, colour in zip(TENSORS, COLOURS):
            one = at["fp32", 1, tensor][f"{what}_error"]
            for carry, style in (("fp32", "o-"), ("bf16", "s--")):
                ys = [at[carry, n, tensor][f"{what}_error"] / one for n in ranks if (carry, n, tensor) in at]
                axes.plot(range(len(ys)), ys, style, ms=4, color=colour, label=f"{tensor}, {carry}")
            if what == "mean":
                axes.axhline(at["floor", 1, tensor][f"{what}_error"] / one, ls=":", lw=1, color=colour)
        axes.set_xticks(range(len(ranks)), ranks)
        axes.set_xlabel("ranks")
        axes.set_ylim(bottom=0)
        axes.set_title({"mean": "mean error", "max": "largest error"}[what] + ", multiples of one rank's")
    marks = [plt.Line2D([], [], color=c, label=t) for t, c in zip(TENSORS, COLOURS)]
    marks += [plt.Line2D([], [], color=GREY, ls=ls, marker=m, ms=4, label=label) for ls, m, label in
              (("-", "o", "carried in fp32"), ("--", "s", "carried in bf16"), (":", "", "fp64, rounded once"))]
    figure.legend(handles=marks, loc="outside lower center", ncols=7, frameon=False)
    figure.suptitle(f"Ring attention, T {found[0]['T']}, bf16, {found[0]['gpu']}: flat is better", x=0.01, ha="left")
    return figure


def plot_timeline(plt, found):
    if not found:
        return None
    most = max(r["gpus"] for r in found)
    found = [r for r in found if r["gpus"] == most]
    ranks = range(found[0]["gpus"])
    figure, panels = plt.subplots(2, 1, figsize=(11, 1.6 + 1.1 * len(ranks)), layout="constrained")
    for axes, way in zip(panels, ("forward", "backward")):
        for rank, e in ((r["rank"], e) for r in found if r["pass"] == way for e in r["events"]):
            copy, block = e["what"] == "copy", e["name"].startswith(f"{way}_kernel")
            axes.broken_barh([(e["start_ms"], e["ms"])], (2 * rank + copy - 0.4, 0.8), edgecolor="white", lw=0.5,
                             facecolors=COLOURS[1] if copy else COLOURS[0] if block else GREY)
        axes.set_yticks(range(2 * len(ranks)), [f"GPU {rank}{what}" for rank in ranks for what in ("", ", travel")])
        axes.invert_yaxis()
        axes.set_xlabel(f"{way}: ms")
    marks = [plt.Rectangle((0, 0), 1, 1, color=c, label=t) for c, t in
             ((COLOURS[0], "attention, a block"), (GREY, "other kernels"), (COLOURS[1], "copies to the next GPU"))]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Ring of {gpus}, {tokens_per_gpu} tokens each, one layer of GPT-2 124M, {gpu}".format(**found[0]),
                    x=0.01, ha="left")
    return figure


if __name__ == "__main__":
    result_plots.main(__doc__, {"ring": {}, "ring_timeline": {"apart": ["gpus"]}}, lambda plt, found: {
        "ring": plot_ring(plt, found["ring"]), "ring_timeline": plot_timeline(plt, found["ring_timeline"])},
                      "./dev/study_ring --json")
