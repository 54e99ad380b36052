#!/usr/bin/env python3
"""The tutorial's exercises: small changes of a kernel, what to predict, and their answers.

This makes each change in a copy of the sources, builds it, and runs dev/bench_attention before and after it. It needs
a GPU, and Hopper's for the last ones."""
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

import results
from results import ROOT

# The fields of an exercise:
#   its name, a part of the question, which rows keep     the file to change, and what becomes what
#   the file that the tutorial quotes where it asks       the question
#   kernel, and "B x T"                                   what explains the measured answer
EXERCISES = [
    ("kShortRowBytes", "naive.cu", "naive", "4x4096", "attention/naive.cu", {"kShortRowBytes = 2048": "kShortRowBytes = 1 << 20"},
     "Give every row of S to a warp: `kShortRowBytes = 1 << 20`. What does T = 4096 lose?",
     "Nothing forward. Backward reads two rows twice, and so many are in flight that they leave the cache between."),
    ("kOwn + 4", "flash_simple.cu", "flash_simple", "4x4096", "attention/flash_simple.cu", {"kOwn + 4": "kOwn"},
     "Take the padding away: write `kOwn` for `kOwn + 4` in all three places. Which reads collide then, and do they count?",
     "A warp's reads of its own rows do, in 32 passes and not 4: rows of 256 bytes begin in one bank. A passing row is one address."),
    ("kPassing = 8", "flash_simple.cu", "flash_simple", "4x4096", "attention/flash_simple.cu", {"kPassing = 16": "kPassing = 8"},
     "Halve the tile that passes by: `kPassing = 8`. Twice the barriers: how much slower is forward?",
     "Each tile reads the thread's own row again, for half as many keys, and loads wait at twice as many barriers."),
    ("threadIdx.x >> 3 & 3", "flash_fp32.cu", "flash_fp32", "4x4096", "attention/flash_fp32.cu",
     {"(threadIdx.x & 1) | (threadIdx.x >> 3 & 2)": "threadIdx.x >> 3 & 3", "threadIdx.x >> 1 & 7": "threadIdx.x & 7",
      "int bit = 2; bit <= 8": "int bit = 1; bit <= 4"},
     "Number the lane grid plainly: row `threadIdx.x >> 3 & 3`, column `threadIdx.x & 7`, and bits 1 to 4 in row_max and "
     "row_sum. How many passes does a 16-byte load take now?",
     "Four, not two, where lanes share a column. Forward hides most of them behind FMAs. Backward has smaller sub-tiles, so more loads an FMA."),
    ("bf16[Bc][HS]", "flash_mma.cu", "flash_mma", "4x4096", "attention/flash_mma.cu", {"bf16[Bc][HS + 8]": "bf16[Bc][HS]"},
     "Take the padding away: `bf16[Bc][HS]`. How many passes does ldmatrix take, and what share of the time was it?",
     "Eight, not one, because rows of 128 bytes repeat the banks: 7·512 clk more a tile. So it was a third before."),
    ("softmax.exponentials", "flash_bf16.cu", "flash_bf16", "4x4096", "attention/flash_bf16.cu",
     {"softmax.exponentials(p.scale_log2, s, kk);":
      "if (kk == 0) for (int k = 0; k < Bc / 16; k++) softmax.exponentials(p.scale_log2, s, k);"},
     "Take all exponentials of a tile before its first product: `if (kk == 0) for (int k = 0; k < Bc / 16; k++) "
     "softmax.exponentials(p.scale_log2, s, k);` in place of the first line. What is lost?",
     "Little. Two blocks of four warps share the SM, and while one takes exponentials another multiplies."),
    ("Bc = 64", "flash_wgmma.cu", "flash_wgmma", "4x4096", "attention/flash_wgmma.cu", {"Bc = 128;": "Bc = 64;"},
     "Halve the tile of keys: `Bc = 64`. More blocks share an SM, and each waits twice as often. What wins?",
     "The blocks do, barely: without roles only other blocks fill a wait."),
    ("Stages = 2", "flash_bf16_sm90.cu", "flash_bf16_sm90", "4x4096", "attention/flash_bf16_sm90.cu",
     {"Stages = HS == 64 ? 4 : 2": "Stages = 2"},
     "Give K and V two stages instead of four: `Stages = 2`. Does the producer still keep ahead?",
     "Nearly. A stage is free once the slowest warpgroup has left it, and then a copy has one tile's time to arrive."),
    ("returns false", "flash_bf16_sm90_backward.cu", "flash_bf16_sm90", "4x4096", "attention/sm90_backward_work.cuh",
     {"return masked && (group == 1 ? bh % NH % period > 0 : bh >= group);": "return false;"},
     "Let all heads walk back: `walks_forward` returns false. What do the turns cost?",
     "Key tiles that begin together at the last query wait for each other's sums."),
    ("let all of them walk forward", "flash_bf16_sm90_backward.cu", "flash_bf16_sm90", "4x4096", "attention/sm90_backward_work.cuh",
     {"return masked && (group == 1 ? bh % NH % period > 0 : bh >= group);": "return masked;"},
     "Then let all of them walk forward: it returns `masked`. What does the end of the kernel cost?",
     "The longest items begin last, and most SMs wait for them."),
    ("mma(c, n, hi[kk], b)", "fp16_pairs.cuh", "flash_fp16x3", "4x4096", "attention/fp16_pairs.cuh",
     {"mma(c, n, hi[kk], b);": ""},
     "Leave out one of the three products, hi · lo: delete `mma(c, n, hi[kk], b);` above. How large is the error of out, "
     "if fp16 has 11 bits?",
     "About 2⁻¹², as if that operand were a plain fp16. The bench calls it wrong and times nothing."),
]


