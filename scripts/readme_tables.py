#!/usr/bin/env python3
"""Writes the tables and plots of every README from dev/results, between their markers:

    <!-- table: attention bf16 --> … <!-- end -->        also: see TABLES

    python3 scripts/readme_tables.py            rewrites both
    python3 scripts/readme_tables.py --check    exit code 1 if they are not what it would write
"""
import argparse
import os
import pathlib
import re
import sys
import textwrap

from results import DEFAULTS, ROOT, arguments, fail, kernels_of, read_rows, shared

WIDTH = 120
TENSORS = ["out", "lse", "dq", "dk", "dv"]
VEHICLES = {"mma.sync": "flash_bf16", "wgmma": "flash_bf16_sm90"}  # and the trainer's kernel beside each
STUDY_INPUTS = {"normal": "N(0,1)", "large_q": "q ×5", "shifted": "mean 0.5", "large_qk": "q, k ×8", "huge_qk": "q, k ×64",
                "large_v": "v N(0.5,1) ×1000"}


def close(a, b):
    return abs(a - b) < 0.03 * max(a, b)


def figure(row, value, others, text):
    """The text of value(row). Where one of `others` is less than 3 % away: least and most of three jobs, or "≈"."""
    if not any(close(value(row), other) for other in others if other):
        return text(value(row))
    of_jobs = [value(job) for job in row["jobs"]]
    if len(of_jobs) < 3:
        return f"≈{text(value(row))}"
    return "–".join(dict.fromkeys((text(min(of_jobs)), text(max(of_jobs)))))


def table(title, found, header, body):
    machines = sorted({f"{r['gpu']}, driver {r['driver']}, CUDA {r['cuda']}" for r in found})
    measured = sorted({f"{r['date'][:10]} at {r['commit'][:7]}" for r in found})
    cells = " ".join(cell for line in body for cell in line)
    notes = " ≈: less than 3 % from what it is compared with, and measured once." if "≈" in cells else ""
    notes += "" if all("dirty" in r for r in found) else " Whether the sources differed from the commit was not recorded."
    notes += " a–b: least and most of three jobs or more." if re.search(r"\d–\d", cells) else ""
    caption = f"{title}. {'; '.join(machines)}. Measured {', '.join(measured)}.{notes}"
    lines = [header, ["---"] + ["--:"] * (len(header) - 1)] + body
    return textwrap.fill(caption, WIDTH) + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def attention(found):
    same, varying = shared(found, ["NH", "HS"])
    at = {(r["HS"], r["NH"], r["T"], r["B"], r["pass"], r["kernel"]): r for r in found}
    kernels = kernels_of(found)

    def cell(row, beside):
        if not row or not row["ms"]:
            return "–"
        return " / ".join(figure(row, lambda r: r[rate], [r.get(rate) for r in beside if r is not row], "{:.0f}".format)
                          for rate in ("tflops", "tflops_sustained") if row.get(rate))

    def line(*shape):
        beside = [at[(*shape, kernel)] for kernel in kernels if (*shape, kernel) in at]
        return [cell(at.get((*shape, kernel)), beside) for kernel in kernels]
    body = [[f"{b}, {t}"] + [str({"NH": nh, "HS": hs}[f]) for f in varying] + [pas] + line(hs, nh, t, b, pas)
            for pas in ("fwd", "bwd") for hs, nh, t, b in sorted({key[:4] for key in at})]
    title = f"Attention, {found[0]['dtype']}, causal, {same + ', ' if same else ''}TFLOP/s cool / sustained"
    return table(title, found, ["B, T", *varying, "pass", *kernels], body)


def beside(row, found, fields, value):
    """What a row is compared with: the values of the others that agree in these fields."""
    return [r[value] for r in found if r is not row and all(r[field] == row[field] for field in fields)]


