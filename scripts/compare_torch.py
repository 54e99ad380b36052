#!/usr/bin/env python3
"""Trains a plain PyTorch GPT-2 and ./train_gpt2cu from the same llm.c-format fp32 checkpoint and token shard, with the same
batches, clipping and AdamW, and compares their losses step by step with PyTorch's in strict fp32. Exit code 1 if some
step's are further apart than allowed, or if fewer than half of the steps were clipped.

fp32: --tol is allowed. A second PyTorch run, whose attention adds in another order (SDPA), shows how far rounding alone
carries: where training is unstable (--lr 3e-4 without warm-up, say) two correct programs part after some tens of steps.

bf16: twice as far is allowed as PyTorch's own bf16 is from its fp32. Both keep fp32 masters and compute with bf16 copies of
all weights and with bf16 activations. PyTorch rounds the copies to nearest and we stochastically, whose errors are up
to a whole unit in the last place instead of half of one: hence the 2.

    make train_gpt2cu && python3 scripts/compare_torch.py            # needs PyTorch, numpy and a GPU
    python3 scripts/compare_torch.py --precision bf16
"""
import math
import pathlib
import sys
import tempfile

import results

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None  # --help and the arithmetic need neither

SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024)}
MAX_T, V, VP = 1024, 50257, 50304


def tensors(L, C):
    """The sixteen tensors of a checkpoint in file order: name, shape, decayed."""
    return [("wte", (VP, C), True), ("wpe", (MAX_T, C), True), ("ln1w", (L, C), False), ("ln1b", (L, C), False),
            ("qkvw", (L, 3 * C, C), True), ("qkvb", (L, 3 * C), False), ("attprojw", (L, C, C), True),
            ("attprojb", (L, C), False), ("ln2w", (L, C), False), ("ln2b", (L, C), False), ("fcw", (L, 4 * C, C), True),
            ("fcb", (L, 4 * C), False), ("fcprojw", (L, C, 4 * C), True), ("fcprojb", (L, C), False),
            ("lnfw", (C,), False), ("lnfb", (C,), False)]


def forward(masters, tokens, targets, L, NH, sdpa, dtype):
    p = {name: master.to(dtype) for name, master in masters.items()}
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
    return F.cross_entropy(logits.view(-1, V).float(), targets.reshape(-1))


def train(params, data, a, L, NH, sdpa, dtype):
    """(loss, gradient norm) of every step."""
    p = {name: value.cuda().requires_grad_() for name, value in params.items()}
    decayed = [p[name] for name, _, decay in tensors(L, 0) if decay]
    other = [p[name] for name, _, decay in tensors(L, 0) if not decay]
    adam = torch.optim.AdamW([{"params": decayed, "weight_decay": a.weight_decay}, {"params": other, "weight_decay": 0.0}],
                             lr=a.lr, betas=(0.9, 0.95), eps=1e-8)
    steps = []
    for step in range(a.steps):
        begin, n = step * a.B * a.T, a.B * a.T
        tokens, targets = (data[at:at + n].view(a.B, a.T) for at in (begin, begin + 1))
        loss = forward(p, tokens, targets, L, NH, sdpa, dtype)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(p.values()), a.max_norm)
        adam.step()
        steps.append((loss.item(), norm.item()))
    return steps


def apart(a, b):
    """The largest difference of two runs' losses; NaN if there is one."""
    if len(a) != len(b):
        raise ValueError(f"runs of {len(a)} and {len(b)} steps")
    return results.largest(abs(x - y) for (x, _), (y, _) in zip(a, b))


def judge(a, ours, reference, other):
    """What a row says of the losses, and whether they and the clipping are as they should be. `other` is PyTorch's fp32
    with another attention, or its bf16."""
    own = apart(other, reference)
    found = {"difference": apart(ours, reference), "allowed": a.tol if a.precision == "fp32" else 2 * own,
             "torch_itself": own, "clipped": sum(norm > a.max_norm for _, norm in ours)}
    return found, found["difference"] <= found["allowed"] and 2 * found["clipped"] >= len(ours)


def trainer_options(a, checkpoint, shard):
    return ["-e", checkpoint, "-i", shard, "-b", a.B, "-t", a.T, "-x", a.steps, "-l", a.lr, "-u", 0, "-k", "constant",
            "-v", 0, "-s", 0, "-c", a.weight_decay, "--max-norm", a.max_norm, "--precision", a.precision,
            "--no-shuffle", "--attention", a.attention, *(["--no-tf32"] if a.precision == "fp32" else [])]


