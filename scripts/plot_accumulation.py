#!/usr/bin/env python3
"""Plots what fp16 inside attention's forward buys and costs, beside the rows it was measured in: dev/results/<gpu>/

    accumulation.svg   a panel for each kernel of dev/study_accumulation: TFLOP/s against L2 error, a point a variant

Speed at the longest T up to 4096 that was timed, errors at the same T on N(0,1). Hollow: for some magnitude of q, k, v
some element was not finite.

    python3 scripts/plot_accumulation.py   # every GPU that has rows; then scripts/readme_tables.py shows it
"""
import result_plots
from plot import COLOURS, GREY
from readme_tables import VEHICLES

LONGEST = 4096
DTYPES = dict(zip(("fp16", "bf16"), COLOURS))


def timed_as(variant):
    """The shift is a number in the exponent: its kernel is the one without it."""
    return "+".join(part for part in variant.split("+") if part != "shift") or "base"


def plot_accumulation(plt, found):
    speeds = {(r["kernel"], r["dtype"], r["variant"], r["T"]): r["tflops"] for r in found if "ms" in r}
    errors = [r for r in found if "input" in r]
    lengths = {key[3] for key in speeds} & {r["T"] for r in errors if r["T"] <= LONGEST}
    if not lengths:
        return None
    T = max(lengths)
    overflown = {(r["kernel"], r["dtype"], r["variant"]) for r in errors if r["not_finite"]}
    vehicles = [v for v in VEHICLES if any(key[0] == v for key in speeds)]
    figure, panels = plt.subplots(1, len(vehicles), figsize=(6 * len(vehicles), 5.5), squeeze=False, sharey=True,
                                  layout="constrained")
    for axes, vehicle in zip(panels[0], vehicles):
        points = sorted((r["relative_l2"], speeds[vehicle, r["dtype"], timed_as(r["variant"]), T], r["dtype"], r["variant"])
                        for r in errors if (r["kernel"], r["input"], r["T"]) == (vehicle, "normal", T) and
                        r["relative_l2"] and (vehicle, r["dtype"], timed_as(r["variant"]), T) in speeds)
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
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"fp16 in the forward, T {T}, {found[0]['gpu']}: right is faster, down is better", x=0.01, ha="left")
    return figure


if __name__ == "__main__":
    result_plots.main(__doc__, {"accumulation": {}},
                      lambda plt, found: {"accumulation": plot_accumulation(plt, found["accumulation"])},
                      "./dev/study_accumulation --json")
