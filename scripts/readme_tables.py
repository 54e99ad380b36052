#!/usr/bin/env python3
"""Writes the result tables and plots of README.md and attention/README.md from dev/results, between their markers:

    <!-- table: attention bf16 --> … <!-- end -->        also: see TABLES

    python3 scripts/readme_tables.py            rewrites both
    python3 scripts/readme_tables.py --check    exit code 1 if they are not what it would write
"""
import argparse
import json
import os
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "attention/README.md"]
WIDTH = 120
# What was measured, rather than what came out: a newer row replaces one that agrees in all of these.
WHAT = ["kernel", "pass", "model", "dtype", "attention", "B", "T", "NH", "HS", "causal", "deterministic", "gpus",
        "zero", "what", "steps", "lr", "tf32", "input", "tensor", "recompute", "call", "variant", "study", "carry", "ranks",
        "chunk", "tokens_per_gpu", "rank"]
DEFAULTS = {"recompute": 0}  # of rows from before there was a choice


def rows(path, **where):
    """The newest row of each measurement in a file that matches `where`."""
    newest = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            if all(row.get(field) == value for field, value in where.items()):
                key = tuple(row.get(field, DEFAULTS.get(field)) for field in WHAT)
                if key not in newest or newest[key]["date"] <= row["date"]:
                    newest[key] = row
        except (ValueError, KeyError, AttributeError, TypeError):
            sys.exit(f"readme_tables.py: {path}:{number}: expected a result row with its date, found {line[:60]!r}")
    return list(newest.values())


def shared(found, fields):
    """ "B 4, HS 64" of those fields that are the same in all rows, and those that are not."""
    varying = [f for f in fields if len({r[f] for r in found}) > 1]
    return ", ".join(f"{f} {found[0][f]}" for f in fields if f not in varying), varying


def table(title, found, header, body):
    machines = sorted({f"{r['gpu']}, driver {r['driver']}, CUDA {r['cuda']}" for r in found})
    measured = sorted({f"{r['date'][:10]} at {r['commit'][:7]}" for r in found})
    caption = f"{title}. {'; '.join(machines)}. Measured {', '.join(measured)}."
    lines = [header, ["---"] + ["--:"] * (len(header) - 1)] + body
    return textwrap.fill(caption, WIDTH) + "\n\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def kernels_of(found):
    """naive, then the peers, then ours, each in the order in which they were measured: slowest first."""
    kernels = dict.fromkeys(r["kernel"] for r in found)
    return sorted(kernels, key=lambda k: (k.startswith("flash"), not k.startswith("naive")))


def attention(path, dtype):
    found = rows(path, dtype=dtype, causal=True)
    if not found:
        return None
    same, varying = shared(found, ["NH", "HS"])
    at = {(r["HS"], r["NH"], r["T"], r["B"], r["pass"], r["kernel"]): r for r in found}
    kernels = kernels_of(found)

    def cell(row):
        if not row or not row["ms"]:
            return "–"
        sustained = row.get("tflops_sustained")
        return f"{row['tflops']:.0f}" + (f" / {sustained:.0f}" if sustained else "")

    body = [[f"{b}, {t}"] + [str({"NH": nh, "HS": hs}[f]) for f in varying] + [pas] +
            [cell(at.get((hs, nh, t, b, pas, kernel))) for kernel in kernels]
            for pas in ("fwd", "bwd") for hs, nh, t, b in sorted({key[:4] for key in at})]
    title = f"Attention, {dtype}, causal, {same + ', ' if same else ''}TFLOP/s cool / sustained"
    return table(title, found, ["B, T", *varying, "pass", *kernels], body)


def ladder(path):
    """Naive against flash by T, at the largest B up to 4 that naive has memory for; if it has for none, flash alone."""
    found = [r for r in rows(path, dtype="fp32", causal=True, NH=12, HS=64)
             if r["B"] <= 4 and not r["kernel"].startswith("torch")]
    batches = {}
    for r in found:
        if r["ms"]:
            batches.setdefault(r["T"], []).append((r["kernel"].startswith("naive"), r["B"]))
    batch = {T: max(of_T)[1] for T, of_T in batches.items()}
    found = [r for r in found if r["B"] == batch.get(r["T"])]
    if not found:
        return None
    at = {(r["T"], r["pass"], r["kernel"]): r for r in found}
    kernels = kernels_of(found)
    yardsticks = [k for k in kernels if k.startswith("naive")]

    def cell(t, pas, kernel):
        row = at.get((t, pas, kernel))
        if not row:
            return "–"
        if not row["ms"]:
            return "out of memory"
        others = [at.get((t, pas, k), {}).get("ms") for k in yardsticks]
        speed_ups = ", ".join(f"{ms / row['ms']:.2f}×" if ms else "–" for ms in others)
        ms = f"{row['ms']:.{3 if row['ms'] < 10 else 1}f}"
        return f"{ms} ({speed_ups})" if kernel not in yardsticks and any(others) else ms

    body = [[str(batch[t]), str(t), pas] + [cell(t, pas, kernel) for kernel in kernels]
            for pas in ("fwd", "bwd") for t in sorted(batch)]
    title = f"Attention, fp32, causal, NH 12, HS 64: ms cool (speed-up over {', '.join(yardsticks)})"
    return table(title, found, ["B", "T", "pass", *kernels], body)