def write(path, header, *arrays):
    """A file of llm.c's: a header of 256 ints, and what follows."""
    with open(path, "wb") as f:
        f.write(np.array(header + [0] * (256 - len(header)), np.int32).tobytes())
        for array in arrays:
            f.write(array.tobytes())


def initial_weights(L, C):
    params = {}
    for name, shape, decay in tensors(L, C):
        sigma = 0.02 / (math.sqrt(2 * L) if name in ("attprojw", "fcprojw") else 1)
        constant = torch.zeros if name.endswith("b") else torch.ones
        params[name] = torch.randn(shape) * sigma if decay else constant(shape)
    params["wte"][V:] = 0
    return params


def random_chain(n):
    """Tokens that mostly follow a random first-order chain, so that there is something to learn."""
    rng = np.random.default_rng(2)
    follow = rng.integers(0, V, size=(V, 2))
    tokens = np.zeros(n, np.int64)
    choice, jump, free = rng.integers(0, 2, n), rng.random(n), rng.integers(0, V, n)
    for i in range(1, n):
        tokens[i] = free[i] if jump[i] < 0.1 else follow[tokens[i - 1] % 1000, choice[i]]
    return tokens


def main():
    arg = results.arguments(__doc__)
    arg.add_argument("--model", choices=SIZES, default="d12")
    arg.add_argument("--steps", type=int, default=50)
    arg.add_argument("-B", type=int, default=4)
    arg.add_argument("-T", type=int, default=1024)
    arg.add_argument("--lr", type=float, default=1e-4)
    arg.add_argument("--attention", default="flash", choices=["flash", "naive"])
    arg.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arg.add_argument("--max-norm", type=float, default=0.5, help="where gradients are clipped (default: %(default)s)")
    arg.add_argument("--weight-decay", type=float, default=1.0, help="so much that it shows (default: %(default)s)")
    arg.add_argument("--tol", type=float, default=1e-4, help="in fp32 (default: %(default)s)")
    arg.add_argument("--json", action="store_true", help="append the result to dev/results/<gpu>/torch.jsonl")
    a = arg.parse_args()
    if not torch:
        results.fail("needs torch and numpy: pip install -c scripts/requirements-more.txt torch numpy")
    L, NH, C = SIZES[a.model]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)

    params, tokens = initial_weights(L, C), random_chain(a.steps * a.B * a.T + 1)
    with tempfile.TemporaryDirectory() as folder:  # one checkpoint and one shard for both
        checkpoint, shard = (pathlib.Path(folder, name) for name in ("model.bin", "train.bin"))
        write(checkpoint, [20240326, 3, MAX_T, V, L, NH, C, VP], *(value.numpy() for value in params.values()))
        write(shard, [20240520, 1, len(tokens)], tokens.astype(np.uint16))
        _, log = results.train(*trainer_options(a, checkpoint, shard))
    ours = [(r["loss_nats"], r["grad_norm"]) for r in log["train"]]

    data = torch.from_numpy(tokens).cuda()
    reference = train(params, data, a, L, NH, sdpa=False, dtype=torch.float32)
    other = train(params, data, a, L, NH, sdpa=a.precision == "fp32",
                  dtype=torch.float32 if a.precision == "fp32" else torch.bfloat16)
    for step in [*range(0, a.steps - 1, 10), a.steps - 1]:
        (loss, norm), (our_loss, our_norm) = reference[step], ours[step]
        print(f"step {step + 1:3d}  torch {loss:.6f}  ours {our_loss:.6f}  norm torch {norm:.5f}  ours {our_norm:.5f}")
    found, ok = judge(a, ours, reference, other)
    print(f"largest difference over {a.steps} steps: {found['difference']:.2e} ({'fine' if ok else 'WRONG'}: "
          f"{found['allowed']:.2e} is allowed, PyTorch's own is {found['torch_itself']:.2e}); {found['clipped']} clipped")
    if a.json:
        results.append([results.row("torch", torch.cuda.get_device_name(), torch.version.cuda, torch=torch.__version__,
                                    model=a.model, dtype=a.precision, B=a.B, T=a.T, steps=a.steps, attention=a.attention,
                                    lr=a.lr, max_norm=a.max_norm, weight_decay=a.weight_decay, **found)], "torch")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
