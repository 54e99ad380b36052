#!/usr/bin/env python3
"""Makes the tables and plots of the READMEs from the measured rows in dev/results/*/*.jsonl.

A page has a line <!-- table: NAME --> above each table and <!-- end --> below it. NAME is one of
TABLES, at the end of this file, or

    speed KERNEL    a sentence that says how fast a kernel of attention/ is
    quote FILE      the lines of attention/FILE between // [quote] and // [end]

Plots are SVG files in the folder of the rows that they show.

    python3 scripts/tables.py            writes all tables and plots
    python3 scripts/tables.py --check    writes nothing; names stale tables and exits with 1
"""

import itertools
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import plot
import results

try:
    import numpy as np
    import pandas as pd
except ImportError:
    pd = None  # --help works without pandas

# What tells one training setup from another.
SETUP = ["model", "dtype", "B", "T"]
TENSORS = ["out", "lse", "dq", "dk", "dv"]
# What the READMEs call the libraries' kernels.
LIBRARIES = {
    "fa3_det": "FlashAttention-3",
    "fa3": "FlashAttention-3",
    "torch_cudnn": "cuDNN",
    "torch_flash": "FlashAttention-2",
    "torch_efficient": "PyTorch's memory-efficient attention",
    "torch_math": "PyTorch's attention by matmuls",
}
# The kernels of each type's ladder from the lowest rung to the highest, and what is new in each.
RUNGS = {
    "fp32": {
        "naive": "the formula, by cuBLAS",
        "flash_simple": "S and P stay on the SM; a thread owns a query",
        "flash_fp32": "a thread owns a piece of a tile",
        "flash_fp16x3": "tensor cores: an fp32 number is two fp16 numbers",
    },
    "bf16": {
        "naive": "the formula, by cuBLAS",
        "flash_mma": "tensor cores by mma.sync; fragments",
        "flash_bf16": "copies and exponentials overlap products",
        "flash_wgmma": "Hopper's instructions: wgmma and TMA",
        "flash_bf16_sm90": "warps with roles; five products and a deterministic sum of dQ",
    },
}


# --------------------------------------------------------------------------------------------------
# Rows, and how they become text


def newest_rows(path, where, newest_by):
    """The rows of a file that match `where` and belong to its newest run.

    Figures of different runs are not comparable, so a table does not mix them. But each combination
    of the fields `newest_by` has a newest run of its own. Rows that were measured with uncommitted
    changes are never shown.
    """
    rows = pd.DataFrame([row for _, row in results.json_rows(path)])
    if rows.empty:
        return rows
    rows = rows[rows["dirty"].eq(False)]
    for field, value in where.items():
        rows = rows[rows[field] == value]
    rows = rows.sort_values("date", kind="stable")
    newest_run = rows.groupby(["gpu", *newest_by])["run"].transform("last")
    return rows[rows["run"] == newest_run]


def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def cell(value):
    """A value as text. Measured figures get three digits, as many as two runs agree on."""
    if pd.isna(value):
        return "–"
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 100 or value.is_integer():
        return f"{value:.0f}"
    return f"{value:#.3g}"


def table(rows, frame, text_columns=1):
    """`frame` in Markdown, below a line that says where and when its rows were measured."""
    machines = (rows["gpu"] + ", driver " + rows["driver"] + ", CUDA " + rows["cuda"]).unique()
    commits = rows["commit"].str[:7].groupby(rows["date"].str[:10]).unique()
    dates = []
    for date, these in commits.items():
        word = "commits" if len(these) > 1 else "commit"
        dates.append(f"{date} ({word} {' and '.join(these)})")
    caption = paragraph(f"{'; '.join(machines)}. Measured on {', '.join(dates)}.")
    rule = ["---"] * text_columns + ["--:"] * (len(frame.columns) - text_columns)
    lines = [frame.columns, rule, *frame.astype(object).to_numpy()]
    text = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    return "\n".join([caption, "", *text])


def filled(rows, template):
    """The template for each row, filled with its fields. A field without a figure becomes "nan",
    which the callers remove."""
    return rows.apply(template.format_map, axis=1)


