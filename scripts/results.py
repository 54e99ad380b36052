"""Shared by the scripts: rows of dev/results (which dev/common/bench.h writes, too), starting the
trainer, and the logs of its runs."""

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

# The fields that read_log() checks, by the row's kind. Scripts also read others, which it does not
# check, such as "device" of "run".
FIELDS = {
    "run": ["tokens_per_step"],
    "train": ["step", "loss_nats", "grad_norm", "lr", "tokens_per_s"],
    "val": ["step", "loss_nats"],
    "sample": ["step", "text"],
    "hellaswag": ["step", "correct", "examples"],
}


def fail(text):
    """Ends the script with exit code 1 and a line on stderr."""
    sys.exit(f"{pathlib.Path(sys.argv[0]).name}: {text}")


def arguments(doc, bench=None):
    """A parser whose --help shows the script's `doc`. If the script measures, its rows go to
    `bench`.jsonl with --json, or to the file that --out names."""
    run_name()  # sets RUN, which the programs that the script starts inherit
    arg = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if bench:
        arg.add_argument(
            "--json",
            action="store_true",
            help=f"append the results to dev/results/GPU/{bench}.jsonl, where GPU is its name",
        )
        arg.add_argument("--out", metavar="FILE", help="append the results to this file instead")
    return arg


def output_of(*command):
    """What a program prints; empty if there is no such program."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def largest(values):
    """The largest value, or NaN if any is NaN, which max() may overlook."""
    values = list(values)
    return math.nan if any(map(math.isnan, values)) else max(values)


def json_rows(path):
    """Yields (line number, row) of a file with one JSON value per line, without a last line that a
    crash has cut off or that a run is still writing."""
    try:
        check_fetched(path)
    except Fail as e:
        fail(e)
    # str.splitlines() would also split at a U+2028 in a sample.
    lines = path.read_bytes().split(b"\n")
    del lines[-1]  # empty, or a line without its end
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as e:
            fail(f"{path}:{number}: not JSON in UTF-8: {e}, found {line[:60]!r}; delete this line")
        yield number, row


# --------------------------------------------------------------------------------------------------
# Rows of dev/results


@functools.cache
def toolkit():
    """The version of nvcc, such as "13.0"; empty if there is none."""
    release = re.search(r"release ([\d.]+)", output_of("nvcc", "--version"))
    return release[1] if release else ""


def utc_now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def run_name():
    """Marks all rows of one run. It is an environment variable, so that the programs that a script
    starts write the same name."""
    return os.environ.setdefault("RUN", utc_now())


@functools.cache
def tree():
    """The commit of these sources, and whether they differ from it."""
    commit, _, state = output_of(ROOT / "scripts" / "tree.sh").partition(" ")
    return {"commit": commit, "dirty": state != "clean"}


def row(kind, gpu, cuda=None, **fields):
    """A row that says where its figures come from. Only rows of the same run may be compared."""
    return {
        "kind": kind,
        **tree(),
        "run": run_name(),
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
    """Appends to the file `out`, or else to dev/results/GPU/`bench`.jsonl, and returns its path."""
    path = pathlib.Path(out) if out else folder_of_gpu(rows[0]["gpu"]) / f"{bench}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(r) + "\n" for r in rows)
    return path


# --------------------------------------------------------------------------------------------------
# The trainer, and the logs that it writes


def folder_of(run):
    """The folder of a run, which may be named by its log.jsonl."""
    return run if run.is_dir() else run.parent


def checked(row):
    """The row, with NaN where one of FIELDS is null, which is how the log writes NaN. Raises an
    error if one of them is missing or has the wrong type."""
    values = {}
    for field in FIELDS.get(row["kind"], []):
        value = math.nan if row[field] is None else row[field]
        is_text = isinstance(value, str)
        if is_text != (field == "text"):
            raise TypeError(field)
        values[field] = value
    return row | values


def read_log(run):
    """The rows of a log by kind: {"run": […], "train": […], "val": […], …}."""
    path = run / "log.jsonl" if run.is_dir() else run
    try:
        found = list(json_rows(path))
    except OSError as e:
        fail(f"{path}: cannot be read: {e}; give a folder that ./train_gpt2cu -o wrote")
    rows = {kind: [] for kind in FIELDS}
    for number, row in found:
        try:
            row = checked(row)
        except (KeyError, TypeError) as e:
            fail(
                f"{path}:{number}: not a row that ./train_gpt2cu writes: {e!r} in "
                f"{str(row)[:60]!r}; delete this line"
            )
        rows.setdefault(row["kind"], []).append(row)
    if not rows["train"] and not rows["val"]:
        fail(f"{path}: has no steps yet; wait for the first one")
    return rows


@contextlib.contextmanager
def write_atomically(path):
    """Yields a temporary path next to `path`. Its file is renamed to `path` if the block succeeds,
    and removed otherwise."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as e:
        fail(f"{path}: cannot write: {e.strerror or e}; free some space or choose another file")
    finally:
        part.unlink(missing_ok=True)


def need_trainer():
    if not (ROOT / "train_gpt2cu").exists():
        fail("there is no ./train_gpt2cu; run make train_gpt2cu")


def option_words(options):
    """The words of a command line: -b 4 --no-shuffle for {"-b": 4, "--no-shuffle": None}."""
    words = []
    for name, value in options.items():
        words.append(name)
        if value is not None:
            words.append(str(value))
    return words


def run_trainer(options, **variables):
    """What ./train_gpt2cu prints with these options and environment variables."""
    command = ["./train_gpt2cu", *option_words(options)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )
    if done.returncode:
        fail(f"{shlex.join(command)} exited with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def run_and_print(*command):
    """Runs a program, passes its lines on to this script's stdout, and returns the exit code. The
    program runs to its end even if nobody reads the lines."""
    command = [str(word) for word in command]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, encoding="utf-8", errors="replace"
    ) as program:
        for line in program.stdout:
            print(line, end="", flush=True)
    return program.returncode


def train(options):
    """The rows of the log of a run with these options."""
    with tempfile.TemporaryDirectory() as folder:
        run_trainer(options | {"-o": folder})
        return read_log(pathlib.Path(folder))
