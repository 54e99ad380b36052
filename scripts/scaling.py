#!/usr/bin/env python3
"""Trains on 1, 2, 4, … GPUs, and compares the losses at one global batch and the tokens per second
at one batch per GPU.

    make train_gpt2cu && python3 scripts/scaling.py     # on up to all GPUs here, or --gpus 1,2,4
    python3 scripts/scaling.py --model d24 --batch 32 --json

Losses: 20 steps in strict fp32, with the global batch of the most GPUs, which fewer GPUs split into
more micro-batches of the same data. All losses must be within 1e-3 of one GPU's, or nothing is
timed.

Speed (weak scaling): each GPU has B·T tokens per step, and the median of the steps after the first
ten counts. For comparison, the same GPUs run side by side, each with a run of its own: the slowest
shows what a step would take if the ranks did not communicate.

Losses and speed are both measured without and with a sharded optimizer (ZeRO-1).
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
    """The median of the steps, once plans are made, connections are open and the GPUs are fully
    warmed up."""
    tok_s = [float(rate) for rate in re.findall(r"^step .* ([\d.]+) tok/s", text, flags=re.M)]
    return gpus * a.batch * a.tokens / statistics.median(tok_s[10:]) * 1e3


def side_by_side(a, gpus, options):
    """ms a step of the slowest of so many GPUs, each with a run of its own."""

    def alone(gpu):
        seen = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        return usual_ms(a, 1, results.run_trainer(*options, **seen))

    names = gpus_here() if a.device == "cuda" else [None] * gpus
    with concurrent.futures.ThreadPoolExecutor(gpus) as pool:
        return max(pool.map(alone, names[:gpus]))


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "scaling")
    arg.add_argument(
        "--gpus", help="numbers of GPUs, from 1 on (default: 1,2,4,… up to this machine's)"
    )
    arg.add_argument("--model", default="d12")
    arg.add_argument(
        "--batch", type=int, default=64, help="sequences per GPU when timed (default: %(default)s)"
    )
    arg.add_argument("--tokens", type=int, default=1024, help="per sequence (default: %(default)s)")
    arg.add_argument(
        "--steps", type=int, default=40, help="of a run that is timed (default: %(default)s)"
    )
    arg.add_argument(
        "--precision",
        default="bf16",
        choices=["bf16", "fp32"],
        help="when timed (default: %(default)s)",
    )
    arg.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    a = arg.parse_args()
    results.need_trainer()
    text = a.gpus or ",".join(str(n) for n in (1, 2, 4, 8, 16) if n <= max(1, len(gpus_here())))
    if not re.fullmatch(r"1(,\d+)*", text):
        arg.error(f'--gpus: "{text}" is no list that begins with 1, such as 1,2,4')
    if a.steps < 11:
        arg.error("--steps: the first ten are not counted")
    numbers = [int(n) for n in text.split(",")]
    several = [(n, zero) for n in numbers[1:] for zero in (0, 1)]

    def ranks(n, zero):
        return [
            "-e",
            a.model,
            "-t",
            a.tokens,
            "-v",
            0,
            "-s",
            0,
            "--device",
            a.device,
            "--gpus",
            n,
            "--zero",
            zero,
        ]

    def record(n, zero, **fields):
        """Appends a row as soon as it is known, so that it survives a later run that fails or is
        interrupted."""
        if a.json or a.out:
            row = results.row(
                "scaling", device, model=a.model, T=a.tokens, gpus=n, zero=zero, **fields
            )
            results.append([row], "scaling", a.out)

    batch = 2 * max(numbers) * a.tokens  # of two sequences a GPU
    strict = [
        "-b",
        2,
        "-d",
        batch,
        "-x",
        20,
        "--precision",
        "fp32",
        *["--no-tf32"] * (a.device == "cuda"),
    ]
    first = results.train(*ranks(1, 0), *strict)[1]
    one, device = first["train"], first["run"][0]["device"]
    for n, zero in several:
        log = results.train(*ranks(n, zero), *strict)[1]
        apart = results.largest(
            abs(x["loss_nats"] - y["loss_nats"]) / y["loss_nats"]
            for x, y in zip(log["train"], one, strict=True)
        )
        print(
            f"{n} GPUs, --zero {zero}: losses of {len(one)} steps within {apart:.1e} of one GPU's",
            flush=True,
        )
        record(n, zero, what="losses", apart=apart)
        if not apart <= 1e-3:
            results.fail("the losses differ by more than 1e-3: not timed")

    print("gpus  zero  ms a step  side by side       tok/s  of linear    GiB", flush=True)
    timed = [
        "-b",
        a.batch,
        "-x",
        a.steps,
        "--precision",
        "fp32" if a.device == "cpu" else a.precision,
    ]
    single = None
    for n, zero in [(1, 0), *several]:
        text = results.run_trainer(*ranks(n, zero), *timed)
        ms = usual_ms(a, n, text)
        alone = side_by_side(a, n, [*ranks(1, 0), *timed]) if n > 1 else ms
        tok_s = n * a.batch * a.tokens / ms * 1e3
        single = single or tok_s
        of_linear = tok_s / (n * single)
        gib = float(re.search(r"^memory +([\d.]+) MiB", text, flags=re.M)[1]) / 1024
        print(
            f"{n:4}  {zero:4}  {ms:9.2f}  {alone:12.2f}  {tok_s:10.0f}  {of_linear:9.1%}  "
            f"{gib:5.1f}",
            flush=True,
        )
        record(
            n,
            zero,
            what="speed",
            dtype=timed[-1],
            B=a.batch,
            ms=ms,
            ms_side_by_side=alone,
            tok_s=tok_s,
            of_linear=of_linear,
            gib=gib,
        )


if __name__ == "__main__":
    main()
