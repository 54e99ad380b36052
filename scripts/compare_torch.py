#!/usr/bin/env python3
"""Trains a plain PyTorch GPT-2 and ./train_gpt2cu from one checkpoint and shard, with the same
batches, clipping and AdamW, and compares our losses step by step with PyTorch's in strict fp32. The
exit code is 1 if the losses of a step are further apart than allowed, or if fewer than half of the
steps were clipped.

fp32: the losses may differ by --tol. A second PyTorch run, whose attention adds in another order
(SDPA), shows how far apart rounding alone takes them. Where training is unstable, two correct
programs diverge, as at --lr 1e-4, where the loss jumps by 1.6 at step 7.

bf16: the losses may differ by twice as much as PyTorch's own bf16 does from its fp32. Both programs
keep fp32 masters and compute with bf16 copies. PyTorch rounds the copies to nearest and we round
them stochastically, hence the factor of 2.

    make train_gpt2cu && python3 scripts/compare_torch.py     # needs PyTorch, numpy and a GPU
    python3 scripts/compare_torch.py --precision bf16
"""

import itertools
import math
import pathlib
import sys
import tempfile

import results

sys.path.append(str(results.ROOT / "dev" / "common"))
from torch_gpt2 import MAX_T, SIZES, VP, V, adamw, gpt2, text_ids, write  # noqa: E402

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None  # --help and the arithmetic need neither


def plain_attention(q, k, v, is_causal):
    T, HS = q.shape[-2:]
    s = (q @ k.transpose(-1, -2)) / math.sqrt(HS)
    future = torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1)
    return s.masked_fill(future, -math.inf).softmax(-1) @ v


def train(model, data, a, attention, dtype):
    """(loss, gradient norm) of every step. The masters are fp32, all else has this type."""
    for block in model.blocks:
        block.attention = attention
    masters = {
        name: p.detach().clone().cuda().requires_grad_() for name, p in model.named_parameters()
    }
    adam = adamw(torch, masters.values(), a.lr, a.weight_decay)
    steps = []
    for step in range(a.steps):
        begin, n = step * a.B * a.T, a.B * a.T
        batch = tuple(data[at : at + n].view(a.B, a.T) for at in (begin, begin + 1))
        loss = torch.func.functional_call(
            model, {name: p.to(dtype) for name, p in masters.items()}, batch
        )
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), a.max_norm)
        adam.step()
        steps.append((loss.item(), norm.item()))
    return steps


def apart(a, b):
    """The largest difference of two runs' losses; NaN if there is one."""
    return results.largest(abs(x - y) for (x, _), (y, _) in zip(a, b, strict=True))


def judge(a, ours, reference, other):
    """What a row says about the losses, and whether they and the clipping are as they should be.
    `other` is PyTorch's fp32 run with another attention, or its bf16 run."""
    own = apart(other, reference)
    found = {
        "difference": apart(ours, reference),
        "allowed": a.tol if a.precision == "fp32" else 2 * own,
        "torch_itself": own,
        "clipped": sum(norm > a.max_norm for _, norm in ours),
    }
    return found, found["difference"] <= found["allowed"] and 2 * found["clipped"] >= len(ours)


def trainer_options(a, checkpoint, shard):
    return [
        "-e",
        checkpoint,
        "-i",
        shard,
        "-b",
        a.B,
        "-t",
        a.T,
        "-x",
        a.steps,
        "-l",
        a.lr,
        "-u",
        0,
        "-k",
        "constant",
        "-v",
        0,
        "-s",
        0,
        "-c",
        a.weight_decay,
        "--max-norm",
        a.max_norm,
        "--precision",
        a.precision,
        "--no-shuffle",
        "--attention",
        a.attention,
        *(["--no-tf32"] if a.precision == "fp32" else []),
    ]


