#!/usr/bin/env python3
"""Trains with naive and with flash attention from the same seeds, and compares time and final loss.

    make train_gpt2cu && python3 scripts/compare_losses.py      # fp32, 400 steps, three seeds; five minutes on an H200
    python3 scripts/compare_losses.py --precision bf16 --shapes 16x1024 --json

A seed sets initial weights and the order of the built-in corpus, so that naive and flash see the same batches. The loss
is that of the validation after the last step, the time a step's mean after the first tenth. Exit code 1 if flash's mean
loss lies outside the losses that naive's seeds gave. In fp32, matmuls use TF32, naive attention's among them.
"""
import concurrent.futures
import itertools
import os
import re
import sys
import threading
from statistics import mean

import results

worker = threading.local()  # the thread's own GPU


def train(a, B, T, attention, seed):
    """(device, mean ms, final loss) of a run on this thread's GPU."""
    options = ["-e", a.model, "-b", B, "-t", T, "-x", a.steps, "-v", a.steps, "-s", 0, "--seed", seed,
               "--precision", a.precision, "--attention", attention, "--device", a.device]
    _, log = results.train(*options, *["--no-tf32"] * a.no_tf32, CUDA_VISIBLE_DEVICES=worker.gpu)
    ms = [r["step_ms"] for r in log["train"]][a.steps // 10:]
    return log["run"][0]["device"], mean(ms), log["val"][-1]["loss_nats"]


def main():
    arg = results.arguments(__doc__, "losses")
    arg.add_argument("--shapes", default="4x1024,16x1024", help="BxT,BxT,… (default: %(default)s)")
    arg.add_argument("--model", default="d12")
    arg.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arg.add_argument("--no-tf32", action="store_true", help="strict fp32 matmuls, naive attention's among them")
    arg.add_argument("--steps", type=int, default=400)
    arg.add_argument("--seeds", type=int, default=3, help="how many")
    arg.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    arg.add_argument("--gpus", type=int, default=1, help="so many runs side by side, each on a GPU of its own")
    a = arg.parse_args()
    if not re.fullmatch(r"\d+x\d+(,\d+x\d+)*", a.shapes):
        arg.error(f'--shapes: "{a.shapes}" is no list of BxT such as 4x1024,16x1024')
    if a.seeds < 2:
        arg.error("--seeds: a spread needs two at least")
    if a.gpus < 1:
        arg.error("--gpus: expected at least 1")
    results.need("train_gpt2cu")

    all_gpus = ",".join(map(str, range(a.gpus)))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", all_gpus).split(",")[:a.gpus]
    pool = concurrent.futures.ThreadPoolExecutor(len(gpus), initializer=lambda: setattr(worker, "gpu", gpus.pop(0)))
    shapes = [tuple(map(int, shape.split("x"))) for shape in a.shapes.split(",")]
    started = {(*shape, attention): [pool.submit(train, a, *shape, attention, seed + 1) for seed in range(a.seeds)]
               for shape, attention in itertools.product(shapes, ("naive", "flash"))}

    rows, all_within = [], True
    print("   B     T  attention  ms a step     mean loss  of the seeds")
    try:
        for (B, T, attention), runs in started.items():
            devices, ms, losses = zip(*(run.result() for run in runs))
            rows.append(results.row(
                "losses", devices[0], model=a.model, dtype=a.precision, B=B, T=T, steps=a.steps,
                tf32=a.precision == "fp32" and not a.no_tf32, attention=attention, seeds=a.seeds, ms=mean(ms),
                loss=mean(losses), loss_min=min(losses), loss_max=max(losses)))
            print(f"{B:4} {T:5}  {attention:9}  {mean(ms):9.2f}  {mean(losses):12.5f}  "
                  f"{', '.join(f'{loss:.5f}' for loss in losses)}", flush=True)
            if attention == "naive":
                naive = losses
                continue
            within = min(naive) <= mean(losses) <= results.largest(naive)
            all_within &= within
            apart = results.largest(abs(flash - other) for flash, other in zip(losses, naive))
            print(f"flash's mean final loss is {'within' if within else 'OUTSIDE'} the seeds' spread of naive's "
                  f"({min(naive):.5f} to {max(naive):.5f}); of one seed they differ by {apart:.1e} at most", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)  # a run failed, or Ctrl-C: no other starts
    if a.json or a.out:
        print(results.append(rows, "losses", a.out))
    sys.exit(0 if all_within else 1)


if __name__ == "__main__":
    main()
