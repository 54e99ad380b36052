#!/usr/bin/env python3
"""Tests of the scripts and of the Makefile's probe: plots, TensorBoard files, README's tables, training recipes.

    make train_gpt2cu && python3 dev/test_tools.py
"""
import calendar
import contextlib
import json
import math
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import types

from harness import Skip, main, need, write_launcher

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
RECIPES = sorted(SCRIPTS.glob("run_*.sh"))
sys.path += [str(SCRIPTS), str(ROOT / "dev")]


@contextlib.contextmanager
def scratch():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def run(*command, cwd=ROOT, **variables):
    # Under `make test` the outer make's options would reach an inner one.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "B", "GPUS", "COMMIT", "TREE", "RUN")}
    return subprocess.run([str(c) for c in command], cwd=cwd, env={**env, **variables}, capture_output=True, text=True)


def script(name, *arguments, **variables):
    return run(sys.executable, SCRIPTS / name, *arguments, **variables)


def built(program="train_gpt2cu"):
    if not (ROOT / program).exists():
        raise Skip(f"there is no ./{program}: make {program}")
    return ROOT / program


def executable(path, text):
    path.write_text(text)
    path.chmod(0o755)


def write_log(folder, steps=100, floor=1.1, mfu=40.0):
    """A log such as ./train_gpt2cu -o writes, of a loss that falls from 11 to 2."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "run", "device": "NVIDIA H200", "tokens_per_step": 8192, "steps": steps, "floor_nats": floor,
             "B": 8, "T": 1024, "precision": "bf16"}]
    for step in range(1, steps + 1):
        rows.append({"kind": "train", "step": step, "loss_nats": 2 + 9 * math.exp(-step / 10), "grad_norm": 1.0,
                     "lr": 3e-4, "step_ms": 20.0, "tokens_per_s": 4e5, "mfu_percent": mfu})
        if step % 50 == 0:
            rows.append({"kind": "val", "step": step, "loss_nats": 2 + 25 / step, "floor_nats": floor})
            rows.append({"kind": "sample", "step": step, "text": "Once\nupon a time"})
            rows.append({"kind": "hellaswag", "step": step, "correct": 30, "examples": 40})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def check_fails(result, *parts):
    assert result.returncode == 1, result
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr, (part, result.stderr)


# ----------------------------------------------------------------------------------------------------------------------
# Logs, plots, TensorBoard

def test_smoothing():
    from plot import smooth
    assert smooth([1, 2, 3, 4], 1) == [1, 2, 3, 4]
    assert smooth([1, 5, 3, 4, 5], 2) == [1, 3, 4, 4, 4.5]
    assert smooth([math.nan, 2, math.nan, 4], 2)[1:] == [2, 3, 4]
    assert math.isnan(smooth([math.nan], 5)[0])


class Drawn:
    """Stands for anything of matplotlib, which need not be installed: each attribute is one too, and calls are kept."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __getattr__(self, name):
        setattr(self, name, Drawn(f"{self.name}.{name}" if self.name else name, self.calls))
        return getattr(self, name)

    def __call__(self, *args, **options):
        self.calls.append((self.name, args, options))
        what = self.name.split(".")[-1]
        if what == "subplots":
            rows, columns = args or (1, 1)
            grid = [[Drawn(f"{r}{c}", self.calls) for c in range(columns)] for r in range(rows)]
            flat = [axes for row in grid for axes in row]
            return Drawn("", self.calls), grid if not options.get("squeeze", True) else flat if flat[1:] else flat[0]
        if what == "subplot_mosaic":
            return {name: Drawn(name, self.calls) for row in args[0] for name in row}
        if what == "savefig":
            args[0].write_text(f"drawn: {self.calls}")
        if what == "get_legend_handles_labels":
            labels = [o["label"] for o in self.options(self.name.replace(what, "plot")) if "label" in o]
            return [types.SimpleNamespace(get_label=lambda label=label: label) for label in labels], labels
        return (0.5, 2.0) if what == "get_ylim" else (args, options) if what in ("Line2D", "Rectangle") else self

    def __getitem__(self, i):
        return getattr(self, str(i))

    def of(self, name):
        """The positional arguments of each call of that name, iterators as lists."""
        return [[list(arg) if isinstance(arg, (zip, range, tuple)) else arg for arg in args] for what, args, _ in self.calls
                if what == name]

    def options(self, name):
        return [options for what, _, options in self.calls if what == name]


@contextlib.contextmanager
def drawn():
    """pyplot, as the scripts import it inside."""
    plt = Drawn("", [])
    names = ("matplotlib", "matplotlib.pyplot", "matplotlib.lines", "matplotlib.ticker")
    old = {name: sys.modules.get(name) for name in names}
    stand_in = types.SimpleNamespace(use=lambda _: None, pyplot=plt)
    try:
        sys.modules.update({"matplotlib": stand_in, **{name: plt for name in names[1:]}})
        yield plt
    finally:
        for name, module in old.items():
            sys.modules.pop(name)
            if module:
                sys.modules[name] = module


def test_plot_of_a_run():
    from plot import plot
    from results import read_log
    with scratch() as tmp, drawn() as plt:
        log = read_log(write_log(tmp / "run", steps=300))
        log["run"][0]["floor_nats"] = None  # validations say it too
        for i, row in enumerate(log["train"]):
            row.update(grad_norm=1.0 + i, tokens_per_s=2e5 + i, mfu_percent=40.0 + i, lr=i * 1e-5)
        plot([log, read_log(write_log(tmp / "other", steps=40, floor=None))], ["one", "two"], tmp / "out.png", 0, "Two")
        assert (tmp / "out.png").read_text().startswith("drawn") and plt.options("figure.savefig")[0]["format"] == "png"
        steps, losses = plt.of("loss.plot")[0]
        assert steps == list(range(1, 301)) and losses[9] == 2 + 9 * math.exp(-1)
        smoothed = plt.of("loss.plot")[1][1]  # three steps: a hundredth
        assert abs(smoothed[9] - sum(losses[8:11]) / 3) < 1e-12 and smoothed[0] == losses[0]
        assert plt.of("loss.plot")[2] == [list(range(50, 301, 50)), [2 + 25 / step for step in range(50, 301, 50)]]
        first = {"norm": 1.0, "speed": 2e5, "mfu": 40.0}
        for name, value in first.items():
            assert plt.of(f"{name}.plot")[1][1][1] == value + 1, name  # of steps 1 to 3
            assert name == "speed" or abs(plt.of(f"{name}.set_ylim")[0][1] - 1.1 * (value + 298.5)) < 1e-6, name
        assert plt.of("lr.plot")[0][1] == [i * 1e-5 for i in range(300)]
        assert plt.of("loss.axhline") == [[1.1]] and plt.of("loss.annotate")[0][0] == "floor 1.1000"
        low, high = plt.of("loss.set_ylim")[0]
        assert high < 10 and abs(low - (1.1 - 0.1 * (high - 1.1) / 1.1)) < 1e-9  # the first twentieth may be above
        labels = [options["label"] for options in plt.options("Line2D")]
        assert labels == ["one, validation 2.0833", "two", "training, mean of 3 steps", "training, each step", "validation"]
        titles = {name: plt.of(f"{name}.set_title")[0][0] for name in ("loss", "norm", "lr", "speed", "mfu")}
        assert list(titles.values()) == ["Loss", "Gradient norm", "Learning rate", "Tokens per second", "MFU, %"]
        assert plt.of("figure.suptitle")[0] == ["Two"] and not plt.of("mfu.text")
        plt.calls.clear()
        plot([read_log(tmp / "other")], ["two"], tmp / "out.png", 0, "")
        assert len(plt.of("loss.plot")) == 1 and not plt.of("loss.axhline")  # too short to be smoothed


def test_command_of_the_plot():
    """By the stand-in: where the plot goes, what its options do, and whose names stand in it."""
    with scratch() as tmp:
        package = tmp / "stand_in" / "matplotlib"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("def use(_):\n    pass\n")
        (package / "pyplot.py").write_text("import sys\nfrom test_tools import Drawn\nsys.modules[__name__] = Drawn('', [])\n")
        for name in ("lines", "ticker"):
            (package / f"{name}.py").write_text("import sys\nimport matplotlib.pyplot as plt\nsys.modules[__name__] = plt\n")
        path = {"PYTHONPATH": f"{package.parent}:{ROOT / 'dev'}"}
        a, b = write_log(tmp / "a"), write_log(tmp / "b")
        result = script("plot.py", b, a / "log.jsonl", "--smooth", "7", "--title", "Both", **path)
        assert result.returncode == 0 and result.stdout == f"{b / 'plot.png'}\n" and not (a / "plot.png").exists(), result
        drawn = (b / "plot.png").read_text()
        for text in "training, mean of 7 steps", "'Both'", "'b, validation 2.2500'", "'a, validation 2.2500'":
            assert text in drawn, (text, drawn)
        check_fails(script("plot.py", a, "-o", tmp / "out.gif", **path), "out.gif", ".png")
        check_fails(script("plot.py", a, "-o", tmp / "no/such/out.png", **path), "No such file")


def test_plot_formats_and_several_runs():
    need("matplotlib")
    magic = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    with scratch() as tmp:
        a, b = write_log(tmp / "a"), write_log(tmp / "b", steps=250, floor=None, mfu=None)
        for suffix, start in magic.items():
            result = script("plot.py", a, b / "log.jsonl", "-o", tmp / f"out.{suffix}", "--title", "two runs")
            assert result.returncode == 0, result.stderr
            assert (tmp / f"out.{suffix}").read_bytes().startswith(start)
        result = script("plot.py", b)
        assert result.returncode == 0 and (b / "plot.png").stat().st_size > 10000, result.stderr
        check_fails(script("plot.py", a, "-o", tmp / "out.gif"), "out.gif", ".png")
        check_fails(script("plot.py", a, "-o", tmp / "no/such/out.png"), "No such file")


