#!/usr/bin/env python3
"""Gives a checkpoint more positions: its position embeddings, repeated; training tells the copies apart.

    python3 scripts/longer_context.py log_gpt2_124M/model_00019073.bin start.bin 16384
"""
import pathlib
import struct

import results

arg = results.arguments(__doc__)
arg.add_argument("source", help="a checkpoint, a model_….bin")
arg.add_argument("target")
arg.add_argument("T", type=int, help="positions that it gets")
a = arg.parse_args()
try:
    data = pathlib.Path(a.source).read_bytes()
except OSError as e:
    results.fail(f"{e}: give a checkpoint, a model_….bin of a run")
magic, version, max_T, V, L, NH, C, Vp = struct.unpack_from("<8i", data.ljust(1024, b"\0"))
size = {3: 4, 5: 2}.get(version, 0)
wpe = 1024 + Vp * C * size  # behind the header and wte
rest = wpe + max_T * C * size
expected = rest + (L * (12 * C * C + 13 * C) + 2 * C) * size
if magic != 20240326 or not size or len(data) != expected:
    results.fail(f"{a.source}: not a whole checkpoint: found magic {magic}, version {version}, {len(data)} "
                 "bytes; give a model_….bin of a run")
if a.T < max_T:
    results.fail(f"T: expected at least the {max_T} positions of {a.source}, found {a.T}")
with results.whole(pathlib.Path(a.target)) as part, open(part, "wb") as f:
    f.write(data[:8] + struct.pack("<i", a.T) + data[12:wpe])
    f.write((data[wpe:rest] * -(-a.T // max_T))[:a.T * C * size] + data[rest:])
