#!/usr/bin/env python3
"""Trains a plain PyTorch GPT-2 and ./train_gpt2cu from the same checkpoint and shard, with the same
batches, clipping and AdamW, and compares our losses step by step with PyTorch's in strict fp32. The
exit code is 1 if the losses of any step differ by more than is allowed, or if fewer than half of
the steps were clipped.

fp32: the losses may differ by --tol. A second PyTorch run, whose attention adds in another order
(SDPA), shows how far apart rounding alone takes them. Where training is unstable, even two correct
programs diverge: at --lr 1e-4, for example, the loss jumps by 1.6 at step 7.

bf16: the losses may differ by twice as much as PyTorch's own bf16 run differs from its fp32 run.
Both programs keep fp32 master weights and compute with bf16 copies. PyTorch rounds the copies to
nearest and we round them stochastically, hence the factor of 2.

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
    torch = None  # --help and the tests of judge() need neither


def plain_attention(q, k, v, is_causal):
    T, HS = q.shape[-2:]
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(HS)
    future = torch.ones(T, T, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def train_torch(model, data, a, attention, dtype):
    """(loss, gradient norm) of every step. The master weights are fp32; the model computes in
    `dtype`."""
    for block in model.blocks:
        block.attention = attention
    masters = {
        name: p.detach().clone().cuda().requires_grad_() for name, p in model.named_parameters()
    }
    adam = adamw(torch, masters.values(), a.lr, a.weight_decay)
    batch_tokens = a.B * a.T
    steps = []
    for step in range(a.steps):
        begin = step * batch_tokens
        tokens = data[begin : begin + batch_tokens].view(a.B, a.T)
        targets = data[begin + 1 : begin + 1 + batch_tokens].view(a.B, a.T)

        copies = {name: p.to(dtype) for name, p in masters.items()}
        loss = torch.func.functional_call(model, copies, (tokens, targets))
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), a.max_norm)
        adam.step()
        steps.append((loss.item(), norm.item()))
    return steps


def largest_difference(run, other):
    """How far apart the losses of two runs are; NaN if any of them is."""
    return results.largest(abs(x - y) for (x, _), (y, _) in zip(run, other, strict=True))


def judge(a, ours, reference, other):
    """What a row says about the losses, and whether they and the clipping are as they should be.
    `other` is PyTorch's fp32 run with another attention, or its bf16 run."""
    own = largest_difference(other, reference)
    found = {
        "difference": largest_difference(ours, reference),
        "allowed": a.tol if a.precision == "fp32" else 2 * own,
        "torch_itself": own,
        "clipped": sum(norm > a.max_norm for _, norm in ours),
    }
    is_near = found["difference"] <= found["allowed"]
    is_clipped = 2 * found["clipped"] >= len(ours)
    return found, is_near and is_clipped


def trainer_options(a, checkpoint, shard):
    options = {
        "-e": checkpoint,
        "-i": shard,
        "-b": a.B,
        "-t": a.T,
        "-x": a.steps,
        "-l": a.lr,
        "-u": 0,
        "-k": "constant",
        "-v": 0,
        "-s": 0,
        "-c": a.weight_decay,
        "--max-norm": a.max_norm,
        "--precision": a.precision,
        "--no-shuffle": None,
        "--attention": a.attention,
    }
    if a.precision == "fp32":
        options["--no-tf32"] = None
    return options


def checkpoint_tensors(model):
    """The tensors in a checkpoint's order: a block's first tensor of every layer, then its second
    of every layer, and so on. wte is padded to VP rows."""
    same_tensor_of_every_layer = zip(*(block.parameters() for block in model.blocks))
    found = [
        model.wte.weight,
        torch.zeros(VP - V, model.wte.weight.shape[1]),
        model.wpe.weight,
        *itertools.chain(*same_tensor_of_every_layer),
        *model.lnf.parameters(),
    ]
    return [p.detach().numpy() for p in found]


