#!/usr/bin/env python3
"""Trains a plain PyTorch GPT-2 and ./train_gpt2cu from the same llm.c-format fp32 checkpoint and token shard, with the same
batches, clipping and AdamW, and compares their losses step by step with PyTorch's in strict fp32. Exit code 1 if some
step's are further apart than allowed, or if fewer than half of the steps were clipped.

fp32: --tol is allowed. A second PyTorch run, whose attention adds in another order (SDPA), shows how far rounding alone
carries. Where training is unstable two correct programs part. At --lr 1e-4, without warm-up, the loss jumps by 1.6 at
step 7. There PyTorch's own runs with bf16 copies are 0.08 to 0.28 from its fp32, and at the default less than 0.007.

bf16: twice as far is allowed as PyTorch's own bf16 is from its fp32. Both keep fp32 masters and compute with bf16 copies of
all weights and with bf16 activations. PyTorch rounds the copies to nearest and we stochastically, whose errors are up
to a whole unit in the last place instead of half of one: hence the 2.

    make train_gpt2cu && python3 scripts/compare_torch.py            # needs PyTorch, numpy and a GPU
    python3 scripts/compare_torch.py --precision bf16
"""
import array
import itertools
import math
import pathlib
import random
import sys
import tempfile

import results

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None  # --help and the arithmetic need neither

SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}  # L, NH, C
MAX_T, V, VP = 1024, 50257, 50304


def gpt2(torch, L, NH, C, max_T, rows=VP):
    """GPT-2 as a module from (tokens, targets) to the mean loss. wte has so many rows and is the classifier too. No
    dropout. A block's parameters are in the order of a checkpoint."""
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = F.scaled_dot_product_attention
            self.ln1, self.qkv, self.attproj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
            self.ln2, self.fc, self.fcproj = nn.LayerNorm(C), nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = (y.view(B, T, NH, C // NH).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(C, dim=2))
            y = self.attention(q, k, v, is_causal=True)
            x = x + self.attproj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(rows, C), nn.Embedding(max_T, C)
            self.blocks, self.lnf = nn.ModuleList(Block() for _ in range(L)), nn.LayerNorm(C)
            for name, p in self.named_parameters():
                if p.dim() == 2:
                    nn.init.normal_(p, std=0.02 / (math.sqrt(2 * L) if "proj" in name else 1))
                elif name.endswith("bias"):
                    nn.init.zeros_(p)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.lnf(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, rows).float(), targets.view(-1))
    return GPT2()


def adamw(torch, params, lr, weight_decay, **more):
    groups = [{"params": [p for p in params if p.dim() == 2], "weight_decay": weight_decay},
              {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **more)


def plain_attention(q, k, v, is_causal):
    T, HS = q.shape[-2:]
    s = (q @ k.transpose(-1, -2)) / math.sqrt(HS)
    return s.masked_fill(torch.ones(T, T, dtype=torch.bool, device=s.device).triu(1), -math.inf).softmax(-1) @ v


def train(model, data, a, attention, dtype):
    """(loss, gradient norm) of every step. The masters are fp32, all else has this type."""
    for block in model.blocks:
        block.attention = attention
    masters = {name: p.detach().clone().cuda().requires_grad_() for name, p in model.named_parameters()}
    adam = adamw(torch, masters.values(), a.lr, a.weight_decay)
    steps = []
    for step in range(a.steps):
        begin, n = step * a.B * a.T, a.B * a.T
        batch = tuple(data[at:at + n].view(a.B, a.T) for at in (begin, begin + 1))
        loss = torch.func.functional_call(model, {name: p.to(dtype) for name, p in masters.items()}, batch)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(masters.values()), a.max_norm)
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


def text_ids(n, seed=1):
    """Random token ids with p ∝ 1/(id + 2.7), about as often as text has them: dev/bench_train.cu says why."""
    up_to = list(itertools.accumulate(1 / (token + 2.7) for token in range(V)))
    return random.Random(seed).choices(range(V), cum_weights=up_to, k=n)


def write(path, header, *arrays):
    """A file of llm.c's: a header of 256 ints, and what follows."""
    with open(path, "wb") as f:
        for values in (array.array("i", header + [0] * (256 - len(header))), *arrays):
            f.write(values.tobytes())


def checkpoint_tensors(model):
    """In the order of the file. A block's tensor comes for all layers at once, and wte is padded."""
    layers = zip(*(block.parameters() for block in model.blocks))
    found = [model.wte.weight, torch.zeros(VP - V, model.wte.weight.shape[1]), model.wpe.weight,
             *itertools.chain(*layers), *model.lnf.parameters()]
    return [p.detach().numpy() for p in found]


def random_chain(n):
    """Tokens as text has them that mostly follow a random first-order chain, so that there is something to learn."""
    rng = np.random.default_rng(2)
    follow, free = np.reshape(text_ids(2000, 2), (1000, 2)), text_ids(n, 3)
    tokens = np.zeros(n, np.int64)
    choice, jump = rng.integers(0, 2, n), rng.random(n)
    for i in range(1, n):
        tokens[i] = free[i] if jump[i] < 0.1 else follow[tokens[i - 1] % 1000, choice[i]]
    return tokens


def main():
    arg = results.arguments(__doc__)
    arg.add_argument("--model", choices=SIZES, default="d12")
    arg.add_argument("--steps", type=int, default=50)
    arg.add_argument("-B", type=int, default=4)
    arg.add_argument("-T", type=int, default=1024)
    arg.add_argument("--lr", type=float, default=3e-5)
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
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # a sum split in bf16 is ten times as far
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
    other = train(model, data, a, *(F.scaled_dot_product_attention, torch.float32) if a.precision == "fp32" else
                  (plain_attention, torch.bfloat16))
    for step in [*range(0, a.steps - 1, 10), a.steps - 1]:
        (loss, norm), (our_loss, our_norm), (again, _) = reference[step], ours[step], other[step]
        print(f"step {step + 1:3d}  torch {loss:.6f} and {again:.6f}  ours {our_loss:.6f}  "
              f"norm torch {norm:.5f}  ours {our_norm:.5f}")
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
