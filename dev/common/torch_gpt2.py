"""A plain PyTorch GPT-2, and data for it. scripts/compare_torch.py and dev/bench/peers_train.py
compare ours with it."""

import array
import math
import random

# L, NH and C of each model.
SIZES = {
    "d12": (12, 12, 768),
    "d24": (24, 16, 1024),
    "d36": (36, 20, 1280),
    "d48": (48, 25, 1600),
}
MAX_T = 1024
V = 50257
VP = 50304  # V padded to a multiple of 128, as a checkpoint stores wte


def gpt2(torch, L, NH, C, max_T, rows=VP):
    """GPT-2 as a module from (tokens, targets) to the mean loss. wte, which is also the classifier,
    has `rows` rows. There is no dropout. A block's parameters are in the order of a checkpoint."""
    nn = torch.nn
    F = torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = F.scaled_dot_product_attention
            self.ln1 = nn.LayerNorm(C)
            self.qkv = nn.Linear(C, 3 * C)
            self.attproj = nn.Linear(C, C)
            self.ln2 = nn.LayerNorm(C)
            self.fc = nn.Linear(C, 4 * C)
            self.fcproj = nn.Linear(4 * C, C)

        def forward(self, x):
            B, T, _ = x.shape
            qkv = self.qkv(self.ln1(x)).split(C, dim=2)
            q, k, v = (y.view(B, T, NH, C // NH).transpose(1, 2) for y in qkv)
            y = self.attention(q, k, v, is_causal=True)
            x = x + self.attproj(y.transpose(1, 2).reshape(B, T, C))
            return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(rows, C)
            self.wpe = nn.Embedding(max_T, C)
            self.blocks = nn.ModuleList(Block() for _ in range(L))
            self.lnf = nn.LayerNorm(C)
            for name, p in self.named_parameters():
                if "proj.weight" in name:  # its result is added to the residual stream
                    nn.init.normal_(p, std=0.02 / math.sqrt(2 * L))
                elif p.dim() == 2:
                    nn.init.normal_(p, std=0.02)
                elif name.endswith("bias"):
                    nn.init.zeros_(p)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.lnf(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, rows).float(), targets.view(-1))

    return GPT2()


def adamw(torch, params, lr, weight_decay, **more):
    """GPT-2's AdamW: matrices decay, biases and norms do not."""
    groups = [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **more)


def text_ids(n, seed=1):
    """Random token ids with p ∝ 1/(id + 2.7), roughly the frequencies of real text;
    dev/bench/bench_train.cu says why."""
    weights = [1 / (token + 2.7) for token in range(V)]
    return random.Random(seed).choices(range(V), weights, k=n)


def write(path, header, *arrays):
    """Writes a file in one of llm.c's formats: 256 ints, which begin with `header`, and arrays."""
    padding = [0] * (256 - len(header))
    with open(path, "wb") as f:
        for values in (array.array("i", header + padding), *arrays):
            f.write(values.tobytes())