def accuracy(found):
    case = {"B": 2, "T": 256, "NH": 2, "HS": 64, "causal": False, "input": "normal", "dtype": "bf16"}
    case = [r for r in found if case.items() <= r.items()]
    found = [r for r in found if r["kernel"] != "naive"]
    body = []
    for dtype in ("fp32", "bf16"):
        for kernel in kernels_of(r for r in found if r["dtype"] == dtype):
            def worst(tensor, ratio):
                x = [r[ratio] for r in found if (r["dtype"], r["kernel"], r["tensor"]) == (dtype, kernel, tensor)]
                return "NaN" if None in x else f"{max(x):.{2 if max(x) < 100 else 0}f}"
            body.append([dtype, kernel] + [f"{worst(t, 'ratio_max')} / {worst(t, 'ratio_l2')}" for t in TENSORS])
    lengths = sorted({r["T"] for r in found})
    title = (f"Errors against fp64 as multiples of naive's in the same precision, largest / L2: the worst of T "
             f"{lengths[0]} to {lengths[-1]} and inputs N(0,1), q five times as large, mean 0.5")
    parts = [table(title, found, ["dtype", "kernel", *TENSORS], body)]

    if case:
        at = {(r["kernel"], r["tensor"]): r for r in case}
        body = [[kernel] + [f"{at[kernel, t]['max_error']:.1e}, {at[kernel, t]['snr_db']:.0f}" for t in TENSORS]
                for kernel in kernels_of(case)]
        title = "bf16, B 2, T 256, NH 2, HS 64, not causal, N(0,1): largest error against fp64, signal-to-noise in dB"
        parts.append(table(title, case, ["kernel", *TENSORS], body))
    return "\n\n".join(parts)


def accumulation_speed(found):
    found = [r for r in found if "ms" in r]
    if not found:
        return None
    at = {(r["kernel"], r["dtype"], r["variant"], r["B"], r["T"]): r for r in found}
    shapes = sorted({(r["T"], r["B"]) for r in found})

    def line(dtype, variant, kernels):
        return [dtype, variant, *(cell(at.get((kernel, dtype, variant, b, t))) for kernel in kernels for t, b in shapes)]

    def cell(r):
        beside = [o["tflops"] for o in found if r and o is not r and (o["B"], o["T"]) == (r["B"], r["T"])]
        return figure(r, lambda r: r["tflops"], beside, "{:.0f}".format) if r else "–"
    variants = dict.fromkeys((r["dtype"], r["variant"]) for r in found if r["kernel"] in VEHICLES)
    body = [line(dtype, variant, VEHICLES) for dtype, variant in variants]
    if any(r["variant"] == "trainer" for r in found):
        body.append(line("bf16", "trainer", VEHICLES.values()))
    header = ["dtype", "variant", *(f"{vehicle} {b}, {t}" for vehicle in VEHICLES for t, b in shapes)]
    title = (f"Forward by variant, causal, {shared(found, ['NH', 'HS'])[0]}, TFLOP/s cool at B, T; sums in fp16 exist for "
             f"fp16 operands only; a shift has its kernel's speed; trainer: {', '.join(VEHICLES.values())}")
    return table(title, found, header, body)


def accumulation_errors(found):
    """Of one vehicle: the last that ran. N(0,1) by T, other inputs at the longest T."""
    found = [r for r in found if "input" in r]
    if not found:
        return None
    vehicle = [v for v in VEHICLES if any(r["kernel"] == v for r in found)][-1]
    found = [r for r in found if r["kernel"] == vehicle]
    at = {(r["dtype"], r["variant"], r["input"], r["T"]): r for r in found}
    lengths = sorted({r["T"] for r in found})
    columns = [("normal", T) for T in lengths] + [(name, lengths[-1]) for name in STUDY_INPUTS if name != "normal"]

    def cell(r):
        if not r:
            return "–"
        if r["not_finite"]:
            share = 100 * r["not_finite"] / r["elements"]
            return f"{share:.0f} % ∞" if share >= 1 else f"{r['not_finite']} ∞"
        ratio = r["ratio_l2"]
        return f"{r['relative_l2']:.1e}" + (f" ({ratio:.{2 if ratio < 1 else 1}f}×)" if ratio else "")
    body = [[dtype, variant, *(cell(at.get((dtype, variant, name, T))) for name, T in columns)]
            for dtype, variant in dict.fromkeys((r["dtype"], r["variant"]) for r in found)]
    title = (f"L2 error of out against fp64 (multiple of naive's in the same type; ∞: elements that are not finite), "
             f"{vehicle}, {shared(found, ['NH', 'HS'])[0]}")
    return table(title, found, ["dtype", "variant", *(f"{STUDY_INPUTS[name]}, T {T}" for name, T in columns)], body)


