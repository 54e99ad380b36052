#!/usr/bin/env python3
"""Trains with ./train_gpt2cu's defaults and keeps what the README shows of the run: a plot, and the
samples with their losses, which are appended to dev/results/<gpu>/default_run.jsonl.

python3 scripts/default_run.py     # two minutes on an H200
"""

import pathlib
import tempfile

import results
from plot import plot


def samples(log):
    """What a row says about each sample: the run's settings and that step's validation loss."""
    run = log["run"][0]
    settings = {
        "dtype": run["precision"],
        **{field: run[field] for field in ("steps", "B", "T", "floor_nats")},
    }
    losses = {r["step"]: r["loss_nats"] for r in log["val"]}
    return [
        {**settings, "step": r["step"], "val_loss_nats": losses[r["step"]], "text": r["text"]}
        for r in log["sample"]
        if r["step"] in losses
    ]


@results.check_stdout()
def main():
    results.arguments(__doc__).parse_args()
    results.need_trainer()
    with tempfile.TemporaryDirectory() as folder:
        if results.run_aloud("./train_gpt2cu", "-o", folder):
            results.fail("./train_gpt2cu failed")
        log = results.read_log(pathlib.Path(folder))
        rows = [
            results.row("default_run", log["run"][0]["device"], **fields) for fields in samples(log)
        ]
        path = results.append(rows, "default_run")
        if rows[0]["dirty"]:
            print("default_run.py: no plot, because the sources differ from the commit")
        else:
            plot([log], ["default run"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
