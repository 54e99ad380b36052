#!/usr/bin/env python3
"""Times a plain PyTorch GPT-2 and ./dev/bench_train in one run, on the same shapes: tokens per
second and memory.

    make benches && python3 dev/bench/peers_train.py  # exits with 0 without PyTorch or a GPU
    python3 dev/bench/peers_train.py --model d24 --shapes 16x1024,4x1024 --json

The peer is what people run: the same model under torch.compile, matmuls and attention in bf16 by
autocast over fp32 weights, F.scaled_dot_product_attention, fused AdamW, and gradients clipped to
norm 1. Its initial weights, learning rate, weight decay, token ids (with the frequencies of text)
and vocabulary (50257, padded to 50304) are like those of bench_train, and the same is timed: the
whole step, from uploading its batch to reading back the loss, as the mean of 5 s of steps after 3 s
of warm-up.

Each attention backend (FlashAttention 2 and cuDNN's) trains in a process of its own, and the faster
one is recorded. Before it is timed, the loss must start at ln V and fall over 20 steps on one
batch. "GiB" is the device memory in use after the last step, including the CUDA context and all
that PyTorch's allocator holds for the peak of a step. Ours runs at -r 1, the default, and at -r 0,
which recomputes nothing; neither do the peers. "ours/peer" is how many times as fast ours is at
-r 0: above 1, ours wins.

--llmc PROGRAM is llm.c's train_gpt2cu, built with cuDNN as its README says. It trains on such
tokens at -r 0, once with each of -ge 0, 1 and 2. The fastest is recorded, with the milliseconds and
the memory that it prints.
"""

import argparse
import array
import concurrent.futures
import math
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from operator import itemgetter

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "dev" / "common")]
import results  # noqa: E402
from peers import run_benchmark, torch_with_gpu  # noqa: E402
from torch_gpt2 import MAX_T, SIZES, V, adamw, gpt2, text_ids, write  # noqa: E402

BACKENDS = {"torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION"}
WARM_UP_SECONDS = 3
TIMED_SECONDS = 5
OUT_OF_MEMORY = "out of memory"


class Wrong(Exception):
    """The peer does not train, so its time would mean nothing."""


def our_row(model, B, T, recompute):
    """The row that ./dev/bench_train writes; None if the GPU's memory is too small."""

    def run(*command):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    options = {"--model": model, "--shapes": f"{B}x{T}", "--precision": "bf16", "-r": recompute}
    done, rows = run_benchmark("bench_train", options, run)
    if done.returncode and re.search(f"{OUT_OF_MEMORY}|the model needs", done.stderr):
        return None
    if done.returncode:
        sys.exit(done.stderr.strip() or f"./dev/bench_train exited with code {done.returncode}")
    return rows[0]


def training_step(torch, model, batch):
    """Returns a function that trains `model` for one step on `batch`, tokens and targets in host
    memory, and returns the loss."""
    params = list(model.parameters())
    device = params[0].device
    adam = adamw(torch, params, lr=3e-4, weight_decay=0.1, fused=True)

    def train():
        tokens, targets = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        return loss.item()

    return train


def random_batch(torch, B, T):
    """Tokens, and as targets the tokens that follow them, as one tensor of shape (2, B, T)."""
    tokens = torch.tensor(text_ids(B * T + 1))
    return torch.stack([tokens[:-1], tokens[1:]]).view(2, B, T)


def check_losses(losses):
    first, last = losses[0], losses[-1]
    if not (abs(first - math.log(V)) < 0.5 and last < first):
        raise Wrong(
            f"expected the loss to fall from ln V = {math.log(V):g}, "
            f"but it went from {first:g} to {last:g}"
        )