def losses(found):
    found.sort(key=lambda r: (r["model"], r["dtype"], r["B"], r["T"], r["attention"] != "naive"))
    body = [[r["model"], "tf32" if r["tf32"] else r["dtype"], str(r["B"]), str(r["T"]), r["attention"],
             figure(r, lambda r: r["ms"], beside(r, found, LOSSES, "ms"), "{:.2f}".format), f"{r['loss']:.4f}",
             f"{r['loss_min']:.4f} – {r['loss_max']:.4f}"] for r in found]
    same, _ = shared(found, ["steps", "seeds"])
    header = ["model", "matmuls", "B", "T", "attention", "ms a step", "mean final loss", "least – most of the seeds"]
    return table(f"Training with naive and with flash attention, {same}", found, header, body)


def train(found):
    ours = [{**DEFAULTS, **r} for r in found if r["kernel"] == "train_gpt2cu"]
    peers = [{**r, "attention": f"{r['kernel']}, {r['sdpa'].removeprefix('torch_')}", "recompute": "–"}
             for r in found if r["kernel"] != "train_gpt2cu"]
    same, varying = shared(ours, ["recompute"]) if ours else ("", [])
    lines = [*sorted(ours, key=lambda r: (r["attention"], r["recompute"], r["T"], r["B"])),
             *sorted(peers, key=lambda r: (r["T"], r["B"], r["attention"]))]
    lines.sort(key=lambda r: (r["model"], r["dtype"]))

    def cell(r, field, text):
        return figure(r, lambda r: r[field], beside(r, lines, TRAIN, field), text)
    body = [[r["model"], r["dtype"], r["attention"], *(str(r[field]) for field in varying), str(r["B"]), str(r["T"]),
             cell(r, "tok_s", lambda rate: f"{rate / 1e3:.0f}k"), cell(r, "ms", "{:.2f}".format),
             cell(r, "mfu", "{:.1f} %".format) if r["mfu"] else "n/a", f"{r['mem_gib']:.1f}"] for r in lines]
    header = ["model", "dtype", "attention", *varying, "B", "T", "tok/s", "ms", "MFU", "GiB in use"]
    title = "The whole training step, sustained" + (f", {same}" if same else "")
    return table(title, found, header, body)


def scaling(found):
    """Weak scaling: the newest run of each model, with the losses of its ranks beside one GPU's."""
    speed = sorted((r for r in found if r["what"] == "speed"), key=lambda r: (r["model"], r["B"], r["gpus"], r["zero"]))
    if not speed:
        return None
    apart = {(r["model"], r["gpus"], r["zero"]): r["apart"] for r in found if r["what"] == "losses"}
    same, varying = shared(speed, ["model", "dtype", "B", "T"])

    def cells(r):
        rates = beside(r, speed, ["model", "B", "gpus"], "tok_s")
        times = beside(r, speed, ["model", "B"], "ms") + [r["ms_side_by_side"]] * (r["gpus"] > 1)
        return [figure(r, lambda r: r["tok_s"] / 1e3, [rate / 1e3 for rate in rates], "{:.0f}k".format),
                figure(r, lambda r: 100 * r["of_linear"], [100] * (r["gpus"] > 1), "{:.1f} %".format),
                figure(r, lambda r: r["ms"], times, "{:.2f}".format),
                figure(r, lambda r: r["ms_side_by_side"], [r["ms"]] * (r["gpus"] > 1), "{:.2f}".format)]
    body = [[str(r["gpus"]), str(r["zero"]) if r["gpus"] > 1 else "–", *(str(r[field]) for field in varying), *cells(r),
             f"{r['gib']:.1f}", f"{apart[key]:.0e}" if (key := (r["model"], r["gpus"], r["zero"])) in apart else "–"]
            for r in speed]
    header = ["GPUs", "--zero", *varying, "tok/s", "of linear", "ms a step", "ms side by side", "GiB a GPU", "losses apart"]
    title = (f"Data parallel, {same}, B for each GPU, sustained. Side by side: the slowest of as many runs that know nothing "
             f"of each other, one a GPU, at once. GiB: of tensors. Losses apart: largest relative difference of a step's "
             f"loss from one GPU's at the same global batch, strict fp32, 20 steps")
    return table(title, found, header, body)