def test_full_disk_leaves_what_was_there():
    """A limit on the size of files stands for the disk."""
    need("matplotlib", "tensorboard.backend")
    with scratch() as tmp:
        log = write_log(tmp / "run", steps=400)
        for name, *to in (("plot.py", "-o", tmp / "out.png"), ("plot.py", "-o", tmp / "out.svg"), ("tensorboard.py",)):
            command = [sys.executable, SCRIPTS / name, log, *to]
            made = run(*command)
            assert made.returncode == 0, made.stderr
            target = pathlib.Path(made.stdout.strip())
            before = {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()}
            check_fails(run("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command), str(target), "cannot write: File too large")
            assert {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()} == before


def test_log_shorter_than_a_smoothing_window():
    need("matplotlib")
    with scratch() as tmp:
        for steps in (1, 2):
            result = script("plot.py", write_log(tmp / str(steps), steps), "--smooth", "50")
            assert result.returncode == 0, result.stderr


def test_malformed_logs_name_file_and_line():
    good = ('{"kind": "train", "step": 1, "loss_nats": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 9, '
            '"mfu_percent": null}\n')
    from results import read_log
    with scratch() as tmp:
        path = tmp / "log.jsonl"
        for bad, what in (("{oops\n", "expected a JSON object"), ("[1]\n", "expected a JSON object"),
                          ('{"step": 2}\n', '"kind"'), ('{"kind": "train", "step": 2}\n', '"loss_nats"'),
                          (good.replace("2.0", '"2.0"'), '"loss_nats" is \'2.0\'')):
            path.write_text(good + bad + good)
            try:
                read_log(tmp)
                raise AssertionError(f"accepted {bad}")
            except SystemExit as e:
                assert f"{path}:2: " in str(e) and what in str(e), e
        path.write_text('{"kind": "val", "step": 0, "loss_nats": 2.0}\n')  # alone it is enough
        assert read_log(tmp)["val"][0]["loss_nats"] == 2
        path.write_text(good + '{"kind": "tra')  # a row that is being written
        rows = read_log(tmp)["train"]
        assert len(rows) == 1 and math.isnan(rows[0]["mfu_percent"])


def test_logs_without_steps():
    need("matplotlib", "tensorboard.backend")
    with scratch() as tmp:
        path = tmp / "log.jsonl"
        path.touch()
        for name in ("plot.py", "tensorboard.py"):
            check_fails(script(name, tmp), str(path), "no steps yet")
            check_fails(script(name, tmp / "nowhere"), "nowhere", "cannot be read")


def test_benchmarks_say_what_is_wrong():
    for name in ("bench_attention", "bench_train", "bench_layers"):
        program = built(f"dev/{name}")
        result = run(program, "--help")
        assert result.returncode == 0 and f"usage: {name}" in result.stdout.lower() and "--json" in result.stdout, result
        result = run(program, "--jsom")
        assert result.returncode == 2 and "--json" in result.stderr, result
        result = run(program, CUDA_VISIBLE_DEVICES="")
        assert result.returncode == 1 and "GPU" in result.stderr, result


def test_scripts_without_the_trainer():
    with scratch() as tmp:
        shutil.copytree(SCRIPTS, tmp / "scripts")
        for name in ("default_run.py", "compare_losses.py", "scaling.py"):
            check_fails(run(sys.executable, tmp / "scripts" / name), f"{name}: there is no ./train_gpt2cu: make")


def test_missing_packages_are_named():
    with scratch() as tmp:
        log = write_log(tmp / "run")
        for package, name, *arguments in (("matplotlib", "plot.py", log), ("tensorboard", "tensorboard.py", log),
                                          ("matplotlib", "plot_results.py")):
            (tmp / f"{package}.py").write_text(f'raise ImportError("no {package}")')
            check_fails(script(name, *arguments, PYTHONPATH=str(tmp)), "needs", f"no {package}", "requirements.txt")


def test_peers_without_pytorch_or_gpu_are_skipped():
    with scratch() as tmp:
        for fake, what in (('raise ImportError("no torch")', "no torch"),
                           ("class cuda:\n    is_available = lambda: False", "needs a GPU")):
            (tmp / "torch.py").write_text(fake)
            for name in ("peers.py", "peers_train.py"):
                result = run(sys.executable, ROOT / "dev" / name, PYTHONPATH=str(tmp))
                assert result.returncode == 0 and re.match(f"skipped: {name} .*{what}", result.stdout), result
    for name, option, bad, what in (("peers.py", "--peers", "nonsense", "torch_cudnn"),
                                    ("peers_train.py", "--model", "d13", "d48"),
                                    ("peers_train.py", "--shapes", "4x1024,4by4", "16x1024"),
                                    ("peers_train.py", "--shapes", "0x1024", "16x1024")):
        result = run(sys.executable, ROOT / "dev" / name, option, bad)
        assert result.returncode == 2 and bad in result.stderr and what in result.stderr, result


def test_peers_of_training_side_by_side():
    """A pretended ./dev/bench_train and pretended figures of the peer: two backends, and memory that ends."""
    import peers_train
    ours = {"kernel": "train_gpt2cu", "gpu": "GPU A", "attention": "flash", "B": 4, "T": 1024, "ms": 8.0,
            "tok_s": 5e5, "mfu": 40.0, "mem_gib": 3.5}
    peer = {"gpu": "GPU A", "ms": 10.0, "tok_s": 4e5, "mem_gib": 5.0, "loss": 9.0}
    figures = {("torch_flash", 4): peer, ("torch_cudnn", 4): {**peer, "ms": 16.0, "tok_s": 2.5e5},
               ("torch_flash", 64): "out of memory", ("torch_cudnn", 64): {**peer, "ms": 160.0}}
    with scratch() as tmp:
        (tmp / "dev").mkdir()
        executable(tmp / "dev" / "bench_train", f"""#!/bin/sh
            case "$4" in
                4x1024) echo '{json.dumps(ours)}' >"$8";;
                *) echo "the model needs 200 GiB" >&2; exit 1;;
            esac""")
        printed, out = tmp / "printed", tmp / "rows.jsonl"
        replaced = {"ROOT": tmp, "in_a_fresh_process": lambda _, size, backend, B, T: figures[backend, B]}
        kept = {name: getattr(peers_train, name) for name in replaced}
        arguments, torch = sys.argv, sys.modules.get("torch")
        try:
            vars(peers_train).update(replaced)
            sys.argv = ["peers_train.py", "--shapes", "4x1024,64x1024", "--out", str(out)]
            sys.modules["torch"] = types.SimpleNamespace(
                cuda=types.SimpleNamespace(is_available=lambda: True), version=types.SimpleNamespace(cuda="13.0"),
                __version__="2.15")
            with open(printed, "w") as f, contextlib.redirect_stdout(f):
                peers_train.main()
        finally:
            vars(peers_train).update(kept)
            sys.argv = arguments
            del sys.modules["torch"]
            sys.modules.update({"torch": torch} if torch else {})
        lines = [line.split() for line in printed.read_text().splitlines()[2:]]
        assert [words[0] for words in lines] == 2 * ["train_gpt2cu", "torch_compile", "torch_compile"] + [str(out)]
        assert lines[1][1:4] == ["torch_flash", "4", "1024"] and [words[-1] for words in lines[1:3]] == ["1.25", "2.00"]
        assert lines[3][-4:] == lines[4][-4:] == "skipped: out of memory".split() and lines[5][-2:] == ["n/a", "5.00"]
        rows = [json.loads(text) for text in out.read_text().splitlines()]
        assert rows[0] == ours and [r["sdpa"] for r in rows[1:]] == ["torch_flash", "torch_cudnn"]
        assert [rows[1][field] for field in ("kind", "kernel", "dtype", "mfu")] == ["train", "torch_compile", "bf16", 32.0]
        assert rows[2]["mfu"] is None and rows[2]["B"] == 64


def test_the_peer_is_gpt2_and_trains():
    need("torch")
    import torch
    from peers_train import VP, check_losses, gpt2, random_batch, training_step
    torch.manual_seed(1)
    L, C, max_T = 2, 64, 32
    model = gpt2(torch, L, 2, C, max_T)
    assert sum(p.numel() for p in model.parameters()) == VP * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    batch = random_batch(torch, 2, 16)
    assert batch.shape == (2, 2, 16) and (batch[1].view(-1)[:-1] == batch[0].view(-1)[1:]).all()
    train = training_step(torch, model, batch)
    losses = [train() for _ in range(20)]
    check_losses(losses)
    for wrong in ([math.nan, 2], [10.8, math.nan], [10.8, 10.9], [5, 4]):
        try:
            check_losses(wrong)
        except Exception as e:
            assert "expected from ln V" in str(e), e
        else:
            raise AssertionError(wrong)


def test_help():
    for name in ("plot.py", "plot_results.py", "tensorboard.py", "readme_tables.py",
                 "compare_losses.py", "scaling.py", "default_run.py", "trace_ring.py", "../dev/peers.py",
                 "../dev/peers_train.py"):
        result = script(name, "--help")
        assert result.returncode == 0 and "usage" in result.stdout, name


TENSORBOARD = """
import json, sys, types
class Event(dict):
    SerializeToString = lambda self: json.dumps(self).encode()
class Summary(dict):
    Value = dict
class RecordWriter:
    def __init__(self, file):
        self.write = lambda data: file.write(data + b"\\n")
it = types.SimpleNamespace(Event=Event, Summary=Summary, RecordWriter=RecordWriter, make_tensor_proto=str,
                           create_summary_metadata=lambda *_: "")
for name in ("compat.proto.summary_pb2", "compat.proto.event_pb2", "plugins.text.metadata", "util.tensor_util",
             "summary.writer.record_writer"):
    words = ["tensorboard"] + name.split(".")
    for n in range(2, len(words) + 1):
        sys.modules[".".join(words[:n])] = it
"""


def test_tensorboard_events():
    """By a stand-in for the package, which writes events as JSON."""
    with scratch() as tmp:
        (tmp / "tensorboard").mkdir()
        (tmp / "tensorboard" / "__init__.py").write_text(TENSORBOARD)
        log = write_log(tmp / "run")
        for _ in range(2):  # the second time replaces what the first one wrote
            result = script("tensorboard.py", log, PYTHONPATH=str(tmp))
            assert result.returncode == 0, result.stderr
        (path,) = (log / "tensorboard").iterdir()
        events = [json.loads(line) for line in path.read_text().splitlines()][1:]
        found = {}
        for e in events:
            for value in e["summary"]["value"]:
                found.setdefault(value["tag"], []).append((e["step"], value.get("simple_value", value.get("tensor"))))
        assert found["loss/train"] == [(step, 2 + 9 * math.exp(-step / 10)) for step in range(1, 101)]
        assert found["loss/val"] == [(50, 2.5), (100, 2.25)] and found["loss/floor"] == [(50, 1.1), (100, 1.1)]
        constant = {"train/grad_norm": 1.0, "train/lr": 3e-4, "speed/tokens_per_s": 4e5, "speed/mfu_percent": 40.0}
        assert all(found[tag] == [(step, value) for step in range(1, 101)] for tag, value in constant.items())
        assert found["hellaswag"] == [(50, 0.75), (100, 0.75)] and found["sample"][0] == (50, "    Once\n    upon a time")
        times = [e["wall_time"] for e in events[:100]]
        assert abs(times[-1] - times[0] - 99 * 0.020) < 1e-3 and abs(times[-1] - os.path.getmtime(log / "log.jsonl")) < 1e-3
        here = run(sys.executable, SCRIPTS / "tensorboard.py", ".", "-o", tmp / "events", cwd=log, PYTHONPATH=str(tmp))
        assert here.returncode == 0 and len(list((tmp / "events" / "run").iterdir())) == 1, here
        assert script("tensorboard.py", write_log(tmp / "none", mfu=None, floor=None), PYTHONPATH=str(tmp)).returncode == 0
        text = next((tmp / "none" / "tensorboard").iterdir()).read_text()
        assert "loss/val" in text and "loss/floor" not in text and "mfu" not in text
        check_fails(script("tensorboard.py", log, write_log(tmp / "c" / "run"), "-o", tmp / "out", PYTHONPATH=str(tmp)), "one folder")


def test_tensorboard_files_hold_the_log():
    need("tensorboard.backend")  # not scripts/tensorboard.py
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    with scratch() as tmp:
        log, other = write_log(tmp / "a"), write_log(tmp / "b", mfu=None, floor=None)
        for _ in range(2):  # the second time replaces what the first one wrote
            result = script("tensorboard.py", log, other)
            assert result.returncode == 0, result.stderr
        events = EventAccumulator(str(log / "tensorboard"), size_guidance={"scalars": 0}).Reload()
        loss = events.Scalars("loss/train")
        assert [e.step for e in loss] == list(range(1, 101))
        assert abs(loss[0].value - (2 + 9 * math.exp(-0.1))) < 1e-5
        assert abs(loss[-1].wall_time - loss[0].wall_time - 99 * 0.020) < 1e-3
        assert [(e.step, round(e.value, 3)) for e in events.Scalars("loss/val")] == [(50, 2.5), (100, 2.25)]
        assert len(events.Scalars("loss/floor")) == 2 and len(events.Scalars("speed/mfu_percent")) == 100
        assert [e.value for e in events.Scalars("hellaswag")] == [0.75, 0.75]
        assert b"upon a time" in events.Tensors("sample")[0].tensor_proto.string_val[0]
        tags = EventAccumulator(str(other / "tensorboard")).Reload().Tags()["scalars"]
        assert "loss/train" in tags and "speed/mfu_percent" not in tags and "loss/floor" not in tags
        assert script("tensorboard.py", log, "-o", tmp / "events").returncode == 0
        assert list((tmp / "events" / "a").iterdir())
        check_fails(script("tensorboard.py", log, write_log(tmp / "c" / "a"), "-o", tmp / "events"), "one folder")


# ----------------------------------------------------------------------------------------------------------------------
# Rows of results, and README's tables

def test_rows_name_the_sources():
    """A copy of this tree, small: with git, changed in each of its places, and without git."""
    def state(**variables):
        return run(tree / "scripts" / "tree.sh", **variables).stdout.split()

    def row(**variables):
        code = f"import sys; sys.path.append({str(tree / 'scripts')!r}); import results; print(results.row('x', 'G', '1', ms=2))"
        return eval(run(sys.executable, "-B", "-c", code, **variables).stdout)
    folders = {path.parent.name for path in ROOT.glob("*/*") if path.suffix in (".cu", ".cpp", ".h", ".py", ".sh")}
    folders = {name for name in folders if name[0] != "." and name != "build"}
    assert {"attention", "layers", "scripts"} < folders
    with scratch() as tmp:
        tree = tmp / "tree"
        sources = [tree / name for name in ("Makefile", "train_gpt2.cu", *(f"{folder}/some.h" for folder in folders))]
        for path in (*sources, tree / "README.md", tree / "dev" / "results" / "A" / "attention.jsonl"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1\n")
        for name in ("tree.sh", "results.py"):
            shutil.copy(SCRIPTS / name, tree / "scripts")
        git = ["git", "-C", tree, "-c", "user.name=A", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
            assert run(*git, *command).returncode == 0
        commit = run(*git, "rev-parse", "--short=12", "HEAD").stdout.strip()
        tree_is = run(tree / "scripts" / "tree.sh", "--sum").stdout.strip()
        for path in tree / "README.md", tree / "dev" / "results" / "A" / "attention.jsonl", tree / "dev" / "none.md":
            path.write_text("2\n")
        assert state() == state(COMMIT="other", TREE="other") == [commit, "clean"] and len(commit) == 12
        for path in (*sources, tree / "attention" / "new.cu", tree / "dev" / "new.cpp", tree / "scripts" / "new.py",
                     tree / "scripts" / "new.sh", tree / "layers" / "new.cuh", tree / "data" / "new.txt"):
            old = path.read_text() if path.exists() else None
            path.write_text("2\n")
            assert state() == [commit, "dirty"], path
            path.unlink() if old is None else path.write_text(old)
        assert state() == [commit, "clean"]
        clean = row(RUN="r")
        assert (clean["commit"], clean["dirty"], clean["run"], clean["gpu"], clean["ms"]) == (commit, False, "r", "G", 2)
        assert abs(time.time() - calendar.timegm(time.strptime(clean["date"], "%Y-%m-%dT%H:%M:%SZ"))) < 60, clean
        shutil.rmtree(tree / ".git")  # a copy
        assert state(COMMIT=commit, TREE=tree_is) == [commit, "clean"] and state(COMMIT=commit) == [commit, "dirty"]
        sources[0].write_text("2\n")
        assert state(COMMIT=commit, TREE=tree_is) == [commit, "dirty"] and state() == ["unknown", "dirty"]
        dirty = row(COMMIT=commit, TREE=tree_is)
        assert dirty["dirty"] is True and dirty["run"] == dirty["date"] or dirty["run"] < dirty["date"]
    made = run("make", "-s", "build/tree.cpp")  # what benchmarks link
    assert made.returncode == 0, made.stderr
    here = run(SCRIPTS / "tree.sh").stdout.strip()
    assert f'char built_from[] = "{here}";' in (ROOT / "build" / "tree.cpp").read_text()


def test_rows_name_driver_and_toolkit():
    with scratch() as tmp:
        executable(tmp / "nvidia-smi", "#!/bin/sh\ncase $1 in --query-gpu=driver_version) echo 580.65 ;; *) echo other ;; esac\n")
        executable(tmp / "nvcc", "#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.0.48'\n")
        code = f"import sys; sys.path.append({str(SCRIPTS)!r}); import results; print(results.row('x', 'G', results.toolkit()))"
        row = eval(run(sys.executable, "-c", code, PATH=f"{tmp}:{os.environ['PATH']}").stdout)
        assert (row["driver"], row["cuda"]) == ("580.65", "13.1"), row


def test_rows_of_a_benchmark():
    program = built("dev/bench_layers")
    with scratch() as tmp:
        out = tmp / "rows.jsonl"
        result = run(program, "--layer", "adamw", "--quick", "--out", out, RUN="r")
        if "GPU" in result.stderr:
            raise Skip("no GPU")
        tree = re.search('"([^"]*)"', (ROOT / "build" / "tree.cpp").read_text())[1].split()
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        for r in rows:
            assert [r["commit"], r["dirty"], r["run"]] == [*tree[:-1], tree[-1] != "clean", "r"], (r, tree)
        assert rows, result


def attention_row(**fields):
    return {"kind": "attention", "commit": "0123456789ab", "dirty": False, "run": "1", "date": "2030-01-01T00:00:00Z",
            "gpu": "GPU A", "driver": "1.2", "cuda": "13.0", "kernel": "flash_bf16", "pass": "fwd", "dtype": "bf16", "B": 4, "T": 1024,
            "NH": 12, "HS": 64, "causal": True, "deterministic": True, "ms": 1.0, "tflops": 100.0,
            "tflops_sustained": 90.0, "relative_error": 0.001, **fields}


def test_rows_that_tables_show():
    """Never of a differing tree; of one run wherever they are compared; close ones as the span of three jobs."""
    from readme_tables import close, figure, ratio
    from results import read_rows as rows
    old, new, dirty = {"run": "1"}, {"run": "2", "date": "2030-02-01T00:00:00Z"}, {"dirty": True, "date": "2030-03-01T00:00:00Z"}
    with scratch() as tmp:
        def read(*fields, apart=(), **where):
            write_rows(tmp, "attention", [attention_row(**f) for f in fields])
            found = rows(tmp / "dev" / "results" / "A" / "attention.jsonl", apart, **where)
            return [(r["kernel"], r["ms"]) for r in found], found
        naive = {"kernel": "naive"}
        assert read({**old, "ms": 1.0}, {**dirty, "ms": 2.0}, {**dirty, **naive})[0] == [("flash_bf16", 1.0)]
        assert read({**new, "ms": 1.0}, {**old, **naive}, {**old, "ms": 9.0})[0] == [("flash_bf16", 1.0)]  # not naive of run 1
        assert read({**new, "ms": 1.0}, {**new, "ms": 3.0, "date": "2030-02-01T00:00:01Z"}, {**new, **naive})[0] == [
            ("flash_bf16", 3.0), ("naive", 1.0)]
        other = {"commit": "ba9876543210"}  # the same run's name is not enough
        assert read({**new, **other, "ms": 4.0}, {**old, "run": "2", **naive})[0] == [("flash_bf16", 4.0)]
        assert read({**new, "T": 64}, {**old, **naive, "ms": 5.0}, apart=["T"])[0] == [("flash_bf16", 1.0), ("naive", 5.0)]
        assert read({**new, "T": 64}, {**old, **naive, "ms": 5.0}, T=1024)[0] == [("naive", 5.0)]
        for field in ("kernel", "pass", "model", "dtype", "attention", "B", "T", "NH", "HS", "causal", "deterministic", "gpus",
                      "zero", "lr", "tf32", "input", "tensor", "recompute", "variant", "carry", "ranks", "chunk", "step"):
            assert len(read({field: 1}, {field: 2})[1]) == 2, field  # neither replaces the other
        (path := tmp / "dev" / "results" / "A" / "attention.jsonl").write_text("{}\n")
        try:
            rows(path)
            raise AssertionError("a row without date and commit")
        except SystemExit as e:
            assert f"{path}:1: " in str(e), e

        def shown(*ms, others=(10.2,), **fields):
            _, found = read(*({"run": str(i), "ms": x, "date": f"2030-01-0{i + 1}", **fields} for i, x in enumerate(ms)))
            return figure(found[0], lambda r: r["ms"], others, "{:.1f}".format)
        assert shown(9.8, 10.4, 10.0) == "9.8–10.4" and shown(9.8, 10.4, 10.0, others=(10.32, 9.69)) == "10.0"
        assert shown(9.9, 10.0) == "≈10.0" and shown(10.0, 10.0, 10.0) == "10.0" and shown(10.0, others=(None,)) == "10.0"
        assert shown(9.8, 10.4, 10.0, others=(None, 20, 10.29)) == "9.8–10.4"
        _, found = read(*({"run": str(i), "date": f"2030-01-0{i + 1}", "commit": str(i)} for i in range(3)))
        assert len(found[0]["jobs"]) == 1  # of other sources
    assert close(100, 97.1) and close(97.1, 100) and not close(100, 96.9) and not close(96.9, 100)
    assert (ratio(0.98), ratio(1.02), ratio(1.04), ratio(0.5)) == ("≈1×", "≈1×", "1.04×", "0.50×")


def test_rows_of_dev_results_are_honest():
    """A row is not older than the commit that it names; since rows say so, it says whether the sources were the commit's;
    no row has been edited since it was committed."""
    if run("git", "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        raise Skip("needs the history")
    committed = {line[:7]: int(line.split()[1]) for line in run("git", "log", "--format=%H %ct").stdout.splitlines()}
    for path in sorted((ROOT / "dev" / "results").glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            r = json.loads(line)
            at = calendar.timegm(time.strptime(r["date"], "%Y-%m-%dT%H:%M:%SZ"))
            assert committed.get(r["commit"][:7], math.inf) <= at, f"{path}:{number}: {r['commit']} is younger than its row, or nowhere"
            assert r["date"] < "2026-11-22T14" or (r["dirty"] is False and r["run"] <= r["date"]), f"{path}:{number}: {line[:90]}"
    edited = run("git", "log", "--since=2026-11-22T14:00Z", "--format=", "--numstat", "--", "dev/results/*.jsonl").stdout
    for added, removed, name in map(str.split, edited.splitlines()):
        assert "0" in (added, removed), f"{name}: rows were added and removed in one commit: was one edited?"


def test_tables():
    train = {"kind": "train", "commit": "0123456789ab", "dirty": False, "run": "1", "date": "2030-01-01T00:00:00Z",
             "gpu": "GPU A", "driver": "1.2", "cuda": "13.0", "kernel": "train_gpt2cu", "model": "d12", "dtype": "bf16", "B": 4, "T": 1024, "gpus": 1,
             "attention": "flash", "ms": 8.0, "tok_s": 5e5, "mfu": None, "mem_gib": 3.5}
    later = {"date": "2030-02-01T00:00:00Z", "relative_error": 0.002}
    results = {
        "A/attention": [attention_row(), attention_row(tflops=120.0, **later), attention_row(HS=128, tflops=200.0),
                        attention_row(kernel="torch_flash", tflops=77.0), attention_row(causal=False),
                        attention_row(kernel="naive", tflops=40.0, tflops_sustained=None)],
        "B/attention": [attention_row(gpu="GPU B", tflops=7.0), attention_row(gpu="GPU B", **{"pass": "bwd"})],
        "A/train": [train, {**train, "attention": "naive", "mfu": 12.34, "tok_s": 4e5, "ms": 10.0}],
        "B/train": [{**train, "tok_s": 3e5}, {**train, "recompute": 0}, {**train, "recompute": 1, "T": 4096, "B": 1},
                    {**train, "kernel": "torch_compile", "attention": "sdpa", "sdpa": "torch_cudnn"}],
    }
    with scratch() as tmp:
        (tmp / "attention").mkdir()
        documents = [tmp / "README.md", tmp / "attention" / "README.md"]
        for document in documents:
            document.write_text("before\n<!-- table: attention bf16 -->\nold\n<!-- end -->\nbetween\n"
                                "<!-- table: train -->\nold\n<!-- end -->\n"
                                "<!-- table: torch -->\nold\n<!-- end -->\nafter\n")
        for name, rows in results.items():
            path = tmp / "dev" / "results" / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))

        def tables(*arguments):
            return script("readme_tables.py", "--root", tmp, *arguments)
        check_fails(tables("--check"), "README.md", "readme_tables.py")
        assert "old" in documents[0].read_text()  # --check changes nothing
        assert tables().returncode == 0 and tables("--check").returncode == 0
        text = documents[0].read_text()
        assert text == documents[1].read_text()
        assert text.startswith("before\n") and text.endswith("after\n") and "between" in text and "old" not in text
        caption = "Attention, bf16, causal, NH 12, TFLOP/s cool / sustained. GPU A, driver 1.2, CUDA 13.0. Measured"
        assert caption in text.replace("\n", " ")  # HS is a column: there are two
        assert "| B, T | HS | pass | naive | torch_flash | flash_bf16 |" in text
        assert "| 4, 1024 | 64 | fwd | 40 | 77 / ≈90 | 120 / ≈90 |" in text
        assert "| 4, 1024 | 128 | fwd | – | – | 200 / 90 |" in text
        assert "NH 12, HS 64, TFLOP/s" in text  # GPU B
        assert "| 4, 1024 | fwd | 7 / 90 |" in text and "| 4, 1024 | bwd | 100 / 90 |" in text
        assert "| d12 | bf16 | flash | 4 | 1024 | 500k | 8.00 | n/a | 3.5 |" in text and "12.3 %" in text
        # B: a row without a level is of level 0, which a newer one replaces; two levels make a column, peers have none.
        assert "| model | dtype | attention | recompute | B | T |" in text and "300k" not in text
        rows = ["| flash | 0 | 4 | 1024 | ≈500k |", "| flash | 1 | 1 | 4096 | 500k |",
                "| torch_compile, cudnn | – | 4 | 1024 | ≈500k |"]
        assert [text.index(row) for row in rows] == sorted(text.index(row) for row in rows)
        assert "Not measured yet: `scripts/measure.sh torch`" in text
        assert all(len(line) <= 120 for line in text.splitlines())

        bad = tmp / "dev" / "results" / "A" / "train.jsonl"
        bad.write_text(json.dumps(train) + "\n{oops\n")
        check_fails(tables(), f"{bad}:2: ")
        bad.write_text("")
        documents[1].write_text("<!-- table: nonsense -->\n<!-- end -->\n\n<!-- end -->\n")
        check_fails(tables(), "nonsense", "attention bf16")


def write_rows(root, name, rows):
    path = root / "dev" / "results" / "A" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def documents_with(root, *tables):
    """README.md and attention/README.md as readme_tables.py writes them around these tables."""
    documents = (root / "README.md", root / "attention" / "README.md")
    for document in documents:
        document.parent.mkdir(exist_ok=True)
        document.write_text("".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in tables))
    result = script("readme_tables.py", "--root", root)
    assert result.returncode == 0, result.stderr
    return [document.read_text() for document in documents]


def accuracy_row(**fields):
    return {**attention_row(), "kind": "accuracy", "input": "normal", "tensor": "out", "max_error": 1e-3,
            "mean_error": 1e-4, "relative_l2": 2e-3, "snr_db": 54.0, "ratio_max": 1.25, "ratio_l2": 0.5,
            "within_bounds": True, **fields}


TENSORS = ["out", "lse", "dq", "dk", "dv"]
SOURCES = ("commit", "dirty", "run", "date", "gpu", "driver", "cuda")


def test_tables_of_ladder_accuracy_and_losses():
    fp32 = {"dtype": "fp32", "kernel": "flash_fp32"}
    ladder = [attention_row(**{**fp32, "kernel": "naive", "ms": 4.0}),
              attention_row(**{**fp32, "kernel": "naive_tf32", "ms": 1.0}),
              attention_row(**fp32, ms=2.0), attention_row(**fp32, ms=0.5, B=32),
              attention_row(**{**fp32, "kernel": "naive", "ms": None, "tflops": None, "T": 65536, "B": 1}),
              attention_row(**fp32, ms=149.3, T=65536, B=1)]
    accuracy = [accuracy_row(tensor=tensor) for tensor in TENSORS] + [
        accuracy_row(T=4096, ratio_max=1.5), accuracy_row(tensor="dv", T=4096, ratio_l2=None)] + [
        accuracy_row(tensor=tensor, B=2, T=256, NH=2, causal=False) for tensor in TENSORS]
    losses = [{**attention_row(), "kind": "losses", "model": "d12", "dtype": "fp32", "tf32": True, "steps": 400,
               "seeds": 3, "attention": attention, "ms": ms, "loss": 2.5, "loss_min": 2.4, "loss_max": 2.6}
              for attention, ms in (("flash", 20.0), ("naive", 20.7))]
    with scratch() as tmp:
        for name, rows in (("attention", ladder), ("accuracy", accuracy), ("losses", losses)):
            write_rows(tmp, name, rows)
        write_rows(tmp, "torch", [{**attention_row(), "model": "d12", "dtype": "bf16", "steps": 50, "attention": "flash", "lr": 1e-4,
                                   "max_norm": 0.5, "weight_decay": 1.0, "clipped": 47, "difference": 0.001,
                                   "allowed": 0.002, "torch_itself": 0.0015}])
        (tmp / "dev" / "results" / "A" / "accuracy.svg").write_text("<svg/>")
        readme, text = documents_with(tmp, "ladder", "accuracy", "losses", "torch", "plot accuracy", "plot attention bf16")
        assert "| d12 | bf16 | flash | 0.5 | 47 of 50 | 1 | 1.0e-03 | 2.0e-03 | 1.5e-03 |" in text
        assert "| 4 | 1024 | fwd | 4.000 | 1.000 | 2.000 (2.00×, 0.50×) |" in text
        assert "| 1 | 65536 | fwd | out of memory | – | 149.3 |" in text
        ratios = "| bf16 | flash_bf16 | 1.50 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / NaN |"
        assert ratios in text and f"| flash_bf16 |{' 1.0e-03, 54 |' * 5}" in text
        naive, flash = (text.index(f"| d12 | tf32 | 4 | 1024 | {kind} | 2.5000 | 2.4000 – 2.6000 |")
                        for kind in ("naive | 20.70", "flash | 20.00"))
        assert naive < flash and "steps 400, seeds 3" in text
        assert "![accuracy](../dev/results/A/accuracy.svg)" in text and "Not measured yet: `scripts/measure.sh bf16`" in text
        assert "![accuracy](dev/results/A/accuracy.svg)" in readme


def test_samples_of_the_default_run():
    row = {**attention_row(), "kind": "default_run", "steps": 6500, "B": 8, "T": 1024, "floor_nats": 0.1273}
    rows = [{**row, "step": 1300, "val_loss_nats": 9.0, "text": "an older run"},
            {**row, "run": "2", "date": "2030-02-01T00:00:00Z", "step": 1300, "val_loss_nats": 0.4764, "text": "The badger\nhummed. " * 40},
            {**row, "run": "2", "date": "2030-02-01T00:00:00Z", "step": 6500, "val_loss_nats": 0.1613, "text": "The end."}]
    with scratch() as tmp:
        write_rows(tmp, "default_run", rows)
        text, _ = documents_with(tmp, "default run")
        assert "6500 steps of 8·1024 tokens" in text and "older" not in text and "![" not in text  # there is no plot
        assert "*Step 1300, validation loss 0.476:* The badger hummed. The" in text and "…" in text
        assert "*Step 6500, validation loss 0.161:* The end." in text


def test_rows_of_the_default_run():
    with scratch() as tmp:
        shutil.copytree(SCRIPTS, tmp / "scripts")
        log = write_log(tmp / "log") / "log.jsonl"
        executable(tmp / "train_gpt2cu", f'#!/bin/sh\n[ "$#" = 2 ] && [ "$1" = -o ] && cp {log} "$2"\n')
        result = run(sys.executable, tmp / "scripts" / "default_run.py", COMMIT="abc")
        assert result.returncode == 0 and "no plot, because the sources differ" in result.stdout, result
        rows = (tmp / "dev" / "results" / "NVIDIA-H200" / "default_run.jsonl").read_text().splitlines()
        assert [json.loads(row)["step"] for row in rows] == [50, 100], rows
        row = json.loads(rows[0])
        assert (row["commit"], row["val_loss_nats"], row["text"], row["dtype"]) == ("abc", 2.5, "Once\nupon a time", "bf16")
        assert json.loads(rows[1])["val_loss_nats"] == 2.25
        executable(tmp / "scripts" / "tree.sh", "#!/bin/sh\necho abc clean\n")
        (tmp / "scripts" / "plot.py").write_text("import sys\nprint(*sys.argv[2:])\nopen(sys.argv[1] + '/log.jsonl')\n")
        result = run(sys.executable, tmp / "scripts" / "default_run.py")
        plot = tmp / "dev" / "results" / "NVIDIA-H200" / "default_run.png"  # where readme_tables.py looks for it
        assert result.returncode == 0 and result.stdout == f"-o {plot} --title The default run\n", result
        executable(tmp / "train_gpt2cu", "#!/bin/sh\nexit 1\n")
        check_fails(run(sys.executable, tmp / "scripts" / "default_run.py"), "default_run.py: ./train_gpt2cu failed")


def test_table_of_a_breakdown():
    step = {**attention_row(), "kind": "breakdown", "kernel": "train_gpt2cu", "model": "d12", "attention": "flash",
            "recompute": 1, "B": 64, "calls": 12, "step_ms": 100.0, "tflops": 0, "tb_s": 2.0,
            "gemm_tflops_sustained": 700.0, "copy_tb_s_sustained": 4.0}
    new = {**step, "run": "2", "date": "2030-02-01T00:00:00Z", "step_ms": 80.0}
    rows = [{**step, "call": "adamw", "ms": 9.0, "lost_ms": 9.0}, {**step, "call": "gone", "ms": 50.0, "lost_ms": 50.0},
            {**new, "call": "adamw", "calls": 1, "ms": 2.0, "lost_ms": 1.0},
            {**new, "call": "matmul", "ms": 60.0, "lost_ms": 8.0, "tflops": 630.0, "tb_s": 1.0},
            {**new, "call": "clear", "ms": 1.0, "lost_ms": 0.5},
            {**new, "call": "fast", "ms": 0.5, "lost_ms": -0.25, "tflops": 770.0},
            {**new, "call": "attention", "ms": 12.5, "lost_ms": 7.25, "tflops": 350.0},
            {**new, "call": "matmul", "B": 4, "ms": 60.0, "lost_ms": 8.0, "gemm_size": 4096}]
    with scratch() as tmp:
        write_rows(tmp, "breakdown", rows)
        text, _ = documents_with(tmp, "breakdown")
        assert text.count("| all of these |") == 2 and "gone" not in text  # B 4 and B 64; a call of the older run
        assert "| TFLOP/s | % of 4096³ |" in text and "beside a product of 4096³" in text.replace("\n", " ")
        text = text[text.index("B 64"):]
        assert "| TFLOP/s | % of 8192³ | TB/s | % of copy | ms beyond |" in text
        lines = ["| matmul | 12 | 60.000 | 75.0 | 630.0 | 90 | 1.00 | 25 | 8.000 |",
                 "| attention | 12 | 12.500 | 15.6 | 350.0 | 50 | 2.00 | 50 | 7.250 |",
                 "| adamw | 1 | 2.000 | 2.5 |  |  | 2.00 | 50 | 1.000 |",
                 "| clear | 12 | 1.000 | 1.2 |  |  | 2.00 | 50 | 0.500 |",
                 "| fast | 12 | 0.500 | 0.6 | 770.0 | 110 | 2.00 | 50 |  |",
                 "| all of these | 49 | 76.000 | 95.0 |  |  |  |  | 16.750 |"]
        assert [text.index(line) for line in lines] == sorted(text.index(line) for line in lines)
        assert ("Most of it: matmul (8.00 ms, 10.0 % of the step); attention (7.25 ms, 9.1 % of the step); adamw "
                "(1.00 ms, 1.2 % of the step).") in text.replace("\n", " ")
        assert ("recompute 1; beside a product of 8192³, 700 TFLOP/s, and a copy of 1 GiB, 4.00 TB/s, both sustained. GPU A"
                in text.replace("\n", " "))


def test_plots_of_attention():
    need("matplotlib")
    with scratch() as tmp:
        check_fails(script("plot_results.py", "--root", tmp), "no rows", "bench_attention")
        attention = [attention_row(kernel=kernel, T=T, HS=HS, ms=None if kernel == "naive" and T > 1024 else 1.0,
                                   **{"pass": pas})
                     for kernel in ("naive", "torch_flash", "flash_bf16") for T in (1024, 2048) for HS in (64, 128)
                     for pas in ("fwd", "bwd")]
        write_rows(tmp, "attention", attention)
        write_rows(tmp, "accuracy", [accuracy_row(tensor=tensor, T=T) for tensor in TENSORS for T in (64, 255)])
        written = []
        for _ in range(2):  # the same rows give the same bytes
            result = script("plot_results.py", "--root", tmp)
            assert result.returncode == 0, result.stderr
            paths = [pathlib.Path(line) for line in result.stdout.splitlines()]
            assert [path.name for path in paths] == ["attention_bf16.svg", "accuracy.svg"]
            written.append([path.read_bytes() for path in paths])
        assert written[0] == written[1] and all(svg.startswith(b"<?xml") for svg in written[0])


def accumulation_rows():
    """Two variants in fp16, a shifted one that is not timed, and bf16 beside the trainer; wgmma and mma.sync."""
    def row(kernel, dtype, variant, **fields):
        return {**{k: v for k, v in attention_row().items() if k not in ("ms", "tflops", "tflops_sustained")},
                "kind": "accumulation", "kernel": kernel, "dtype": dtype, "variant": variant, "NH": 2, **fields}
    found = []
    for kernel, trainer in (("mma.sync", "flash_bf16"), ("wgmma", "flash_bf16_sm90")):
        for dtype, variant in (("fp16", "base"), ("fp16", "pv16"), ("fp16", "pv16+shift"), ("bf16", "base")):
            for T in (1024, 4096):
                for name in ("normal", "huge_qk"):
                    broken = {"relative_l2": None, "ratio_l2": None, "not_finite": 50} if name == "huge_qk" else {}
                    fields = {"relative_l2": 1e-4 * len(variant) * T / 1024, "ratio_l2": 1.5, "not_finite": 0, **broken}
                    found.append(row(kernel, dtype, variant, T=T, input=name, elements=200, **fields))
            if "shift" not in variant:
                found += [row(kernel, dtype, variant, T=T, NH=12, ms=1.0, tflops=300.0 + T) for T in (1024, 4096)]
        found += [row(trainer, "bf16", "trainer", T=T, NH=12, ms=1.0, tflops=400.0 + T) for T in (1024, 4096)]
    return found


def plotted(plot, tmp, name=None):
    """What the script scripts/plot_<plot>.py draws into <plot>.svg or <name>.svg, by the stand-in."""
    package = tmp / "stand_in" / "matplotlib"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("def use(_):\n    pass\n")
    (package / "pyplot.py").write_text("import sys\nfrom test_tools import Drawn\nsys.modules[__name__] = Drawn('', [])\n")
    result = script("plot_results.py", name or plot, "--root", tmp, PYTHONPATH=f"{package.parent}:{ROOT / 'dev'}")
    if result.returncode:
        check_fails(result, "plot_results.py", "no rows")
        return None
    svg = pathlib.Path(result.stdout.strip())
    assert svg == tmp / "dev" / "results" / svg.parent.name / f"{name or plot}.svg", svg
    return svg.read_text()


def test_tables_and_plot_of_the_accumulation_study():
    with scratch() as tmp:
        write_rows(tmp, "accumulation", accumulation_rows())
        (tmp / "dev" / "results" / "A" / "accumulation.svg").write_text("<svg/>")
        _, text = documents_with(tmp, "accumulation speed", "accumulation errors", "plot accumulation")
        assert "| dtype | variant | mma.sync 4, 1024 | mma.sync 4, 4096 | wgmma 4, 1024 | wgmma 4, 4096 |" in text
        assert "| fp16 | pv16 | ≈1324 | ≈4396 | ≈1324 | ≈4396 |" in text and "pv16+shift | ≈1324" not in text
        assert "| bf16 | trainer | ≈1424 | ≈4496 | ≈1424 | ≈4496 |" in text
        assert "| fp16 | pv16+shift | 1.0e-03 (1.5×) | 4.0e-03 (1.5×) | – | – | – | 25 % ∞ | – |" in text
        assert "wgmma, NH 2, HS 64" in text.replace("\n", " ") and "![accumulation](../dev/results/A/accumulation.svg)" in text
        assert "'base, pv16'" in plotted("accumulation", tmp)
        write_rows(tmp, "accumulation", [])
        assert not plotted("accumulation", tmp)


def ring_rows():
    """A study of chunks, one of rings up to 2 ranks, and a measured ring of 4 GPUs."""
    def row(study, dtype="bf16", **fields):
        return {**{k: v for k, v in attention_row().items() if k in SOURCES},
                "kind": "ring", "study": study, "dtype": dtype, "T": 1024, "NH": 12, "HS": 64, **fields}
    errors = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 1e-3)
    wrong = {"own_lse_dq": 0.4, "own_lse_dk": 0.3, "own_lse_dv": 0.2, "used_sum_dq": 4.5}
    found = [row("chunks", chunk=i, chunks=8, **errors, **wrong) for i in range(2)] + [row("unchunked", **errors)]
    for carry, ranks, ratio in (("floor", 1, 0.6), ("fp32", 1, 1), ("fp32", 2, 1), ("bf16", 1, 1), ("bf16", 2, 1.2)):
        found += [row("ring", carry=carry, ranks=ranks, tensor=t, mean_error=6e-5 * ratio, max_error=0.01 * ratio,
                      mean_ratio=ratio, max_ratio=2 * ratio) for t in ("out", "dq", "dk", "dv")]
    return found


def test_tables_and_plot_of_the_ring():
    with scratch() as tmp:
        write_rows(tmp, "ring", ring_rows())
        speed = {k: v for k, v in ring_rows()[0].items() if k in (*SOURCES, "NH", "HS")}
        write_rows(tmp, "ring_speed", [{**speed, "pass": "forward", "gpus": 4, "tokens_per_gpu": 16384, "single_ms": 3.0,
                                        "single_ms_sustained": 3.3, "ms": 3.2, "ms_sustained": 3.4, "still_ms": 3.1,
                                        "still_ms_sustained": 3.35, "hop_ms": 0.2, "hop_ms_sustained": 0.2}])
        (tmp / "dev" / "results" / "A" / "ring.svg").write_text("<svg/>")
        _, text = documents_with(tmp, "ring chunks", "ring errors", "ring speed", "plot ring")
        assert "| bf16 | 1 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 0.40 | 0.30 | 0.20 | 4.50 |" in text
        assert "| bf16 | bf16 | 2 | 7.20e-05 (1.20), 1.2e-02 (2.40) |" in text and "| bf16 | floor | – |" in text
        assert "| 4 | 12, 64 | forward | 3.00 | 3.20 | 93.8 / ≈97.1 % | 96.8 / ≈98.5 % | 0.20 |" in text
        assert "![ring](../dev/results/A/ring.svg)" in text
        assert "Ring attention, T 1024, bf16, GPU A" in plotted("ring", tmp)


def trace_of_a_gpu(gpu):
    """As dev/trace.so writes it: a layer's attention, forward and backward, a copy half behind each; GPU 1 starts later."""
    def event(kind, name, start, duration, ranges):
        return {"name": name, "cat": kind, "ph": "X", "pid": gpu, "tid": "stream 7", "ts": start, "dur": duration,
                "args": {"gpu": -1 if kind == "range" else gpu, "range": ranges}}
    events = [event("range", "step 5", 0, 9000, "")]
    for at, way in ((1000, "forward"), (5000, "backward")):
        inside = f"step 5 / forward and backward / {way} / layer 6"
        events += [event("kernel", f"{way}_kernel<64, true>", at, 700, inside),
                   event("copy", "copy 50331648 bytes to another GPU", at + 600, 200, inside),
                   event("copy", "copy 50331648 bytes", at, 150, inside),
                   event("kernel", f"{way}_kernel<64, true>", at, 700, inside.replace("6", "7")),
                   event("kernel", "long before", at - 300, 50, inside), event("kernel", "long after", at + 950, 50, inside)]
    for e in events:
        e["ts"] += 40 * gpu
    return {"traceEvents": events}


def test_travel_behind_kernels():
    from trace_ring import behind
    kernels = [{"ts": ts, "dur": dur} for ts, dur in ((660, 80), (0, 700), (500, 150))]  # that overlap
    assert behind([{"ts": 600, "dur": 200}, {"ts": 50, "dur": 10}, {"ts": 800, "dur": 9}], kernels) == 150


def test_timeline_of_a_ring():
    with scratch() as tmp:
        shutil.copytree(SCRIPTS, tmp / "scripts")
        ring = tmp / "scripts" / "trace_ring.py"
        check_fails(run(sys.executable, ring), "there is no ./train_gpt2cu")
        for gpu in (0, 1):
            (tmp / f"gpu{gpu}").write_text(json.dumps(trace_of_a_gpu(gpu)))
        executable(tmp / "train_gpt2cu", '#!/bin/sh\necho "$@" >args\nfor i in 0 1; do cp gpu$i "$TRACE.10$i.json"; done\n')
        check_fails(run(sys.executable, ring), "there is no ./dev/trace.so")
        (tmp / "dev").mkdir()
        (tmp / "dev" / "trace.so").touch()
        result = run(sys.executable, ring, "--json")
        assert "--gpus 2 --context-parallel 2 -b 1 -t 32768 --profile 1 " in (tmp / "args").read_text()
        assert "GPU 1, backward: 0.20 ms of travel, 50 % of it behind kernels" in result.stdout, result
        path = next(tmp.glob("dev/results/*/ring_timeline.jsonl"))
        assert path.read_text().count('"dirty": true') == path.read_text().count("\n") == 4
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [(r["rank"], r["pass"], min(e["start_ms"] for e in r["events"])) for r in rows] == [
            (gpu, way, 0.04 * gpu) for way in ("forward", "backward") for gpu in (0, 1)] and "long" not in path.read_text(), rows
        (tmp / "kept").mkdir()
        run(sys.executable, ring, "--keep", cwd=tmp / "kept")
        assert {p.name for p in (tmp / "kept").iterdir()} == {"trace.100.json", "trace.101.json"}
        check_fails(run(sys.executable, ring, "--gpus", "4"), "traces of 2 GPUs, not 4")
        check_fails(run(sys.executable, ring, "--layer", "8"), "no blocks of forward in layer 8")
        executable(tmp / "train_gpt2cu", "#!/bin/sh\necho boom >&2\nexit 1\n")
        check_fails(run(sys.executable, ring), "ended with 1", "boom")
        assert not plotted("ring", tmp)  # of sources that nobody knows
        path.write_text(path.read_text().replace('"dirty": true', '"dirty": false'))
        assert "Ring of 2, 16384 tokens each" in plotted("ring", tmp, "ring_timeline")


def test_timeline_of_a_training_step():
    built = run("make", "dev/trace.so")
    if built.returncode and "cupti" in built.stderr.lower():
        raise Skip("needs CUPTI of CUDA 13")
    assert built.returncode == 0, built.stderr
    with scratch() as tmp:
        result = run("./train_gpt2cu", "-e", "tiny", "-b", "1", "--profile", "1", "-v", "0", "-s", "0",
                     CUDA_INJECTION64_PATH=str(ROOT / "dev" / "trace.so"), TRACE=str(tmp / "trace"))
        assert result.returncode == 0, result.stderr
        if "using the CPU" in result.stderr:
            raise Skip("no GPU")
        (path,) = tmp.glob("trace.*.json")
        kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e["cat"] == "kernel"]
        for way in ("forward", "backward"):
            assert any(e["args"]["range"].endswith(f"{way} / layer 3") and e["dur"] > 0 for e in kernels), result.stderr


def test_plot_of_the_accumulation_study():
    """A shifted variant stands at the speed of the kernel that it is; hollow says that something was not finite."""
    from plot_results import plot_accumulation
    found = accumulation_rows()
    for r in found:
        if r["kernel"] == "wgmma":
            r["not_finite"] = 0
    with drawn() as plt:
        plot_accumulation(plt, found)
    for axes, hollow, title in ("00", True, "mma.sync"), ("01", False, "wgmma"):
        assert [args[:2] for args in plt.of(f"{axes}.plot")] == [[4396, 4e-4 * n] for n in (4, 4, 4, 10)]
        assert [options["mfc"] == "white" for options in plt.options(f"{axes}.plot")] == [hollow] * 4
        assert [args[0] for args in plt.of(f"{axes}.annotate")] == ["base", "base, pv16", "pv16+shift"]
        assert plt.of(f"{axes}.set_title") == [[title]] and plt.of(f"{axes}.set_yscale") == [["log"]]


def test_plot_of_memory():
    """Points and lines at their places, one line a setting; a single length has none."""
    from plot_results import plot_memory

    def row(dtype, T, mem_gib, **fields):
        return {**attention_row(), "kind": "train", "kernel": "train_gpt2cu", "model": "d12", "attention": "flash",
                "dtype": dtype, "B": 1, "T": T, "mem_gib": mem_gib, "recompute": 1, **fields}
    found = [row("fp32", 8192, 6.5), row("fp32", 4096, 4.0), row("fp32", 16384, 10.0), row("bf16", 65536, 17.0)]
    others = [row("bf16", 1024, 99.0, B=4), row("bf16", 1024, 99.0, kernel="torch_compile")]
    with drawn() as plt:
        plot_memory(plt, found)
    assert plt.of("00.plot") == [[[65536], [17]], [[4096, 16384], [4, 10]], [[4096, 8192, 16384], [4, 6.5, 10]]]
    labels = [options["label"] for options in plt.options("00.plot") if "label" in options]
    assert labels == ["bf16", "fp32: 0.50 GiB per 1024 tokens"]
    assert plt.of("00.set_title")[0][0] == "Training with B 1, model d12, attention flash, recompute 1, GPU A"
    assert plt.options("00.set_xlim") == [{"left": 0}] and plt.options("00.set_ylim") == [{"bottom": 0}]
    with scratch() as tmp:
        write_rows(tmp, "train", others)
        assert not plotted("memory", tmp)
        write_rows(tmp, "train", found + others)
        assert "65536" in plotted("memory", tmp) and "99.0" not in plotted("memory", tmp)


def test_plots_of_attention_and_errors():
    from plot_results import plot_accuracy, plot_attention
    rates = [attention_row(kernel=kernel, T=T, B=B, HS=HS, tflops=tflops + T + HS + B, tflops_sustained=tflops / 2, **{"pass": pas})
             for kernel, tflops in (("naive", 100.0), ("torch_flash", 200.0), ("flash_bf16", 300.0))
             for T, B in ((2048, 1), (1024, 4), (1024, 32)) for HS in (64, 128) for pas in ("fwd", "bwd")]
    with drawn() as plt:
        plot_attention(plt, rates + [attention_row(causal=False, T=64)])
    for axes, HS, title in ("00", 64, "bf16 forward, head size 64"), ("11", 128, "bf16 backward, head size 128"):
        assert plt.of(f"{axes}.plot")[::2] == [[[1024, 2048], [x + 1024 + HS + 32, x + 2048 + HS + 1]] for x in (300, 200, 100)]
        assert plt.of(f"{axes}.plot")[1::2] == [[[1024, 2048], [x / 2, x / 2]] for x in (300, 200, 100)]
        assert plt.of(f"{axes}.set_title") == [[title]] and plt.options(f"{axes}.set_ylim") == [{"bottom": 0}]
    assert [o["ls"] for o in plt.options("00.plot")[::2]] == ["-", "--", "-"]
    errors = [accuracy_row(tensor=t, T=T, HS=HS, ratio_l2=1 + T / HS + n, input=name) for n, t in enumerate(TENSORS)
              for T in (255, 64) for HS in (64, 128) for name in ("normal", "shifted")]
    with drawn() as plt:
        plot_accuracy(plt, errors + [accuracy_row(kernel="naive"), accuracy_row(causal=False)])
    worst = [args for args in plt.of("02.plot") if args[0]]
    assert worst == [[[64, 255], [4, 3 + 255 / 64]]] * 2, worst  # the larger of both head sizes
    assert [args[0] for n in range(5) for args in plt.of(f"0{n}.set_title")] == [f"bf16 {t}" for t in TENSORS]


def test_plots_of_the_ring():
    from plot_results import plot_ring, plot_timeline
    with drawn() as plt:
        plot_ring(plt, [r for r in ring_rows() if r["study"] == "ring"])
    fp32, bf16 = plt.of("00.plot")[:2]
    assert fp32[0] == [0, 1] and [round(y, 6) for y in fp32[1]] == [1, 1] and [round(y, 6) for y in bf16[1]] == [1, 1.2]
    assert [round(args[0], 6) for args in plt.of("00.axhline")] == [0.6] * 4 and not plt.of("01.axhline")
    events = [{"what": "kernel", "name": "forward_kernel<64, true>", "start_ms": 0.5, "ms": 1.5},
              {"what": "kernel", "name": "merge", "start_ms": 2.0, "ms": 0.25}, {"what": "copy", "name": "copy", "start_ms": 1.0, "ms": 0.5}]
    row = {**ring_rows()[0], "gpus": 2, "tokens_per_gpu": 16384, "layer": 6, "pass": "forward"}
    with drawn() as plt:
        plot_timeline(plt, [{**row, "rank": 1, "events": events}, {**row, "gpus": 1, "rank": 0, "events": events}])
    assert plt.of("00.broken_barh") == [[[(0.5, 1.5)], [1.6, 0.8]], [[(2.0, 0.25)], [1.6, 0.8]], [[(1.0, 0.5)], [2.6, 0.8]]]
    assert len({options["facecolors"] for options in plt.options("00.broken_barh")}) == 3 and not plt.of("10.broken_barh")


def test_tables_are_those_of_dev_results():
    result = script("readme_tables.py", "--check")
    assert result.returncode == 0, result.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The Makefile's probe

def gencode(nvidia_smi, *arguments):
    """GENCODE where `nvidia-smi` is this shell code."""
    with scratch() as tmp:
        executable(tmp / "nvidia-smi", f"#!/bin/sh\n{nvidia_smi}\n")
        result = run("make", "-pn", "help", *arguments, PATH=f"{tmp}:{os.environ['PATH']}")
        return re.search(r"^GENCODE :?= *(.*)$", result.stdout, re.M)[1].strip()


def arch(a):
    return f"-gencode arch=compute_{a},code=sm_{a}"


def test_probe_of_gpus():
    for found, expected in (("8.0", ["80"]), ("9.0", ["90a"]), ("8.0\n8.0\n8.0", ["80"]), ("8.6\n9.0", ["86", "90a"]),
                            ("9.0\n7.5", ["75", "90a"]), ("10.0", ["100"]), ("12.0", ["120"])):
        assert gencode(f"printf '{found}\\n'") == " ".join(map(arch, expected)), found


def test_probe_without_gpu():
    fallback = "-gencode arch=compute_80,code=[sm_80,compute_80]"
    for what in ("exit 127", "echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9",
                 "echo '[N/A]'", "echo 'No devices were found'", "echo 9.0.1; echo 8; echo x8.0; echo",
                 "echo 8.0 >&2; exit 1"):
        assert gencode(what) == fallback, what


def test_arch_overrides_the_probe():
    assert gencode("echo 8.6", "ARCH=75 90a") == f"{arch('75')} {arch('90a')}"


def test_probe_of_nccl():
    """Where a header and a library are that can be linked, in lib or lib64; NCCL_HOME=none is an answer too."""
    with scratch() as tmp:
        for folder in "include", "lib64":
            (tmp / folder).mkdir()
        (tmp / "include" / "nccl.h").touch()
        assert run("g++", "-shared", "-o", tmp / "lib64" / "libnccl.so.2", "-x", "c++", "/dev/null").returncode == 0

        def probed(home):
            text = run("make", "-pn", "help", f"NCCL_HOME={home}").stdout
            flags = re.search("^NCCLFLAGS :?= (.*)$", text, re.M)
            return flags and flags[1], re.search(r"^LDLIBS :?= (.*)$", text, re.M)[1]
        flags, libraries = probed(tmp)
        assert "-DHAVE_NCCL" in flags and f"{tmp}/include" in flags, flags
        for part in f"-L{tmp}/lib64 -Xlinker -rpath,{tmp}/lib64", "-l:libnccl.so.2":  # found by the linker and when it runs
            assert part in libraries, libraries
        flags_without, libraries = probed("none")
        assert not flags_without and "nccl" not in libraries, (flags_without, libraries)
        (tmp / "lib64").rename(tmp / "lib")
        assert probed(tmp)[0] == flags


def test_other_flags_compile_anew():
    """In a copy of the Makefile with few sources and a stand-in for both compilers; and what `make archs` and `make clean` do."""
    with scratch() as tmp:
        shutil.copy(ROOT / "Makefile", tmp)
        for name in "data/a.cpp", "layers/b.cu", "attention/c.cu", "dev/test_d.cpp", "dev/test_d":
            (tmp / name).parent.mkdir(exist_ok=True)
            (tmp / name).touch()
        executable(tmp / "cc", '#!/bin/sh\n[ "$1" != --list-gpu-code ] || echo sm_75 sm_80 sm_90\nwhile [ "$1" != -o ]; do shift || exit; done\ntouch "$2"; echo "$2"\n')
        objects = ["build/data/a.o", "build/layers/b.o"]

        def made(*options):
            result = run("make", "-s", f"CXX={tmp}/cc", f"NVCC={tmp}/cc", "NCCL_HOME=none", *objects, *options, cwd=tmp)
            assert result.returncode == 0, result
            return result.stdout.split()
        assert made() == objects and made() == []
        assert made("EXTRA=-DX") == objects and made("EXTRA=-DX") == []
        archs = run("make", "-n", "archs", f"NVCC={tmp}/cc", cwd=tmp).stdout.replace("\\\n", "").splitlines()
        built = {re.search(r"-o (\S+)", line)[1]: line for line in archs if " -o " in line}
        of = {name: re.findall(r"code=sm_(\w+)", line) for name, line in built.items()}
        assert of == {"build/archs/attention/c.spills.o": ["80", "90a"], "build/archs/attention/c.o": ["75"],
                      "build/archs/layers/b.o": ["75", "80", "90a"]}, archs
        assert all("-Werror all-warnings" in line and ("-warn-spills" in line) == ("spills" in name) for name, line in built.items())
        assert made("EXTRA=-DX", "MARCH=x86-64") == objects[:1] and made("EXTRA=-DX", "MARCH=x86-64", "ARCH=75") == objects[1:]
        assert run("make", "clean", cwd=tmp).returncode == 0
        assert not (tmp / "build").exists() and not (tmp / "dev" / "test_d").exists()


def test_profile_without_nsys_builds_nothing():
    with scratch() as tmp:
        for name in ("make", "sh", "grep", "tr", "sort", "find", "nproc", "sed"):  # a PATH without nsys and compilers
            (tmp / name).symlink_to(shutil.which(name))
        result = run("make", "profile", PATH=str(tmp))
        assert result.returncode == 2 and "needs nsys (Nsight Systems)" in result.stderr, result
        assert "train_gpt2cu" not in result.stdout, result.stdout
        (tmp / "nsys").symlink_to(shutil.which("true"))
        result = run("make", "-n", "profile", PATH=f"{tmp}:{os.environ['PATH']}")
        assert "-lineinfo" in result.stdout or not shutil.which("nvcc"), result
        assert re.search(r"nsys profile .*\n? *\./train_gpt2cu --profile 3", result.stdout.replace("\\\n", "")), result


# ----------------------------------------------------------------------------------------------------------------------
# Training recipes, and the comparison of losses

def test_losses_beside_pytorch():
    """What scripts/compare_torch.py asks of the trainer and makes of the losses; PyTorch's side needs PyTorch."""
    from compare_torch import apart, judge, trainer_options
    a = types.SimpleNamespace(B=3, T=128, steps=4, lr=2e-4, weight_decay=0.75, max_norm=0.5, precision="bf16",
                              attention="naive", tol=1e-4)

    def steps(*losses, norms=(0.6, 0.6, 0.4, 0.3)):
        return list(zip(losses, norms))
    torch, near = steps(4.0, 3.0, 2.0, 1.0), steps(4.0, 3.01, 2.0, 1.0)
    found, ok = judge(a, steps(4.0, 3.0, 2.0, 0.981), torch, near)
    assert ok and abs(found["difference"] - 0.019) < 1e-9 and abs(found["allowed"] - 0.02) < 1e-9, found
    assert found["clipped"] == 2 and abs(found["torch_itself"] - 0.01) < 1e-9, found
    for ours in (steps(4.0, 3.0, 2.0, 0.979), steps(4.021, 3.0, 2.0, 1.0), steps(4.0, math.nan, 2.0, 1.0),
                 steps(math.nan, 3.0, 2.0, 1.0), steps(4.0, 3.0, 2.0, 1.0, norms=(0.6, 0.5, 0.4, 0.3))):
        assert not judge(a, ours, torch, near)[1], ours
    assert not judge(a, torch, torch, steps(4.0, math.nan, 2.0, 1.0))[1]
    command = " ".join(map(str, trainer_options(a, "model", "shard")))
    for option in ("-e model -i shard -b 3 -t 128 -x 4 -l 0.0002 -u 0 -k constant ", " -c 0.75 --max-norm 0.5 --precision bf16 ",
                   " --no-shuffle --attention naive"):
        assert option in command, (option, command)
    assert "--no-tf32" not in command
    a.precision = "fp32"
    assert "--no-tf32" in trainer_options(a, "model", "shard")
    for difference, right in (0.9e-4, True), (1.1e-4, False), (-1.1e-4, False):
        found, ok = judge(a, steps(4.0, 3.0, 2.0 + difference, 1.0), torch, near)
        assert ok == right and found["allowed"] == 1e-4, found
    try:
        apart(torch, torch[1:])
    except ValueError as e:
        assert "4 and 3 steps" in str(e)
    else:
        raise AssertionError("runs of other lengths")


def test_losses_are_compared():
    """On the CPU, where naive and flash are one."""
    built()
    with scratch() as tmp:
        out = tmp / "losses.jsonl"
        result = script("compare_losses.py", "--device", "cpu", "--model", "tiny", "--shapes", "2x16", "--steps", "3",
                        "--seeds", "2", "--gpus", "2", "--out", out)
        assert result.returncode == 0 and "is within the seeds' spread" in result.stdout, result
        naive, flash = (json.loads(line) for line in out.read_text().splitlines())
        assert (naive["attention"], flash["attention"], naive["B"], naive["T"]) == ("naive", "flash", 2, 16)
        assert naive["loss_min"] < naive["loss"] == flash["loss"] < naive["loss_max"] < 12 and naive["ms"] > 0
        for bad, what in ((("--seeds", "1"), "--seeds"), (("--shapes", "4by4"), "4by4"), (("--gpus", "0"), "--gpus")):
            result = script("compare_losses.py", *bad)
            assert result.returncode == 2 and what in result.stderr, result
        result = script("compare_losses.py", "--device", "cpu", "--model", "tiny", "--shapes", "2x999999", "--gpus", "2")
        assert result.returncode == 1 and "999999" in result.stderr, result


# Writes and prints what ./train_gpt2cu does. Its losses and rates are those of the environment.
STAND_IN = f"#!{sys.executable}\n" + '''
import json, os, sys
option = dict(zip(sys.argv, sys.argv[1:]))
print(*sys.argv[1:], file=open("ran", "a"))
print(os.environ.get("CUDA_VISIBLE_DEVICES"), file=open("gpus", "a"))
ranks = option.get("--gpus", "1") + "_" + option.get("--zero", "0")
run = option["--attention"] + "_" + option["--seed"] if "--attention" in option else "ranks_" + ranks
loss = float(os.environ.get(run, 2))
rate = os.environ.get("rate_on_" + os.environ.get("CUDA_VISIBLE_DEVICES", ""), os.environ.get("rate_" + ranks))
print("device             GPU A, 1 GiB\\n  total   %d.0 MiB" % (2048 if ranks.endswith("1") else 4096))
rows = [{"kind": "run", "device": "GPU A", "tokens_per_step": 1}]
for i in range(1, int(option["-x"]) + 1):
    print("step %d/9 | %s tok/s" % (i, rate if i > 10 else "1"))
    rows.append({"kind": "train", "step_ms": 3 * i if i > 2 else 999, "loss_nats": loss if i == 11 else 2.0,
                 "step": i, "grad_norm": 1, "lr": 1, "tokens_per_s": 1, "mfu_percent": 1})
if "-o" in option:
    with open(option["-o"] + "/log.jsonl", "w") as log:
        for row in rows + [{"kind": "val", "step": 0, "loss_nats": 9.0}, {"kind": "val", "step": i, "loss_nats": loss}]:
            print(json.dumps(row), file=log)
'''


def test_comparisons_fail_where_runs_differ():
    """compare_losses.py and scaling.py with a stand-in for the trainer."""
    with scratch() as tmp:
        shutil.copytree(SCRIPTS, tmp / "scripts")
        executable(tmp / "train_gpt2cu", STAND_IN)

        def measured(name, *arguments, **variables):
            out = tmp / "rows.jsonl"
            out.unlink(missing_ok=True)
            result = run(sys.executable, tmp / "scripts" / name, "--out", out, *arguments, **variables)
            return result, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
        naive, shape = {"naive_1": "2.0", "naive_2": "2.2"}, ("--shapes", "2x16", "--steps", "20", "--seeds", "2")
        for flash, code, word in ((("2.3", "2.0"), 0, "within"), (("2.3", "2.2"), 1, "OUTSIDE"), (("1.9", "2.0"), 1, "OUTSIDE"),
                                  (("2.1", "NaN"), 1, "OUTSIDE")):
            result, rows = measured("compare_losses.py", *shape, **naive, flash_1=flash[0], flash_2=flash[1])
            assert result.returncode == code and f"loss is {word} the seeds' spread" in result.stdout, result
        assert [(r["attention"], r["ms"]) for r in rows] == [("naive", 34.5), ("flash", 34.5)], rows  # 3·3 … 3·20
        result, _ = measured("compare_losses.py", *shape, naive_1="2.0", naive_2="NaN", flash_1="2.0", flash_2="2.0")
        assert result.returncode == 1 and "OUTSIDE" in result.stdout, result
        ran = (tmp / "ran").read_text()
        assert "-e d12 -b 2 -t 16 -x 20 -v 20 -s 0 --seed 2 --precision fp32 --attention naive --device cuda" in ran, ran
        assert "--no-tf32" not in ran
        result, rows = measured("compare_losses.py", *shape, "--precision", "bf16", "--no-tf32", **naive, flash_1="2.05", flash_2="2.1")
        assert "--seed 1 --precision bf16 --attention flash --device cuda" in (last := (tmp / "ran").read_text()) and "--no-tf32" in last
        assert "of one seed they differ by 1.0e-01 at most" in result.stdout, result
        assert (rows[0]["loss"], rows[0]["loss_min"], rows[0]["loss_max"], rows[1]["loss"]) == (2.1, 2.0, 2.2, 2.075), rows

        (tmp / "gpus").unlink()
        result, _ = measured("compare_losses.py", *shape, "--gpus", "2", CUDA_VISIBLE_DEVICES="7,9")
        assert set((tmp / "gpus").read_text().split()) == {"7", "9"}, result  # each run on one of its own

        timed = ("--batch", "3", "--tokens", "16", "--steps", "12")
        ranks = ("--gpus", "1,2", *timed)
        for losses in {"ranks_2_1": "2.0021"}, {"ranks_2_0": "1.9979"}, {"ranks_2_0": "NaN"}, {"ranks_1_0": "2.003"}:
            result, rows = measured("scaling.py", *ranks, **losses)
            assert result.returncode == 1 and "differ by more than 1e-3: not timed" in result.stderr, (losses, result)
            assert {r["what"] for r in rows} == {"losses"} and "of linear" not in result.stdout, rows
        result, rows = measured("scaling.py", *ranks, CUDA_VISIBLE_DEVICES="7,9", ranks_2_1="2.0019", rate_on_7="960",
                                rate_on_9="800", rate_1_0="1000", rate_2_0="1900", rate_2_1="2200")
        ran = (tmp / "ran").read_text()
        assert "-t 16 -v 0 -s 0 --device cuda --gpus 2 --zero 1 -b 2 -d 64 -x 20 --precision fp32 --no-tf32" in ran, ran
        assert "--gpus 2 --zero 1 -b 3 -x 12 --precision bf16\n" in ran, ran
        assert result.returncode == 0 and [round(r["apart"], 6) for r in rows[:2]] == [0, 0.00095], (result, rows)
        speed = [[round(r[field], 3) for field in ("gpus", "zero", "tok_s", "ms", "ms_side_by_side", "of_linear", "gib")]
                 for r in rows[2:]]
        assert speed == [[1, 0, 1000, 48, 48, 1, 4], [2, 0, 1900, 50.526, 60, 0.95, 4], [2, 1, 2200, 43.636, 60, 1.1, 2]], speed
        # All GPUs of the machine: the slowest is the last.
        executable(tmp / "nvidia-smi", "#!/bin/sh\nfor i in 0 1 2 3; do echo \"GPU $i: it (UUID: GPU-1)\"; done\n")
        out = tmp / "all.jsonl"
        result = run("env", "-u", "CUDA_VISIBLE_DEVICES", sys.executable, tmp / "scripts" / "scaling.py", "--out", out, *timed,
                     PATH=f"{tmp}:{os.environ['PATH']}", rate_on_="1000", rate_on_0="960", rate_on_1="960", rate_on_2="960",
                     rate_on_3="800")
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(r["gpus"], r["zero"], round(r["ms_side_by_side"])) for r in found if r["what"] == "speed"] == [
            (1, 0, 48), (2, 0, 50), (2, 1, 50), (4, 0, 60), (4, 1, 60)], (result, found)
        write_rows(tmp, "scaling", [{**r, "dirty": False} for r in rows])
        table, _ = documents_with(tmp, "scaling")
        for line in ("| 1 | – | 1k | 100.0 % | 48.00 | 48.00 | 4.0 | – |", "| 2 | 0 | 2k | 95.0 % | 50.53 | 60.00 | 4.0 | 0e+00 |",
                     "| 2 | 1 | 2k | 110.0 % | 43.64 | 60.00 | 2.0 | 1e-03 |"):
            assert line in table, table


