#!/usr/bin/env python3
"""Writes the tables and plots of every README from dev/results, and what it quotes of kernels, between markers:

    <!-- table: attention bf16 --> … <!-- end -->            see TABLES
    <!-- table: plot ring --> … <!-- end -->                 see PLOTS in plot_results.py
    <!-- table: quote flash_simple.cu --> … <!-- end -->     attention/'s file, from // [quote] to // [end]

    python3 scripts/readme_tables.py            rewrites them
    python3 scripts/readme_tables.py --check    exit code 1 if they are not what it would write
"""
import os
import re
import textwrap
from operator import itemgetter

from plot_results import PLOTS
from results import (RESULTS, ROOT, TENSORS, arguments, check_stdout, fail, folder_of_gpu,
                     kernels_of, kind_of, matching, publish, read_rows, shared, values)

# Rows are compared that agree in these fields, or newest runs kept of each combination of them.
SHAPE = ["HS", "NH", "T", "B", "pass"]
TRAIN = ["model", "dtype", "B", "T"]
GPT2_124M = {"model": "d12", "dtype": "bf16", "T": 1024}
BREAKDOWN = ["model", "dtype", "B", "T", "attention", "recompute"]


def thousands(rate):
    return f"{rate / 1e3:.0f}k"


def compared(row, rows, alike, field, text):
    """The text of this field, with "≈" where it is less than 3 % from that of another row with the same `alike`."""
    mine = row[field]
    others = [r.get(field) for r in rows if r is not row and values(r, alike) == values(row, alike)]
    close = any(abs(mine - other) < 0.03 * max(mine, other) for other in others if other)
    return "≈" * close + text(mine)


def plain(*fields):
    """Columns that are fields."""
    return {field: f"{{{field}}}" for field in fields}


def listed(title, rows, columns):
    """A table with a line for each row. A column's cell is a template of the row's fields, or a function of the row."""
    lines = [[cell(r) if callable(cell) else cell.format_map(r) for cell in columns.values()] for r in rows]
    return table(title, rows, columns, lines)


def crossed(title, rows, by, across, columns, cell):
    """A table with a line for each combination of the fields `by`: its values, then cell() of each column's last row.
    Columns are values of the field `across`."""
    found = {}
    for r in rows:
        found.setdefault(values(r, by), {})[r[across]] = r
    lines = [[*map(str, key), *(cell(at[column]) if column in at else "–" for column in columns)]
             for key, at in found.items()]
    return table(title, rows, [*by, *columns], lines)


def table(title, rows, columns, lines):
    """The lines below their columns' names, and above both the title and where the rows were measured."""
    if not rows:
        return ""
    header, *lines = [" | ".join(cells) for cells in (columns, *lines)]
    machines = sorted({"{gpu}, driver {driver}, CUDA {cuda}".format_map(r) for r in rows})
    measured = sorted({"{date:.10} at {commit:.7}".format_map(r) for r in rows})
    caption = f"{title}. {'; '.join(machines)}. Measured {', '.join(measured)}."
    if "≈" in "".join(lines):
        caption += " ≈: less than 3 % from what it is compared with."
    if not all("dirty" in r for r in rows):
        caption += " Whether the sources differed from the commit was not recorded."
    under = "---" + " | --:" * header.count(" | ")
    return paragraph(caption) + "\n\n" + "\n".join(f"| {line} |" for line in [header, under, *lines])


def paragraph(text):
    return textwrap.fill(" ".join(text.split()), 120)


def attention(rows):
    def cell(r):
        rates = [rate for rate in ("tflops", "tflops_sustained") if r["ms"] and r.get(rate)]
        return " / ".join(compared(r, rows, SHAPE, rate, "{:.0f}".format) for rate in rates) or "–"
    kernels = kernels_of(rows)
    rows.sort(key=lambda r: (r["pass"] != "fwd", values(r, SHAPE)))
    for r in rows:
        r["B, T"] = f"{r['B']}, {r['T']}"
    same, varying = shared(rows, ["NH", "HS"])
    title = f"Attention, {rows[0]['dtype']}, causal, {same + ', ' if same else ''}TFLOP/s cool / sustained"
    return crossed(title, rows, ["B, T", *varying, "pass"], "kernel", kernels, cell)