def crossed(rows, by, across, columns):
    """A line for each combination of the fields `by`, a column for each value of `across`.

    The rows' field "cell" is what the cells show.
    """
    frame = rows.pivot_table(index=by, columns=across, values="cell", aggfunc="last", sort=False)
    return frame.reindex(columns=columns).reset_index()


def kind_of(kernel):
    if kernel.startswith("naive"):
        return "naive"
    return "ours" if (results.ROOT / "attention" / f"{kernel}.cu").exists() else "library"


def kernels_of(rows):
    """naive, then those of libraries, then ours, each in the order in which they were measured."""
    order = ["naive", "library", "ours"]
    return sorted(rows["kernel"].unique(), key=lambda kernel: order.index(kind_of(kernel)))


# --------------------------------------------------------------------------------------------------
# Tables. Each function gets the rows of one GPU and returns text.


def attention(rows):
    rows = rows.dropna(subset="ms")
    kernels = kernels_of(rows)
    by = ["pass", "HS", "NH", "T", "B"]
    rows = rows.sort_values(by, ascending=[False, True, True, True, True])  # forward first
    figures = filled(rows, "{tflops:.0f} / {tflops_sustained:.0f}")
    rows["cell"] = figures.str.removesuffix(" / nan")
    return table(rows, crossed(rows, by, "kernel", kernels))


def with_shares(rows):
    """The ladder's rows, with each rate as a share of GEMM's and of the fastest library's."""
    library_tflops = rows["tflops"].where(rows["kernel"].map(kind_of) == "library")
    fastest = library_tflops.groupby([rows["dtype"], rows["pass"]]).transform("max")
    of_gemm = rows["tflops"] / rows["gemm_tflops"]
    return rows.assign(of_gemm=of_gemm, of_library=rows["tflops"] / fastest)


def fastest_library(rows):
    """A sentence about what the ladder's rungs are compared with."""
    ours = rows[rows["kernel"].isin(RUNGS[rows["dtype"].iloc[0]])]
    text = f"GEMM reaches {ours['gemm_tflops'].max():.0f} TFLOP/s."
    libraries = rows[rows["kernel"].map(kind_of) == "library"].dropna(subset="tflops")
    if set(libraries["pass"]) < {"fwd", "bwd"}:
        return text  # none was measured, for example without PyTorch

    fastest = libraries.loc[libraries.groupby("pass")["tflops"].idxmax()].set_index("pass")
    names = fastest["kernel"].map(LIBRARIES)
    rates = fastest["tflops"].round().astype(int)
    text += f""" The fastest library is {names["fwd"]} forward, with {rates["fwd"]} TFLOP/s, and
        {names["bwd"]} backward, with {rates["bwd"]}."""
    return paragraph(text)


def ladder(rows):
    """The rungs of one type."""
    rows = with_shares(rows)
    new = RUNGS[rows["dtype"].iloc[0]]
    columns = [
        ("rung", [f"[{kernel}](attention/{kernel}.cu)" for kernel in new]),
        ("new", new.values()),
    ]
    for name, text in [("fwd", "forward"), ("bwd", "backward")]:
        figures = rows[rows["pass"] == name].set_index("kernel").reindex(new)
        columns += [
            (f"{text}, TFLOP/s", figures["tflops"].round()),
            ("% of GEMM", (100 * figures["of_gemm"]).round()),
            ("% of library", (100 * figures["of_library"]).round()),
        ]
    headers, values = zip(*columns)
    lines = pd.DataFrame(list(zip(*values)), columns=headers)
    return table(rows, lines, text_columns=2) + "\n\n" + fastest_library(rows)


def speed(rows, kernel):
    """A sentence about one kernel. naive was measured in both types and is described in fp32."""
    rows = with_shares(rows)
    rows = rows[rows["kernel"] == kernel].sort_values("pass", ascending=False)
    if kernel == "naive":
        rows = rows[rows["dtype"] == "fp32"]
    if rows.empty:
        return ""
    rows["way"] = rows["pass"].map({"fwd": "forward", "bwd": "backward"})
    library = " and {of_library:.0%} of the fastest library"
    figures = filled(rows, "{way} {tflops:.0f} TFLOP/s, {of_gemm:.0%} of GEMM" + library)
    passes = figures.str.replace(" and nan% of the fastest library", "")
    return paragraph(f"On an {rows['gpu'].iloc[0]}: {'; '.join(passes)}.").replace("%", " %")