TENSORS = ["out", "lse", "dq", "dk", "dv"]


def accuracy(path):
    found = [r for r in rows(path) if r["kernel"] != "naive"]
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

    case = rows(path, B=2, T=256, NH=2, HS=64, causal=False, input="normal", dtype="bf16")
    if case:
        at = {(r["kernel"], r["tensor"]): r for r in case}
        body = [[kernel] + [f"{at[kernel, t]['max_error']:.1e}, {at[kernel, t]['snr_db']:.0f}" for t in TENSORS]
                for kernel in kernels_of(case)]
        title = "bf16, B 2, T 256, NH 2, HS 64, not causal, N(0,1): largest error against fp64, signal-to-noise in dB"
        parts.append(table(title, case, ["kernel", *TENSORS], body))
    return "\n\n".join(parts)


VEHICLES = {"mma.sync": "flash_bf16", "wgmma": "flash_bf16_sm90"}  # and the trainer's kernel beside each
STUDY_INPUTS = {"normal": "N(0,1)", "large_q": "q ×5", "shifted": "mean 0.5", "large_qk": "q, k ×8", "huge_qk": "q, k ×64",
                "large_v": "v N(0.5,1) ×1000"}


def accumulation_speed(path):
    found = [r for r in rows(path) if "ms" in r]
    if not found:
        return None
    at = {(r["kernel"], r["dtype"], r["variant"], r["B"], r["T"]): r["tflops"] for r in found}
    shapes = sorted({(r["T"], r["B"]) for r in found})

    def line(dtype, variant, kernels):
        rates = [at.get((kernel, dtype, variant, b, t)) for kernel in kernels for t, b in shapes]
        return [dtype, variant, *(f"{rate:.0f}" if rate else "–" for rate in rates)]
    variants = dict.fromkeys((r["dtype"], r["variant"]) for r in found if r["kernel"] in VEHICLES)
    body = [line(dtype, variant, VEHICLES) for dtype, variant in variants]
    if any(r["variant"] == "trainer" for r in found):
        body.append(line("bf16", "trainer", VEHICLES.values()))
    header = ["dtype", "variant", *(f"{vehicle} {b}, {t}" for vehicle in VEHICLES for t, b in shapes)]
    title = (f"Forward by variant, causal, {shared(found, ['NH', 'HS'])[0]}, TFLOP/s cool at B, T; sums in fp16 exist for "
             f"fp16 operands only; a shift has its kernel's speed; trainer: {', '.join(VEHICLES.values())}")
    return table(title, found, header, body)


def accumulation_errors(path):
    """Of one vehicle: the last that ran. N(0,1) by T, other inputs at the longest T."""
    found = [r for r in rows(path) if "input" in r]
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


def losses(path):
    found = rows(path)
    found.sort(key=lambda r: (r["model"], r["dtype"], r["B"], r["T"], r["attention"] != "naive"))
    body = [[r["model"], "tf32" if r["tf32"] else r["dtype"], str(r["B"]), str(r["T"]), r["attention"],
             f"{r['ms']:.2f}", f"{r['loss']:.4f}", f"{r['loss_min']:.4f} – {r['loss_max']:.4f}"] for r in found]
    same, _ = shared(found, ["steps", "seeds"])
    header = ["model", "matmuls", "B", "T", "attention", "ms a step", "mean final loss", "least – most of the seeds"]
    return table(f"Training with naive and with flash attention, {same}", found, header, body)


def train(path):
    found = rows(path)
    ours = [{**DEFAULTS, **r} for r in found if r["kernel"] == "train_gpt2cu"]
    peers = [{**r, "attention": f"{r['kernel']}, {r['sdpa'].removeprefix('torch_')}", "recompute": "–"}
             for r in found if r["kernel"] != "train_gpt2cu"]
    same, varying = shared(ours, ["recompute"]) if ours else ("", [])
    lines = [*sorted(ours, key=lambda r: (r["attention"], r["recompute"], r["T"], r["B"])),
             *sorted(peers, key=lambda r: (r["T"], r["B"], r["attention"]))]
    lines.sort(key=lambda r: (r["model"], r["dtype"]))
    body = [[r["model"], r["dtype"], r["attention"], *(str(r[field]) for field in varying), str(r["B"]), str(r["T"]),
             f"{r['tok_s'] / 1e3:.0f}k", f"{r['ms']:.2f}", f"{r['mfu']:.1f} %" if r["mfu"] else "n/a",
             f"{r['mem_gib']:.1f}"] for r in lines]
    header = ["model", "dtype", "attention", *varying, "B", "T", "tok/s", "ms", "MFU", "GiB in use"]
    title = "The whole training step, sustained" + (f", {same}" if same else "")
    return table(title, found, header, body)