def rates_of(rung, rows):
    """Of forward and of backward: TFLOP/s, its share of the GEMM rate, and of the best library's kernel (0 without
    one). None for a pass that has no figure."""
    found = []
    for passed in "fwd", "bwd":
        alike = {r["kernel"]: r for r in matching(rows, HS=64, B=4, T=4096, dtype=RUNGS[rung][0], **{"pass": passed})}
        row = alike.get(rung, {})
        best = max((r["tflops"] or 0 for kernel, r in alike.items() if kind_of(kernel) == "peer"), default=0)
        found.append(row.get("tflops") and (row["tflops"], row["tflops"] / row["gemm_tflops"],
                                            best and row["tflops"] / best))
    return found


def ladder(rows):
    """A line for each rung: its size, and how fast it is beside the GEMM rate and the best library's kernel."""
    def cell(rates):
        return "{:.0f}: {:.0%}".format(*rates) + (f", {rates[2]:.0%}" if rates[2] else "") if rates else "–"
    lines = []
    for name, (_, new) in RUNGS.items():
        files = [ROOT / "attention" / f"{name}{half}.cu" for half in ("", "_backward")]
        files = [file for file in files if file.exists()]
        for file in files:  # which grows by what each includes
            included = [ROOT / path for path in re.findall(r'#include "(attention/\w+\.cuh)"', file.read_text())]
            files += [path for path in included if path not in files]
        forward, backward = rates_of(name, rows)
        lines.append([f"[{name}]({files[0].name})", new, str(sum(len(f.read_text().splitlines()) for f in files)),
                      cell(forward), cell(backward), "█" * round(20 * min(1, forward[1] if forward else 0))])
    rows = matching(rows, HS=64, B=4, T=4096)
    title = """The ladder at (B, T) = (4, 4096), 12 heads of 64, causal: TFLOP/s, % of a large matrix product in that
        precision (GEMM; in fp32 without tensor cores), % of the fastest library's kernel. The bar is forward's % of GEMM"""
    return table(title, rows, ["rung", "new", "lines", "forward: GEMM, library", "backward: GEMM, library", ""], lines)


def accuracy(rows):
    def worst(r):
        alike = matching(rows, dtype=r["dtype"], kernel=r["kernel"], tensor=r["tensor"])
        ratios = [[r[ratio] for r in alike] for ratio in ("ratio_max", "ratio_l2")]
        return " / ".join("NaN" if None in x else f"{max(x):.{2 if max(x) < 100 else 0}f}" for x in ratios)
    case = matching(rows, B=2, T=256, NH=2, HS=64, causal=False, input="normal", dtype="bf16")
    order = kernels_of(rows)
    rows = [r for r in rows if r["kernel"] != "naive"]
    rows.sort(key=lambda r: (r["dtype"] != "fp32", order.index(r["kernel"])))
    lengths = {r["T"] for r in rows}
    title = f"""Errors against fp64 as multiples of naive's in the same precision, largest / L2: the worst of T
        {min(lengths)} to {max(lengths)} and inputs N(0,1), q five times as large, mean 0.5"""
    text = crossed(title, rows, ["dtype", "kernel"], "tensor", TENSORS, worst)
    if case:
        title = "bf16, B 2, T 256, NH 2, HS 64, not causal, N(0,1): largest error against fp64, signal-to-noise in dB"
        case.sort(key=lambda r: order.index(r["kernel"]))
        text += "\n\n" + crossed(title, case, ["kernel"], "tensor", TENSORS, "{max_error:.1e}, {snr_db:.0f}".format_map)
    return text


def train(rows):
    ours = sorted(matching(rows, kernel="train_gpt2cu"), key=itemgetter("attention", "recompute", "T", "B"))
    peers = [{**r, "attention": f"{r['kernel']}, {r['sdpa'].removeprefix('torch_')}", "recompute": "–"}
             for r in rows if r["kernel"] != "train_gpt2cu"]
    rows = sorted(ours + sorted(peers, key=itemgetter("T", "B", "attention")), key=itemgetter("model", "dtype"))
    told = [shared(ours, ["recompute"]), shared(rows, ["ids"])]
    title = ", ".join(["The whole training step, sustained", *(same for same, _ in told if same)])
    return listed(title, rows, {
        **plain("model", "dtype", "attention", *(field for _, varying in told for field in varying), "B", "T"),
        "tok/s": lambda r: compared(r, rows, TRAIN, "tok_s", thousands),
        "ms": lambda r: compared(r, rows, TRAIN, "ms", "{:.2f}".format),
        "MFU": lambda r: compared(r, rows, TRAIN, "mfu", "{:.1f} %".format) if r["mfu"] else "n/a",
        "GiB in use": "{mem_gib:.1f}"})