def accuracy(rows):
    """The worst error over all lengths, head sizes and inputs."""
    worst = rows[rows["kernel"] != "naive"].groupby(["dtype", "kernel", "tensor"], sort=False)
    ratios = worst[["ratio_max", "ratio_l2"]].max(skipna=False).reset_index()
    ratios["cell"] = filled(ratios, "{ratio_max:.2f} / {ratio_l2:.2f}")
    return table(rows, crossed(ratios, ["dtype", "kernel"], "tensor", TENSORS))


def accuracy_example(rows):
    rows["cell"] = filled(rows, "{max_error:.1e}, {snr_db:.0f}")
    return table(rows, crossed(rows, "kernel", "tensor", TENSORS))


def train(rows):
    rows["ids"] = rows["ids"].fillna("uniform")  # older rows do not have this field
    if "sdpa" in rows:
        rows["attention"] = rows["sdpa"].fillna(rows["attention"])
    rows = rows.sort_values([*SETUP, "kernel", "attention", "recompute"])
    rows["k tok/s"] = rows["tok_s"] / 1e3
    rows = rows.rename(columns={"mfu": "MFU, %", "mem_gib": "GiB in use"})
    columns = ["kernel", "attention", "recompute", "ids", "k tok/s", "ms", "MFU, %", "GiB in use"]
    return table(rows, rows[[*SETUP, *columns]])


def step(rows):
    """A line for each model and batch size at which others were measured. A program's cell is from
    its newest run there with others: tokens per second, how many times as fast the trainer was at
    -r 0 in that run, and GiB in use."""
    setup = ["model", "B"]
    others = rows[rows["kernel"] != "train_gpt2cu"]
    if others.empty:
        return ""
    rows = rows[rows["attention"] != "naive"].merge(others[["run", *setup]].drop_duplicates())
    at_r0 = rows[rows["recompute"] == 0].set_index(["run", *setup])["tok_s"]
    rows = rows.join(at_r0.rename("tok_s_at_r0"), on=["run", *setup])
    rows["ratio"] = rows["tok_s_at_r0"] / rows["tok_s"]
    rows["thousands"] = (rows["tok_s"] / 1e3).map(cell)
    rows["cell"] = filled(rows, "{thousands}k · {ratio:.2f}× · {mem_gib:.1f}")
    rows["cell"] = rows["cell"].str.replace(" · nan×", "")
    rows["program"] = filled(rows, "{kernel} -r {recompute:.0f}").str.removesuffix(" -r nan")
    rows = rows.drop_duplicates([*setup, "program"], keep="last").sort_values(setup)
    programs = sorted(rows["program"].unique(), reverse=True)
    return table(rows, crossed(rows, setup, "program", programs))


def breakdown(rows):
    """A table for each step that was taken apart, its longest call first."""
    steps = rows.sort_values("ms", ascending=False).groupby([*SETUP, "attention", "recompute"])
    return "\n\n".join(breakdown_of_step(calls) for _, calls in steps)


def breakdown_of_step(calls):
    calls["% of step"] = 100 * calls["ms"] / calls["step_ms"]
    calls["% of GEMM"] = 100 * calls["tflops"] / calls["gemm_tflops_sustained"]
    calls["% of copy"] = 100 * calls["tb_s"] / calls["copy_tb_s_sustained"]
    about = """{model} in {dtype}, B {B}, T {T}, `--attention {attention} -r {recompute}`: a step
        takes {step_ms:.2f} ms. GEMM: {gemm_tflops_sustained:.0f} TFLOP/s for square matrices of
        {gemm_size:.0f} rows. Copy: {copy_tb_s_sustained:.2f} TB/s.""".format_map(calls.iloc[0])
    above = calls["lost_ms"].sum()
    about += f" Together, the calls are {above:.1f} ms above the roofline."
    calls = calls.rename(
        columns={"tflops": "TFLOP/s", "tb_s": "TB/s", "lost_ms": "ms above roofline"}
    )
    calls = calls.replace(0, np.nan)  # cell() shows "–": a call without products has no TFLOP/s
    columns = ["call", "calls", "ms", "% of step", "TFLOP/s", "% of GEMM", "TB/s", "% of copy"]
    return paragraph(about) + "\n\n" + table(calls, calls[[*columns, "ms above roofline"]])


