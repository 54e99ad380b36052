#!/usr/bin/env python3
"""Trains on 1, 2, 4, … GPUs: the same losses at one global batch, and tokens per second at one batch a GPU.

    make train_gpt2cu && python3 scripts/scaling.py             # up to all GPUs of this machine, or --gpus 1,2,4
    python3 scripts/scaling.py --model d24 --batch 32 --json

Losses: strict fp32, 20 steps of B·T tokens for the largest number of GPUs, so that fewer make more micro-batches of the
same data; every step's loss within 1e-3 of one GPU's, relative. Speed (weak scaling): each GPU has B·T tokens a step,
the median of the steps after the first ten, and its ratio to so many times one GPU's. Beside it the same GPUs with a
run of its own on each, all at once: the slowest is what the step would take if the ranks had nothing to say to each
other. Both without and with a sharded optimizer (ZeRO-1). Exit code 1 if losses differ; then nothing is timed.
"""
import concurrent.futures
import os
import re
import statistics

import results


def gpus_here():
    """The names of this machine's GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    return re.findall(r"^GPU (\d+)", results.output_of("nvidia-smi", "-L"), flags=re.M)


def usual_ms(a, gpus, text):
    """The median of the steps, once plans are made, connections open and the GPUs as warm as they will be."""
    tok_s = [float(rate) for rate in re.findall(r"^step .* ([\d.]+) tok/s", text, flags=re.M)]
    return gpus * a.batch * a.tokens / statistics.median(tok_s[10:]) * 1e3


def side_by_side(a, gpus, options):
    """ms a step of the slowest of so many GPUs, each with a run of its own."""
    def alone(gpu):
        seen = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        return usual_ms(a, 1, results.run_trainer(*options, **seen)[0])
    names = gpus_here() if a.device == "cuda" else [None] * gpus
    with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
        return max(pool.map(alone, names[:gpus]))


def main():
    arg = results.arguments(__doc__, "scaling")
    arg.add_argument("--gpus", help="numbers of GPUs, from 1 on (default: 1,2,4,… up to this machine's)")
    arg.add_argument("--model", default="d12")
    arg.add_argument("--batch", type=int, default=64, help="sequences per GPU when timed (default: %(default)s)")
    arg.add_argument("--tokens", type=int, default=1024, help="per sequence (default: %(default)s)")
    arg.add_argument("--steps", type=int, default=40, help="of a run that is timed (default: %(default)s)")
    arg.add_argument("--precision", default="bf16", choices=["bf16", "fp32"], help="when timed (default: %(default)s)")
    arg.add_argument("--data", help="train on this instead of the built-in corpus")
    arg.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    a = arg.parse_args()
    results.need("train_gpt2cu")
    if a.gpus is None:
        here = len(gpus_here())
        a.gpus = ",".join(str(2 ** i) for i in range(10) if 2 ** i <= here) or "1"
    if not re.fullmatch(r"1(,\d+)*", a.gpus):
        arg.error(f'--gpus: "{a.gpus}" is no list that begins with 1, such as 1,2,4')
    if a.steps < 11:
        arg.error("--steps: the first ten are not counted")
    if a.device == "cpu":
        a.precision = "fp32"
    numbers = [int(n) for n in a.gpus.split(",")]

    def ranks(n, zero):
        return ["-e", a.model, "-t", a.tokens, "-v", 0, "-s", 0, "--device", a.device, "--gpus", n, "--zero", zero,
                *(["-i", a.data] if a.data else [])]

    def record(text, n, zero, **fields):
        """Appends a row as soon as it is known: what came before a run that fails, or is ended, stays."""
        if a.json or a.out:
            device = re.search(r"^device +(.*), ", text, flags=re.M)[1]
            row = results.row("scaling", device, model=a.model, T=a.tokens, gpus=n, zero=zero, **fields)
            results.append([row], "scaling", a.out)

    batch = 2 * max(numbers) * a.tokens  # of two sequences a GPU
    strict = ["-b", 2, "-d", batch, "-x", 20, "--precision", "fp32", *["--no-tf32"] * (a.device == "cuda")]
    same, one = True, None
    for n in numbers:
        for zero in (0, 1) if one else (0,):
            text, log = results.train(*ranks(n, zero), *strict)
            found = [r["loss_nats"] for r in log["train"]]
            if not one:
                one = found
                continue
            apart = results.largest(abs(x - y) / y for x, y in zip(found, one))
            same &= len(found) == len(one) and apart <= 1e-3
            print(f"{n} GPUs, --zero {zero}: losses of {len(found)} steps within {apart:.1e} of one GPU's", flush=True)
            record(text, n, zero, what="losses", apart=apart)
    if not same:
        results.fail("the losses differ by more than 1e-3: not timed")

    print("gpus  zero  ms a step  side by side       tok/s  of linear    GiB", flush=True)
    timed = ["-b", a.batch, "-x", a.steps, "--precision", a.precision]
    single = None
    for n in numbers:
        alone = side_by_side(a, n, [*ranks(1, 0), *timed]) if n > 1 else None
        for zero in (0, 1) if n > 1 else (0,):
            text, _ = results.run_trainer(*ranks(n, zero), *timed)
            gib = float(re.search(r"^memory +([\d.]+) MiB", text, flags=re.M)[1]) / 1024
            ms = usual_ms(a, n, text)
            tok_s = n * a.batch * a.tokens / ms * 1e3
            single = single or tok_s
            of_linear = tok_s / (n * single)
            print(f"{n:4}  {zero:4}  {ms:9.2f}  {alone or ms:12.2f}  {tok_s:10.0f}  {100 * of_linear:8.1f}%  "
                  f"{gib:5.1f}", flush=True)
            record(text, n, zero, what="speed", dtype=a.precision, B=a.batch, ms=ms, ms_side_by_side=alone or ms,
                   tok_s=tok_s, of_linear=of_linear, gib=gib)


if __name__ == "__main__":
    main()
