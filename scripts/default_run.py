#!/usr/bin/env python3
"""Trains with ./train_gpt2cu's defaults and keeps what README shows of it: a plot, and the samples with their losses.

    python3 scripts/default_run.py     # two minutes on an H200; appends to dev/results/<gpu>/default_run.jsonl
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import results


def main():
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    trainer = results.ROOT / "train_gpt2cu"
    if not trainer.exists():
        sys.exit("default_run.py: there is no ./train_gpt2cu: make train_gpt2cu")
    with tempfile.TemporaryDirectory() as run:
        if subprocess.run([str(trainer), "-o", run], cwd=results.ROOT).returncode:
            sys.exit("default_run.py: ./train_gpt2cu failed")
        rows = [json.loads(line) for line in pathlib.Path(run, "log.jsonl").read_text().splitlines()]
        about = next(r for r in rows if r["kind"] == "run")
        losses = {r["step"]: r["loss_nats"] for r in rows if r["kind"] == "val"}
        row = results.row("default_run", about["device"], results.toolkit(), steps=about["steps"], B=about["B"],
                          T=about["T"], dtype=about["precision"], floor_nats=about["floor_nats"])
        path = results.append([{**row, "step": r["step"], "val_loss_nats": losses[r["step"]], "text": r["text"]}
                               for r in rows if r["kind"] == "sample" and r["step"] in losses], "default_run")
        if row["dirty"]:
            print("default_run.py: no plot, because the sources differ from the commit")
            return
        plot = [sys.executable, str(results.ROOT / "scripts" / "plot.py"), run, "-o", str(path.with_suffix(".png")),
                "--title", "The default run"]
        if subprocess.run(plot).returncode:
            sys.exit("default_run.py: no plot; the rows are written")


if __name__ == "__main__":
    main()
