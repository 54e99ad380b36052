#!/usr/bin/env python3
"""Plots what was measured of attention, beside the rows it was measured in: dev/results/<gpu>/

    attention_bf16.svg, attention_fp32.svg   TFLOP/s by T, forward and backward, ours and every peer
    accuracy.svg                             L2 error against fp64, as a multiple of naive's, by T

    python3 scripts/plot_attention.py      # every GPU that has rows; then scripts/readme_tables.py shows them in README
"""
import result_plots
from plot import COLOURS, GREY, INK
from readme_tables import TENSORS, kernels_of

INPUTS = {"normal": ("N(0,1)", "-"), "large_q": ("q ×5", "--"), "shifted": ("mean +0.5", ":")}


def looks(found):
    """Kernel → line: naive grey, peers dashed, ours solid and thick."""
    kernels = kernels_of(found)[::-1]
    colours = iter(COLOURS * len(kernels))
    return {k: {"color": GREY, "lw": 1.3, "ls": ":" if k == "naive_tf32" else "-"} if k.startswith("naive") else
            {"color": next(colours), "lw": 2.4 if k.startswith("flash") else 1.3,
             "ls": "-" if k.startswith("flash") else "--"} for k in kernels}


def axis_of_lengths(axes, lengths, labels):
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, labels)
    axes.minorticks_off()


def plot_attention(plt, found, dtype):
    """A panel a pass and head size. Of the batches at a T the largest, which fills the GPU best."""
    found = [r for r in found if r["dtype"] == dtype and r["causal"] and r["ms"]]
    sizes = sorted({r["HS"] for r in found})
    if not found:
        return None
    style = looks(found)
    figure, panels = plt.subplots(len(sizes), 2, figsize=(10, 0.6 + 3.4 * len(sizes)), squeeze=False,
                                  layout="constrained")
    for row, HS in zip(panels, sizes):
        of_size = [r for r in found if r["HS"] == HS]
        batch = {T: max(r["B"] for r in of_size if r["T"] == T) for T in sorted({r["T"] for r in of_size})}
        for axes, pas, text in zip(row, ("fwd", "bwd"), ("forward", "backward")):
            for kernel, look in style.items():
                points = sorted((r["T"], r["tflops"], r["tflops_sustained"] or float("nan")) for r in of_size
                                if (r["kernel"], r["pass"], r["B"]) == (kernel, pas, batch[r["T"]]))
                if points:
                    lengths, cool, sustained = zip(*points)
                    axes.plot(lengths, cool, marker="o", ms=4, mec="white", mew=0.6, label=kernel, **look)
                    axes.plot(lengths, sustained, ls="none", marker="_", ms=8, color=look["color"])
            axis_of_lengths(axes, list(batch), [f"{T}\nB {B}" for T, B in batch.items()])
            axes.set_title(f"{dtype} {text}, head size {HS}")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("TFLOP/s")
            axes.set_xlabel("T")
    handles = {h.get_label(): h for row in panels for axes in row for h in axes.get_legend_handles_labels()[0]}
    handles = [handles[k] for k in style if k in handles]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"Causal attention, {found[0]['gpu']}: cool (lines) and sustained (dashes)", x=0.01, ha="left")
    return figure


def plot_accuracy(plt, found):
    from matplotlib.ticker import LogLocator
    found = [r for r in found if r["causal"] and r["kernel"].startswith("flash") and r["ratio_l2"]]
    dtypes = sorted({r["dtype"] for r in found}, reverse=True)
    if not found:
        return None
    style = looks(found)
    figure, panels = plt.subplots(len(dtypes), len(TENSORS), figsize=(12, 0.6 + 2.6 * len(dtypes)), squeeze=False,
                                  sharex=True, layout="constrained")
    for row, dtype in zip(panels, dtypes):
        for axes, tensor in zip(row, TENSORS):
            here = [r for r in found if (r["dtype"], r["tensor"]) == (dtype, tensor)]
            for kernel, look in style.items():
                for name, (_, ls) in INPUTS.items():
                    points = sorted((r["T"], r["HS"], r["ratio_l2"]) for r in here
                                    if (r["kernel"], r["input"]) == (kernel, name))
                    worst = {T: max(p[2] for p in points if p[0] == T) for T, _, _ in points}  # of the head sizes
                    axes.plot(list(worst), list(worst.values()), marker="o", ms=3, color=look["color"], ls=ls, lw=1.4)
            axes.axhline(1, color=INK, lw=0.8)
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.set_ylim(min(low, 0.4), max(high, 2.5))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
            lengths = sorted({r["T"] for r in found})
            axis_of_lengths(axes, lengths, [str(T) for T in lengths])
            axes.tick_params(axis="x", rotation=60)
            axes.set_title(f"{dtype} {tensor}")
        row[0].set_ylabel("multiple of naive's L2 error")
    lines = [plt.Line2D([], [], color=look["color"], lw=3, label=k) for k, look in style.items()]
    lines += [plt.Line2D([], [], color=GREY, ls=ls, label=text) for text, ls in INPUTS.values()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(f"Error against fp64 by T, {found[0]['gpu']}", x=0.01, ha="left")
    return figure


def figures(plt, found):
    return {"attention_bf16": plot_attention(plt, found["attention"], "bf16"),
            "attention_fp32": plot_attention(plt, found["attention"], "fp32"),
            "accuracy": plot_accuracy(plt, found["accuracy"])}


if __name__ == "__main__":
    result_plots.main(__doc__, {"attention": {"apart": ["dtype"]}, "accuracy": {"apart": ["HS"]}}, figures, "./dev/bench_attention --json")