def ring_chunks(found):
    own = {r["dtype"]: r for r in found if r["study"] == "unchunked"}
    found = [r for r in found if r["study"] == "chunks"]
    wrong = ["own_lse_dq", "own_lse_dk", "own_lse_dv", "used_sum_dq"]
    body = []
    for dtype in dict.fromkeys(r["dtype"] for r in found):
        body += [[dtype, str(r["chunk"]), *(f"{r[t]:.1e}" for t in TENSORS), *(f"{r[w]:.2f}" for w in wrong)]
                 for r in found if r["dtype"] == dtype]
        body.append([dtype, "all, fp64", *(f"{own[dtype][t]:.1e}" for t in TENSORS), *([""] * len(wrong))])
    header = ["dtype", "chunk", *TENSORS, "own lse: dq", "dk", "dv", "used sum: dq"]
    title = (f"Largest difference from the unchunked call, chunk by chunk, causal, {shared(found, ['T', 'NH', 'HS'])[0]}, 8 by "
             f"8 chunks; behind them the unchunked call's own from fp64. On the right two mistakes: the block's own lse and "
             f"D, and a sum of dq that was not cleared")
    return table(title, found, header, body)


def ring_errors(found):
    found = [r for r in found if r["study"] == "ring"]
    tensors = ["out", "dq", "dk", "dv"]
    at = {(r["dtype"], r["carry"], r["ranks"], r["tensor"]): r for r in found}

    def cell(r):
        if r["carry"] == "floor":
            return f"{r['mean_error']:.2e}, {r['max_error']:.1e}"
        return f"{r['mean_error']:.2e} ({r['mean_ratio']:.2f}), {r['max_error']:.1e} ({r['max_ratio']:.2f})"
    body = [[dtype, carry, str(n) if carry != "floor" else "–", *(cell(at[dtype, carry, n, t]) for t in tensors)]
            for dtype, carry, n in dict.fromkeys(key[:3] for key in at)]
    title = (f"Ring attention against fp64 by number of ranks, causal, {shared(found, ['T', 'NH', 'HS'])[0]}, N(0,1): mean and "
             f"largest absolute error (multiples of one rank's); floor: fp64's result, rounded")
    return table(title, found, ["dtype", "carry", "ranks", *tensors], body)


def ring_speed(found):
    found.sort(key=lambda r: (r["HS"], r["gpus"], r["pass"]))

    def share(r, ms):
        return " / ".join(figure(r, lambda r: 100 * r["single_ms" + p] / r[ms + p], [100], "{:.1f}".format)
                          for p in ("", "_sustained") if r.get(ms + p)) + " %"
    body = [[str(r["gpus"]), f"{r['NH']}, {r['HS']}", r["pass"], f"{r['single_ms']:.2f}", f"{r['ms']:.2f}", share(r, "ms"),
             share(r, "still_ms"), f"{r['hop_ms']:.2f}"] for r in found]
    header = ["GPUs", "NH, HS", "pass", "one GPU's time / GPUs, ms", "ring, ms", "of one GPU's rate", "nothing sent", "a hop, ms"]
    title = (f"Ring attention, bf16, causal, B 1, {found[0]['tokens_per_gpu']} tokens a GPU; ms cool, rates cool / sustained. "
             f"Nothing sent: the ring's blocks without its travel. A hop: the most that travels in a step, by itself")
    return table(title, found, header, body)