def test_ranks_are_compared_and_timed():
    built()
    with scratch() as tmp:
        text, out = tmp / "text.txt", tmp / "scaling.jsonl"
        text.write_text("".join(f"{i} ships sailed to port {i * 7 % 31}.\n" for i in range(300)))
        result = script("scaling.py", "--device", "cpu", "--model", "tiny", "--batch", "1", "--tokens", "16", "--steps", "12",
                        "--gpus", "1,2", "--data", text, "--out", out)
        assert result.returncode == 0 and "2 GPUs, --zero 1: losses of 20 steps" in result.stdout, result
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert [(r["what"], r["gpus"], r["zero"]) for r in rows] == [
            ("losses", 2, 0), ("losses", 2, 1), ("speed", 1, 0), ("speed", 2, 0), ("speed", 2, 1)], rows
        assert all(r["apart"] < 1e-4 for r in rows[:2]) and rows[2]["of_linear"] == 1 and rows[4]["tok_s"] > 0
        assert rows[2]["ms_side_by_side"] == rows[2]["ms"] and rows[3]["ms_side_by_side"] > 0
        assert rows[3]["gib"] > rows[4]["gib"] > 0, rows  # half the optimizer's state
        check_fails(script("scaling.py", "--device", "cpu", "--model", "tiny", "--gpus", "1", "--data", tmp / "none"),
                    "scaling.py: ./train_gpt2cu -e tiny", "ended with 1", f"{tmp / 'none'}: no such file")
        for bad in (("--gpus", "2,4"), ("--steps", "5")):
            result = script("scaling.py", *bad)
            assert result.returncode == 2 and bad[0] in result.stderr, result