def torch(rows):
    rows = rows.rename(
        columns={
            "max_norm": "max norm",
            "clipped": "steps clipped",
            "difference": "largest difference",
            "torch_itself": "PyTorch's own",
        }
    )
    columns = ["attention", "steps", "max norm", "steps clipped", "largest difference", "allowed"]
    return table(rows, rows[[*SETUP, *columns, "PyTorch's own"]])


def default_run(rows):
    """What the newest default run was, and the beginning of its last sample."""
    last = rows.sort_values("step").iloc[-1].to_dict()
    last["text"] = textwrap.shorten(last["text"], 300, placeholder=" …")
    about = """`./train_gpt2cu` without options, {steps} steps of {B}·{T} tokens in {dtype}, ends
        at a validation loss of {val_loss_nats:.3f}, with the floor at {floor_nats:.4f}. {gpu},
        driver {driver}, CUDA {cuda}. Trained on {date:.10} (commit {commit:.7}). The model then
        writes:"""
    quoted = textwrap.indent(paragraph(last["text"]), "> ")
    return f"{paragraph(about.format_map(last))}\n\n{quoted}"


def start(rows):
    """Seconds; in parentheses, where a start reads files, how long reading alone takes."""
    figures = filled(rows, "{seconds:.1f} ({read_seconds:.1f})")
    rows["cell"] = figures.str.removesuffix(" (0.0)")
    return table(rows, crossed(rows, ["model", "B"], "what", rows["what"].unique()))


def scaling(rows):
    """Weak scaling, and how far the losses of several ranks are from those of one GPU."""
    ranks = ["model", "gpus", "zero"]
    losses = rows[rows["what"] == "losses"].set_index(ranks)["apart"].rename("loss difference")
    rows = rows[rows["what"] == "speed"].join(losses, on=ranks).sort_values(ranks)
    if rows.empty:
        return ""  # the losses differed, so nothing was timed
    rows["k tok/s"] = rows["tok_s"] / 1e3
    rows["% of linear"] = 100 * rows["of_linear"]
    rows = rows.rename(columns={"ms_side_by_side": "ms side by side", "gib": "GiB per GPU"})
    columns = ["gpus", "zero", "k tok/s", "% of linear", "ms", "ms side by side", "GiB per GPU"]
    return table(rows, rows[[*SETUP, *columns, "loss difference"]])


def ring_errors(rows):
    template = "{mean_error:.2e} ({mean_ratio:.2f}), {max_error:.1e} ({max_ratio:.2f})"
    rows["cell"] = filled(rows, template)
    by = ["dtype", "T", "NH", "HS", "carry", "ranks"]
    return table(rows, crossed(rows, by, "tensor", ["out", "dq", "dk", "dv"]))


def ring_speed(rows):
    rows = rows.sort_values(["HS", "gpus", "pass"])
    rows["% of ideal"] = 100 * rows["single_ms"] / rows["ms"]
    rows["% of ideal, sustained"] = 100 * rows["single_ms_sustained"] / rows["ms_sustained"]
    rows["compute only, %"] = 100 * rows["single_ms"] / rows["still_ms"]
    rows = rows.rename(
        columns={
            "tokens_per_gpu": "tokens per GPU",
            "single_ms": "ideal ms",
            "still_ms": "compute only, ms",
            "hop_ms": "hop, ms",
        }
    )
    case = ["gpus", "tokens per GPU", "NH", "HS", "pass"]
    ring = ["ideal ms", "ms", "% of ideal", "% of ideal, sustained"]
    return table(rows, rows[[*case, *ring, "compute only, ms", "compute only, %", "hop, ms"]])


# --------------------------------------------------------------------------------------------------
# Plots. Each function gets the rows of one GPU and returns a figure.


