#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention and ./dev/bench_attention in one run, on the same
shapes.

    make benches && python3 dev/bench/peers.py  # without PyTorch or a GPU: skipped, exit code 0
    python3 dev/bench/peers.py --dtype bf16 --hs 128 --shapes 4x4096,2x16384 --json

The peers are torch_flash (FlashAttention 2), torch_cudnn, torch_efficient (in fp32: 3xTF32) and
torch_math (T×T in memory). If FlashAttention 3's module flash_attn_interface is installed, fa3 and
its deterministic form fa3_det are timed too. They get what our kernels get: q, k and v as views of
one packed (B, T, 3, NH, HS), random values, and buffers that rotate through twice the L2 cache. One
head of each is first validated against fp64. What is timed is the bare operator, forward or
backward, on the GPU alone, in the two protocols of dev/common/bench.h; the sustained one replays
CUDA graphs. "ours/peer" is how many times as fast our fastest kernel is at that shape: above 1,
ours wins.
"""

import importlib.util
import itertools
import math
import pathlib
import statistics
import sys
import tempfile
import time
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
import results  # noqa: E402

BACKENDS = {
    "torch_flash": "FLASH_ATTENTION",
    "torch_cudnn": "CUDNN_ATTENTION",
    "torch_efficient": "EFFICIENT_ATTENTION",
    "torch_math": "MATH",
}
FA3 = ("fa3", "fa3_det")
PEERS = (*BACKENDS, *FA3)
NH = 12
WAIT_CYCLES = 4_000_000  # about 2 ms: more than PyTorch takes to queue a pass
WARM_UPS, RUNS, MAX_REST = 3, 15, 50.0  # ms
TOLERANCE = {"bf16": 1e-2, "fp32": 1e-5}


def torch_with_gpu(script):
    """PyTorch, for a script that measures it on a GPU. Without either, the script says so and exits
    with 0."""
    try:
        import torch

        if torch.cuda.is_available():
            return torch
        missing = "a GPU that PyTorch can use"
    except ImportError:
        missing = "PyTorch"
    print(f"skipped: {script} needs {missing}")
    sys.exit()


def rows_of(program, *options, run=results.run_and_print):
    """What `run` says of a benchmark with these options, and the rows that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "rows.jsonl")
        try:
            done = run(program, *map(str, options), "--out", out)
        except FileNotFoundError:
            results.fail(f"there is no ./dev/{program.name}: make benches")
        return done, [row for _, row in results.json_rows(out)] if out.exists() else []


def our_rows(a):
    """The rows that ./dev/bench_attention writes. It exits with 1 if a result of ours is wrong."""
    code, rows = rows_of(
        ROOT / "dev" / "bench_attention",
        "--heads",
        NH,
        "--hs",
        a.hs,
        "--dtype",
        a.dtype,
        *["--shapes", a.shapes] * bool(a.shapes),
    )
    if code:
        sys.exit(code)
    return rows


class Peer:
    """A backend at a shape: `sets` copies of inputs and results, and its two passes."""

    def __init__(self, torch, backend, dtype, B, T, HS, stream):
        self.torch, self.stream = torch, stream
        if backend in FA3:
            fa3 = importlib.import_module("flash_attn_interface")
            self.version = {"fa3": fa3.__version__}
            self.attention = lambda *qkv: fa3.flash_attn_func(
                *(x.transpose(1, 2) for x in qkv), causal=True, deterministic=backend == "fa3_det"
            ).transpose(1, 2)
        else:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            self.version = {}

            def attention(*qkv):
                with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
                    return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

            self.attention = attention
        X = torch.bfloat16 if dtype == "bf16" else torch.float32
        touched = 4 * B * T * NH * HS * X.itemsize
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        sets = 1 if backend == "torch_math" else math.ceil(2 * l2_bytes / touched)

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=X)

        self.qkv = [
            [x.transpose(1, 2).requires_grad_() for x in random(B, T, 3, NH, HS).unbind(2)]
            for _ in range(sets)
        ]
        self.dout = [random(B, T, NH, HS).transpose(1, 2) for _ in range(sets)]
        self.out = [None] * sets
        self.forward_all()

    def forward_all(self):
        for i in range(len(self.out)):
            self.forward(i)

    def forward(self, i):
        i %= len(self.out)
        self.out[i] = self.attention(*self.qkv[i])

    def backward(self, i):
        i %= len(self.out)
        return self.torch.autograd.grad(self.out[i], self.qkv[i], self.dout[i], retain_graph=True)

    def relative_error(self):
        """The largest relative L2 error among the last head's out, dq, dk and dv, against fp64 in
        blocks of queries."""
        torch = self.torch
        q, k, v = (x[-1, -1].detach().double().requires_grad_() for x in self.qkv[0])
        dout, places = self.dout[0][-1, -1].double(), torch.arange(len(q), device=q.device)
        out = []
        for rows in places.split(1024):
            s = (q[rows] @ k.T / math.sqrt(q.shape[1])).masked_fill(
                rows[:, None] < places, -math.inf
            )
            out.append(s.softmax(-1) @ v)
            out[-1].backward(dout[rows])
        got = [x[-1, -1].double() for x in (self.out[0], *self.backward(0))]
        wanted = (torch.cat(out), q.grad, k.grad, v.grad)
        return results.largest(((a - b).norm() / b.norm()).item() for a, b in zip(got, wanted))

    def cool_ms(self, run):
        torch, i = self.torch, itertools.count()
        torch.cuda.synchronize()
        time.sleep(0.5)
        for _ in range(WARM_UPS):
            run(next(i))
        ms = []
        for _ in range(RUNS):
            torch.cuda.synchronize()
            time.sleep(min(4 * min(ms, default=0.0), MAX_REST) / 1e3)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(WAIT_CYCLES)
            start.record()
            run(next(i))
            end.record()
            end.synchronize()
            ms.append(start.elapsed_time(end))
        return statistics.median(ms)

    def sustained_ms(self, run, about_ms):
        torch, graphs = self.torch, []
        for i in range(len(self.out)):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], stream=self.stream):
                run(i)
        runs = max(1, math.ceil(500 / about_ms))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(2 * runs):
            if i == runs:
                start.record()
            graphs[i % len(graphs)].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs


def peer_rows(torch, backend, dtype, B, T, HS):
    """Two rows, forward and backward. Raises RuntimeError if the backend refuses the shape."""
    bytes_of_math = 6 * 4 * B * NH * T * T
    if backend == "torch_math" and bytes_of_math > 0.8 * torch.cuda.mem_get_info()[0]:
        raise RuntimeError(f"needs some {bytes_of_math / 2**30:.0f} GiB")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        peer = Peer(torch, backend, dtype, B, T, HS, stream)
        error = peer.relative_error()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"WRONG: relative L2 error {error:.2g} > {TOLERANCE[dtype]:g}")
        rows = []
        for name, run, products in (("fwd", peer.forward, 2), ("bwd", peer.backward, 5)):
            flops = products * B * NH * T * T * HS
            ms = peer.cool_ms(run)
            sustained = peer.sustained_ms(run, ms)
            peer.forward_all()  # the results of a pass that was captured belong to its graphs
            rows.append(
                results.row(
                    "attention",
                    torch.cuda.get_device_name(),
                    torch.version.cuda,
                    torch=torch.__version__,
                    **peer.version,
                    kernel=backend,
                    **{"pass": name},
                    dtype=dtype,
                    B=B,
                    T=T,
                    NH=NH,
                    HS=HS,
                    causal=True,
                    deterministic=name == "fwd" or backend in ("torch_math", "fa3_det"),
                    ms=ms,
                    tflops=flops / ms * 1e-9,
                    ms_sustained=sustained,
                    tflops_sustained=flops / sustained * 1e-9,
                    relative_error=error,
                )
            )
        return rows


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "attention")
    arg.add_argument("--shapes", default="", help="BxT,BxT,… (default: bench_attention's)")
    arg.add_argument("--hs", type=int, default=64, choices=[64, 128], help="head size HS")
    arg.add_argument("--dtype", default="all", choices=["fp32", "bf16", "all"])
    a = arg.parse_args()
    peers = PEERS if importlib.util.find_spec("flash_attn_interface") else BACKENDS
    torch = torch_with_gpu("peers.py")
    torch.backends.cuda.matmul.allow_tf32 = False
    # A backend that refuses a shape warns at length, and then raises.
    warnings.simplefilter("ignore")
    torch.manual_seed(1)

    def record(found):
        """Appends at once, so that rows survive a later run that fails or is interrupted."""
        return results.append(found, "attention", a.out) if (a.json or a.out) and found else None

    rows = our_rows(a)
    path = record(rows)
    shapes = list(dict.fromkeys((r["dtype"], r["B"], r["T"]) for r in rows))
    print(
        f"\nPyTorch {torch.__version__}, {torch.cuda.get_device_name()}, NH {NH}, HS {a.hs}, causal"
    )
    print(
        f"{'kernel':17} dtype pass    B      T |  cool ms   TF/s ours/peer "
        "| sust. ms   TF/s ours/peer | error"
    )
    for dtype, B, T in shapes:
        found = [r for r in rows if (r["dtype"], r["B"], r["T"]) == (dtype, B, T)]
        for backend in peers:
            try:
                found += peer_rows(torch, backend, dtype, B, T, a.hs)
            except RuntimeError as e:  # also PyTorch's out of memory
                why = str(e).splitlines()[0][:80]
                print(f"{backend:17} {dtype}       {B:4} {T:6} | skipped: {why}")
            torch.cuda.empty_cache()
        path = record([r for r in found if r["kernel"] in PEERS]) or path
        for pas, r in itertools.product(("fwd", "bwd"), found):
            if r["pass"] != pas:
                continue
            line = f"{r['kernel']:17} {dtype}  {pas}  {B:4} {T:6}"
            for field in ("", "_sustained"):
                ms, rate = r["ms" + field], r["tflops" + field]
                ours = [
                    o["ms" + field]
                    for o in found
                    if o["pass"] == pas and o["kernel"].startswith("flash_")
                ]
                ratio = f"{ms / min(ours):.2f}" if ours and r["kernel"] in PEERS else ""
                line += f" | {ms:8.4f} {rate:6.1f} {ratio:>9}"
            print(line + f" | {r['relative_error']:.1e}", flush=True)
    if path:
        print(path)


if __name__ == "__main__":
    main()