def measure(size, backend, B, T):
    """The figures of a backend. The calling process must not have used the GPU before."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_float32_matmul_precision("high")
    torch.manual_seed(1)
    model = torch.compile(gpt2(torch, *size, max(T, MAX_T)).cuda())
    train = training_step(torch, model, random_batch(torch, B, T).pin_memory())

    def mean_ms(seconds):
        steps = 0
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            train()
            steps += 1
        return (time.perf_counter() - start) / steps * 1e3

    with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
        losses = [train() for _ in range(20)]
        check_losses(losses)
        torch.cuda.empty_cache()  # of what only compiling needed
        mean_ms(WARM_UP_SECONDS)
        ms = mean_ms(TIMED_SECONDS)
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": torch.cuda.get_device_name(),
        "ms": ms,
        "tok_s": B * T / ms * 1e3,
        "mem_gib": (total - free) / 2**30,
        "loss": losses[-1],
    }


def llmc_steps(program, options, folder):
    """Runs llm.c until enough steps are timed. Returns their milliseconds, the loss that it printed
    last, and the other lines that it printed."""
    run = subprocess.Popen(
        [program, *results.option_words(options)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    text = ""
    loss = None
    warm_up_ms = 0
    timed_ms = []
    for line in run.stdout:
        step = re.search(r"^step .* \| loss ([\d.]+) .*\| ([\d.]+) ms \|", line)
        if not step:
            text += line
            continue
        loss = float(step[1])
        ms = float(step[2])
        if warm_up_ms < 1e3 * WARM_UP_SECONDS:
            warm_up_ms += ms
        elif sum(timed_ms) < 1e3 * TIMED_SECONDS:
            timed_ms.append(ms)
        else:
            break
    run.kill()
    run.wait()
    return timed_ms, loss, text


def llmc_figures(program, model, ge, B, T):
    """Figures from what llm.c prints, or a few words on why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = array.array("H", text_ids(20 * B * T + 1))
        for name in "train.bin", "val.bin":
            write(pathlib.Path(folder, name), [20240520, 1, len(tokens)], tokens)
        options = {
            "-i": f"{folder}/train.bin",
            "-j": f"{folder}/val.bin",
            "-e": model,
            "-b": B,
            "-t": T,
            "-d": B * T,
            "-x": 100000,
            "-r": 0,
            "-ge": ge,
            "-l": 0.0003,
            "-c": 0.1,
            "-v": 100000,
            "-s": 100000,
            "-h": 0,
        }
        timed_ms, loss, text = llmc_steps(program, options, folder)
    if not timed_ms:
        return OUT_OF_MEMORY if OUT_OF_MEMORY in text else f"llm.c says {text[-100:]!r}"
    ms = sum(timed_ms) / len(timed_ms)
    used = re.search(r"device memory usage: (\d+) MiB", text)
    return {
        "ms": ms,
        "tok_s": B * T / ms * 1e3,
        "mem_gib": int(used[1]) / 1024,
        "loss": loss,
    }


def figures_or_reason(*arguments):
    """What measure() returns, or a few words on why it failed, because not all of PyTorch's
    exceptions can be passed between processes."""
    try:
        return measure(*arguments)
    except Wrong:
        raise
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        return OUT_OF_MEMORY if OUT_OF_MEMORY in text else text.splitlines()[0][:100]


def torch_figures(model, backend, B, T):
    """What figures_or_reason() returns in a process of its own."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(figures_or_reason, SIZES[model], backend, B, T).result()
        except concurrent.futures.process.BrokenProcessPool as e:
            return str(e)
        except Wrong as e:
            sys.exit(f"peers_train.py: {backend} at B={B} T={T}: {e}; not timed")


def table_line(row, ours=None):
    """What is printed of a row; `ours` is the row that a peer is compared with."""
    mfu = f"{row['mfu']:.1f}" if row["mfu"] else "n/a"
    ratio = f" {ours['tok_s'] / row['tok_s']:10.2f}" if ours else ""
    attention = row.get("sdpa") or f"{row['attention']}, -r {row['recompute']}"
    return (
        f"{row['kernel']:13} {attention:12} {row['B']:4} {row['T']:6} | {row['ms']:9.2f} "
        f"{row['tok_s']:9.0f} {mfu:>6} {row['mem_gib']:7.2f}{ratio}"
    )


def skipped_line(kernel, attention, B, T, reason):
    return f"{kernel:13} {attention:12} {B:4} {T:6} | skipped: {reason}"


def fastest(kernel, model, B, T, ours, tried, **about):
    """Prints a line for each kind of attention that was tried. Returns a list with the row of the
    fastest, empty if there is none. `tried` yields each kind with its figures, or with the reason
    why there are none. `about` is what a row says beside these, such as the CUDA version, and the
    GPU's name if the figures do not have it."""
    found = []
    for sdpa, figures in tried:
        if isinstance(figures, str):
            print(skipped_line(kernel, sdpa, B, T, figures), flush=True)
            continue
        mfu = None
        if ours and ours["mfu"]:
            # The same model on the same GPU, so MFU is proportional to tokens per second.
            mfu = figures["tok_s"] * ours["mfu"] / ours["tok_s"]
        fields = {
            "kernel": kernel,
            "model": model,
            "dtype": "bf16",
            "B": B,
            "T": T,
            "ids": "text-like",
            "gpus": 1,
            "attention": "sdpa",
            "sdpa": sdpa,
            "deterministic": False,
            "mfu": mfu,
        }
        row = results.row("train", **fields, **about, **figures)
        print(table_line(row, ours), flush=True)
        found.append(row)
    return sorted(found, key=itemgetter("ms"))[:1]


