#!/usr/bin/env python3
"""Times PyTorch's scaled_dot_product_attention and ./dev/bench_attention in one run, on the same
shapes.

    make benches && python3 dev/bench/peers.py  # exits with 0 if there is no PyTorch or no GPU
    python3 dev/bench/peers.py --dtype bf16 --hs 128 --shapes 4x4096,2x16384 --json

The peers are torch_flash (FlashAttention 2), torch_cudnn, torch_efficient (in fp32: 3xTF32) and
torch_math (T×T in memory). If FlashAttention 3's module flash_attn_interface is installed, fa3 and
its deterministic variant fa3_det are timed, too. The peers' inputs are like those of our kernels:
q, k and v are views of one packed (B, T, 3, NH, HS), the values are random, and the buffers rotate
through twice the L2 cache. One head of each result is first validated against fp64. We time the
bare operator, forward or backward, by GPU events and in the two protocols of dev/common/bench.h;
the sustained one replays CUDA graphs. "ours/peer" is how many times as fast our fastest kernel is
at that shape: above 1, ours wins.
"""

import importlib.util
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
WARM_UPS = 3
RUNS = 15
MAX_REST_MS = 50.0
SUSTAINED_MS = 500
WAIT_CYCLES = 4_000_000  # about 2 ms: more than PyTorch takes to queue a pass
# Forward multiplies S = QKᵀ and PV; backward S, dP, dQ, dK and dV. A product of a head takes
# 2·T·T·HS FLOPs, of which the causal mask leaves half.
PRODUCTS = {"fwd": 2, "bwd": 5}
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


def run_benchmark(name, options, run=results.run_and_print):
    """Starts ./dev/NAME by `run`. Returns what `run` returns, and the rows that were written."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "rows.jsonl")
        try:
            done = run(ROOT / "dev" / name, *results.option_words(options), "--out", out)
        except FileNotFoundError:
            results.fail(f"there is no ./dev/{name}; run make benches")
        rows = [row for _, row in results.json_rows(out)] if out.exists() else []
    return done, rows


def our_rows(a):
    """The rows of ./dev/bench_attention, which exits with 1 if a result of ours is wrong."""
    options = {"--heads": NH, "--hs": a.hs, "--dtype": a.dtype}
    if a.shapes:
        options["--shapes"] = a.shapes
    code, rows = run_benchmark("bench_attention", options)
    if code:
        sys.exit(code)
    return rows


def torch_attention(torch, backend):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def attention(q, k, v):
        with sdpa_kernel(getattr(SDPBackend, BACKENDS[backend])):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def fa3_attention(fa3, deterministic):
    def attention(*qkv):
        q, k, v = (x.transpose(1, 2) for x in qkv)  # (B, T, NH, HS)
        out = fa3.flash_attn_func(q, k, v, causal=True, deterministic=deterministic)
        return out.transpose(1, 2)

    return attention


class Peer:
    """A backend at a shape: several sets of inputs and results, and its two passes."""

    def __init__(self, torch, backend, dtype, B, T, HS, stream):
        self.torch = torch
        self.stream = stream
        self.version = {}
        if backend in FA3:
            fa3 = importlib.import_module("flash_attn_interface")
            # the interface itself has no version in every build
            self.version["fa3"] = getattr(fa3, "__version__", "unknown")
            self.attention = fa3_attention(fa3, deterministic=backend == "fa3_det")
        else:
            self.attention = torch_attention(torch, backend)

        torch_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        set_bytes = 4 * B * T * NH * HS * torch_dtype.itemsize  # q, k, v and dout
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        sets = 1 if backend == "torch_math" else math.ceil(2 * l2_bytes / set_bytes)

        def random(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch_dtype)

        self.qkv = []
        for _ in range(sets):
            packed = random(B, T, 3, NH, HS)
            self.qkv.append([x.transpose(1, 2).requires_grad_() for x in packed.unbind(2)])
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
        """The largest relative L2 error of the last head's out, dq, dk and dv, against fp64."""
        torch = self.torch
        q, k, v = (x[-1, -1].detach().double().requires_grad_() for x in self.qkv[0])
        dout = self.dout[0][-1, -1].double()
        columns = torch.arange(len(q), device=q.device)
        out = []
        for rows in columns.split(1024):  # so that S fits in memory
            s = q[rows] @ k.T / math.sqrt(q.shape[1])
            s = s.masked_fill(rows[:, None] < columns, -math.inf)
            piece = s.softmax(-1) @ v
            piece.backward(dout[rows])
            out.append(piece)
        found = [x[-1, -1].double() for x in (self.out[0], *self.backward(0))]
        exact = (torch.cat(out), q.grad, k.grad, v.grad)
        return results.largest(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact))

    def new_event(self):
        return self.torch.cuda.Event(enable_timing=True)

    def cool_ms(self, run):
        cuda = self.torch.cuda
        cuda.synchronize()
        time.sleep(0.5)
        for i in range(WARM_UPS):
            run(i)
        ms = []
        for i in range(WARM_UPS, WARM_UPS + RUNS):
            cuda.synchronize()
            last = ms[-1] if ms else 0.0
            time.sleep(min(4 * last, MAX_REST_MS) / 1e3)
            start, end = self.new_event(), self.new_event()
            cuda._sleep(WAIT_CYCLES)
            start.record()
            run(i)
            end.record()
            end.synchronize()
            ms.append(start.elapsed_time(end))
        return statistics.median(ms)

    def sustained_ms(self, run, about_ms):
        cuda = self.torch.cuda
        graphs = []
        for i in range(len(self.out)):
            graph = cuda.CUDAGraph()
            with cuda.graph(graph, stream=self.stream):
                run(i)
            graphs.append(graph)

        runs = max(1, math.ceil(SUSTAINED_MS / about_ms))
        start, end = self.new_event(), self.new_event()
        for i in range(2 * runs):  # the first half warms up
            if i == runs:
                start.record()
            graphs[i % len(graphs)].replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs


def peer_rows(torch, backend, dtype, B, T, HS):
    """Two rows, forward and backward. Raises RuntimeError if the backend refuses the shape."""
    math_bytes = 6 * 4 * B * NH * T * T  # some six T×T matrices of fp32 for each head
    if backend == "torch_math" and math_bytes > 0.8 * torch.cuda.mem_get_info()[0]:
        raise RuntimeError(f"needs about {math_bytes / 2**30:.0f} GiB")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        peer = Peer(torch, backend, dtype, B, T, HS, stream)
        error = peer.relative_error()
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"WRONG: relative L2 error {error:.2g} > {TOLERANCE[dtype]:g}")

        rows = []
        for name, run in ("fwd", peer.forward), ("bwd", peer.backward):
            flops = PRODUCTS[name] * B * NH * T * T * HS
            ms = peer.cool_ms(run)
            sustained = peer.sustained_ms(run, ms)
            # For backward. The results of captured passes belonged to the graphs, which are gone.
            peer.forward_all()
            fields = {
                "torch": torch.__version__,
                **peer.version,
                "kernel": backend,
                "pass": name,
                "dtype": dtype,
                "B": B,
                "T": T,
                "NH": NH,
                "HS": HS,
                "causal": True,
                "deterministic": name == "fwd" or backend in ("torch_math", "fa3_det"),
                "ms": ms,
                "tflops": flops / ms * 1e-9,
                "ms_sustained": sustained,
                "tflops_sustained": flops / sustained * 1e-9,
                "relative_error": error,
            }
            gpu = torch.cuda.get_device_name()
            rows.append(results.row("attention", gpu, torch.version.cuda, **fields))
    return rows


def print_rows(rows):
    """Prints one shape's rows, ours and the peers', forward first."""
    for name in PRODUCTS:
        of_pass = [row for row in rows if row["pass"] == name]
        ours = [row for row in of_pass if row["kernel"].startswith("flash_")]
        for row in of_pass:
            line = f"{row['kernel']:17} {row['dtype']}  {name}  {row['B']:4} {row['T']:6}"
            for protocol in ("", "_sustained"):
                ms = row["ms" + protocol]
                ratio = ""
                if ours and row["kernel"] in PEERS:
                    fastest = min(our["ms" + protocol] for our in ours)
                    ratio = f"{ms / fastest:.2f}"
                line += f" | {ms:8.4f} {row['tflops' + protocol]:6.1f} {ratio:>9}"
            print(line + f" | {row['relative_error']:.1e}", flush=True)


@results.check_stdout()
def main():
    arg = results.arguments(__doc__, "attention")
    arg.add_argument(
        "--shapes",
        metavar="BxT,BxT,…",
        default="",
        help="batch sizes and sequence lengths (default: those of bench_attention)",
    )
    arg.add_argument(
        "--hs", type=int, default=64, choices=[64, 128], help="head size (default: %(default)s)"
    )
    arg.add_argument(
        "--dtype", default="all", choices=["fp32", "bf16", "all"], help="default: %(default)s"
    )
    a = arg.parse_args()
    peers = PEERS if importlib.util.find_spec("flash_attn_interface") else BACKENDS
    torch = torch_with_gpu("peers.py")
    torch.backends.cuda.matmul.allow_tf32 = False
    # A backend that refuses a shape warns at length before it raises.
    warnings.simplefilter("ignore")
    torch.manual_seed(1)
    path = None

    def record(rows):
        """Appends rows at once, so that they survive a later run that fails or is interrupted."""
        nonlocal path
        if rows and (a.json or a.out):
            path = results.append(rows, "attention", a.out)

    ours = our_rows(a)
    record(ours)
    print(
        f"\nPyTorch {torch.__version__}, {torch.cuda.get_device_name()}, NH {NH}, HS {a.hs}, causal"
    )
    print(
        f"{'kernel':17} dtype pass    B      T |  cool ms   TF/s ours/peer "
        "| sust. ms   TF/s ours/peer | error"
    )
    shapes = dict.fromkeys((row["dtype"], row["B"], row["T"]) for row in ours)  # in order
    for dtype, B, T in shapes:
        theirs = []
        for backend in peers:
            try:
                theirs += peer_rows(torch, backend, dtype, B, T, a.hs)
            except RuntimeError as e:  # also PyTorch's out of memory
                why = str(e).splitlines()[0][:80]
                print(f"{backend:17} {dtype}       {B:4} {T:6} | skipped: {why}")
            torch.cuda.empty_cache()
        record(theirs)
        same_shape = [row for row in ours if (row["dtype"], row["B"], row["T"]) == (dtype, B, T)]
        print_rows(same_shape + theirs)
    if path:
        print(path)


if __name__ == "__main__":
    main()
