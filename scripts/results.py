"""Rows of dev/results, as dev/bench.h writes them, for the scripts that measure with PyTorch or train."""
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def largest(values):
    """NaN if there is one, unlike max()."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def toolkit():
    """The version of nvcc, "13.0"; empty without one."""
    release = re.search(r"release ([\d.]+)", output_of("nvcc", "--version"))
    return release[1] if release else ""


def torch_with_gpu(script):
    """PyTorch, for a script that measures it on a GPU; without either the script says so and ends with 0."""
    try:
        import torch
    except ImportError as e:
        print(f"skipped: {script} needs PyTorch ({e})")
        sys.exit()
    if not torch.cuda.is_available():
        print(f"skipped: {script} needs a GPU that PyTorch can use")
        sys.exit()
    return torch


def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


os.environ.setdefault("RUN", utc_now())  # for the programs that a script starts, too


@functools.cache
def tree():
    """The commit of the sources that are here, and whether they differ from it."""
    commit, _, state = output_of(ROOT / "scripts" / "tree.sh").partition(" ")
    return {"commit": commit, "dirty": state != "clean"}


def row(kind, gpu, cuda, **fields):
    """A row that says where its figures come from. All rows of one run may be compared."""
    return {"kind": kind, **tree(), "run": os.environ["RUN"], "date": utc_now(), "gpu": gpu,
            "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"),
            "cuda": cuda, **fields}


def append(rows, bench, out=None):
    """Appends to the file `out`, or to dev/results/<gpu>/<bench>.jsonl, and returns its path."""
    path = pathlib.Path(out) if out else ROOT / "dev" / "results" / rows[0]["gpu"].replace(" ", "-") / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return path