def scaling(path):
    """Weak scaling: the newest run of each model, with the losses of its ranks beside one GPU's."""
    found = rows(path)
    speed = sorted((r for r in found if r["what"] == "speed"), key=lambda r: (r["model"], r["B"], r["gpus"], r["zero"]))
    if not speed:
        return None
    apart = {(r["model"], r["gpus"], r["zero"]): r["apart"] for r in found if r["what"] == "losses"}
    same, varying = shared(speed, ["model", "dtype", "B", "T"])
    body = [[str(r["gpus"]), str(r["zero"]) if r["gpus"] > 1 else "–", *(str(r[field]) for field in varying),
             f"{r['tok_s'] / 1e3:.0f}k", f"{100 * r['of_linear']:.1f} %", f"{r['ms']:.2f}", f"{r['ms_side_by_side']:.2f}",
             f"{r['gib']:.1f}", f"{apart[key]:.0e}" if (key := (r["model"], r["gpus"], r["zero"])) in apart else "–"]
            for r in speed]
    header = ["GPUs", "--zero", *varying, "tok/s", "of linear", "ms a step", "ms side by side", "GiB a GPU", "losses apart"]
    title = (f"Data parallel, {same}, B for each GPU, sustained. Side by side: the slowest of as many runs that know nothing "
             f"of each other, one a GPU, at once. GiB: of tensors. Losses apart: largest relative difference of a step's "
             f"loss from one GPU's at the same global batch, strict fp32, 20 steps")
    return table(title, found, header, body)


def ring_chunks(path):
    found = rows(path, study="chunks")
    own = {r["dtype"]: r for r in rows(path, study="unchunked")}
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


def ring_errors(path):
    found = rows(path, study="ring")
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


def ring_speed(path):
    found = sorted(rows(path), key=lambda r: (r["HS"], r["gpus"], r["pass"]))

    def share(r, ms):
        at_length = [f"{100 * r['single_ms' + p] / r[ms + p]:.1f}" for p in ("", "_sustained") if r.get(ms + p)]
        return " / ".join(at_length) + " %"
    body = [[str(r["gpus"]), f"{r['NH']}, {r['HS']}", r["pass"], f"{r['single_ms']:.2f}", f"{r['ms']:.2f}", share(r, "ms"),
             share(r, "still_ms"), f"{r['hop_ms']:.2f}"] for r in found]
    header = ["GPUs", "NH, HS", "pass", "one GPU's time / GPUs, ms", "ring, ms", "of one GPU's rate", "nothing sent", "a hop, ms"]
    title = (f"Ring attention, bf16, causal, B 1, {found[0]['tokens_per_gpu']} tokens a GPU; ms cool, rates cool / sustained. "
             f"Nothing sent: the ring's blocks without its travel. A hop: the most that travels in a step, by itself")
    return table(title, found, header, body)


def breakdown(path):
    """A table for each step that was taken apart, its longest call first."""
    steps = {}
    for r in rows(path):
        steps.setdefault((r["model"], r["dtype"], r["B"], r["T"], r["attention"], r["recompute"]), []).append(r)
    return "\n\n".join(breakdown_of_step(of_step) for _, of_step in sorted(steps.items()))


