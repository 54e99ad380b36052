#!/usr/bin/env python3
"""Times a run's start: seconds from the start of the process to the end of step 1.

    make train_gpt2cu && python3 scripts/start.py                # GPT-2 124M
    python3 scripts/start.py --models d12,d48 --resume --json    # 1558M too, and from files

Every model starts with random weights, once with as many threads as there are cores and once with
OMP_NUM_THREADS=1, which is what torchrun sets; each time the faster of two starts counts. With
--resume it also starts once from a model file (-e) and once from a checkpoint (-y), both of which
are first written to --folder. Before each of these starts we time how long cat takes to read the
same files; by then the system has them in memory, because they have just been written.
"""

import os
import pathlib
import signal
import subprocess
import tempfile
import time

import results

# Sequences per micro-batch: the default for the small model, and what fills a GPU for a large one.
BATCH = {"d12": 8, "d24": 32, "d36": 16, "d48": 16}


def seconds_to_first_step(options, **variables):
    command = ["./train_gpt2cu", *results.option_words(options)]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    start = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=results.ROOT,
        env={**environment, **variables},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        for line in run.stdout:
            if line.startswith("step ") and "| norm" in line:
                seconds = time.monotonic() - start
                run.send_signal(signal.SIGKILL)
                return seconds
        said = run.stderr.read().strip()
        results.fail(f"{' '.join(command)} ended before its first step was done: {said}")


def seconds_to_read(*paths):
    start = time.monotonic()
    subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


def row(gpu, model, what, seconds, read_seconds=0.0):
    """Prints and returns what was measured of one start."""
    print(
        f"{model:5} {what:24} {seconds:7.2f} s to the end of step 1, "
        f"{read_seconds:6.2f} s only reading",
        flush=True,
    )
    figures = {"what": what, "seconds": seconds, "read_seconds": read_seconds}
    return results.row("start", gpu, model=model, B=BATCH[model], **figures)


def random_rows(gpu, model, options):
    """The rows of starts with random weights."""
    rows = []
    one_thread = {"OMP_NUM_THREADS": "1"}
    for what, variables in ("random", {}), ("random, one thread", one_thread):
        seconds = min(seconds_to_first_step(options, **variables) for _ in range(2))
        rows.append(row(gpu, model, what, seconds))
    return rows


def resumed_rows(gpu, model, options, folder):
    """The rows of starts from files, which a run of one step writes into the folder."""
    results.run_trainer(options | {"-x": 1, "-o": folder})
    model_file = pathlib.Path(folder, "model_00000001.bin")
    state_file = pathlib.Path(folder, "state_00000001.bin")

    read_seconds = seconds_to_read(model_file)
    seconds = seconds_to_first_step(options | {"-e": model_file})
    from_model = row(gpu, model, "model file", seconds, read_seconds)

    read_seconds = seconds_to_read(model_file, state_file)
    more_steps = {"-x": 9, "-o": folder, "-y": None}
    seconds = seconds_to_first_step(options | more_steps)
    return [from_model, row(gpu, model, "resumed", seconds, read_seconds)]


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "start")
    arg.add_argument(
        "--models",
        default="d12",
        help=f"comma-separated list of models: {', '.join(BATCH)} (default: %(default)s)",
    )
    arg.add_argument(
        "--resume",
        action="store_true",
        help="also start from a model file and from a checkpoint",
    )
    arg.add_argument(
        "--folder", help="where --resume writes its files (default: a temporary folder)"
    )
    a = arg.parse_args()
    results.need_trainer()
    models = a.models.split(",")
    unknown = sorted(set(models) - set(BATCH))
    if unknown:
        arg.error(f"--models: there is no {', '.join(unknown)}; give some of {', '.join(BATCH)}")
    gpu = results.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0")
    if not gpu:
        results.fail("needs a GPU, but nvidia-smi found none")
    if a.folder:
        os.makedirs(a.folder, exist_ok=True)

    rows = []
    for model in models:
        options = {"-e": model, "-b": BATCH[model], "-t": 1024, "-r": 1, "-v": 0, "-s": 0}
        rows += random_rows(gpu, model, options)
        if a.resume:
            with tempfile.TemporaryDirectory(dir=a.folder) as folder:
                rows += resumed_rows(gpu, model, options, folder)
    if a.json or a.out:
        results.append(rows, "start", a.out)


if __name__ == "__main__":
    main()