def rows_of_shape(a, torch, B, T):
    """Our rows, then that of the fastest of each peer."""
    rows = []
    by_recompute = {}
    for recompute in 1, 0:
        row = our_row(a.model, B, T, recompute)
        by_recompute[recompute] = row
        if row:
            rows.append(row)
            print(table_line(row), flush=True)
        else:
            attention = f"flash, -r {recompute}"
            print(skipped_line("train_gpt2cu", attention, B, T, OUT_OF_MEMORY), flush=True)
    ours = by_recompute[0]  # recomputes nothing; neither do the peers

    # Each is measured when fastest() asks for it, so that its line appears before the next starts.
    tried = ((backend, torch_figures(a.model, backend, B, T)) for backend in BACKENDS)
    about = {"cuda": torch.version.cuda, "torch": torch.__version__}
    rows += fastest("torch_compile", a.model, B, T, ours, tried, **about)

    if a.llmc and rows:
        tried = (
            (f"cudnn, -ge {ge}", llmc_figures(a.llmc.resolve(), a.model, ge, B, T))
            for ge in range(3)
        )
        about = {"gpu": rows[0]["gpu"], "cuda": rows[0]["cuda"]}
        rows += fastest("llm.c", a.model, B, T, ours, tried, **about)
    return rows


def shapes_of(text):
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*(,[1-9]\d*x[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(
            f'expected BxT,BxT,… such as 16x1024,4x1024; found "{text}"'
        )
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "train")
    arg.add_argument(
        "--model", default="d12", choices=SIZES, help="GPT-2 to train (default: %(default)s)"
    )
    arg.add_argument(
        "--shapes",
        default="64x1024,16x1024,4x1024",
        type=shapes_of,
        metavar="BxT,BxT,…",
        help="batch sizes and sequence lengths (default: %(default)s)",
    )
    arg.add_argument(
        "--llmc",
        type=pathlib.Path,
        metavar="PROGRAM",
        default=os.environ.get("LLMC"),
        help="also time llm.c's train_gpt2cu (default: $LLMC; if neither is given, it is left out)",
    )
    a = arg.parse_args()
    if a.llmc and not a.llmc.is_file():
        arg.error(
            f"--llmc {a.llmc}: there is no such program; "
            "build llm.c's train_gpt2cu as its README says"
        )
    torch = torch_with_gpu("peers_train.py")

    # This process must not use the GPU, because its context would count in the peers' memory.
    print(
        f"PyTorch {torch.__version__}, {a.model}, bf16, sustained, whole step\n"
        f"{'kernel':13} {'attention':12} {'B':>4} {'T':>6} | "
        f"{'ms':>9} {'tok/s':>9} {'MFU %':>6} {'GiB':>7} {'ours/peer':>10}",
        flush=True,
    )
    path = None
    for B, T in a.shapes:
        rows = rows_of_shape(a, torch, B, T)
        if rows and (a.json or a.out):
            # At once, so that the rows survive a later shape that fails.
            path = results.append(rows, "train", a.out)
    if path:
        print(path)


if __name__ == "__main__":
    main()