def random_chain(n):
    """Token ids with the frequencies of text, most of which follow a random first-order Markov
    chain, so that there is something to learn."""
    rng = np.random.default_rng(2)
    successors = np.reshape(text_ids(2000, seed=2), (1000, 2))  # two for each id modulo 1000
    free = text_ids(n, seed=3)
    choice = rng.integers(0, 2, n)
    jump = rng.random(n)
    tokens = np.zeros(n, np.int64)
    for i in range(1, n):
        if jump[i] < 0.1:
            tokens[i] = free[i]
        else:
            tokens[i] = successors[tokens[i - 1] % 1000, choice[i]]
    return tokens


def train_ours(a, model, tokens):
    """(loss, gradient norm) of every step of ./train_gpt2cu, starting from PyTorch's weights."""
    L, NH, C = SIZES[a.model]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = pathlib.Path(folder, "model.bin")
        shard = pathlib.Path(folder, "train.bin")
        # Each header begins with a magic number and a version; version 3 of a checkpoint is fp32.
        write(checkpoint, [20240326, 3, MAX_T, V, L, NH, C, VP], *checkpoint_tensors(model))
        write(shard, [20240520, 1, len(tokens)], tokens.astype(np.uint16))
        log = results.train(trainer_options(a, checkpoint, shard))
    return [(row["loss_nats"], row["grad_norm"]) for row in log["train"]]


def parse_arguments():
    arg = results.arguments(__doc__, "torch")
    arg.add_argument("--model", choices=SIZES, default="d12", help="default: %(default)s")
    arg.add_argument(
        "--steps", type=int, default=50, help="steps to compare (default: %(default)s)"
    )
    arg.add_argument("-B", type=int, default=4, help="sequences per batch (default: %(default)s)")
    arg.add_argument(
        "-T", type=int, default=1024, help="tokens per sequence (default: %(default)s)"
    )
    arg.add_argument("--lr", type=float, default=3e-5, help="learning rate (default: %(default)s)")
    arg.add_argument(
        "--attention",
        default="flash",
        choices=["flash", "naive"],
        help="attention of ./train_gpt2cu (default: %(default)s)",
    )
    arg.add_argument(
        "--precision", default="fp32", choices=["fp32", "bf16"], help="default: %(default)s"
    )
    arg.add_argument(
        "--max-norm",
        type=float,
        default=0.5,
        help="clip gradients to this norm (default: %(default)s)",
    )
    arg.add_argument(
        "--weight-decay",
        type=float,
        default=1.0,
        help="AdamW's weight decay, larger than usual so that a mistake shows "
        "(default: %(default)s)",
    )
    arg.add_argument(
        "--tol",
        type=float,
        default=1e-4,
        help="largest difference that is allowed between the losses in fp32 (default: %(default)s)",
    )
    return arg.parse_args()


def append_row(a, found):
    settings = "model B T steps attention lr max_norm weight_decay".split()
    row = results.row(
        "torch",
        torch.cuda.get_device_name(),
        torch.version.cuda,
        torch=torch.__version__,
        dtype=a.precision,
        **{name: vars(a)[name] for name in settings},
        **found,
    )
    results.append([row], "torch", a.out)


@results.check_stdout()
def main():
    a = parse_arguments()
    if not torch:
        results.fail(
            "needs torch and numpy: pip install -c scripts/requirements-more.txt torch numpy"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    # With sums split in bf16 the losses would be ten times as far apart.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(1)

    L, NH, C = SIZES[a.model]
    model = gpt2(torch, L, NH, C, MAX_T, V)
    tokens = random_chain(a.steps * a.B * a.T + 1)
    ours = train_ours(a, model, tokens)

    data = torch.from_numpy(tokens).cuda()
    reference = train_torch(model, data, a, plain_attention, torch.float32)
    if a.precision == "fp32":
        other = train_torch(model, data, a, F.scaled_dot_product_attention, torch.float32)
    else:
        other = train_torch(model, data, a, plain_attention, torch.bfloat16)

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
        append_row(a, found)
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