def run_recipe(recipe, tmp, program, *arguments, **variables):
    """Runs a copy of the recipe where there is no data, with `program` as ./train_gpt2cu and a make of no effect."""
    (tmp / "scripts").mkdir(exist_ok=True)
    for file in (recipe, SCRIPTS / "longer_context.py", SCRIPTS / "results.py"):
        shutil.copy(file, tmp / "scripts")
    executable(tmp / "make", "#!/bin/sh\n")
    write_launcher(tmp / "torchrun", shown=tmp / "launched")
    write_launcher(tmp / "srun")
    executable(tmp / "scontrol", "#!/bin/sh\necho 127.0.0.1; echo elsewhere\n")
    if re.search("_(gpus|torchrun|slurm)", recipe.name):
        variables = {"CUDA_VISIBLE_DEVICES": "", "SLURM_SUBMIT_DIR": str(tmp), "SLURM_JOB_NODELIST": "[1-2]",
                     "SLURM_JOB_ID": "7", **variables}
    (tmp / "train_gpt2cu").unlink(missing_ok=True)
    (tmp / "train_gpt2cu").symlink_to(program)
    return run(tmp / "scripts" / recipe.name, *arguments, cwd="/", PATH=f"{tmp}:{os.environ['PATH']}", **variables)


def long_context_start(path):
    """A checkpoint of one layer and one head, its position embeddings numbered."""
    max_T, V, Vp, C = 1024, 50257, 50304, 64
    block = 12 * C * C + 13 * C
    values = [0.0] * (Vp * C) + [float(i) for i in range(max_T * C)] + [1.0] * (block + 2 * C)
    path.write_bytes(struct.pack("<256i", 20240326, 3, max_T, V, 1, 1, C, Vp, *[0] * 248) +
                     struct.pack(f"<{len(values)}f", *values))


