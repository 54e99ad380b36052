#!/usr/bin/env python3
"""Gives a checkpoint more positions: its position embeddings, repeated; training tells the copies apart.

    python3 scripts/longer_context.py log_gpt2_124M/model_00019073.bin start.bin 16384
"""
import argparse
import os
import struct
import sys

arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arg.add_argument("source", help="a checkpoint, a model_….bin")
arg.add_argument("target")
arg.add_argument("T", type=int, help="positions that it gets")
a = arg.parse_args()
try:
    data = open(a.source, "rb").read()
except OSError as e:
    sys.exit(f"longer_context.py: {e}: give a checkpoint, a model_….bin of a run")
header = list(struct.unpack_from("<256i", data))
max_T, C, Vp, size = header[2], header[6], header[7], {3: 4, 5: 2}[header[1]]
wpe = 1024 + Vp * C * size  # behind the header and wte
rest = wpe + max_T * C * size
header[2] = a.T
with open(a.target + ".part", "wb") as f:
    f.write(struct.pack("<256i", *header) + data[1024:wpe])
    f.write((data[wpe:rest] * -(-a.T // max_T))[:a.T * C * size] + data[rest:])
os.rename(a.target + ".part", a.target)
