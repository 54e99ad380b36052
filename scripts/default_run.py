#!/usr/bin/env python3
"""Trains with ./train_gpt2cu's defaults and keeps what the README shows of the run: a plot, and the
samples with their losses, which are appended to dev/results/GPU/default_run.jsonl.

    python3 scripts/default_run.py     # two minutes on an H200
"""

import pathlib
import tempfile

import results
from plot import plot


def samples(log):
    """What a row says about each sample: the run's settings, and its step's validation loss."""
    run = log["run"][0]
    settings = {
        "dtype": run["precision"],
        "steps": run["steps"],
        "B": run["B"],
        "T": run["T"],
        "floor_nats": run["floor_nats"],
    }
    losses = {row["step"]: row["loss_nats"] for row in log["val"]}
    found = []
    for sample in log["sample"]:
        step = sample["step"]
        if step in losses:
            about = {"step": step, "val_loss_nats": losses[step], "text": sample["text"]}
            found.append(settings | about)
    return found


@results.check_stdout()
def main():
    results.arguments(__doc__).parse_args()
    results.need_trainer()
    with tempfile.TemporaryDirectory() as folder:
        code = results.run_and_print("./train_gpt2cu", "-o", folder)
        if code:
            results.fail(f"./train_gpt2cu exited with code {code}")
        log = results.read_log(pathlib.Path(folder))

    gpu = log["run"][0]["device"]
    rows = [results.row("default_run", gpu, **fields) for fields in samples(log)]
    path = results.append(rows, "default_run")
    if rows[0]["dirty"]:
        print("default_run.py: no plot was drawn, because the sources differ from their commit")
    else:
        plot([log], ["default run"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