def test_recipes_use_options_that_exist():
    known = set(re.findall(r"(?<=[ ,])-{1,2}[a-z][a-z0-9-]*", run(built(), "--help").stdout))
    for recipe in RECIPES:
        command = re.search(r"^exec .*?\./train_gpt2cu(.*)", recipe.read_text(), flags=re.S | re.M)[1]
        used = set(re.findall(r"(?<=\s)-{1,2}[a-z][a-z-]*", command))
        assert len(used) > 10 and used <= known, (recipe.name, used - known)


def test_recipes_pass_the_trainers_checks():
    """They fail at the missing data and nowhere before it, whatever B: sizes, steps and options are accepted."""
    for recipe in RECIPES:
        for batch in ("", "4"):
            with scratch() as tmp:
                arguments = []
                if "long" in recipe.name:
                    long_context_start(tmp / "model.bin")
                    arguments = [tmp / "model.bin"]
                result = run_recipe(recipe, tmp, built(), *arguments, B=batch)
                assert result.returncode == 1 and "data/cache/fineweb" in result.stderr, (recipe.name, batch, result)
                assert "data/prepare.py" in result.stderr, result.stderr


# Data, T, tokens a step, steps, learning rate, its warm-up and end: those of llm.c's recipes, and for long contexts ours.
SETTINGS = {"124M": "d12 fineweb10B 1024 524288 19073 6e-4 700 0", "350M": "d24 fineweb100B 1024 524288 60000 3e-4 700 0",
            "774M": "d36 fineweb100B 1024 524288 30000 2.5e-4 700 0",
            "1558M": "d48 fineweb100B 1024 1048576 32000 6e-4 700 0.1",
            "context": "log_long_context/start.bin fineweb10B 16384 524288 1000 1e-4 100 0",
            "context_gpus": "log_long_context_gpus/start.bin fineweb10B 262144 524288 500 1e-4 50 0"}