def checkpoint_tensors(model):
    """The tensors in the file's order: each of a block's is there for all layers in a row, and wte
    is padded."""
    layers = zip(*(block.parameters() for block in model.blocks))
    found = [
        model.wte.weight,
        torch.zeros(VP - V, model.wte.weight.shape[1]),
        model.wpe.weight,
        *itertools.chain(*layers),
        *model.lnf.parameters(),
    ]
    return [p.detach().numpy() for p in found]


def random_chain(n):
    """Tokens with the frequencies of text that mostly follow a random first-order chain, so that
    there is something to learn."""
    rng = np.random.default_rng(2)
    follow, free = np.reshape(text_ids(2000, 2), (1000, 2)), text_ids(n, 3)
    tokens = np.zeros(n, np.int64)
    choice, jump = rng.integers(0, 2, n), rng.random(n)
    for i in range(1, n):
        tokens[i] = free[i] if jump[i] < 0.1 else follow[tokens[i - 1] % 1000, choice[i]]
    return tokens


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "torch")
    arg.add_argument("--model", choices=SIZES, default="d12")
    arg.add_argument("--steps", type=int, default=50)
    arg.add_argument("-B", type=int, default=4)
    arg.add_argument("-T", type=int, default=1024)
    arg.add_argument("--lr", type=float, default=3e-5)
    arg.add_argument("--attention", default="flash", choices=["flash", "naive"])
    arg.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    arg.add_argument(
        "--max-norm",
        type=float,
        default=0.5,
        help="where gradients are clipped (default: %(default)s)",
    )
    arg.add_argument(
        "--weight-decay",
        type=float,
        default=1.0,
        help="so much that it shows (default: %(default)s)",
    )
    arg.add_argument("--tol", type=float, default=1e-4, help="in fp32 (default: %(default)s)")
    a = arg.parse_args()
    if not torch:
        results.fail(
            "needs torch and numpy: pip install -c scripts/requirements-more.txt torch numpy"
        )
    L, NH, C = SIZES[a.model]
    torch.backends.cuda.matmul.allow_tf32 = False
    # A sum split in bf16 would be ten times as far off.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(1)

    model, tokens = gpt2(torch, L, NH, C, MAX_T, V), random_chain(a.steps * a.B * a.T + 1)
    with tempfile.TemporaryDirectory() as folder:  # one checkpoint and one shard for both
        checkpoint, shard = (pathlib.Path(folder, name) for name in ("model.bin", "train.bin"))
        write(checkpoint, [20240326, 3, MAX_T, V, L, NH, C, VP], *checkpoint_tensors(model))
        write(shard, [20240520, 1, len(tokens)], tokens.astype(np.uint16))
        _, log = results.train(*trainer_options(a, checkpoint, shard))
    ours = [(r["loss_nats"], r["grad_norm"]) for r in log["train"]]

    data = torch.from_numpy(tokens).cuda()
    reference = train(model, data, a, plain_attention, torch.float32)
    if a.precision == "fp32":
        other = train(model, data, a, F.scaled_dot_product_attention, torch.float32)
    else:
        other = train(model, data, a, plain_attention, torch.bfloat16)
    for step in range(0, a.steps, 10):
        print(
            f"step {step + 1:3d}  torch {reference[step][0]:.6f} and {other[step][0]:.6f}  "
            f"ours {ours[step][0]:.6f}"
        )
    found, ok = judge(a, ours, reference, other)
    print(
        f"largest difference over {a.steps} steps: {found['difference']:.2e} "
        f"({'fine' if ok else 'WRONG'}: {found['allowed']:.2e} is allowed, "
        f"PyTorch's own is {found['torch_itself']:.2e}); {found['clipped']} clipped"
    )
    if a.json or a.out:
        about = {
            name: vars(a)[name]
            for name in "model B T steps attention lr max_norm weight_decay".split()
        }
        row = results.row(
            "torch",
            torch.cuda.get_device_name(),
            torch.version.cuda,
            torch=torch.__version__,
            dtype=a.precision,
            **about,
            **found,
        )
        results.append([row], "torch", a.out)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