def breakdown(found):
    """A table for each step that was taken apart, its longest call first."""
    steps = {}
    for r in found:
        steps.setdefault(tuple(r[field] for field in BREAKDOWN), []).append(r)
    return "\n\n".join(breakdown_of_step(of_step) for _, of_step in sorted(steps.items()))


def breakdown_of_step(found):
    """The two rates are yardsticks: a call of another shape may beat them, and then nothing of it is beyond them."""
    found.sort(key=lambda r: -r["ms"])
    of = found[0]
    step_ms, n = of["step_ms"], of.get("gemm_size", 8192)

    def rate(r, field, yardstick, digits):
        return [f"{r[field]:.{digits}f}", f"{100 * r[field] / r[yardstick]:.0f}"] if r[field] else ["", ""]

    def beyond(r):
        return max(0, r["lost_ms"])
    body = [[r["call"], str(r["calls"]), f"{r['ms']:.3f}", f"{100 * r['ms'] / step_ms:.1f}",
             *rate(r, "tflops", "gemm_tflops_sustained", 1), *rate(r, "tb_s", "copy_tb_s_sustained", 2),
             f"{beyond(r):.3f}" if beyond(r) else ""] for r in found]
    calls, ms = (sum(r[field] for r in found) for field in ("calls", "ms"))
    body.append(["all of these", str(calls), f"{ms:.3f}", f"{100 * ms / step_ms:.1f}", "", "", "", "",
                 f"{sum(map(beyond, found)):.3f}"])
    title = (f"Where a step of {step_ms:.2f} ms goes, call by call: {of['model']}, {of['dtype']}, B {of['B']}, "
             f"T {of['T']}, attention {of['attention']}, recompute {of['recompute']}; beside a product of {n}³, "
             f"{of['gemm_tflops_sustained']:.0f} TFLOP/s, and a copy of 1 GiB, {of['copy_tb_s_sustained']:.2f} TB/s, both "
             f"sustained")
    header = ["call", "calls", "ms", "% of step", "TFLOP/s", f"% of {n}³", "TB/s", "% of copy", "ms beyond"]
    most = [f"{r['call']} ({beyond(r):.2f} ms, {100 * beyond(r) / step_ms:.1f} % of the step)"
            for r in sorted(found, key=beyond)[:-4:-1]]
    sentence = f"Beyond is what a call takes longer than at both of these rates. Most of it: {'; '.join(most)}."
    return table(title, found, header, body) + "\n\n" + textwrap.fill(sentence, WIDTH)


def torch(found):
    body = [[r["model"], r["dtype"], r["attention"], f"{r['max_norm']:g}", f"{r['clipped']} of {r['steps']}",
             f"{r['weight_decay']:g}", f"{r['difference']:.1e}", f"{r['allowed']:.1e}", f"{r['torch_itself']:.1e}"]
            for r in found]
    header = ["model", "dtype", "attention", "clipped at", "steps clipped", "decay", "difference", "allowed", "PyTorch's own"]
    title = (f"Losses beside a plain PyTorch GPT-2 of the same type, from one checkpoint and shard, "
             f"{shared(found, ['B', 'T', 'lr'])[0]}: largest difference of a step's loss from PyTorch's in strict fp32; "
             f"PyTorch's own: with another attention in fp32, in bf16 its plain one")
    return table(title, found, header, body)


def default_run(found, path):
    """The plot of the newest default run, and the beginnings of its samples."""
    found.sort(key=lambda r: r["step"])
    first = found[0]
    caption = (f"`./train_gpt2cu` without options: {first['steps']} steps of {first['B']}·{first['T']} tokens in "
               f"{first['dtype']}; no model can pass the floor of {first['floor_nats']:.4f} nats. {first['gpu']}, driver "
               f"{first['driver']}, CUDA {first['cuda']}. Made {first['date'][:10]} at {first['commit'][:7]}.")
    parts = [textwrap.fill(caption, WIDTH)]
    plot = path.with_suffix(".png")
    if plot.exists():
        parts.append(f"![loss, gradient norm, learning rate and speed](dev/results/{plot.parent.name}/{plot.name})")
    for r in found:
        text = " ".join(r["text"].split())
        text = textwrap.shorten(text, 300, placeholder=" …")
        parts.append(textwrap.fill(f"*Step {r['step']}, validation loss {r['val_loss_nats']:.3f}:* {text}", WIDTH))
    return "\n\n".join(parts)