def line_styles(kernels):
    """Ours are thick, the libraries' dashed, and naive is grey."""
    colours = itertools.cycle(plot.COLOURS)
    styles = {}
    for kernel in kernels:
        kind = kind_of(kernel)
        styles[kernel] = {
            "label": kernel,
            "color": plot.GREY if kind == "naive" else next(colours),
            "linewidth": 2.4 if kind == "ours" else 1.3,
            "linestyle": "--" if kind == "library" or kernel == "naive_tf32" else "-",
            "marker": "o",
            "markersize": 4,
        }
    return styles


def log_axis(axes, values):
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:.0f}" for value in values])
    axes.minorticks_off()


def plot_attention(plt, rows):
    """A panel for each head size and pass. At each T it shows the largest B that was measured."""
    rows = rows.dropna(subset="ms").sort_values("T")
    rows = rows[rows["B"] == rows.groupby(["HS", "T"])["B"].transform("max")]
    styles = line_styles(kernels_of(rows)[::-1])
    head_sizes = sorted(rows["HS"].unique())
    size = (10, 0.6 + 3.4 * len(head_sizes))
    figure, panels = plt.subplots(len(head_sizes), 2, figsize=size, squeeze=False)
    for panels_of_size, head_size in zip(panels, head_sizes):
        for axes, name in zip(panels_of_size, ["fwd", "bwd"]):
            panel = rows[(rows["HS"] == head_size) & (rows["pass"] == name)]
            for kernel, points in panel.groupby("kernel"):
                axes.plot(points["T"], points["tflops"], **styles[kernel])
            log_axis(axes, panel["T"].unique())
            axes.set(title=f"{name}, head size {head_size}", xlabel="T", ylabel="TFLOP/s")
            axes.set_ylim(0, None)
    marks = [plt.Line2D([], [], **style) for style in styles.values()]
    figure.legend(handles=marks, loc="outside right upper")
    figure.suptitle(f"Causal attention in {rows['dtype'].iloc[0]}, cool, {rows['gpu'].iloc[0]}")
    return figure


def plot_accuracy(plt, rows):
    """A panel for each type and tensor. Each point is the worst of the head sizes."""
    from matplotlib.ticker import LogLocator

    rows = rows[rows["kernel"].map(kind_of) == "ours"]
    styles = line_styles(kernels_of(rows))
    inputs = {"normal": "-", "large_q": "--", "shifted": ":"}
    worst = rows.groupby(["dtype", "tensor", "kernel", "input", "T"])["ratio_l2"].max()
    lengths = sorted(rows["T"].unique())
    dtypes = sorted(rows["dtype"].unique(), reverse=True)
    size = (13, 3 * len(dtypes))
    figure, panels = plt.subplots(len(dtypes), len(TENSORS), figsize=size, squeeze=False)
    for panels_of_dtype, dtype in zip(panels, dtypes):
        for axes, tensor in zip(panels_of_dtype, TENSORS):
            for (kernel, name), errors in worst[dtype, tensor].groupby(["kernel", "input"]):
                style = styles[kernel] | {"linewidth": 1.4, "linestyle": inputs[name]}
                axes.plot(errors.index.get_level_values("T"), errors, **style)
            axes.axhline(1, color=plot.INK, linewidth=0.8)
            axes.set(title=f"{dtype} {tensor}", yscale="log")
            axes.yaxis.set_major_locator(LogLocator(subs=[1, 2, 5]))
            axes.yaxis.set_major_formatter("{x:g}")
            log_axis(axes, lengths)
        panels_of_dtype[0].set_ylabel("multiple of naive's L2 error")
    marks = [plt.Line2D([], [], **style) for style in styles.values()]
    for name, linestyle in inputs.items():
        marks.append(plt.Line2D([], [], color=plot.GREY, linestyle=linestyle, label=name))
    figure.legend(handles=marks, loc="outside lower center", ncols=5)
    figure.suptitle(f"Errors against fp64 by T, {rows['gpu'].iloc[0]}")
    return figure