def build(copy, exercise):
    """The bench with an exercise done, in a copy of the sources and of what is built."""
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "results"))
    path, edits = copy / exercise[4], exercise[5]
    text = path.read_text()
    for old, new in edits.items():
        if old not in text:
            results.fail(f"{exercise[4]}: no {old!r}")
        text = text.replace(old, new)
    path.write_text(text)
    done = subprocess.run(["make", "dev/bench_attention"], cwd=copy, capture_output=True, text=True)
    if done.returncode:
        results.fail(f"{exercise[2]}: {done.stderr[-1000:]}")


def figures(folder, kernel, shape):
    """{"fwd": TFLOP/s, "bwd": …, "error": …} of what the bench in this folder prints, and the GPU's name."""
    command = ["./dev/bench_attention", "--quick", "--kernel", kernel, "--shapes", shape]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    rows = re.findall(r"^\S+ +\S+ +(fwd|bwd) .*?\| +\S+ +(\S+) .*\| (\S+)$", text, flags=re.M)
    wrong = re.search(r"WRONG: relative L2 error (\S+)", text)
    if not rows and not wrong:
        results.fail(f"{' '.join(command)}: no figures in {text!r}")
    error = float(wrong[1] if wrong else rows[-1][2])
    return {**{name: float(rate) for name, rate, _ in rows}, "error": error}, text.split(",")[0].strip()


def main():
    arg = results.arguments(__doc__, "exercises")
    arg.add_argument("--kernel", default="", help="only those of this kernel")
    a = arg.parse_args()
    todo = [exercise for exercise in EXERCISES if a.kernel in exercise[2]]
    results.need("dev/bench_attention")
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count() // 2) as pool:
        copies = [pathlib.Path(folder) / str(number) for number in range(len(todo))]
        list(pool.map(build, copies, todo))
        rows = []
        for copy, (name, _, kernel, shape, _, _, asks, _) in zip(copies, todo):
            (before, gpu), (after, _) = figures(ROOT, kernel, shape), figures(copy, kernel, shape)
            B, T = map(int, shape.split("x"))
            rows.append(results.row("exercise", gpu, kernel=kernel, B=B, T=T, what=name, before=before, after=after))
            print(f"{kernel} {shape}: {before} becomes {after}. {asks}")
    if a.json or a.out:
        print(results.append(rows, "exercises", a.out))


if __name__ == "__main__":
    main()