def test_recipes_settings():
    with scratch() as tmp:
        executable(tmp / "show", '#!/bin/sh\necho "<$*>"\n')
        (tmp / "scripts").mkdir()
        long_context_start(tmp / "model.bin")
        for recipe in RECIPES:
            is_long = "long" in recipe.name
            result = run_recipe(recipe, tmp, tmp / "show", *([tmp / "model.bin"] if is_long else ["--seed", "5"]), B="2")
            assert result.returncode == 0, result
            words = re.search("<(.*)>", result.stdout)[1].split()
            given = dict(zip(words, words[1:]))
            name = re.sub("_(gpus|torchrun|slurm)", "", recipe.stem) if not is_long else recipe.stem
            expected = SETTINGS[re.search("(context_gpus|context|[0-9]+M)$", name)[1]].split()
            found = [given["-e"], given["-i"].split("/")[2], *(given[option] for option in ("-t", "-d", "-x", "-l", "-u", "-q"))]
            assert found == expected and (given["-c"], given["-k"], given["-nk"], given["-y"]) == ("0.1", "cosine", "2", "1"), words
            assert given["-j"] == given["-i"].replace("train", "val") and given["--tokenizer"].split("/")[2] == expected[1]
            per_validation = int(given["-m"]) * int(given["-b"]) * int(given["-t"])
            assert per_validation in ((64 * 16384, 4 * 262144) if is_long else (10240 * 1024,)), words
            assert given["-b"] == ("1" if is_long and "gpus" in recipe.name else "2") and (is_long or given["--seed"] == "5")
            gpus = ("4", "4" if is_long else None) if "gpus" in recipe.name else (None, None)
            assert (given.get("--gpus"), given.get("--context-parallel")) == gpus, words
            assert int(given["-s"]) % 1000 == 0 and int(given.get("-g", 1)) < int(given["-t"]), words  # samples: seldom, short
            assert int(given["-n"]) in (100, 1000) and int(given["-v"]) == (100 if is_long else 250), words


