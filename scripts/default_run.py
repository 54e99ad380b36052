#!/usr/bin/env python3
"""Trains with ./train_gpt2cu's defaults and keeps what README shows of it: a plot, and the samples with their losses.

    python3 scripts/default_run.py     # two minutes on an H200; appends to dev/results/<gpu>/default_run.jsonl
"""
import pathlib
import subprocess
import tempfile

import results
from plot import plot


def main():
    results.arguments(__doc__).parse_args()
    results.need_trainer()
    with tempfile.TemporaryDirectory() as run:
        if subprocess.run([results.ROOT / "train_gpt2cu", "-o", run], cwd=results.ROOT).returncode:
            results.fail("./train_gpt2cu failed")
        log = results.read_log(pathlib.Path(run))
        about = log["run"][0]
        losses = {r["step"]: r["loss_nats"] for r in log["val"]}
        row = results.row("default_run", about["device"], steps=about["steps"], B=about["B"],
                          T=about["T"], dtype=about["precision"], floor_nats=about["floor_nats"])
        path = results.append([{**row, "step": r["step"], "val_loss_nats": losses[r["step"]], "text": r["text"]}
                               for r in log["sample"] if r["step"] in losses], "default_run")
        if row["dirty"]:
            print("default_run.py: no plot, because the sources differ from the commit")
        else:
            plot([log], ["default run"], path.with_suffix(".png"))


if __name__ == "__main__":
    main()