def step(rows):
    """Ours beside the peers on the same shapes: tokens a second, how many times a peer's rate, and memory. All rows are
    of one job, the newest with peers."""
    job = max((values(r, ["date", "run"]) for r in rows if r["kernel"] != "train_gpt2cu"), default=["", ""])[1]
    rows = sorted(matching(rows, run=job), key=itemgetter("B"))
    peers = [r for r in rows if r["kernel"] != "train_gpt2cu"]
    shapes = {r["B"] for r in peers}
    ours = [{**r, "kernel": f"train_gpt2cu -r {r['recompute']}"}
            for r in matching(rows, kernel="train_gpt2cu", attention="flash") if r["B"] in shapes]
    rate = {r["B"]: r["tok_s"] for r in matching(ours, recompute=0)}
    names = dict.fromkeys(r["kernel"] for r in [*ours, *peers])

    def cell(r):
        times = f" · {rate[r['B']] / r['tok_s']:.2f}×" if r in peers else ""
        return f"{thousands(r['tok_s'])}{times} · {r['mem_gib']:.1f}"
    title = """The whole step of GPT-2 124M in bf16 at T = 1024, sustained, ids drawn with p ∝ 1/(rank + 2.7), as text
        has them: tokens a second, how many times as fast train_gpt2cu is at -r 0, which recomputes nothing, as the
        peers do, GiB of memory. The default is -r 1. torch.compile has fused AdamW and its faster attention. llm.c has
        cuDNN and its fastest options"""
    return crossed(title, [*ours, *peers], ["B"], "kernel", list(names), cell)


def scaling(rows):
    """Weak scaling, and the losses of several ranks beside one GPU's."""
    of = ["model", "gpus", "zero"]
    apart = {values(r, of): f"{r['apart']:.0e}" for r in matching(rows, what="losses")}
    rows = sorted(matching(rows, what="speed"), key=itemgetter(*of))
    title = f"""Data parallel, {shared(rows, ["model", "dtype", "B", "T"])[0]}, B for each GPU, sustained. Side by side:
        as many runs of one GPU each, at once. Losses apart: a step's loss from one GPU's at the same global batch,
        strict fp32, 20 steps"""
    return listed(title, rows, {
        "GPUs": "{gpus}", "--zero": "{zero}", "tok/s": lambda r: thousands(r["tok_s"]),
        "of linear": lambda r: f"{100 * r['of_linear']:.1f} %", "ms a step": "{ms:.2f}",
        "side by side": "{ms_side_by_side:.2f}", "GiB a GPU": "{gib:.1f}",
        "losses apart": lambda r: apart.get(values(r, of), "–")})


def ring_speed(rows):
    def share(field):
        return lambda r: " / ".join(f"{100 * r['single_' + ms] / r[field + ms]:.1f} %" for ms in ("ms", "ms_sustained"))
    rows.sort(key=itemgetter("HS", "gpus", "pass"))
    title = f"""Ring attention, bf16, causal, B 1, {rows[0]['tokens_per_gpu']} tokens a GPU: ms cool, and shares of one
        GPU's rate cool / sustained. Nothing sent: the same calls without travel. A hop: keys and values travel once,
        and nothing else happens"""
    return listed(title, rows, {
        "GPUs": "{gpus}", "NH, HS": "{NH}, {HS}", **plain("pass"), "one GPU's ms / GPUs": "{single_ms:.2f}",
        "ms": "{ms:.2f}", "share": share(""), "nothing sent, ms": "{still_ms:.2f}", "share then": share("still_"),
        "a hop, ms": "{hop_ms:.2f}"})


def ring_errors(rows):
    def cell(r):
        return "{mean_error:.2e} ({mean_ratio:.2f}), {max_error:.1e} ({max_ratio:.2f})".format_map(r)
    rows = [r for r in rows if r["carry"] != "floor"]
    title = f"""Ring attention against fp64 by number of ranks, causal, {shared(rows, ['T', 'NH', 'HS'])[0]}, N(0,1):
        mean and largest absolute error (multiples of one rank's)"""
    return crossed(title, rows, ["dtype", "carry", "ranks"], "tensor", ["out", "dq", "dk", "dv"], cell)


def breakdown(rows):
    """A table for each step that was taken apart."""
    steps = sorted({values(r, BREAKDOWN) for r in rows})
    return "\n\n".join(breakdown_of_step(matching(rows, **dict(zip(BREAKDOWN, step)))) for step in steps)