def test_recipe_of_several_machines():
    with scratch() as tmp:
        executable(tmp / "true.sh", "#!/bin/sh\n")
        launched = {}
        recipe = SCRIPTS / "run_gpt2_350M_torchrun.sh"
        for variables in {}, {"NODES": "3", "NODE": "2", "GPUS": "5", "MASTER": "first", "PORT": "123"}:
            result = run_recipe(recipe, tmp, tmp / "true.sh", **variables)
            assert result.returncode == 0, result
            words = (tmp / "launched").read_text().split()
            launched = dict(zip(words, words[1:]))
            assert [launched[f"--{name}"] for name in ("nnodes", "node-rank", "nproc-per-node", "master-addr", "master-port")] == (
                ["3", "2", "5", "first", "123"] if variables else ["1", "0", "8", "127.0.0.1", "29500"]), words


def test_recipes_arithmetic():
    """Steps and tokens a step in the command are those of the comment, and their product is what it says."""
    for recipe in RECIPES:
        text = recipe.read_text()
        steps, per_step, tokens = re.search(r"tokens +([\d ]+) steps · ([\d ]+) tokens = ([\d.e]+)", text).groups()
        steps, per_step = (int(n.replace(" ", "")) for n in (steps, per_step))
        assert f"-d {per_step} " in text and f"-x {steps} " in text, recipe.name
        assert abs(steps * per_step / float(tokens) - 1) < 0.005, recipe.name
        N, L, C, T = (int(n.replace(" ", "")) for n in re.search(
            r"= 6·([\d ]+) \+ 6·([\d ]+)·([\d ]+)·([\d ]+) = ", text).groups())
        flops, total = re.search(r"([\d.e]+) a token; +([\d.e]+) in all", text).groups()
        assert abs((6 * N + 6 * L * C * T) / float(flops) - 1) < 0.005, recipe.name
        assert abs(steps * per_step * float(flops) / float(total) - 1) < 0.01, recipe.name
        rate = int(re.search(r"([\d ]+) tokens/s", text)[1].replace(" ", ""))
        time, unit = re.search(r"time +([\d.]+) (\w+)", text).groups()
        seconds = float(time) * {"minutes": 60, "hours": 3600, "days": 86400}[unit]
        assert abs(steps * per_step / rate / seconds - 1) < 0.02, recipe.name
        mfu, gpus = re.search(r"which is (\d+) % of (?:an|the (\d+) · 989)", text).groups()
        assert abs(rate * float(flops) / (int(gpus or 1) * 989e12) - int(mfu) / 100) < 0.01, recipe.name
        for n, hours in re.findall(r"^#   (\d) GPUs +([\d.]+) hours, [\d.]+ GiB each", text, re.M):
            expected = steps * per_step / (rate / int(gpus or 1) * int(n) * 0.96) / 3600
            assert abs(expected - float(hours)) < max(0.051, 0.01 * expected), (recipe.name, n, expected)
        assert "long" in recipe.name or gpus or re.findall(r"^#   (\d) GPUs", text, re.M) == ["4", "8"], recipe.name


def test_recipes_are_what_was_measured():
    """Where an H200's step has been measured as the recipe runs it, rate and memory are not far from that."""
    rows = [json.loads(line) for line in (ROOT / "dev/results/NVIDIA-H200/train.jsonl").read_text().splitlines()]
    measured = {(row["model"], row["B"], row["T"]): row for row in rows if row["kernel"] == "train_gpt2cu" and
                (row["dtype"], row["attention"], row.get("recompute"), row["gpus"]) == ("bf16", "flash", 1, 1)}
    compared = 0
    for name, model, T in (("124M", "d12", 1024), ("350M", "d24", 1024), ("1558M", "d48", 1024),
                           ("long_context", "d12", 16384)):
        text = next(recipe for recipe in RECIPES if recipe.stem.endswith(name)).read_text()
        rate = int(re.search(r"([\d ]+) tokens/s", text)[1].replace(" ", ""))
        for (other, B, other_T), row in measured.items():
            if (other, other_T) == (model, T) and B in (1, 16, 64):
                assert abs(rate / row["tok_s"] - 1) < 0.2, (name, row)
            at = re.search(rf"([\d.]+)(?: GiB of tensors)? at B={B}\b|B={B} scripts\S+ needs ([\d.]+)", text)
            if (other, other_T) == (model, T) and at:
                assert 0 < row["mem_gib"] - float(at[1] or at[2]) < 1.5, (name, row)  # the row's is the whole device's
                compared += 1
    assert compared >= 5, compared


