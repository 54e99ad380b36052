"""What the scripts share: rows of dev/results (dev/common/bench.h writes such rows too), logs of
runs, and the trainer."""

import argparse
import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "dev" / "results"
sys.path.append(str(ROOT / "data"))
from prepare_common import Fail, check_fetched, check_stdout  # noqa: E402, F401 (for scripts)

# Of a run's log.
FIELDS = {
    "run": ["tokens_per_step"],
    "train": ["step", "loss_nats", "grad_norm", "lr", "tokens_per_s"],
    "val": ["step", "loss_nats"],
    "sample": ["step", "text"],
    "hellaswag": ["step", "correct", "examples"],
}


def fail(text):
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {text}")


def arguments(doc, bench=None):
    """A parser that shows the script's `doc`, with the options of a script that appends rows of
    `bench`."""
    arg = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if bench:
        arg.add_argument(
            "--json", action="store_true", help=f"append rows to dev/results/<gpu>/{bench}.jsonl"
        )
        arg.add_argument("--out", help="append rows to this file")
    return arg


def output_of(*command):
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def largest(values):
    """NaN if there is one, unlike max()."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def json_rows(path):
    """(number of the line, row) of a file with one JSON value a line. A last line that a crash has
    cut, or that a run is still writing, is left out."""
    try:
        check_fetched(path)
    except Fail as e:
        fail(e)
    lines = path.read_bytes().split(b"\n")  # str.splitlines() would cut at a sample's U+2028 too
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline there is no whole line
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as e:
            fail(f"{path}:{number}: not JSON in UTF-8: {e}, found {line[:60]!r}; delete it")
        yield number, row


# --------------------------------------------------------------------------------------------------
# Rows of dev/results


@functools.cache
def toolkit():
    """The version of nvcc, "13.0"; empty without one."""
    release = re.search(r"release ([\d.]+)", output_of("nvcc", "--version"))
    return release[1] if release else ""


def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


os.environ.setdefault("RUN", utc_now())  # for the programs that a script starts, too


@functools.cache
def tree():
    """The commit of the sources that are here, and whether they differ from it."""
    commit, _, state = output_of(ROOT / "scripts" / "tree.sh").partition(" ")
    return {"commit": commit, "dirty": state != "clean"}


def row(kind, gpu, cuda=None, **fields):
    """A row that says where its figures come from. All rows of one run may be compared."""
    return {
        "kind": kind,
        **tree(),
        "run": os.environ["RUN"],
        "date": utc_now(),
        "gpu": gpu,
        "driver": output_of(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        ),
        "cuda": toolkit() if cuda is None else cuda,
        **fields,
    }


def folder_of_gpu(gpu):
    return RESULTS / gpu.replace(" ", "-")


def append(rows, bench, out=None):
    """Appends to the file `out`, or to dev/results/<gpu>/<bench>.jsonl, and returns its path."""
    path = pathlib.Path(out) if out else folder_of_gpu(rows[0]["gpu"]) / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return path


# --------------------------------------------------------------------------------------------------
# The trainer, and the logs that it writes


def folder_of(run):
    return run if run.is_dir() else run.parent


def read_log(run):
    """The rows of a log by kind: {"run": […], "train": […], "val": […], …}; null becomes NaN."""
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        found = list(json_rows(path))
    except OSError as e:
        fail(f"{path}: cannot be read: {e}; give a folder that ./train_gpt2cu -o wrote")
    rows = {kind: [] for kind in FIELDS}
    for number, row in found:
        try:
            for field in FIELDS.get(row["kind"], []):
                row[field] = math.nan if row[field] is None else row[field]
                assert isinstance(row[field], str) == (field == "text"), field
        except (KeyError, TypeError, AssertionError) as e:
            fail(f"{path}:{number}: not a row of ./train_gpt2cu's: {e!r} in {str(row)[:60]!r}")
        rows.setdefault(row["kind"], []).append(row)
    if not rows["train"] and not rows["val"]:
        fail(f"{path}: no steps yet")
    return rows


@contextlib.contextmanager
def whole(path):
    """Gives a temporary name next to `path`. The file is renamed to `path` if the block succeeds,
    and removed otherwise."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as e:
        fail(f"{path}: cannot write: {e.strerror or e}; make room or choose another place")
    finally:
        part.unlink(missing_ok=True)


def need_trainer():
    if not (ROOT / "train_gpt2cu").exists():
        fail("there is no ./train_gpt2cu: make train_gpt2cu")


def run_trainer(*options, **variables):
    """What ./train_gpt2cu prints with these options and environment variables."""
    command = ["./train_gpt2cu", *map(str, options)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        fail(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def run_aloud(*command):
    """The exit code of a program whose lines this script passes on to its own stdout. The program
    comes to its end even if nobody reads them."""
    command = [str(word) for word in command]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as program:
        for line in program.stdout:
            print(line, end="", flush=True)
    return program.returncode


def train(*options, **variables):
    """What a run prints, and the rows of its log by kind."""
    with tempfile.TemporaryDirectory() as folder:
        return run_trainer(*options, "-o", folder, **variables), read_log(pathlib.Path(folder))