def breakdown_of_step(rows):
    """Its longest call first. A call may beat both rates, and then nothing of it is beyond them."""
    rows.sort(key=itemgetter("ms"), reverse=True)
    step = {"gemm_size": 8192, **rows[0]}
    for r in rows:
        r["beyond"], r["percent"] = max(0, r["lost_ms"]), 100 * r["ms"] / step["step_ms"]

    def rate(field, yardstick, digits):
        return lambda r: f"{r[field]:.{digits}f} | {100 * r[field] / r[yardstick]:.0f}" if r[field] else " | "
    most = [f"{r['call']} ({r['beyond']:.2f} ms, {100 * r['beyond'] / step['step_ms']:.1f} % of the step)"
            for r in sorted(rows, key=itemgetter("beyond"))[:-4:-1]]
    sums = {field: sum(r[field] for r in rows) for field in ("calls", "ms", "percent", "beyond")}
    title = """Where a step of {step_ms:.2f} ms goes, call by call: {model}, {dtype}, B {B}, T {T}, attention
        {attention}, recompute {recompute}; beside a product of {gemm_size}³, {gemm_tflops_sustained:.0f} TFLOP/s, and a
        copy of 1 GiB, {copy_tb_s_sustained:.2f} TB/s, both sustained"""
    sentence = f"Beyond is what a call takes longer than at both of these rates. Most of it: {'; '.join(most)}."
    return listed(title.format_map(step), [*rows, {**step, "call": "all of these", "tflops": 0, "tb_s": 0, **sums}], {
        **plain("call", "calls"), "ms": "{ms:.3f}", "% of step": "{percent:.1f}",
        f"TFLOP/s | % of {step['gemm_size']}³": rate("tflops", "gemm_tflops_sustained", 1),
        "TB/s | % of copy": rate("tb_s", "copy_tb_s_sustained", 2),
        "ms beyond": lambda r: f"{r['beyond']:.3f}" if r["beyond"] else ""}) + "\n\n" + paragraph(sentence)


def torch(rows):
    title = f"""Losses beside a plain PyTorch GPT-2 of the same type, from one checkpoint and shard,
        {shared(rows, ['B', 'T', 'lr'])[0]}: largest difference of a step's loss from PyTorch's in strict fp32;
        PyTorch's own: with another attention in fp32, in bf16 its plain one"""
    return listed(title, rows, {
        **plain("model", "dtype", "attention"), "clipped at": "{max_norm:g}", "steps clipped": "{clipped} of {steps}",
        "decay": "{weight_decay:g}", "difference": "{difference:.1e}", "allowed": "{allowed:.1e}",
        "PyTorch's own": "{torch_itself:.1e}"})


def default_run(rows):
    """The plot of the newest default run, and the beginnings of its first and last samples."""
    rows.sort(key=itemgetter("step"))
    caption = """`./train_gpt2cu` without options: {steps} steps of {B}·{T} tokens in {dtype}; no model can pass the
        floor of {floor_nats:.4f} nats. {gpu}, driver {driver}, CUDA {cuda}. Made {date:.10} at {commit:.7}."""
    plot = folder_of_gpu(rows[0]["gpu"]) / "default_run.png"
    parts = [paragraph(caption.format_map(rows[0])),
             f"![loss, gradient norm, learning rate and speed]({plot.relative_to(ROOT)})"]
    for r in rows[0], rows[-1]:
        text = textwrap.shorten(r["text"], 300, placeholder=" …")
        parts.append(paragraph(f"*Step {r['step']}, validation loss {r['val_loss_nats']:.3f}:* {text}"))
    return "\n\n".join(parts)


RUNGS = {
    "naive": ("fp32", "the formula, by cuBLAS"),
    "flash_simple": ("fp32", "S and P stay on the SM"),
    "flash_fp32": ("fp32", "a thread owns a piece of a tile"),
    "flash_mma": ("bf16", "mma.sync and fragments"),
    "flash_bf16": ("bf16", "copies and exponentials beside products"),
    "flash_wgmma": ("bf16", "wgmma and TMA"),
    "flash_bf16_sm90": ("bf16", "roles; a deterministic backward"),
    "flash_fp16x3": ("fp32", "beside the ladder: an fp32 is two fp16, for tensor cores"),
}


def start(rows):
    """Seconds to the end of step 1, a column for each way to begin."""
    title = ("Seconds from the start of the process to the end of step 1, the built-in corpus made on the way: with "
             "random weights, the same with OMP_NUM_THREADS=1, from a model file, and resumed; "
             "in brackets what only reading the files takes")
    names = {"d12": "124M", "d24": "350M", "d36": "774M", "d48": "1558M"}

    def cell(row):
        return f"{row['seconds']:.1f}" + (f" ({row['read_seconds']:.1f})" if row["read_seconds"] else "")
    named = [{**row, "model": names[row["model"]]} for row in rows]
    return crossed(title, named, ["model", "B"], "what", ["random", "random, one thread", "model file", "resumed"], cell)