def breakdown_of_step(found):
    # Of an earlier run, with another length of the step, there may be calls that are no longer made.
    step_ms = max(found, key=lambda r: r["date"])["step_ms"]
    found = sorted((r for r in found if r["step_ms"] == step_ms), key=lambda r: -r["ms"])

    def rate(r, field, ceiling, digits):
        return [f"{r[field]:.{digits}f}", f"{100 * r[field] / r[ceiling]:.0f}"] if r[field] else ["", ""]
    body = [[r["call"], str(r["calls"]), f"{r['ms']:.3f}", f"{100 * r['ms'] / step_ms:.1f}",
             *rate(r, "tflops", "gemm_tflops_sustained", 1), *rate(r, "tb_s", "copy_tb_s_sustained", 2),
             f"{r['lost_ms']:.3f}"] for r in found]
    calls, ms, lost_ms = (sum(r[field] for r in found) for field in ("calls", "ms", "lost_ms"))
    share = f"{100 * ms / step_ms:.1f}"
    body.append(["all of these", str(calls), f"{ms:.3f}", share, "", "", "", "", f"{lost_ms:.3f}"])
    of = found[0]
    title = (f"Where a step of {step_ms:.2f} ms goes, call by call: {of['model']}, {of['dtype']}, B {of['B']}, "
             f"T {of['T']}, attention {of['attention']}, recompute {of['recompute']}; sustained ceilings: "
             f"GEMM {of['gemm_tflops_sustained']:.0f} TFLOP/s, copy {of['copy_tb_s_sustained']:.2f} TB/s")
    header = ["call", "calls", "ms", "% of step", "TFLOP/s", "% of GEMM", "TB/s", "% of copy", "lost ms"]
    losses = [f"{r['call']} ({r['lost_ms']:.2f} ms, {100 * r['lost_ms'] / step_ms:.1f} % of the step)"
              for r in sorted(found, key=lambda r: -r["lost_ms"])[:3]]
    sentence = f"Lost is what a call takes beyond the slower of its two ceilings; most is lost in {'; '.join(losses)}."
    return table(title, found, header, body) + "\n\n" + textwrap.fill(sentence, WIDTH)


def torch(path):
    found = rows(path)
    body = [[r["model"], r["attention"], str(r["B"]), str(r["T"]), str(r["steps"]), f"{r['lr']:g}",
             f"{r['max_loss_difference']:.1e}", f"{r['max_loss_difference_torch_itself']:.1e}"] for r in found]
    header = ["model", "attention", "B", "T", "steps", "lr", "largest difference of a step's loss",
              "of PyTorch with another attention"]
    return table("Losses beside a plain PyTorch GPT-2, strict fp32, from one checkpoint and shard", found, header, body)


# What stands between the markers: the file of each GPU, and the text that is made of it; a plot is shown as it is.
def default_run(path):
    """The plot of the newest default run, and the beginnings of its samples."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    newest = max(r["date"] for r in found)
    found = [r for r in found if r["date"] == newest]
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


TABLES = {"attention bf16": ("attention.jsonl", lambda path: attention(path, "bf16")),
          "attention fp32": ("attention.jsonl", lambda path: attention(path, "fp32")),
          "ladder": ("attention.jsonl", ladder), "accuracy": ("accuracy.jsonl", accuracy),
          "losses": ("losses.jsonl", losses), "train": ("train.jsonl", train),
          "breakdown": ("breakdown.jsonl", breakdown), "scaling": ("scaling.jsonl", scaling), "torch": ("torch.jsonl", torch),
          "default run": ("default_run.jsonl", default_run),
          "accumulation speed": ("accumulation.jsonl", accumulation_speed),
          "accumulation errors": ("accumulation.jsonl", accumulation_errors),
          "plot accumulation": ("accumulation.svg", None), "plot attention bf16": ("attention_bf16.svg", None),
          "plot attention fp32": ("attention_fp32.svg", None),
          "ring chunks": ("ring.jsonl", ring_chunks), "ring errors": ("ring.jsonl", ring_errors),
          "ring speed": ("ring_speed.jsonl", ring_speed), "plot ring": ("ring.svg", None),
          "plot ring timeline": ("ring_timeline.svg", None),
          "plot accuracy": ("accuracy.svg", None), "plot memory": ("memory.svg", None)}


def make(name, document, root):
    """The table's text, one part for each GPU that was measured."""
    if name not in TABLES:
        sys.exit(f"readme_tables.py: {document}: no table \"{name}\"; there are {', '.join(TABLES)}")
    file, of_file = TABLES[name]
    files = sorted((root / "dev" / "results").glob(f"*/{file}"))
    folder = (root / document).parent
    parts = [of_file(path) if of_file else f"![{name[5:]}]({os.path.relpath(path, folder)})"
             for path in files if path.stat().st_size]
    return "\n\n".join(part for part in parts if part) or "Not measured yet."


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--check", action="store_true", help="change nothing, exit with 1 if a table is out of date")
    arg.add_argument("--root", type=pathlib.Path, default=ROOT, help=argparse.SUPPRESS)  # for tests
    a = arg.parse_args()
    for document in DOCUMENTS:
        path = a.root / document
        old = path.read_text()
        new = re.sub(r"(<!-- table: ([^\n]*?) -->\n).*?(\n<!-- end -->)",
                     lambda m: m[1] + make(m[2], document, a.root) + m[3], old, flags=re.S)
        if a.check and new != old:
            sys.exit(f"{document}: its tables are not those of dev/results: run python3 scripts/readme_tables.py")
        if not a.check:
            path.write_text(new)


if __name__ == "__main__":
    main()