def test_long_context_repeats_the_position_embeddings():
    with scratch() as tmp:
        long_context_start(tmp / "model.bin")
        executable(tmp / "true.sh", "#!/bin/sh\n")
        recipe = SCRIPTS / "run_long_context.sh"
        result = run_recipe(recipe, tmp, tmp / "true.sh", tmp / "model.bin")
        assert result.returncode == 0, result.stderr
        old, new = (tmp / "model.bin").read_bytes(), (tmp / "log_long_context" / "start.bin").read_bytes()
        wpe, size = 1024 + 50304 * 64 * 4, 1024 * 64 * 4
        assert struct.unpack_from("<8i", new) == (20240326, 3, 16384, 50257, 1, 1, 64, 50304)
        assert new[32:wpe] == old[32:wpe] and new[wpe:wpe + 16 * size] == 16 * old[wpe:wpe + size]
        assert new[wpe + 16 * size:] == old[wpe + size:]
        result = script("longer_context.py", tmp / "model.bin", tmp / "same.bin", "1024")
        assert result.returncode == 0 and (tmp / "same.bin").read_bytes() == old, result
        again = run_recipe(recipe, tmp, tmp / "true.sh", tmp / "nowhere.bin")  # one that goes on needs no other start
        assert again.returncode == 0 and (tmp / "log_long_context" / "start.bin").read_bytes() == new, again
        shutil.rmtree(tmp / "log_long_context")
        result = run_recipe(recipe, tmp, tmp / "true.sh", tmp / "nowhere.bin")
        assert result.returncode == 1 and "nowhere.bin" in result.stderr and "checkpoint" in result.stderr, result


def test_longer_context_of_both_types():
    """fp32 and bf16, to a number of positions that is no multiple of what there is."""
    with scratch() as tmp:
        for version, size in (3, 4), (5, 2):
            Vp, C, parts = 128, 2, []
            for n in Vp * C, 3 * C, 12 * C * C + 13 * C + 2 * C:
                parts.append(os.urandom(n * size))
            header = [20240326, version, 3, 5, 1, 1, C, Vp, *[0] * 248]
            (tmp / "a.bin").write_bytes(struct.pack("<256i", *header) + b"".join(parts))
            result = script("longer_context.py", tmp / "a.bin", tmp / "b.bin", "7")
            assert result.returncode == 0, result
            header[2], wpe = 7, parts[1]
            assert (tmp / "b.bin").read_bytes() == struct.pack("<256i", *header) + parts[0] + (wpe * 3)[:7 * C * size] + parts[2]


def test_long_context_of_bad_checkpoints():
    with scratch() as tmp:
        long_context_start(tmp / "model.bin")
        (tmp / "short.bin").write_bytes((tmp / "model.bin").read_bytes()[:300])
        (tmp / "text.bin").write_bytes(b"GPT-2" * 1000)
        command = [sys.executable, SCRIPTS / "longer_context.py", tmp / "model.bin", tmp / "out.bin", "2048"]
        for result, *says in (
                (script("longer_context.py", tmp / "short.bin", tmp / "out.bin", "2048"), "short.bin: not a whole", "300 bytes"),
                (script("longer_context.py", tmp / "text.bin", tmp / "out.bin", "2048"), "text.bin: not a whole"),
                (script("longer_context.py", tmp / "model.bin", tmp / "out.bin", "1000"), "at least the 1024 positions"),
                (script("longer_context.py", tmp / "model.bin", tmp / "none" / "out.bin", "2048"), "none/out.bin: cannot write"),
                (run("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command), "out.bin: cannot write", "too large")):
            check_fails(result, *says)
        assert not list(tmp.glob("out.bin*"))


def test_runner_of_the_tests():
    """dev/run_tests.sh with few cores and with many: what it counts, and that Ctrl-C leaves nothing behind."""
    programs = {"good": "#!/bin/sh\necho 3 passed, 0 failed, 1 skipped\n",
                "bad": "#!/bin/sh\necho 1 passed, 2 failed, 0 skipped; exit 1\n",
                "dies": "#!/bin/sh\necho boom; exit 139\n",
                "lies": "#!/bin/sh\necho 3 passed, 0 failed, 0 skipped; exit 3\n",
                "gpu": "#!/bin/sh\necho 5 passed, 0 failed, 0 skipped\n", "gpu.cu": "",
                "python.py": "import signal\nassert signal.getsignal(signal.SIGINT) != signal.SIG_IGN, 'deaf to Ctrl-C'\n"
                             "print('2 passed, 0 failed, 0 skipped')\n",
                "test_program": "#!/bin/sh\necho 1 passed, 0 failed, 0 skipped\n",
                "slow.py": "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(60)\n",
                "hangs": "#!/bin/sh\nsleep 60 & echo $! >pid; wait\n",
                "leaves": "#!/bin/sh\nsleep 60 >/dev/null 2>&1 & echo $! >pid\necho 1 passed, 0 failed, 0 skipped\n"}
    with scratch() as tmp:
        for name, text in programs.items():
            executable(tmp / name, text)
        runner, few = ROOT / "dev" / "run_tests.sh", ["good", "bad", "dies", "lies", "gpu", "./test_program", "python.py"]
        # What has a .cu file and the program as a whole first, the others beside them.
        many = ["gpu", "./test_program", "good", "bad", "dies", "lies", "python.py"]
        for cores, order in (2, few), (16, many):
            executable(tmp / "nproc", f"#!/bin/sh\necho {cores}\n")
            path = {"PATH": f"{tmp}:{os.environ['PATH']}"}
            result = run(runner, "true", *few, cwd=tmp, **path)
            assert result.returncode == 1 and result.stdout.splitlines()[-1] == "13 passed, 4 failed, 1 skipped", result
            assert [line[3:] for line in result.stdout.splitlines() if line.startswith("== ")][:7] == order, result.stdout
            assert run(runner, "true", "good", "python.py", cwd=tmp, **path).returncode == 0

            interrupt_and_wait(runner, "true", "slow.py", pid=tmp / "pid", cwd=tmp, **path)
        (tmp / "tools").mkdir()  # all but python3
        for name in ("sh", "dirname", "nproc", "mktemp", "mkdir", "rm", "basename", "timeout", "env", "touch", "cat", "tail", "sed", "true"):
            (tmp / "tools" / name).symlink_to(shutil.which(name))
        result = run(runner, "true", "good", "python.py", cwd=tmp, PATH=str(tmp / "tools"))
        assert result.returncode == 0 and result.stdout.splitlines()[-1] == "4 passed, 0 failed, 2 skipped", result
        result = run(runner, "true", "hangs", cwd=tmp, TEST_LIMIT="1", TEST_PATIENCE="2")
        assert "./hangs: no end after 2 s" in result.stdout, result
        for programs, archs, *says in ((["hangs", "good"], "true", "./hangs: no end after 1 s", "4 passed, 1 failed, 1"),
                                       (["leaves"], "sleep 60", "sleep 60: no end after 1 s", "1 passed, 1 failed, 0")):
            result = run(runner, archs, *programs, cwd=tmp, TEST_LIMIT="1")
            assert result.returncode == 1 and all(part in result.stdout for part in says), result
            wait_for(lambda: not runs((tmp / "pid").read_text().strip()), 5)


def test_tests_have_limits_and_names():
    """Of dev/test.h, by a program that uses it, and of dev/harness.py: a limit that is hit, and a name that no test has."""
    with scratch() as tmp:
        (tmp / "some.py").write_text("import time\nimport harness\n\n\ndef test_quick():\n    pass\n\n\ndef test_slow():\n"
                                     "    time.sleep(9)\n\n\nharness.main()\n")
        for program in [sys.executable, tmp / "some.py"], [built("dev/test_job")]:
            result = run(*program, PYTHONPATH=str(ROOT / "dev"), TEST_PATIENCE="0.0001")
            assert result.returncode == 1 and "no end after 0.012 s" in result.stdout, result
            assert re.search(r"\nFAIL \w+[: ].*\n[1-9] passed, 1 failed, 0 skipped\n$", result.stdout, re.S), result
            result = run(*program, "nonsense", PYTHONPATH=str(ROOT / "dev"))
            assert result.returncode == 1 and 'no test has "nonsense"' in result.stdout, result
            assert result.stdout.endswith("0 passed, 1 failed, 0 skipped\n"), result


def test_measuring_in_parts():
    """scripts/measure.sh with stand-ins for all that it runs: what runs, and that one which fails or hangs is named, that
    the others run all the same, and that no table is written then."""
    with scratch() as tmp:
        for path in (SCRIPTS / "measure.sh", ROOT / "dev" / "within.sh"):
            (tmp / path.parent.name).mkdir(exist_ok=True)
            shutil.copy(path, tmp / path.parent.name)
        stand_in = ('#!/bin/sh\necho "$(basename "$0") $*" >>ran\necho "$RUN" >>runs\n'
                    'case "$(basename "$0") $*" in $BAD) exit 3 ;; $SLOW) sleep 60 & echo $! >pid; wait ;; esac\n')
        for name in ("accuracy", "study_accumulation", "study_ring", "bench_attention", "bench_layers", "bench_ring",
                     "bench_train", "test_attention", "test_layers", "test_gpt2"):
            executable(tmp / "dev" / name, stand_in)
        executable(tmp / "python3", stand_in)
        executable(tmp / "make", "#!/bin/sh\n")

        def measure(*parts, gpus=1, **variables):
            executable(tmp / "nvidia-smi", "#!/bin/sh\n" + gpus * "echo GPU 0: it\n")
            for name in ("ran", "runs"):
                (tmp / name).unlink(missing_ok=True)
            result = run(tmp / "scripts" / "measure.sh", *parts, PATH=f"{tmp}:{os.environ['PATH']}", **variables)
            ran = [line for line in (tmp / "ran").read_text().splitlines() if line != "python3 -c import torch"]
            assert len(set((tmp / "runs").read_text().split())) == 1 or variables or not ran  # one run: RUN
            return result, ran
        result, ran = measure()
        assert result.returncode == 0 and "one GPU" in result.stdout, result
        assert ran[:3] == ["test_attention ", "test_layers ", "test_gpt2 "] and ran[-1] == "python3 scripts/readme_tables.py"
        plots = ["python3 scripts/plot_results.py"]
        assert ran[-2:-1] == plots and [line for line in ran if "compare_torch" in line] == [
            "python3 scripts/compare_torch.py --json", "python3 scripts/compare_torch.py --json --precision bf16"]
        measured = [line for line in ran[3:-2] if not re.search("default_run|--json( |$)", line)]
        assert not measured and len(ran) == 3 + 19 + 2, ran
        _, ran = measure("--no-tests", "ring", "scaling", gpus=4)
        assert ran[:5] == ["study_ring --json", "bench_ring --json --gpus 4 --heads 12 --hs 64",
                           "bench_ring --json --gpus 4 --heads 32 --hs 128", "python3 scripts/trace_ring.py --json --gpus 4",
                           "python3 scripts/scaling.py --json"] and ran[5:] == plots + ["python3 scripts/readme_tables.py"]
        result, ran = measure("--no-tests", "accuracy", "study", "layers", BAD="accuracy*64", SLOW="study_accum*", PART_LIMIT="1")
        assert result.returncode == 1 and "failed: accuracy study; no table is written" in result.stderr, result
        assert "--part study: no end after 1 s" in result.stdout, result
        assert ran == ["accuracy --json --hs 64", "study_accumulation --json", "bench_layers --json"], ran
        wait_for(lambda: not runs((tmp / "pid").read_text().strip()), 5)
        result, ran = measure("--no-tests", "fp32", "torch", "train", BAD="*import?torch")
        assert result.returncode == 0 and "no PyTorch" in result.stdout, result
        assert [line.split(" --")[0] for line in ran[:6]] == ["bench_attention"] * 2 + ["bench_train"] * 4, ran
        result, ran = measure("layers", "layer")
        assert result.returncode == 2 and "layer: expected" in result.stderr and not ran, (result, ran)
        result, ran = measure("layers", BAD="test_layers*")
        assert result.returncode != 0 and ran == ["test_attention ", "test_layers "], (result, ran)


def test_sanitizer_of_the_kernels():
    """scripts/sanitize.sh with a stand-in for compute-sanitizer: what it runs, its exit code, and Ctrl-C."""
    with scratch() as tmp:
        (tmp / "scripts").mkdir()
        sanitize = shutil.copy(SCRIPTS / "sanitize.sh", tmp / "scripts")
        executable(tmp / "make", "#!/bin/sh\n")
        executable(tmp / "compute-sanitizer", '#!/bin/sh\necho "$2 $6" >>ran\necho "========= ERROR SUMMARY: 0 errors"\n'
                   'case "$2 $6" in "synccheck bad"*) exit 1 ;; *slow) printf "$$ " >pid; exec sleep 60 ;; esac\n')
        path = {"PATH": f"{tmp}:{os.environ['PATH']}"}
        result = run(sanitize, **path)
        ran = (tmp / "ran").read_text().splitlines()
        assert result.returncode == 0 and result.stdout.count("\n") == len(ran) == 26, (result, ran)
        assert "racecheck flash_fp16x3 fp32 few blocks" in ran and "memcheck flash_fp16x3 fp32 block" in ran, ran
        result = run(sanitize, "good", "bad one", **path)
        assert result.returncode == 1 and "synccheck  bad one: FAILED" in result.stdout, result
        assert result.stdout.count("0 errors") == 8 and result.stdout.count("FAILED") == 1, result
        interrupt_and_wait(sanitize, "slow", pid=tmp / "pid", cwd=tmp, **path)


def interrupt_and_wait(*command, pid, cwd, **variables):
    """Ctrl-C once a process has written its number to the file `pid`, and then waits until there is no such process."""
    pid.unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
                               start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_for(lambda: pid.exists() and pid.read_text().endswith(" "))
    os.killpg(process.pid, signal.SIGINT)
    process.wait(30)
    wait_for(lambda: not runs(pid.read_text().strip()))


def runs(pid):
    try:  # a zombie that nobody has buried yet does not
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing for so long"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