# What stands between the markers: the text made of a GPU's rows, their file, what read_rows() is asked for, and the
# part of scripts/measure.sh that measures them.
TABLES = {
    "attention bf16": (attention, "attention", {"dtype": "bf16", "causal": True}, "bf16"),
    "attention fp32": (attention, "attention", {"dtype": "fp32", "causal": True}, "fp32"),
    "ladder": (ladder, "attention", {"apart": ["dtype"], "causal": True}, "bf16"),
    "accuracy": (accuracy, "accuracy", {"apart": ["HS"]}, "accuracy"),
    "train": (train, "train", {"apart": TRAIN}, "train"),
    "step": (step, "train", {"apart": ["run"], "ids": "text-like", **GPT2_124M}, "train"),
    "breakdown": (breakdown, "breakdown", {"apart": BREAKDOWN}, "train"),
    "torch": (torch, "torch", {"apart": ["model", "dtype"]}, "torch"),
    "default run": (default_run, "default_run", {}, "default"),
    "start": (start, "start", {"apart": ["model"]}, "start"),
    "scaling": (scaling, "scaling", {"apart": ["model"]}, "scaling"),
    "ring errors": (ring_errors, "ring", {"study": "ring"}, "ring"),
    "ring speed": (ring_speed, "ring_speed", {"apart": ["gpus"]}, "ring"),
}


def quote(file):
    """Lines of attention/'s file, and how fast its kernel is."""
    path = ROOT / "attention" / file
    lines = re.search(r"^ *// \[quote\]\n(.*?)^ *// \[end\]$", path.read_text(), flags=re.S | re.M)
    if not lines:
        fail(f"attention/{file}: no lines between // [quote] and // [end]")
    text = f"```cpp\n{textwrap.dedent(lines[1])}```"
    rung = {"fp16_pairs": "flash_fp16x3"}.get(path.stem, path.stem.removesuffix("_backward"))
    rows = read_rows(max(RESULTS.glob("*/attention.jsonl")), ["dtype"], causal=True)  # of one GPU
    shown = []
    for word, rates in zip(("Forward", "Backward"), rates_of(rung, rows)):
        if rates and (word == "Backward" or "backward" not in path.stem):
            best = f", {rates[2]:.0%} of the best library's" if rates[2] else ""
            shown.append(f"*{word}* {rates[0]:.0f} TFLOP/s, {rates[1]:.0%} of GEMM{best}.")
    return text + "\n\n" + paragraph(" ".join(shown))


def table_of(name, folder):
    """The table's text, one for each GPU that was measured."""
    if name not in TABLES:
        fail(f'no table "{name}"; there are {", ".join(TABLES)}')
    text_of, bench, query, part = TABLES[name]
    found = [read_rows(path, **query) for path in sorted(RESULTS.glob(f"*/{bench}.jsonl"))]
    text = "\n\n".join(filter(None, (text_of(rows) for rows in found if rows)))
    if name == "ladder" and folder != ROOT / "attention":  # it links attention/'s files
        text = text.replace("](", f"]({os.path.relpath(ROOT / 'attention', folder)}/")
    return text or f"Not measured yet: `scripts/measure.sh {part}`"


def between(name, folder):
    """What stands between the markers of this name in a document of this folder."""
    kind, _, what = name.partition(" ")
    plot = what.replace(" ", "_")
    if kind == "quote":
        return quote(what)
    if kind == "plot" and plot in PLOTS:
        return "\n\n".join(
            textwrap.fill(f"![{PLOTS[plot][-1]}]({os.path.relpath(path, folder)})", 120, break_on_hyphens=False)
            for path in sorted(RESULTS.glob(f"*/{plot}.svg")))
    return table_of(name, folder)


@check_stdout()
def main():
    arg = arguments(__doc__)
    arg.add_argument("--check", action="store_true", help="change nothing, exit with 1 if a table is out of date")
    check = arg.parse_args().check
    publish({path: re.sub(r"(<!-- table: ([^\n]*?) -->\n).*?(\n<!-- end -->)",
                          lambda m: m[1] + between(m[2], path.parent) + m[3], path.read_text(), flags=re.S)
             for path in sorted(ROOT.rglob("*.md"))}, check)


if __name__ == "__main__":
    main()
