#!/usr/bin/env python3
"""Writes the result tables of README.md and attention/README.md from dev/results, between their markers:

    <!-- table: attention bf16 --> … <!-- end -->        also: attention fp32, train, torch

    python3 scripts/readme_tables.py            rewrites both
    python3 scripts/readme_tables.py --check    exit code 1 if they are not what it would write
"""
import argparse
import json
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "attention/README.md"]
WIDTH = 120
# What was measured, rather than what came out: a newer row replaces one that agrees in all of these.
WHAT = ["kernel", "pass", "model", "dtype", "attention", "B", "T", "NH", "HS", "causal", "deterministic", "gpus",
        "steps", "lr"]


def rows(path, **where):
    """The newest row of each measurement in a file that matches `where`."""
    newest = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            if all(row.get(field) == value for field, value in where.items()):
                key = tuple(row.get(field) for field in WHAT)
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


def attention(path, dtype):
    found = rows(path, dtype=dtype, causal=True)
    if not found:
        return None
    same, varying = shared(found, ["NH", "HS"])
    at = {(r["HS"], r["NH"], r["T"], r["B"], r["pass"], r["kernel"]): r for r in found}
    kernels = sorted({r["kernel"] for r in found}, key=lambda k: (not k.startswith("naive"), "flash" in k, k))
    columns = [(pas, kernel) for pas in ("fwd", "bwd") for kernel in kernels]

    def cell(row):
        if not row:
            return "–"
        sustained = row.get("tflops_sustained")
        return f"{row['tflops']:.0f}" + (f" / {sustained:.0f}" if sustained else "")

    body = [[f"{b}, {t}"] + [str({"NH": nh, "HS": hs}[f]) for f in varying] +
            [cell(at.get((hs, nh, t, b, *column))) for column in columns]
            for hs, nh, t, b in sorted({key[:4] for key in at})]
    title = f"Attention, {dtype}, causal, {same + ', ' if same else ''}TFLOP/s cool / sustained"
    return table(title, found, ["B, T", *varying, *(" ".join(column) for column in columns)], body)


def train(path):
    found = rows(path)
    found.sort(key=lambda r: (r["model"], r["dtype"], r["kernel"] != "train_gpt2cu", r["attention"], r["B"], r["T"]))
    body = [[r["model"], r["dtype"], r["attention"] if r["kernel"] == "train_gpt2cu" else r["kernel"], str(r["B"]),
             str(r["T"]), f"{r['tok_s'] / 1e3:.0f}k", f"{r['ms']:.2f}", f"{r['mfu']:.1f} %" if r["mfu"] else "n/a",
             f"{r['mem_gib']:.1f}"] for r in found]
    header = ["model", "dtype", "attention", "B", "T", "tok/s", "ms", "MFU", "GiB in use"]
    return table("The whole training step, sustained", found, header, body)


def torch(path):
    found = rows(path)
    body = [[r["model"], r["attention"], str(r["B"]), str(r["T"]), str(r["steps"]), f"{r['lr']:g}",
             f"{r['max_loss_difference']:.1e}", f"{r['max_loss_difference_torch_itself']:.1e}"] for r in found]
    header = ["model", "attention", "B", "T", "steps", "lr", "largest difference of a step's loss",
              "of PyTorch with another attention"]
    return table("Losses beside a plain PyTorch GPT-2, strict fp32, from one checkpoint and shard", found, header, body)


TABLES = {"attention bf16": ("attention", lambda path: attention(path, "bf16")),
          "attention fp32": ("attention", lambda path: attention(path, "fp32")),
          "train": ("train", train), "torch": ("torch", torch)}


def make(name, document, root):
    """The table's text, one part for each GPU that was measured."""
    if name not in TABLES:
        sys.exit(f"readme_tables.py: {document}: no table \"{name}\"; there are {', '.join(TABLES)}")
    bench, of_file = TABLES[name]
    files = sorted((root / "dev" / "results").glob(f"*/{bench}.jsonl"))
    parts = [of_file(path) for path in files if path.stat().st_size]
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