def plot_ring(plt, rows):
    """Errors of a ring that carries partial results in fp32 or in bf16."""
    looks = {"bf16": ("s--", plot.COLOURS[1]), "fp32": ("o-", plot.COLOURS[0])}
    fields = {"mean_error": "mean", "max_error": "largest"}
    ranks = sorted(rows["ranks"].unique())
    figure, panels = plt.subplots(2, 4, figsize=(10, 5), sharex=True, sharey="row")
    for panels_of_field, (field, text) in zip(panels, fields.items()):
        for axes, tensor in zip(panels_of_field, ["out", "dq", "dk", "dv"]):
            errors = rows[rows["tensor"] == tensor].set_index(["carry", "ranks"])[field]
            errors /= errors["fp32", 1]
            for carry, (style, colour) in looks.items():
                curve = errors[carry]
                axes.plot(curve.index, curve, style, color=colour, label=f"carried in {carry}")
            log_axis(axes, ranks)
            axes.set(title=f"{tensor}: {text} error", xlabel="ranks")
        panels_of_field[0].set(ylabel="multiple of one rank's", ylim=(0, None))
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(f"Ring attention, T {rows['T'].iloc[0]}, {rows['gpu'].iloc[0]}: flat is better")
    return figure


def plot_memory(plt, rows):
    """Flash as measured, and what naive would need.

    naive also stores T×T matrices: P for each of 12 heads in 12 layers, and dP for those of one
    layer.
    """
    squares = 12 * 12 + 12  # P and dP
    figure, axes = plt.subplots(figsize=(10, 4.6))
    for (dtype, flash), colour in zip(rows.sort_values("T").groupby("dtype"), plot.COLOURS):
        axes.plot(flash["T"], flash["mem_gib"], "o-", color=colour, label=f"flash {dtype}")
        if len(flash) < 2:
            continue
        lengths = np.arange(1024, flash["T"].max(), 64)
        fitted = np.polyval(np.polyfit(flash["T"], flash["mem_gib"], 1), lengths)
        naive = fitted + squares * {"bf16": 2, "fp32": 4}[dtype] * lengths**2 / 2**30
        axes.plot(lengths, naive, ":", color=colour, label=f"naive {dtype}, computed")
    axes.set_xticks(rows["T"].unique(), rows["T"].unique())
    axes.set(xlabel="T", ylabel="GiB in use", ylim=(0, 3 * rows["mem_gib"].max()))
    axes.legend(loc="upper right")
    figure.suptitle(f"Training GPT-2 124M with B 1, {rows['gpu'].iloc[0]}")
    return figure


# --------------------------------------------------------------------------------------------------
# Which tables and plots there are, and where they go


class Source(NamedTuple):
    """What a table or plot is made of, and by which function."""

    make: Callable
    file: str  # dev/results/*/FILE.jsonl
    part: str  # of scripts/measure.sh, which measures the rows
    where: dict = {}  # for this and the next see newest_rows()
    newest_by: list = []


# Which rows, for Source.where.
BF16 = {"dtype": "bf16", "causal": True}
FP32 = {"dtype": "fp32", "causal": True}
LADDER = {"B": 4, "T": 4096, "HS": 64, "causal": True}
EXAMPLE = {"dtype": "bf16", "T": 256, "HS": 64}
STEP = {"dtype": "bf16", "T": 1024, "ids": "text-like"}
ONE_SEQUENCE = {"attention": "flash", "model": "d12", "B": 1}

