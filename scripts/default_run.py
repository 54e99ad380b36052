#!/usr/bin/env python3
"""Trains with ./train_gpt2cu's defaults and keeps what README shows of it: a plot, and the samples with their losses.

    python3 scripts/default_run.py                 # two minutes on an H200; appends to dev/results/<gpu>/default_run.jsonl
    python3 scripts/default_run.py --log run1      # from a run of the defaults that has been made with -o run1
"""
import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile

import results


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--log", type=pathlib.Path, metavar="RUN", help="a folder with the log.jsonl of such a run")
    a = arg.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, trainer = a.log or pathlib.Path(folder), results.ROOT / "train_gpt2cu"
        if not a.log and not trainer.exists():
            sys.exit("default_run.py: there is no ./train_gpt2cu: make train_gpt2cu")
        if not a.log and subprocess.run([str(trainer), "-o", folder], cwd=results.ROOT).returncode:
            sys.exit("default_run.py: ./train_gpt2cu failed")
        try:
            rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        except (OSError, ValueError) as e:
            sys.exit(f"default_run.py: {run}/log.jsonl: {e}")
        about = next((r for r in rows if r["kind"] == "run"), None)
        losses = {r["step"]: r["loss_nats"] for r in rows if r["kind"] == "val"}
        samples = [r for r in rows if r["kind"] == "sample" and r["step"] in losses]
        if not about or not samples:
            sys.exit(f"default_run.py: {run}/log.jsonl: expected a run with samples, found none")
        cuda = re.search(r"release ([\d.]+)", results.output_of("nvcc", "--version"))
        row = results.row("default_run", about["device"], cuda[1] if cuda else "", steps=about["steps"], B=about["B"],
                          T=about["T"], dtype=about["precision"], floor_nats=about["floor_nats"])
        path = results.append([{**row, "step": r["step"], "val_loss_nats": losses[r["step"]], "text": r["text"]}
                               for r in samples], "default_run")
        plot = [sys.executable, str(results.ROOT / "scripts" / "plot.py"), str(run), "-o", str(path.with_suffix(".png")),
                "--title", "The default run"]
        if subprocess.run(plot).returncode:
            sys.exit("default_run.py: no plot; the rows are written")


if __name__ == "__main__":
    main()
