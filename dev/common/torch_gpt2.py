"""A plain PyTorch GPT-2 and data for it, with which scripts/compare_torch.py and
dev/bench/peers_train.py compare ours."""

import array
import math
import random

# L, NH, C
SIZES = {
    "d12": (12, 12, 768),
    "d24": (24, 16, 1024),
    "d36": (36, 20, 1280),
    "d48": (48, 25, 1600),
}
MAX_T, V, VP = 1024, 50257, 50304


def gpt2(torch, L, NH, C, max_T, rows=VP):
    """GPT-2 as a module from (tokens, targets) to the mean loss. wte has `rows` rows and is the
    classifier too. There is no dropout. A block's parameters are in the order of a checkpoint."""
    nn, F = torch.nn, torch.nn.functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = F.scaled_dot_product_attention
            self.ln1, self.qkv, self.attproj = nn.LayerNorm(C), nn.Linear(C, 3 * C), nn.Linear(C, C)
            self.ln2, self.fc, self.fcproj = (
                nn.LayerNorm(C),
                nn.Linear(C, 4 * C),
                nn.Linear(4 * C, C),
            )

        def forward(self, x):
            B, T, _ = x.shape
            q, k, v = (
                y.view(B, T, NH, C // NH).transpose(1, 2)
                for y in self.qkv(self.ln1(x)).split(C, dim=2)
            )
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
            x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            logits = F.linear(self.lnf(x), self.wte.weight)
            return F.cross_entropy(logits.view(-1, rows).float(), targets.view(-1))

    return GPT2()


def adamw(torch, params, lr, weight_decay, **more):
    groups = [
        {"params": [p for p in params if p.dim() == 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, **more)


def text_ids(n, seed=1):
    """Random token ids with p ∝ 1/(id + 2.7), roughly the frequencies of real text;
    dev/bench/bench_train.cu says why."""
    return random.Random(seed).choices(range(V), [1 / (token + 2.7) for token in range(V)], k=n)


def write(path, header, *arrays):
    """A file of llm.c's: a header of 256 ints, and what follows."""
    with open(path, "wb") as f:
        for values in (array.array("i", header + [0] * (256 - len(header))), *arrays):
            f.write(values.tobytes())
