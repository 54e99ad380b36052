#!/usr/bin/env python3
"""What GPUs that share a sequence do at a time: one layer's attention, forward and backward, and what travels meanwhile.

    make train_gpt2cu dev/trace.so && python3 scripts/trace_ring.py --gpus 4 --json   # then scripts/plot_results.py

Trains a GPT-2 for six steps, a sequence over all GPUs, the last step under dev/trace.so, and prints how much of the
travel is behind kernels. GPUs exchange heads where their number divides the model's, 12 of d12. `--model d48 --layer 20`
has 25, so 2 or 4 GPUs are a ring. --keep leaves the whole timelines, trace.*.json for https://ui.perfetto.dev.
"""
import json
import pathlib
import shutil
import tempfile

import results

TRAVEL = " to another GPU"  # ends the name of a copy


def trace(a):
    """The events of each process that used a GPU, by GPU."""
    results.need("train_gpt2cu", "dev/trace.so")
    with tempfile.TemporaryDirectory() as folder:
        _, said = results.run_trainer(
            "--gpus", a.gpus, "--context-parallel", a.gpus, "-e", a.model, "-b", 1, "-t", a.tokens * a.gpus, "--profile", 1, "-v", 0,
            "-s", 0, CUDA_INJECTION64_PATH=str(results.ROOT / "dev" / "trace.so"), TRACE=f"{folder}/trace")
        by_gpu = {}
        for path in pathlib.Path(folder).glob("trace.*.json"):
            if a.keep:
                shutil.copy(path, ".")
            events = [e for e in json.loads(path.read_text())["traceEvents"] if e["cat"] != "range"]
            if events:
                by_gpu[events[0]["args"]["gpu"]] = events
    if len(by_gpu) != a.gpus:
        results.fail(f"traces of {len(by_gpu)} GPUs, not {a.gpus}: {said.strip()}")
    return by_gpu


def attention(events, way, layer):
    """The kernels and copies of a layer's attention, from the first block or journey to the last."""
    inside = [e for e in events if e["args"]["range"].endswith(f"{way} / layer {layer}")]
    its = [e for e in inside if e["name"].startswith(f"{way}_kernel<64, ") or e["name"].endswith(TRAVEL)]
    if all(e["cat"] == "copy" for e in its):
        results.fail(f"no blocks of {way} in layer {layer}")
    start, end = min(e["ts"] for e in its), max(e["ts"] + e["dur"] for e in its)
    return [e for e in inside if e["ts"] + e["dur"] > start - 100 and e["ts"] < end + 100]


def behind(copies, kernels):
    """Microseconds of copies during which a kernel runs."""
    hidden, last = 0, 0
    for k in sorted(kernels, key=lambda k: k["ts"]):
        start, end = max(k["ts"], last), k["ts"] + k["dur"]  # a kernel may begin before the one before it ends
        hidden += sum(max(0, min(c["ts"] + c["dur"], end) - max(c["ts"], start)) for c in copies)
        last = max(last, end)
    return hidden


def main():
    arg = results.arguments(__doc__, "ring_timeline")
    arg.add_argument("--gpus", type=int, default=2)
    arg.add_argument("--model", default="d12", help="with heads of 64 (default: %(default)s)")
    arg.add_argument("--tokens", type=int, default=16384, help="of a GPU")
    arg.add_argument("--layer", type=int, default=6)
    arg.add_argument("--keep", action="store_true", help="leave the timelines in the current folder")
    a = arg.parse_args()
    by_gpu = trace(a)
    name = results.output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "-i", "0") or "GPU"
    rows = []
    for way in ("forward", "backward"):
        inside = {gpu: attention(events, way, a.layer) for gpu, events in sorted(by_gpu.items())}
        first = min(e["ts"] for events in inside.values() for e in events)
        for gpu, events in inside.items():
            kernels = [e for e in events if e["cat"] == "kernel"]
            copies = [e for e in events if e["name"].endswith(TRAVEL)]
            travel, hidden = sum(c["dur"] for c in copies), behind(copies, kernels)
            print(f"GPU {gpu}, {way}: {travel * 1e-3:.2f} ms of travel, "
                  f"{100 * hidden / max(travel, 1e-9):.0f} % of it behind kernels")
            rows.append(results.row(
                "ring_timeline", name, model=a.model, gpus=a.gpus, tokens_per_gpu=a.tokens, rank=gpu, layer=a.layer,
                travel_ms=travel * 1e-3, hidden_ms=hidden * 1e-3, **{"pass": way},
                events=[{"what": e["cat"], "name": e["name"], "start_ms": round((e["ts"] - first) * 1e-3, 4),
                         "ms": round(e["dur"] * 1e-3, 4)} for e in kernels + copies]))
    if a.json or a.out:
        print(results.append(rows, "ring_timeline", a.out))


if __name__ == "__main__":
    main()