# What stands between the markers: a bench, what read_rows() is asked for, the text made of a GPU's rows, and the part
# of scripts/measure.sh that measures them.
LOSSES, TRAIN = ["model", "dtype", "tf32", "B", "T"], ["model", "dtype", "B", "T"]
BREAKDOWN = ["model", "dtype", "B", "T", "attention", "recompute"]
TABLES = {
    "attention bf16": ("attention", {"dtype": "bf16", "causal": True}, attention, "bf16"),
    "attention fp32": ("attention", {"dtype": "fp32", "causal": True}, attention, "fp32"),
    "accuracy": ("accuracy", {"apart": ["HS"]}, accuracy, "accuracy"),
    "losses": ("losses", {"apart": LOSSES}, losses, "losses"),
    "train": ("train", {"apart": TRAIN}, train, "train"),
    "breakdown": ("breakdown", {"apart": BREAKDOWN}, breakdown, "train"),
    "scaling": ("scaling", {"apart": ["model"]}, scaling, "scaling"),
    "torch": ("torch", {"apart": ["model", "dtype"]}, torch, "torch"),
    "default run": ("default_run", {}, default_run, "default"),
    "accumulation speed": ("accumulation", {}, accumulation_speed, "study"),
    "accumulation errors": ("accumulation", {}, accumulation_errors, "study"),
    "ring chunks": ("ring", {}, ring_chunks, "ring"), "ring errors": ("ring", {}, ring_errors, "ring"),
    "ring speed": ("ring_speed", {"apart": ["gpus"]}, ring_speed, "ring")}
# Plots, <name>.svg beside the rows, are shown as they are.
PLOTS = {"accumulation": "study", "attention bf16": "bf16", "attention fp32": "fp32", "accuracy": "accuracy",
         "ring": "ring", "ring timeline": "ring", "memory": "memory"}


def make(name, document, root):
    """The table's text or the plot, one for each GPU that was measured."""
    folders = sorted((root / "dev" / "results").glob("*/"))
    if name in TABLES:
        bench, query, text_of, measured_by = TABLES[name]
        paths = [path for folder in folders if (path := folder / f"{bench}.jsonl").exists()]
        found = {path: rows for path in paths if (rows := read_rows(path, **query))}
        parts = [text_of(rows, path) if text_of is default_run else text_of(rows) for path, rows in found.items()]
    elif (plot := name.removeprefix("plot ")) != name and plot in PLOTS:
        measured_by, paths = PLOTS[plot], [folder / f"{plot.replace(' ', '_')}.svg" for folder in folders]
        parts = [f"![{plot}]({os.path.relpath(path, (root / document).parent)})" for path in paths if path.exists()]
    else:
        fail(f'{document}: no table "{name}"; there are {", ".join([*TABLES, *(f"plot {plot}" for plot in PLOTS)])}')
    return "\n\n".join(part for part in parts if part) or f"Not measured yet: `scripts/measure.sh {measured_by}`"


def main():
    arg = arguments(__doc__)
    arg.add_argument("--check", action="store_true", help="change nothing, exit with 1 if a table is out of date")
    arg.add_argument("--root", type=pathlib.Path, default=ROOT, help=argparse.SUPPRESS)  # for tests
    a = arg.parse_args()
    for path in sorted(a.root.rglob("*.md")):
        document, old = str(path.relative_to(a.root)), path.read_text()
        new = re.sub(r"(<!-- table: ([^\n]*?) -->\n).*?(\n<!-- end -->)",
                     lambda m: m[1] + make(m[2], document, a.root) + m[3], old, flags=re.S)
        if a.check and new != old:
            sys.exit(f"{document}: its tables are not those of dev/results: run python3 scripts/readme_tables.py")
        if not a.check:
            path.write_text(new)


if __name__ == "__main__":
    main()