LADDER_SOURCE = Source(ladder, "attention", "bf16", LADDER, newest_by=["dtype"])
TABLES = {
    "attention bf16": Source(attention, "attention", "bf16", BF16),
    "attention fp32": Source(attention, "attention", "fp32", FP32),
    "ladder fp32": LADDER_SOURCE._replace(part="fp32", where=LADDER | FP32),
    "ladder bf16": LADDER_SOURCE._replace(where=LADDER | BF16),
    "accuracy": Source(accuracy, "accuracy", "accuracy", newest_by=["HS"]),
    "accuracy example": Source(accuracy_example, "accuracy", "accuracy", EXAMPLE),
    "train": Source(train, "train", "train", newest_by=[*SETUP, "kernel"]),
    "step": Source(step, "train", "train", STEP, newest_by=["run"]),
    "breakdown": Source(
        breakdown, "breakdown", "train", newest_by=[*SETUP, "attention", "recompute"]
    ),
    "torch": Source(torch, "torch", "torch", newest_by=["model", "dtype"]),
    "default run": Source(default_run, "default_run", "default"),
    "start": Source(start, "start", "start", newest_by=["model"]),
    "scaling": Source(scaling, "scaling", "scaling", newest_by=["model"]),
    "ring errors": Source(ring_errors, "ring", "ring", {"study": "ring"}),
    "ring speed": Source(ring_speed, "ring_speed", "ring", newest_by=["gpus"]),
}
PLOTS = {
    "attention_bf16": Source(plot_attention, "attention", "bf16", BF16),
    "attention_fp32": Source(plot_attention, "attention", "fp32", FP32),
    "accuracy": Source(plot_accuracy, "accuracy", "accuracy", {"causal": True}, newest_by=["HS"]),
    "ring": Source(plot_ring, "ring", "ring", {"study": "ring", "dtype": "bf16"}),
    "memory": Source(plot_memory, "train", "memory", ONE_SEQUENCE, newest_by=SETUP),
}


def rows_of_gpus(source):
    """The folder and the rows of each GPU that was measured."""
    for path in sorted(results.RESULTS.glob(f"*/{source.file}.jsonl")):
        rows = newest_rows(path, source.where, source.newest_by)
        if not rows.empty:
            yield path.parent, rows


def quote(file):
    text = (results.ROOT / "attention" / file).read_text(encoding="utf-8")
    lines = re.search(r"^ *// \[quote\]\n(.*?)^ *// \[end\]$", text, flags=re.S | re.M)
    if not lines:
        results.fail(f"attention/{file}: has no lines between // [quote] and // [end]")
    return f"```cpp\n{textwrap.dedent(lines[1])}```"


def text_of(name):
    """The text between a page's markers of this name."""
    kind, _, what = name.partition(" ")
    if kind == "quote":
        return quote(what)
    if kind == "speed":
        source = LADDER_SOURCE._replace(make=lambda rows: speed(rows, what))
    elif name in TABLES:
        source = TABLES[name]
    else:
        results.fail(f'there is no table "{name}", only quote, speed, {", ".join(TABLES)}')
    texts = [source.make(rows) for _, rows in rows_of_gpus(source)]
    text = "\n\n".join(text for text in texts if text)
    if not text:
        return (
            f"dev/results has no rows for this table: `scripts/measure.sh {source.part}` "
            "measures them"
        )
    return text


def renewed(page):
    """The page's text with its tables regenerated, and the names of those that have changed."""
    changed = []

    def between(match):
        begin, name, old, end = match.groups()
        new = text_of(name)
        if page.parent.name == "attention":
            new = new.replace("](attention/", "](")  # links are relative to their page
        if new != old:
            changed.append(f"{page.relative_to(results.ROOT)}: {name}")
        return begin + new + end

    marked = r"(<!-- table: ([^\n]*) -->\n)(.*?)(\n<!-- end -->)"
    return re.sub(marked, between, page.read_text(encoding="utf-8"), flags=re.S), changed


def draw_plots():
    plt = plot.pyplot()
    plt.rcParams.update({"figure.constrained_layout.use": True, "legend.frameon": False})
    for name, source in PLOTS.items():
        for folder, rows in rows_of_gpus(source):
            source.make(plt, rows).savefig(folder / f"{name}.svg", metadata={"Date": None})


@results.check_stdout()
def main():
    arg = results.arguments(__doc__)
    arg.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a table is stale"
    )
    check = arg.parse_args().check
    if not pd:
        results.fail("needs pandas: pip install -r scripts/requirements.txt")
    stale = []
    for page in sorted(results.ROOT.rglob("*.md")):
        text, changed = renewed(page)
        stale += changed
        if changed and not check:
            page.write_text(text, encoding="utf-8")
    if not check:
        draw_plots()
    elif stale:
        results.fail(
            f"these differ from the rows in dev/results: {', '.join(stale)}; run without --check"
        )


if __name__ == "__main__":
    main()
