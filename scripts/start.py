#!/usr/bin/env python3
"""Times a run's start: seconds from the start of the process to the end of step 1.

    make train_gpt2cu && python3 scripts/start.py                # GPT-2 124M
    python3 scripts/start.py --models d12,d48 --resume --json    # 1558M too, and from files

Every model starts with random weights, once with as many threads as there are cores and once with
OMP_NUM_THREADS=1, as torchrun sets it; each time the faster of two starts counts. With --resume it
also starts once from a model file (-e) and once from a checkpoint (-y), which are written to
--folder. Before each of these, merely reading the files with cat is timed; by then the system has
them in memory, because they have just been written.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import results

# Sequences per micro-batch: the small model's default, and what fills the card with a large one.
BATCH = {"d12": 8, "d24": 32, "d36": 16, "d48": 16}


def seconds_to_first_step(options, **variables):
    command = ["./train_gpt2cu", *map(str, options)]
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
        results.fail(f"{' '.join(command)} made no step: {run.stderr.read().strip()}")


def seconds_to_read(*paths):
    start = time.monotonic()
    subprocess.run(["cat", *map(str, paths)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - start


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "start")
    arg.add_argument(
        "--models", default="d12", help="a list of d12, d24, d36, d48 (default: %(default)s)"
    )
    arg.add_argument(
        "--resume", action="store_true", help="also from files, which are written first"
    )
    arg.add_argument("--folder", help="where these files go (default: a temporary folder)")
    a = arg.parse_args()
    results.need_trainer()
    unknown = set(a.models.split(",")) - set(BATCH)
    if unknown:
        arg.error(f"--models: {', '.join(sorted(unknown))}: expected some of {', '.join(BATCH)}")
    gpu = results.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0")
    if not gpu:
        results.fail("no GPU here")

    rows = []

    def record(model, what, seconds, read_seconds=0.0):
        print(
            f"{model:5} {what:24} {seconds:7.2f} s to the end of step 1, "
            f"{read_seconds:6.2f} s only reading",
            flush=True,
        )
        rows.append(
            results.row(
                "start",
                gpu,
                model=model,
                B=BATCH[model],
                what=what,
                seconds=seconds,
                read_seconds=read_seconds,
            )
        )

    if a.folder:
        os.makedirs(a.folder, exist_ok=True)
    for model in a.models.split(","):
        common = ["-b", BATCH[model], "-t", 1024, "-r", 1, "-v", 0, "-s", 0]
        new = [*common, "-e", model]
        for what, variables in (("random", {}), ("random, one thread", {"OMP_NUM_THREADS": "1"})):
            record(model, what, min(seconds_to_first_step(new, **variables) for _ in range(2)))
        if not a.resume:
            continue
        folder = pathlib.Path(tempfile.mkdtemp(dir=a.folder))
        try:
            results.run_trainer(*new, "-x", 1, "-o", folder)
            files = [folder / "model_00000001.bin", folder / "state_00000001.bin"]
            read = seconds_to_read(files[0])
            record(model, "model file", seconds_to_first_step([*common, "-e", files[0]]), read)
            read = seconds_to_read(*files)
            resumed = [*new, "-x", 9, "-o", folder, "-y"]
            record(model, "resumed", seconds_to_first_step(resumed), read)
        finally:
            shutil.rmtree(folder)
    if a.json or a.out:
        results.append(rows, "start", a.out)


if __name__ == "__main__":
    main()
