#!/usr/bin/env python3
"""Writes README's result tables from dev/results, between their markers:

    <!-- table: attention bf16 --> … <!-- end -->        also: attention fp32, train, torch

    python3 scripts/readme_tables.py            rewrites README.md
    python3 scripts/readme_tables.py --check    exit code 1 if README.md is not what it would write
"""
import argparse
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def rows(name, **where):
    """The newest row of each kind in dev/results/*/name.jsonl that matches `where`, in order of first appearance."""
    newest = {}
    figures = {"commit", "date", "gpu", "driver", "cuda", "ms", "tflops", "ms_sustained", "tflops_sustained", "tok_s", "mfu",
               "mem_gib", "loss", "gemm_tflops", "gemm_tflops_sustained", "max_loss_difference"}
    for path in sorted((ROOT / "dev" / "results").glob(f"*/{name}.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if all(row.get(k) == v for k, v in where.items()):
                key = tuple(sorted((k, str(v)) for k, v in row.items() if k not in figures and not k.startswith(("gemm", "speed", "percent", "naive"))))
                if key not in newest or newest[key]["date"] <= row["date"]:
                    newest[key] = row
    return list(newest.values())


def caption(found):
    machine = sorted({f"{r['gpu']}, driver {r['driver']}, CUDA {r['cuda']}" for r in found})
    measured = sorted({f"{r['date'][:10]} at {r['commit'][:7]}" for r in found})
    return f"{'; '.join(machine)}. Measured {', '.join(measured)}."


def table(header, body):
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in body])


def attention(dtype):
    found = rows("attention", dtype=dtype, causal=True)
    if not found:
        return "Not measured yet."
    kernels = sorted({r["kernel"] for r in found}, key=lambda k: (not k.startswith("naive"), "flash" in k, k))
    shapes = sorted({(r["HS"], r["T"], r["B"]) for r in found})
    body = []
    for hs, t, b in shapes:
        cells = [f"{b}, {t}" + (f", HS {hs}" if hs != 64 else "")]
        for pas in ("fwd", "bwd"):
            for kernel in kernels:
                hit = [r for r in found if (r["HS"], r["T"], r["B"], r["pass"], r["kernel"]) == (hs, t, b, pas, kernel)]
                cells.append(f"{hit[-1]['tflops']:.0f} / {hit[-1]['tflops_sustained']:.0f}" if hit and hit[-1].get("tflops_sustained") else f"{hit[-1]['tflops']:.0f}" if hit else "–")
        body.append(cells)
    header = ["B, T"] + [f"{pas} {kernel}" for pas in ("fwd", "bwd") for kernel in kernels]
    return (f"Attention, {dtype}, causal, NH {found[0]['NH']}, HS 64, TFLOP/s cool / sustained. " + caption(found) + "\n\n" + table(header, body))


def train():
    found = rows("train")
    if not found:
        return "Not measured yet."
    body = [[r["model"], r["dtype"], r["kernel"] if r["kernel"] != "train_gpt2cu" else r["attention"], str(r["B"]), str(r["T"]), f"{r['tok_s'] / 1e3:.0f}k", f"{r['ms']:.2f}",
             f"{r['mfu']:.1f} %" if r.get("mfu") else "n/a", f"{r['mem_gib']:.1f}"]
            for r in sorted(found, key=lambda r: (r["model"], r["dtype"], r["attention"], r["B"], r["T"]))]
    return "The whole training step, sustained. " + caption(found) + "\n\n" + table(["model", "dtype", "attention", "B", "T", "tok/s", "ms", "MFU", "GiB in use"], body)


def torch():
    found = rows("torch")
    if not found:
        return "Not measured yet."
    body = [[r["model"], r["attention"], str(r["B"]), str(r["T"]), str(r["steps"]), f"{r['max_loss_difference']:.1e}"] for r in found]
    return "Losses beside a plain PyTorch GPT-2, strict fp32, from one checkpoint and shard. " + caption(found) + "\n\n" + table(["model", "attention", "B", "T", "steps", "largest difference of a step's loss"], body)


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--check", action="store_true")
    a = arg.parse_args()
    make = {"attention bf16": lambda: attention("bf16"), "attention fp32": lambda: attention("fp32"), "train": train, "torch": torch}
    path = ROOT / "README.md"
    old = path.read_text()
    new = re.sub(r"(<!-- table: (.*?) -->\n).*?(\n<!-- end -->)", lambda m: m[1] + make[m[2]]() + m[3], old, flags=re.S)
    if a.check:
        sys.exit("README.md's tables are not those of dev/results: run scripts/readme_tables.py" if new != old else 0)
    path.write_text(new)


if __name__ == "__main__":
    main()
