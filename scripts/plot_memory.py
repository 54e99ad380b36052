#!/usr/bin/env python3
"""Plots the memory of training one sequence by its length T, beside the rows it was measured in: dev/results/<gpu>/

    memory.svg       GiB in use at B=1, fp32 and bf16; each dashed line goes through the first and the last point

Where memory is linear in T every point lies on its line; a T×T matrix anywhere would lift the last one far above.

    python3 scripts/plot_memory.py         # every GPU that has rows; then scripts/readme_tables.py shows it in README
"""
import result_plots
from plot import COLOURS
from readme_tables import DEFAULTS, shared

SETTINGS = ["model", "dtype", "attention", "recompute"]


def plot_memory(plt, found):
    found = [{**DEFAULTS, **r} for r in found]
    if not found:
        return None
    same, varying = shared(found, SETTINGS)
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


if __name__ == "__main__":
    result_plots.main(__doc__, {"train": {"apart": ["dtype"], "kernel": "train_gpt2cu", "B": 1}}, lambda plt, found: {"memory": plot_memory(plt, found["train"])},
                      "./dev/bench_train --json --shapes 1x16384,1x32768")
