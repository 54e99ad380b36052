#!/usr/bin/env python3
"""Trains on 1, 2, 4, … GPUs: compares the losses at a fixed global batch, and the tokens per second
at a fixed batch per GPU.

    make train_gpt2cu && python3 scripts/scaling.py     # on all GPUs, or --gpus 1,2,4
    python3 scripts/scaling.py --model d24 --batch 32 --json

Losses: 20 steps in strict fp32, always with the global batch of the largest number of GPUs; fewer
GPUs split the same data into more micro-batches. All losses must be within 1e-3 of those of one
GPU, or nothing is timed.

Speed (weak scaling): every GPU trains on B·T tokens per step, and the median of the steps after the
first ten counts. For comparison, the same GPUs train side by side, each in a run of its own: the
slowest shows what a step would take if the ranks did not communicate.

Losses and speed are both measured without and with a sharded optimizer (ZeRO-1).
"""

import concurrent.futures
import os
import re
import statistics

import results

WARM_UP_STEPS = 10  # for autotuning, connections and the GPUs' temperature


def gpus_here():
    """The names of this machine's GPUs, as CUDA_VISIBLE_DEVICES lists them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    return re.findall(r"^GPU (\d+)", results.output_of("nvidia-smi", "-L"), flags=re.M)


def run_options(a, gpus, zero):
    return {
        "-e": a.model,
        "-t": a.tokens,
        "-v": 0,
        "-s": 0,
        "--device": a.device,
        "--gpus": gpus,
        "--zero": zero,
    }


def record(a, device, gpus, zero, **fields):
    """Appends a row at once, so that it survives a later run that fails or is interrupted."""
    if a.json or a.out:
        about = {"model": a.model, "T": a.tokens, "gpus": gpus, "zero": zero}
        row = results.row("scaling", device, **about, **fields)
        results.append([row], "scaling", a.out)


def compare_losses(a, numbers, cases):
    """Checks the losses of each case (GPUs, zero) against those of one GPU. Returns the name of
    the device."""
    strict = {
        "-b": 2,
        "-d": 2 * max(numbers) * a.tokens,
        "-x": 20,
        "--precision": "fp32",
    }
    if a.device == "cuda":
        strict["--no-tf32"] = None
    single = results.train(run_options(a, 1, zero=0) | strict)
    device = single["run"][0]["device"]
    for gpus, zero in cases:
        log = results.train(run_options(a, gpus, zero) | strict)
        apart = results.largest(
            abs(ours["loss_nats"] - theirs["loss_nats"]) / theirs["loss_nats"]
            for ours, theirs in zip(log["train"], single["train"], strict=True)
        )
        steps = len(log["train"])
        print(
            f"{gpus} GPUs, --zero {zero}: losses of {steps} steps within {apart:.1e} of one GPU's",
            flush=True,
        )
        record(a, device, gpus, zero, what="losses", apart=apart)
        if not apart <= 1e-3:
            results.fail("the losses differ by more than 1e-3, so nothing is timed")
    return device


def median_ms(a, gpus, text):
    """The median time of a step, from what the trainer printed."""
    tok_s = [float(rate) for rate in re.findall(r"^step .* ([\d.]+) tok/s", text, flags=re.M)]
    return gpus * a.batch * a.tokens / statistics.median(tok_s[WARM_UP_STEPS:]) * 1e3


def side_by_side_ms(a, gpus, options):
    """The time of a step on the slowest of these GPUs, while each trains in a run of its own."""

    def alone(gpu):
        variables = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        return median_ms(a, 1, results.run_trainer(options, **variables))

    names = gpus_here() if a.device == "cuda" else [None] * gpus
    with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
        return max(pool.map(alone, names[:gpus]))


def time_steps(a, device, cases):
    """Times each case (GPUs, zero), of which the first is a single GPU."""
    print("gpus  zero  ms a step  side by side       tok/s  of linear    GiB", flush=True)
    precision = "fp32" if a.device == "cpu" else a.precision
    timed = {"-b": a.batch, "-x": a.steps, "--precision": precision}
    single_tok_s = None
    for gpus, zero in cases:
        text = results.run_trainer(run_options(a, gpus, zero) | timed)
        ms = median_ms(a, gpus, text)
        alone_ms = ms
        if gpus > 1:
            alone_ms = side_by_side_ms(a, gpus, run_options(a, 1, zero=0) | timed)
        tok_s = gpus * a.batch * a.tokens / ms * 1e3
        if single_tok_s is None:
            single_tok_s = tok_s
        of_linear = tok_s / (gpus * single_tok_s)
        gib = float(re.search(r"^memory +([\d.]+) MiB", text, flags=re.M)[1]) / 1024
        print(
            f"{gpus:4}  {zero:4}  {ms:9.2f}  {alone_ms:12.2f}  {tok_s:10.0f}  {of_linear:9.1%}  "
            f"{gib:5.1f}",
            flush=True,
        )
        figures = {
            "what": "speed",
            "dtype": precision,
            "B": a.batch,
            "ms": ms,
            "ms_side_by_side": alone_ms,
            "tok_s": tok_s,
            "of_linear": of_linear,
            "gib": gib,
        }
        record(a, device, gpus, zero, **figures)


def parse_arguments():
    arg = results.arguments(__doc__, "scaling")
    arg.add_argument(
        "--gpus",
        metavar="N,N,…",
        help="numbers of GPUs to train on, the first of which is 1 "
        "(default: 1,2,4,… up to all GPUs of this machine)",
    )
    arg.add_argument(
        "--model",
        default="d12",
        help="model to train, as in ./train_gpt2cu -e (default: %(default)s)",
    )
    arg.add_argument(
        "--batch",
        type=int,
        default=64,
        help="sequences per GPU in timed runs (default: %(default)s)",
    )
    arg.add_argument(
        "--tokens", type=int, default=1024, help="tokens per sequence (default: %(default)s)"
    )
    arg.add_argument(
        "--steps", type=int, default=40, help="steps of a timed run (default: %(default)s)"
    )
    arg.add_argument(
        "--precision",
        default="bf16",
        choices=["bf16", "fp32"],
        help="precision of timed runs (default: %(default)s)",
    )
    arg.add_argument(
        "--device", default="cuda", choices=["cuda", "cpu"], help="default: %(default)s"
    )
    a = arg.parse_args()
    if a.gpus is None:
        here = max(1, len(gpus_here()))
        a.gpus = ",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= here)
    if not re.fullmatch(r"1(,\d+)*", a.gpus):
        arg.error(f'--gpus: expected a list that begins with 1, such as 1,2,4; found "{a.gpus}"')
    if a.steps <= WARM_UP_STEPS:
        arg.error(f"--steps: give more than {WARM_UP_STEPS}, because that many are not timed")
    return a


@results.check_stdout()
def main():
    a = parse_arguments()
    results.need_trainer()
    numbers = [int(n) for n in a.gpus.split(",")]
    several = [(gpus, zero) for gpus in numbers[1:] for zero in (0, 1)]
    device = compare_losses(a, numbers, several)
    time_steps(a, device, [(1, 0), *several])


if __name__ == "__main__":
    main()
