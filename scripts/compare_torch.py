#!/usr/bin/env python3
"""Trains a plain PyTorch GPT-2 and ./train_gpt2cu from the same llm.c-format fp32 checkpoint and token shard, with the same
batches and AdamW, and compares their losses step by step. Exit code 1 if they differ by more than --tol anywhere.

A second PyTorch run, whose attention adds in another order (SDPA), shows how far rounding alone carries: where training is
unstable (--lr 3e-4 without warm-up, say) two correct programs part after some tens of steps, and so do the two PyTorch runs.

    make train_gpt2cu && python3 scripts/compare_torch.py            # needs PyTorch, numpy and a GPU
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile

import results

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as e:
    if not {"-h", "--help"} & set(sys.argv):  # help needs neither
        sys.exit(f"compare_torch.py needs PyTorch and numpy: {e}")

SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024)}
MAX_T, V, VP = 1024, 50257, 50304


def tensors(L, C):
    """The sixteen tensors of a checkpoint in file order: name, shape, decayed."""
    return [("wte", (VP, C), True), ("wpe", (MAX_T, C), True), ("ln1w", (L, C), False), ("ln1b", (L, C), False),
            ("qkvw", (L, 3 * C, C), True), ("qkvb", (L, 3 * C), False), ("attprojw", (L, C, C), True),
            ("attprojb", (L, C), False), ("ln2w", (L, C), False), ("ln2b", (L, C), False), ("fcw", (L, 4 * C, C), True),
            ("fcb", (L, 4 * C), False), ("fcprojw", (L, C, 4 * C), True), ("fcprojb", (L, C), False),
            ("lnfw", (C,), False), ("lnfb", (C,), False)]


def forward(p, tokens, targets, L, NH, sdpa):
    B, T = tokens.shape
    C = p["wte"].shape[1]
    x = p["wte"][tokens] + p["wpe"][:T]
    for l in range(L):
        h = F.layer_norm(x, (C,), p["ln1w"][l], p["ln1b"][l])
        q, k, v = F.linear(h, p["qkvw"][l], p["qkvb"][l]).view(B, T, 3, NH, C // NH).permute(2, 0, 3, 1, 4)
        if sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            s = (q @ k.transpose(-1, -2)) / math.sqrt(C // NH)
            s = s.masked_fill(torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1), -math.inf)
            y = s.softmax(-1) @ v
        y = y.transpose(1, 2).reshape(B, T, C)
        x = x + F.linear(y, p["attprojw"][l], p["attprojb"][l])
        h = F.layer_norm(x, (C,), p["ln2w"][l], p["ln2b"][l])
        h = F.gelu(F.linear(h, p["fcw"][l], p["fcb"][l]), approximate="tanh")
        x = x + F.linear(h, p["fcprojw"][l], p["fcprojb"][l])
    x = F.layer_norm(x, (C,), p["lnfw"], p["lnfb"])
    logits = F.linear(x, p["wte"][:V])
    return F.cross_entropy(logits.view(-1, V), targets.reshape(-1))


def train(params, data, a, L, NH, sdpa):
    """(loss, gradient norm) of every step."""
    p = {name: value.cuda().requires_grad_() for name, value in params.items()}
    decayed = [p[name] for name, _, decay in tensors(L, 0) if decay]
    other = [p[name] for name, _, decay in tensors(L, 0) if not decay]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=a.lr,
                             betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(a.steps):
        begin, n = step * a.B * a.T, a.B * a.T
        loss = forward(p, data[begin:begin + n].view(a.B, a.T), data[begin + 1:begin + n + 1].view(a.B, a.T), L, NH, sdpa)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(p.values()), 1.0)
        adam.step()
        steps.append((loss.item(), norm.item()))
    return steps


def largest_difference(a, b):
    """NaN if there is one."""
    return float(np.abs(np.array(a)[:, 0] - np.array(b)[:, 0]).max())


def main():
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("--model", choices=SIZES, default="d12")
    arg.add_argument("--steps", type=int, default=50)
    arg.add_argument("-B", type=int, default=4)
    arg.add_argument("-T", type=int, default=1024)
    arg.add_argument("--lr", type=float, default=1e-4)
    arg.add_argument("--attention", default="flash", choices=["flash", "naive"])
    arg.add_argument("--tol", type=float, default=1e-3)
    arg.add_argument("--json", action="store_true", help="append the result to dev/results/<gpu>/torch.jsonl")
    a = arg.parse_args()
    L, NH, C = SIZES[a.model]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)

    with tempfile.TemporaryDirectory() as folder:
        # One checkpoint and one shard for both. The tokens follow a random first-order chain, so that there is something to learn.
        params = {}
        for name, shape, decay in tensors(L, C):
            sigma = 0.02 / (math.sqrt(2 * L) if name in ("attprojw", "fcprojw") else 1)
            value = torch.randn(shape) * sigma if decay else torch.zeros(shape) if name.endswith("b") else torch.ones(shape)
            if name == "wte":
                value[V:] = 0
            params[name] = value
        header = np.zeros(256, np.int32)
        header[:8] = [20240326, 3, MAX_T, V, L, NH, C, VP]
        checkpoint = os.path.join(folder, "model.bin")
        with open(checkpoint, "wb") as f:
            f.write(header.tobytes())
            for name, _, _ in tensors(L, C):
                f.write(params[name].numpy().tobytes())
        rng = np.random.default_rng(2)
        n = a.steps * a.B * a.T + 1
        follow = rng.integers(0, V, size=(V, 2))
        tokens = np.empty(n, np.int64)
        tokens[0] = 0
        choice, jump, free = rng.integers(0, 2, n), rng.random(n), rng.integers(0, V, n)
        for i in range(1, n):
            tokens[i] = free[i] if jump[i] < 0.1 else follow[tokens[i - 1] % 1000, choice[i]]
        header = np.zeros(256, np.int32)
        header[:3] = [20240520, 1, n]
        shard = os.path.join(folder, "train.bin")
        with open(shard, "wb") as f:
            f.write(header.tobytes())
            f.write(tokens.astype(np.uint16).tobytes())

        out = os.path.join(folder, "out")
        command = ["./train_gpt2cu", "-e", checkpoint, "-i", shard, "-b", str(a.B), "-t", str(a.T), "-x", str(a.steps),
                   "-l", str(a.lr), "-u", "0", "-k", "constant", "-v", "0", "-s", "0", "-c", "0.1", "--precision", "fp32",
                   "--no-tf32", "--no-shuffle", "--attention", a.attention, "-o", out]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)}\nended with {done.returncode}: {done.stderr}")
        rows = [json.loads(line) for line in open(os.path.join(out, "log.jsonl"))]
        ours = [(r["loss_nats"], r["grad_norm"]) for r in rows if r["kind"] == "train"]

    data = torch.from_numpy(tokens).cuda()
    torch_steps = train(params, data, a, L, NH, sdpa=False)
    control = train(params, data, a, L, NH, sdpa=True)
    for step in [*range(0, a.steps - 1, 10), a.steps - 1]:
        (loss, norm), (our_loss, our_norm) = torch_steps[step], ours[step]
        print(f"step {step + 1:3d}  torch {loss:.6f}  ours {our_loss:.6f}  norm torch {norm:.5f}  ours {our_norm:.5f}")
    worst, noise = largest_difference(torch_steps, ours), largest_difference(torch_steps, control)
    ok = worst <= a.tol
    print(f"largest difference over {a.steps} steps: {worst:.2e} ({'within' if ok else 'BEYOND'} {a.tol:g}); "
          f"PyTorch with another attention: {noise:.2e}")
    if a.json:
        results.append([results.row("torch", torch.cuda.get_device_name(), torch.version.cuda, torch=torch.__version__,
                                    model=a.model, dtype="fp32", B=a.B, T=a.T, steps=a.steps, attention=a.attention,
                                    lr=a.lr, max_loss_difference=worst,
                                    max_loss_difference_torch_itself=noise)], "torch")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
