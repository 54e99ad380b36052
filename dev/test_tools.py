#!/usr/bin/env python3
"""Tests of the scripts and of the Makefile's probe: plots, TensorBoard files, README's tables, training recipes.

    make train_gpt2cu && python3 dev/test_tools.py
"""
import ast
import calendar
import contextlib
import io
import json
import math
import os
import pathlib
import re
import runpy
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace
from unittest import mock

from harness import Skip, main, need, write_launcher

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
RECIPES = sorted(SCRIPTS.glob("run_*.sh"))
OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "B", "GPUS", "COMMIT", "TREE", "RUN")  # make's, a user's
sys.path += [str(SCRIPTS), str(ROOT / "dev")]


@contextlib.contextmanager
def scratch(*copied):
    """A folder, with a copy of scripts/ if that is asked for."""
    with tempfile.TemporaryDirectory() as folder:
        for name in copied:
            shutil.copytree(ROOT / name, pathlib.Path(folder, name))
        try:
            yield pathlib.Path(folder)
        except SystemExit as e:  # of a script's function: it fails one test, not all
            raise AssertionError(e) from e


def run(*command, cwd=ROOT, **variables):
    env = {k: v for k, v in os.environ.items() if k not in OUTER}
    return subprocess.run([str(c) for c in command], cwd=cwd, env={**env, **variables}, capture_output=True, text=True)


def script(name, *arguments, root=ROOT, **options):
    return run(sys.executable, root / "scripts" / name, *arguments, **options)


def called(name, *arguments, modules=(), cwd=ROOT):
    """Like script(), in this process: with `modules` in place of what is installed; None stands for a missing one."""
    out, err, code, here = io.StringIO(), io.StringIO(), 0, os.getcwd()
    argv = [str(SCRIPTS / name), *map(str, arguments)]
    os.chdir(cwd)
    with mock.patch.object(sys, "argv", argv), mock.patch.object(sys, "path", sys.path[:]), \
            mock.patch.dict(sys.modules, modules) if modules else contextlib.nullcontext(), \
            contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as e:
            code = e.code or 0
            if isinstance(code, str):
                print(code, file=err)
                code = 1
        finally:
            os.chdir(here)
    return subprocess.CompletedProcess(argv, code, out.getvalue(), err.getvalue())


def built(program="train_gpt2cu"):
    if not (ROOT / program).exists():
        raise Skip(f"there is no ./{program}: make {program}")
    return ROOT / program


def executable(path, text):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def before_others(tmp):
    return {"PATH": f"{tmp}:{os.environ['PATH']}"}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_log(folder, steps=100, floor=1.1, mfu=40.0):
    """A log such as ./train_gpt2cu -o writes. Its first row says the floor, or its validations do."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "run", "device": "NVIDIA H200", "tokens_per_step": 8192, "steps": steps, "B": 8, "T": 1024,
             "floor_nats": None if steps >= 50 else floor, "precision": "bf16"}]
    for step in range(1, steps + 1):
        rows.append({"kind": "train", "step": step, "loss_nats": 2 + 9 * math.exp(-step / 10), "grad_norm": 1.0 + step,
                     "lr": step * 1e-5, "step_ms": 20.0, "tokens_per_s": 2e5 + step, "mfu_percent": mfu and mfu + step})
        if step % 50 == 0:
            rows.append({"kind": "val", "step": step, "loss_nats": 2 + 25 / step, "floor_nats": floor})
            rows.append({"kind": "sample", "step": step, "text": "Once\nupon a time"})
            rows.append({"kind": "hellaswag", "step": step, "correct": 30, "examples": 40})
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def check_fails(result, *parts, code=1):
    assert result.returncode == code and (code != 1 or result.stderr.count("\n") == 1), result
    check_in_order(result.stderr, *parts)


def check_in_order(text, *parts):
    """Each part stands in the text, behind the one before it. A line's end counts as a space."""
    text, at = text.replace("\n", " "), 0
    for part in map(str, parts):
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)


@contextlib.contextmanager
def refused(*parts, error=SystemExit):
    try:
        yield
    except error as e:
        check_in_order(str(e), *parts)
    else:
        raise AssertionError(f"accepted, not refused: {parts}")


# ----------------------------------------------------------------------------------------------------------------------
# Logs, plots, TensorBoard

def drawing():
    """Stands for matplotlib, which need not be installed: the modules that are imported, pyplot, and the panels of a
    figure by name or by row and column. They keep what is called."""
    matplotlib, panels = mock.MagicMock(), {}
    figure, plt = matplotlib.figure, matplotlib.pyplot

    def axes(name):
        panels[name] = mock.MagicMock()
        panels[name].get_ylim.return_value = 0.5, 2.0
        return panels[name]

    def subplots(rows=1, columns=1, squeeze=True, **_):
        grid = [[axes(f"{r}{c}") for c in range(columns)] for r in range(rows)]
        flat = sum(grid, [])
        return figure, grid if not squeeze else flat if flat[1:] else flat[0]
    plt.figure.return_value, plt.subplots.side_effect = figure, subplots
    figure.subplot_mosaic.side_effect = lambda rows: {name: axes(name) for name in dict.fromkeys(sum(rows, []))}
    figure.savefig.side_effect = lambda path, **_: path.write_text("drawn")
    names = ("matplotlib", "matplotlib.pyplot", "matplotlib.ticker")
    return dict(zip(names, (matplotlib, plt, matplotlib.ticker))), plt, panels


def args(method):
    """The positional arguments of each call, ranges and tuples as lists."""
    return [[list(arg) if isinstance(arg, (range, tuple)) else arg for arg in call.args]
            for call in method.call_args_list]


def options(method, name):
    return [call.kwargs[name] for call in method.call_args_list if name in call.kwargs]


def test_smoothing():
    from plot import smooth
    assert smooth([1, 2, 3, 4], 1) == [1, 2, 3, 4]
    assert smooth([1, 5, 3, 4, 5], 2) == [1, 3, 4, 4, 4.5]
    assert smooth([math.nan, 2, math.nan, 4], 2)[1:] == [2, 3, 4]
    assert math.isnan(smooth([math.nan], 5)[0])


def test_plot_of_runs():
    """By the stand-in: where the plot goes, what stands in it, what the options do, and whose names it has."""
    with scratch() as tmp:
        one, two = write_log(tmp / "one", steps=300), write_log(tmp / "two", steps=40, floor=1.2)

        def plotted(*arguments):
            modules, plt, panels = drawing()
            result = called("plot.py", *arguments, modules=modules)
            assert result.returncode == 0 and pathlib.Path(result.stdout.strip()).read_text() == "drawn", result
            return result.stdout.strip(), plt, panels
        path, plt, panels = plotted(one, two / "log.jsonl", "--title", "Two")
        assert path == str(one / "plot.png") and options(plt.figure().savefig, "format") == ["png"]
        loss, mfu = panels["loss"], panels["mfu"]
        steps, losses = args(loss.plot)[0]
        assert steps == list(range(1, 301)) and losses[9] == 2 + 9 * math.exp(-1)
        smoothed = args(loss.plot)[1][1]  # three steps: a hundredth
        assert abs(smoothed[9] - sum(losses[8:11]) / 3) < 1e-12 and smoothed[0] == losses[0]
        assert args(loss.plot)[2] == [list(range(50, 301, 50)), [2 + 25 / step for step in range(50, 301, 50)]]
        for name, start in ("norm", 1.0), ("speed", 2e5), ("mfu", 40.0):
            assert args(panels[name].plot)[1][1][1] == start + 2, name  # of steps 1 to 3
            assert abs(args(panels[name].set_ylim)[0][1] / (1.1 * (start + 299.5)) - 1) < 1e-6, name
        assert args(panels["lr"].plot)[0][1] == [i * 1e-5 for i in range(1, 301)]
        assert args(loss.axhline) == [[1.1], [1.2]] and args(loss.annotate)[0][0] == "floor 1.1000"
        low, high = args(loss.set_ylim)[0]
        assert high < 10 and abs(low - (1.1 - 0.1 * (high - 1.1) / 1.1)) < 1e-9  # the first twentieth may be above
        assert options(plt.Line2D, "label") == ["one, validation 2.0833", "two", "training, mean of 3 steps",
                                                "training, each step", "validation"]
        assert [args(axes.set_title) for axes in panels.values()] == [
            [["Loss"]], [["Gradient norm"]], [["Learning rate"]], [["Tokens per second"]], [["MFU, %"]]]
        assert args(plt.figure().suptitle) == [["Two"]] and not mfu.text.called
        _, plt, panels = plotted(two, one, "--smooth", "7", "-o", tmp / "out.svg")
        assert "training, mean of 7 steps" in options(plt.Line2D, "label") and not (two / "plot.png").exists()
        assert options(plt.figure().savefig, "format") == ["svg"] and not plt.figure().suptitle.called
        _, _, panels = plotted(write_log(tmp / "short", steps=40, floor=None, mfu=None))
        assert len(args(panels["loss"].plot)) == 1 and not panels["loss"].axhline.called  # too short to be smoothed
        assert args(panels["mfu"].text)[0][2] == "n/a: no peak is known for this GPU"
        for out, what in ("out.gif", ".png"), ("no/such/out.png", "cannot write: No such file"):
            check_fails(called("plot.py", one, "-o", tmp / out, modules=drawing()[0]), out, what)


def test_plots_by_matplotlib():
    """Formats, several runs, and logs that are shorter than what is smoothed."""
    need("matplotlib")
    with scratch() as tmp:
        a, b = write_log(tmp / "a"), write_log(tmp / "b", steps=250, floor=None, mfu=None)
        for suffix, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
            result = called("plot.py", a, b / "log.jsonl", "-o", tmp / f"out.{suffix}", "--title", "two runs")
            assert result.returncode == 0 and (tmp / f"out.{suffix}").read_bytes().startswith(start), result
        result = script("plot.py", b)
        assert result.returncode == 0 and (b / "plot.png").stat().st_size > 10000, result
        for steps in 1, 2:
            result = called("plot.py", write_log(tmp / str(steps), steps), "--smooth", "50")
            assert result.returncode == 0, result


def test_full_disk_leaves_what_was_there():
    """A limit on the size of files stands for the disk."""
    need("matplotlib", "tensorboard.backend")
    with scratch() as tmp:
        log = write_log(tmp / "run", steps=400)
        for name, *to in (("plot.py", "-o", tmp / "out.png"), ("plot.py", "-o", tmp / "out.svg"), ("tensorboard.py",)):
            made = script(name, log, *to)
            assert made.returncode == 0, made.stderr
            before = {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()}
            full = run("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, SCRIPTS / name, log, *to)
            check_fails(full, made.stdout.strip(), "cannot write: File too large")
            assert {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()} == before


def test_logs_that_cannot_be_read():
    good = ('{"kind": "train", "step": 1, "loss_nats": 2.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 9, '
            '"mfu_percent": null}\n')
    from results import read_log
    with scratch() as tmp:
        path = tmp / "log.jsonl"
        for bad, what in (("{oops\n", "expected a JSON object"), ("[1]\n", "expected a JSON object"),
                          ('{"step": 2}\n', '"kind"'), ('{"kind": "train", "step": 2}\n', '"loss_nats"'),
                          (good.replace("2.0", '"2.0"'), '"loss_nats" is \'2.0\'')):
            path.write_text(good + bad + good)
            with refused(f"{path}:2: ", what):
                read_log(tmp)
        path.write_text('{"kind": "val", "step": 0, "loss_nats": 2.0}\n')  # alone it is enough
        assert read_log(tmp)["val"][0]["loss_nats"] == 2
        path.write_text(good + '{"kind": "tra')  # a row that is being written
        rows = read_log(path)["train"]
        assert len(rows) == 1 and math.isnan(rows[0]["mfu_percent"])
        path.write_text("")
        for name, modules in ("plot.py", drawing()[0]), ("tensorboard.py", tensorboard_stand_in()):
            check_fails(called(name, tmp, modules=modules), f"{name}: {path}", "no steps yet")
            check_fails(called(name, tmp / "nowhere", modules=modules), "nowhere", "cannot be read")


def tensorboard_stand_in():
    """For the package: it writes events as JSON."""
    class Event(dict):
        def SerializeToString(self):
            return json.dumps(self).encode()

    class Summary(dict):
        Value = dict
    it = SimpleNamespace(Event=Event, Summary=Summary, create_summary_metadata=lambda *_: "", make_tensor_proto=str,
                         RecordWriter=lambda file: SimpleNamespace(write=lambda data: file.write(data + b"\n")))
    return {f"tensorboard.{name}": it for name in (
        "compat.proto.summary_pb2", "compat.proto.event_pb2", "plugins.text.metadata", "util.tensor_util",
        "summary.writer.record_writer")}


def events_of_stand_in(folder):
    """What events say: tag → (step, value), and when the losses were."""
    (path,) = folder.iterdir()
    found, times = {}, []
    for e in rows_of(path)[1:]:
        for value in e["summary"]["value"]:
            found.setdefault(value["tag"], []).append((e["step"], value.get("simple_value", value.get("tensor"))))
            times += [e["wall_time"]] if value["tag"] == "loss/train" else []
    return found, times


def events_of_package(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    (path,) = folder.iterdir()
    events = EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    for tag in events.Tags()["tensors"]:
        texts = [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(tag)]
        found[tag.removesuffix("/text_summary")] = texts
    return found, [e.wall_time for e in events.Scalars("loss/train")]


def check_tensorboard_files(modules, events_of):
    with scratch() as tmp:
        log, other = write_log(tmp / "a"), write_log(tmp / "none", mfu=None, floor=None)
        (log / "tensorboard").mkdir()
        (log / "tensorboard" / "events.out.tfevents.1.earlier.1").touch()  # is replaced
        result = called("tensorboard.py", log, other / "log.jsonl", modules=modules)
        assert result.returncode == 0 and result.stdout == f"{log / 'tensorboard'}\n{other / 'tensorboard'}\n", result
        found, times = events_of(log / "tensorboard")
        steps = range(1, 101)
        expected = {"loss/train": [(step, 2 + 9 * math.exp(-step / 10)) for step in steps],
                    "train/grad_norm": [(step, 1.0 + step) for step in steps],
                    "train/lr": [(step, step * 1e-5) for step in steps],
                    "speed/tokens_per_s": [(step, 2e5 + step) for step in steps],
                    "speed/mfu_percent": [(step, 40.0 + step) for step in steps],
                    "loss/val": [(50, 2.5), (100, 2.25)], "loss/floor": [(50, 1.1), (100, 1.1)],
                    "hellaswag": [(50, 0.75), (100, 0.75)]}
        text = "    Once\n    upon a time"
        assert found["sample"] == [(50, text), (100, text)] and set(found) == {*expected, "sample"}
        for tag, values in expected.items():
            assert [step for step, _ in found[tag]] == [step for step, _ in values], tag
            assert all(abs(a / b - 1) < 1e-6 for (_, a), (_, b) in zip(found[tag], values)), tag  # in fp32
        assert abs(times[-1] - times[0] - 99 * 0.020) < 1e-3 and abs(times[-1] - os.path.getmtime(log / "log.jsonl")) < 1e-3
        tags = events_of(other / "tensorboard")[0]
        assert "loss/val" in tags and not {"loss/floor", "speed/mfu_percent"} & set(tags)
        here = called("tensorboard.py", ".", "-o", tmp / "out", modules=modules, cwd=log)
        assert here.returncode == 0 and len(list((tmp / "out" / "a").iterdir())) == 1, here
        two = called("tensorboard.py", log, write_log(tmp / "c" / "a"), "-o", tmp / "out", modules=modules)
        check_fails(two, "one folder")


def test_tensorboard_events():
    check_tensorboard_files(tensorboard_stand_in(), events_of_stand_in)


def test_tensorboard_files_hold_the_log():
    need("tensorboard.backend")  # not scripts/tensorboard.py
    check_tensorboard_files({}, events_of_package)


def test_benchmarks_say_what_is_wrong():
    for name in ("bench_attention", "bench_train", "bench_layers"):
        program = built(f"dev/{name}")
        result = run(program, "--help")
        assert result.returncode == 0 and f"usage: {name}" in result.stdout.lower() and "--json" in result.stdout, result
        check_fails(run(program, "--jsom"), "--json", code=2)
        check_fails(run(program, CUDA_VISIBLE_DEVICES=""), "GPU")


def test_help():
    for name in ("plot.py", "plot_results.py", "tensorboard.py", "readme_tables.py", "compare_losses.py", "scaling.py",
                 "compare_torch.py", "default_run.py", "trace_ring.py", "../dev/peers.py", "../dev/peers_train.py"):
        result = called(name, "--help")
        assert result.returncode == 0 and "usage" in result.stdout, name


def test_what_scripts_need_is_named():
    """A package, a GPU, the trainer; and which arguments are wrong."""
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    with scratch("scripts") as tmp:
        log = write_log(tmp / "run")
        for package, name, *arguments in (("matplotlib", "plot.py", log), ("tensorboard.compat", "tensorboard.py", log),
                                          ("matplotlib", "plot_results.py")):
            without = {**tensorboard_stand_in(), "tensorboard.compat.proto.event_pb2": None, "matplotlib": None}
            check_fails(called(name, *arguments, modules=without), f"{name}", "needs", package, "requirements.txt")
        for name in ("default_run.py", "compare_losses.py", "scaling.py"):
            check_fails(script(name, root=tmp), f"{name}: there is no ./train_gpt2cu: make")
    for name in ("peers.py", "peers_train.py"):
        for torch, what in (None, "needs PyTorch"), (no_gpu, "needs a GPU"):
            result = called(f"../dev/{name}", modules={"torch": torch})
            assert result.returncode == 0 and result.stdout.startswith(f"skipped: {name} {what}"), result
    for name, command, *says in (("../dev/peers.py", "--peers nonsense", "nonsense", "torch_cudnn"),
                                 ("../dev/peers_train.py", "--model d13", "d13", "d48"),
                                 ("../dev/peers_train.py", "--shapes 4x1024,4by4", "4x1024,4by4", "16x1024"),
                                 ("../dev/peers_train.py", "--shapes 0x1024", "0x1024", "16x1024"),
                                 ("plot_results.py", "memory sound", "sound", "ring_timeline"),
                                 ("compare_losses.py", "--seeds 1", "error: --seeds"),
                                 ("compare_losses.py", "--gpus 0", "error: --gpus"),
                                 ("compare_losses.py", "--shapes 4by4", "error: --shapes", "4by4"),
                                 ("scaling.py", "--gpus 2,4", "error: --gpus", "2,4"),
                                 ("scaling.py", "--steps 5", "error: --steps")):
        check_fails(called(name, *command.split()), *says, code=2)


def test_peers_of_training_side_by_side():
    """A pretended ./dev/bench_train and pretended figures of the peer: two backends, and memory that ends."""
    import peers_train
    ours = {"kernel": "train_gpt2cu", "gpu": "GPU A", "attention": "flash", "B": 4, "T": 1024, "ms": 8.0,
            "tok_s": 5e5, "mfu": 40.0, "mem_gib": 3.5}
    peer = {"gpu": "GPU A", "ms": 10.0, "tok_s": 4e5, "mem_gib": 5.0, "loss": 9.0}
    figures = {("torch_flash", 4): peer, ("torch_cudnn", 4): {**peer, "ms": 16.0, "tok_s": 2.5e5},
               ("torch_flash", 64): "out of memory", ("torch_cudnn", 64): {**peer, "ms": 160.0}}
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True), version=SimpleNamespace(cuda="13.0"),
                            __version__="2.15")
    with scratch() as tmp:
        executable(tmp / "dev" / "bench_train", f"""
            case "$4" in
                4x1024) echo '{json.dumps(ours)}' >"$8";;
                *) echo "the model needs 200 GiB" >&2; exit 1;;
            esac""")
        printed, out = io.StringIO(), tmp / "rows.jsonl"
        pretended = {"ROOT": tmp, "in_a_fresh_process": lambda _, size, sdpa, B, T: figures[sdpa, B]}
        with mock.patch.multiple(peers_train, **pretended), \
                mock.patch.object(sys, "argv", ["", "--shapes", "4x1024,64x1024", "--out", str(out)]), \
                mock.patch.dict(sys.modules, torch=torch), contextlib.redirect_stdout(printed):
            peers_train.main()
        lines = [line.split() for line in printed.getvalue().splitlines()[2:]]
        assert [words[0] for words in lines] == 2 * ["train_gpt2cu", "torch_compile", "torch_compile"] + [str(out)]
        assert lines[1][1:4] == ["torch_flash", "4", "1024"] and [words[-1] for words in lines[1:3]] == ["1.25", "2.00"]
        assert lines[3][-4:] == lines[4][-4:] == "skipped: out of memory".split() and lines[5][-2:] == ["n/a", "5.00"]
        rows = rows_of(out)
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
    check_losses([train() for _ in range(20)])
    for wrong in ([math.nan, 2], [10.8, math.nan], [10.8, 10.9], [5, 4]):
        with refused("expected from ln V", error=Exception):
            check_losses(wrong)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of results, README's tables, and plots of them

def printed_row(folder, **variables):
    code = "import results; print(results.row('x', 'G', results.toolkit(), ms=2))"
    return ast.literal_eval(run(sys.executable, "-B", "-c", code, PYTHONPATH=str(folder), **variables).stdout)


def test_rows_name_the_sources():
    """A copy of this tree, small: with git, changed in each of its places, and without git."""
    def state(**variables):
        return run(tree / "scripts" / "tree.sh", **variables).stdout.split()

    def row(**variables):
        return printed_row(tree / "scripts", **variables)
    folders = {path.parent.name for path in ROOT.glob("*/*") if path.suffix in (".cu", ".cpp", ".h", ".py", ".sh")}
    folders = {name for name in folders if name[0] != "." and name != "build"}
    assert {"attention", "layers", "scripts"} < folders
    with scratch() as tmp:
        tree = tmp / "tree"
        sources = [tree / name for name in ("Makefile", "train_gpt2.cu", *(f"{folder}/some.h" for folder in folders))]
        others = [tree / name for name in ("README.md", "dev/results/A/attention.jsonl")]
        for path in sources + others:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1\n")
        for name in ("tree.sh", "results.py"):
            shutil.copy(SCRIPTS / name, tree / "scripts")
        git = ["git", "-C", tree, "-c", "user.name=A", "-c", "user.email=a@b"]
        for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
            assert run(*git, *command).returncode == 0
        commit = run(*git, "rev-parse", "--short=12", "HEAD").stdout.strip()
        tree_is = run(tree / "scripts" / "tree.sh", "--sum").stdout.strip()
        for path in *others, tree / "dev" / "none.md":
            path.write_text("2\n")
        assert state() == state(COMMIT="other", TREE="other") == [commit, "clean"] and len(commit) == 12
        new = ("attention/new.cu", "dev/new.cpp", "scripts/new.py", "scripts/new.sh", "layers/new.cuh", "data/new.txt")
        for path in *sources, *(tree / name for name in new):
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
        assert dirty["dirty"] is True and dirty["run"] <= dirty["date"]
    made = run("make", "-s", "build/tree.cpp")  # what benchmarks link
    assert made.returncode == 0, made.stderr
    here = run(SCRIPTS / "tree.sh").stdout.strip()
    assert f'char built_from[] = "{here}";' in (ROOT / "build" / "tree.cpp").read_text()


def test_rows_name_driver_and_toolkit():
    with scratch() as tmp:
        executable(tmp / "nvidia-smi", "case $1 in --query-gpu=driver_version) echo 580.65 ;; *) echo other ;; esac")
        executable(tmp / "nvcc", "echo 'Cuda compilation tools, release 13.1, V13.0.48'")
        row = printed_row(SCRIPTS, **before_others(tmp))
        assert (row["driver"], row["cuda"]) == ("580.65", "13.1"), row


def test_rows_of_a_benchmark():
    program = built("dev/bench_layers")
    with scratch() as tmp:
        out = tmp / "rows.jsonl"
        result = run(program, "--layer", "adamw", "--quick", "--out", out, RUN="r")
        if "GPU" in result.stderr:
            raise Skip("no GPU")
        tree = re.search('"([^"]*)"', (ROOT / "build" / "tree.cpp").read_text())[1].split()
        for r in rows_of(out):
            assert [r["commit"], r["dirty"], r["run"]] == [*tree[:-1], tree[-1] != "clean", "r"], (r, tree)
        assert rows_of(out), result


def attention_row(**fields):
    return {"kind": "attention", "commit": "0123456789ab", "dirty": False, "run": "1", "date": "2030-01-01T00:00:00Z",
            "gpu": "GPU A", "driver": "1.2", "cuda": "13.0", "kernel": "flash_bf16", "pass": "fwd", "dtype": "bf16", "B": 4, "T": 1024,
            "NH": 12, "HS": 64, "causal": True, "deterministic": True, "ms": 1.0, "tflops": 100.0,
            "tflops_sustained": 90.0, "relative_error": 0.001, **fields}


def train_row(**fields):
    return attention_row(**{"kind": "train", "kernel": "train_gpt2cu", "model": "d12", "gpus": 1, "attention": "flash",
                            "ms": 8.0, "tok_s": 5e5, "mfu": None, "mem_gib": 3.5, **fields})


OLD, NEW = {"run": "1"}, {"run": "2", "date": "2030-02-01T00:00:00Z"}
TENSORS = ["out", "lse", "dq", "dk", "dv"]


def write_rows(root, name, rows, gpu="A"):
    path = root / "dev" / "results" / gpu / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_that_tables_show():
    """Never of a differing tree; of one run wherever they are compared; close ones as the span of three jobs."""
    from readme_tables import close, figure
    from results import read_rows
    dirty, naive = {"dirty": True, "date": "2030-03-01T00:00:00Z"}, {"kernel": "naive"}
    later = {**NEW, "date": "2030-02-01T00:00:01Z"}
    with scratch() as tmp:
        def read(*fields, **query):
            return read_rows(write_rows(tmp, "attention", [attention_row(**f) for f in fields]), **query)
        for fields, query, expected in (
                ([{**OLD, "ms": 1.0}, {**dirty, "ms": 2.0}, {**dirty, **naive}], {}, [("flash_bf16", 1.0)]),
                ([{**NEW, "ms": 1.0}, {**OLD, **naive}, {**OLD, "ms": 9.0}], {}, [("flash_bf16", 1.0)]),  # no old naive
                ([{**NEW, "ms": 1.0}, {**later, "ms": 3.0}, {**NEW, **naive}], {},
                 [("flash_bf16", 3.0), ("naive", 1.0)]),
                ([{**NEW, "commit": "b", "ms": 4.0}, {**OLD, "run": "2", **naive}], {}, [("flash_bf16", 4.0)]),
                ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"apart": ["T"]},
                 [("flash_bf16", 1.0), ("naive", 5.0)]),
                ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"T": 1024}, [("naive", 5.0)])):
            assert [(r["kernel"], r["ms"]) for r in read(*fields, **query)] == expected, (fields, query)
        for field in ("kernel pass model dtype attention B T NH HS causal deterministic gpus zero lr tf32 input tensor "
                      "recompute variant carry ranks chunk step").split():
            assert len(read({field: 1}, {field: 2})) == 2, field  # neither replaces the other
        path = tmp / "dev" / "results" / "A" / "attention.jsonl"
        path.write_text("{}\n")  # without date and commit
        with refused(f"{path}:1: "):
            read_rows(path)

        def shown(*ms, others=(10.2,)):
            jobs = read(*({"run": str(i), "ms": x, "date": f"2030-01-0{i + 1}"} for i, x in enumerate(ms)))
            return figure(jobs[0], lambda r: r["ms"], others, "{:.1f}".format)
        assert shown(9.8, 10.4, 10.0) == "9.8–10.4" and shown(9.8, 10.4, 10.0, others=(10.32, 9.69)) == "10.0"
        assert shown(9.9, 10.0) == "≈10.0" and shown(10.0, 10.0, 10.0) == "10.0" and shown(10.0, others=(None,)) == "10.0"
        assert shown(9.8, 10.4, 10.0, others=(None, 20, 10.29)) == "9.8–10.4"
        found = read(*({"run": str(i), "date": f"2030-01-0{i + 1}", "commit": str(i)} for i in range(3)))
        assert len(found[0]["jobs"]) == 1  # of other sources
    assert close(100, 97.1) and close(97.1, 100) and not close(100, 96.9) and not close(96.9, 100)


def test_rows_of_dev_results_are_honest():
    """A row is not older than the commit that it names; since rows say so, it says whether the sources were the commit's;
    no row has been edited since it was committed."""
    if run("git", "rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        raise Skip("needs the history")
    committed = {line[:7]: int(line.split()[1]) for line in run("git", "log", "--format=%H %ct").stdout.splitlines()}
    for path in sorted((ROOT / "dev" / "results").glob("*/*.jsonl")):
        for number, r in enumerate(rows_of(path), 1):
            at = calendar.timegm(time.strptime(r["date"], "%Y-%m-%dT%H:%M:%SZ"))
            assert committed.get(r["commit"][:7], math.inf) <= at, f"{path}:{number}: {r['commit']} is younger than its row, or nowhere"
            assert r["date"] < "2026-11-22T14" or (r["dirty"] is False and r["run"] <= r["date"]), (path, number)
    edited = run("git", "log", "--since=2026-11-22T14:00Z", "--format=", "--numstat", "--", "dev/results/*.jsonl").stdout
    for added, removed, name in map(str.split, edited.splitlines()):
        assert "0" in (added, removed), f"{name}: rows were added and removed in one commit: was one edited?"


def documents_with(root, *names):
    """README.md and attention/README.md as readme_tables.py writes them around these tables."""
    documents = (root / "README.md", root / "attention" / "README.md")
    for document in documents:
        document.parent.mkdir(exist_ok=True)
        tables = "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in names)
        document.write_text(f"before\n{tables}after\n")
    check_fails(called("readme_tables.py", "--root", root, "--check"), "README.md", "readme_tables.py")
    assert all("old" in document.read_text() for document in documents)  # --check changes nothing
    for options in [], ["--check"]:
        result = called("readme_tables.py", "--root", root, *options)
        assert result.returncode == 0, result.stderr
    texts = [document.read_text() for document in documents]
    for text in texts:
        assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
        assert all(len(line) <= 120 for line in text.splitlines() if line[0:1] != "|"), text
    return texts


def accuracy_row(**fields):
    return attention_row(**{"kind": "accuracy", "input": "normal", "tensor": "out", "max_error": 1e-3, "snr_db": 54.0,
                            "ratio_max": 1.25, "ratio_l2": 0.5, **fields})


def accumulation_rows():
    """Two variants in fp16, a shifted one that is not timed, and bf16 beside the trainer; wgmma and mma.sync."""
    def row(kernel, dtype, variant, **fields):
        measured = ("ms", "tflops", "tflops_sustained")
        return {**{k: v for k, v in attention_row().items() if k not in measured},
                "kind": "accumulation", "kernel": kernel, "dtype": dtype, "variant": variant, "NH": 2, **fields}
    found = []
    for kernel, trainer in (("mma.sync", "flash_bf16"), ("wgmma", "flash_bf16_sm90")):
        for dtype, variant in (("fp16", "base"), ("fp16", "pv16"), ("fp16", "pv16+shift"), ("bf16", "base")):
            for T in (1024, 4096):
                fields = {"T": T, "elements": 200, "relative_l2": 1e-4 * len(variant) * T / 1024, "ratio_l2": 1.5}
                broken = {"relative_l2": None, "ratio_l2": None, "not_finite": 50}
                found += [row(kernel, dtype, variant, input="normal", not_finite=0, **fields),
                          row(kernel, dtype, variant, input="huge_qk", **{**fields, **broken})]
            if "shift" not in variant:
                found += [row(kernel, dtype, variant, T=T, NH=12, ms=1.0, tflops=300.0 + T) for T in (1024, 4096)]
        found += [row(trainer, "bf16", "trainer", T=T, NH=12, ms=1.0, tflops=400.0 + T) for T in (1024, 4096)]
    return found


def ring_row(study, **fields):
    return attention_row(kind="ring", study=study, **fields)


def ring_rows():
    """A study of chunks, and one of rings up to 2 ranks."""
    errors = dict.fromkeys(TENSORS, 1e-3)
    wrong = {"own_lse_dq": 0.4, "own_lse_dk": 0.3, "own_lse_dv": 0.2, "used_sum_dq": 4.5}
    found = [ring_row("unchunked", **errors)]
    found += [ring_row("chunks", chunk=i, chunks=8, **errors, **wrong) for i in range(2)]
    for carry, ranks, ratio in (("floor", 1, 0.6), ("fp32", 1, 1), ("fp32", 2, 1), ("bf16", 1, 1), ("bf16", 2, 1.2)):
        found += [ring_row("ring", carry=carry, ranks=ranks, tensor=t, mean_error=6e-5 * ratio, max_error=0.01 * ratio,
                           mean_ratio=ratio, max_ratio=2 * ratio) for t in ("out", "dq", "dk", "dv")]
    return found


def default_run_row(step, loss, text, **fields):
    return attention_row(steps=6500, B=8, floor_nats=0.1273, step=step, val_loss_nats=loss, text=text, **fields)


def breakdown_rows():
    step = attention_row(kind="breakdown", kernel="train_gpt2cu", model="d12", attention="flash", recompute=1, calls=12,
                         step_ms=100.0, tflops=0, tb_s=2.0, gemm_tflops_sustained=700.0, copy_tb_s_sustained=4.0)
    new = {**step, **NEW, "B": 64, "step_ms": 80.0}
    return [{**step, "B": 64, "call": "adamw", "ms": 9.0, "lost_ms": 9.0},
            {**step, "B": 64, "call": "gone", "ms": 50.0, "lost_ms": 50.0},
            {**new, "call": "adamw", "calls": 1, "ms": 2.0, "lost_ms": 1.0},
            {**new, "call": "matmul", "ms": 60.0, "lost_ms": 8.0, "tflops": 630.0, "tb_s": 1.0},
            {**new, "call": "clear", "ms": 1.0, "lost_ms": 0.5},
            {**new, "call": "fast", "ms": 0.5, "lost_ms": -0.25, "tflops": 770.0},
            {**new, "call": "attention", "ms": 12.5, "lost_ms": 7.25, "tflops": 350.0},
            {**new, "call": "matmul", "B": 4, "ms": 60.0, "lost_ms": 8.0, "gemm_size": 4096}]


FP32 = {"dtype": "fp32", "kernel": "flash_fp32"}
NAIVE = {"dtype": "fp32", "kernel": "naive"}
# Rows by GPU and bench, the tables and plots that are asked for, what attention/README.md then says in this order, and
# what it does not say.
TABLES = {
    "attention": ({
        "A/attention": [attention_row(), attention_row(tflops=120.0, **NEW), attention_row(**NEW, HS=128, tflops=200.0),
                        attention_row(**NEW, kernel="torch_flash", tflops=77.0), attention_row(**NEW, causal=False),
                        attention_row(**NEW, kernel="naive", tflops=40.0, tflops_sustained=None)],
        "B/attention": [attention_row(gpu="GPU B", tflops=7.0), attention_row(gpu="GPU B", **{"pass": "bwd"})]},
        ["attention bf16"],
        ["Attention, bf16, causal, NH 12, TFLOP/s cool / sustained. GPU A, driver 1.2, CUDA 13.0. Measured",  # HS: two
         "| B, T | HS | pass | naive | torch_flash | flash_bf16 |",
         "| 4, 1024 | 64 | fwd | 40 | 77 / ≈90 | 120 / ≈90 |",
         "| 4, 1024 | 128 | fwd | – | – | 200 / 90 |", "NH 12, HS 64, TFLOP/s", "GPU B", "| 4, 1024 | fwd | 7 / 90 |",
         "| 4, 1024 | bwd | 100 / 90 |"], []),
    # B: a row without a level counts as level 0, and a newer one replaces it. Two levels make a column. Peers have none.
    "train": ({
        "A/train": [train_row(), train_row(attention="naive", mfu=12.34, tok_s=4e5, ms=10.0)],
        "B/train": [train_row(tok_s=3e5), train_row(recompute=0), train_row(recompute=1, T=4096, B=1),
                    train_row(kernel="torch_compile", attention="sdpa", sdpa="torch_cudnn")]},
        ["train", "torch"],
        ["| d12 | bf16 | flash | 4 | 1024 | 500k | 8.00 | n/a | 3.5 |", "12.3 %",
         "| model | dtype | attention | recompute | B | T |", "| flash | 0 | 4 | 1024 | ≈500k |",
         "| flash | 1 | 1 | 4096 | 500k |", "| torch_compile, cudnn | – | 4 | 1024 | ≈500k |",
         "Not measured yet: `scripts/measure.sh torch`"], ["300k"]),
    "out of memory": ({"A/attention": [
        attention_row(**NAIVE, tflops=4.0), attention_row(**{**NAIVE, "kernel": "naive_tf32"}, tflops=1.0),
        attention_row(**FP32, tflops=2.0), attention_row(**NAIVE, ms=None, tflops=None, T=65536, B=1),
        attention_row(**FP32, tflops=149.3, T=65536, B=1)]},
        ["attention fp32", "plot attention bf16"],
        ["| B, T | pass | naive | naive_tf32 | flash_fp32 |", "| 4, 1024 | fwd | 4 / ≈90 | 1 / ≈90 | 2 / ≈90 |",
         "| 1, 65536 | fwd | – | – | 149 / ≈90 |", "Not measured yet: `scripts/measure.sh bf16`"], []),
    "accuracy": ({
        "A/accuracy": [accuracy_row(tensor=tensor) for tensor in TENSORS] + [
            accuracy_row(T=4096, ratio_max=1.5), accuracy_row(tensor="dv", T=4096, ratio_l2=None)] + [
            accuracy_row(tensor=tensor, B=2, T=256, NH=2, causal=False) for tensor in TENSORS]},
        ["accuracy", "plot accuracy"],
        ["| bf16 | flash_bf16 | 1.50 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / NaN |",
         f"| flash_bf16 |{' 1.0e-03, 54 |' * 5}", "![accuracy](../dev/results/A/accuracy.svg)"], []),
    "losses": ({"A/losses": [
        train_row(dtype="fp32", tf32=True, steps=400, seeds=3, attention=attention, ms=ms, loss=2.5, loss_min=2.4,
                  loss_max=2.6) for attention, ms in (("flash", 20.0), ("naive", 20.7))]},
        ["losses"],
        ["steps 400, seeds 3", "| d12 | tf32 | 4 | 1024 | naive | 20.70 | 2.5000 | 2.4000 – 2.6000 |",
         "| d12 | tf32 | 4 | 1024 | flash | 20.00 | 2.5000 | 2.4000 – 2.6000 |"], []),
    "torch": ({"A/torch": [train_row(steps=50, lr=1e-4, max_norm=0.5, weight_decay=1.0, clipped=47, difference=0.001,
                                     allowed=0.002, torch_itself=0.0015)]}, ["torch"],
              ["| d12 | bf16 | flash | 0.5 | 47 of 50 | 1 | 1.0e-03 | 2.0e-03 | 1.5e-03 |"], []),
    "default run": ({"A/default_run": [
        default_run_row(1300, 9.0, "an older run"), default_run_row(1300, 0.4764, "The badger\nhummed. " * 40, **NEW),
        default_run_row(6500, 0.1613, "The end.", **NEW)]}, ["default run"],
        ["6500 steps of 8·1024 tokens", "*Step 1300, validation loss 0.476:* The badger hummed. The", "…",
         "*Step 6500, validation loss 0.161:* The end."], ["older run", "!["]),  # there is no plot
    # B 4 and B 64; "gone" is a call of the older run.
    "breakdown": ({"A/breakdown": breakdown_rows()}, ["breakdown"],
        ["beside a product of 4096³", "| TFLOP/s | % of 4096³ |", "| all of these |", "B 64",
         "recompute 1; beside a product of 8192³, 700 TFLOP/s, and a copy of 1 GiB, 4.00 TB/s, both sustained. GPU A",
         "| TFLOP/s | % of 8192³ | TB/s | % of copy | ms beyond |",
         "| matmul | 12 | 60.000 | 75.0 | 630.0 | 90 | 1.00 | 25 | 8.000 |",
         "| attention | 12 | 12.500 | 15.6 | 350.0 | 50 | 2.00 | 50 | 7.250 |",
         "| adamw | 1 | 2.000 | 2.5 |  |  | 2.00 | 50 | 1.000 |",
         "| clear | 12 | 1.000 | 1.2 |  |  | 2.00 | 50 | 0.500 |",
         "| fast | 12 | 0.500 | 0.6 | 770.0 | 110 | 2.00 | 50 |  |",
         "| all of these | 49 | 76.000 | 95.0 |  |  |  |  | 16.750 |",
         "Most of it: matmul (8.00 ms, 10.0 % of the step); attention (7.25 ms, 9.1 % of the step); "
         "adamw (1.00 ms, 1.2 % of the step)."], ["gone"]),
    "accumulation": ({"A/accumulation": accumulation_rows()},
        ["accumulation speed", "accumulation errors", "plot accumulation"],
        ["| dtype | variant | mma.sync 4, 1024 | mma.sync 4, 4096 | wgmma 4, 1024 | wgmma 4, 4096 |",
         "| fp16 | pv16 | ≈1324 | ≈4396 | ≈1324 | ≈4396 |", "| bf16 | trainer | ≈1424 | ≈4496 | ≈1424 | ≈4496 |",
         "wgmma, NH 2, HS 64", "| fp16 | pv16+shift | 1.0e-03 (1.5×) | 4.0e-03 (1.5×) | – | – | – | 25 % ∞ | – |",
         "![accumulation](../dev/results/A/accumulation.svg)"], ["pv16+shift | ≈1324"]),
    "ring": ({"A/ring": ring_rows(), "A/ring_speed": [ring_row(
        "speed", **{"pass": "forward"}, gpus=4, tokens_per_gpu=16384, single_ms=3.0, single_ms_sustained=3.3, ms=3.2,
        ms_sustained=3.4, still_ms=3.1, still_ms_sustained=3.35, hop_ms=0.2, hop_ms_sustained=0.2)]},
        ["ring chunks", "ring errors", "ring speed", "plot ring"],
        ["| bf16 | 1 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 0.40 | 0.30 | 0.20 | 4.50 |",
         "| bf16 | floor | – |", "| bf16 | bf16 | 2 | 7.20e-05 (1.20), 1.2e-02 (2.40) |",
         "| 4 | 12, 64 | forward | 3.00 | 3.20 | 93.8 / ≈97.1 % | 96.8 / ≈98.5 % | 0.20 |",
         "![ring](../dev/results/A/ring.svg)"], [])}


def test_tables():
    """What is between the markers of both documents, and what --check says of it."""
    for name, (rows, tables, parts, absent) in TABLES.items():
        with scratch() as tmp:
            for bench, found in rows.items():
                write_rows(tmp, bench[2:], found, gpu=bench[0])
            for plot in ("accuracy", "accumulation", "ring"):
                (tmp / "dev" / "results" / "A" / f"{plot}.svg").write_text("<svg/>")
            readme, text = documents_with(tmp, *tables)
            check_in_order(text, *parts)
            assert readme == text.replace("(../dev", "(dev") and not any(part in text for part in absent), (name, text)


def test_tables_of_bad_rows():
    with scratch() as tmp:
        documents_with(tmp, "train")
        bad = write_rows(tmp, "train", [train_row()])
        bad.write_text(bad.read_text() + "{oops\n")
        check_fails(called("readme_tables.py", "--root", tmp), f"{bad}:2: ")
        bad.write_text("")
        (tmp / "README.md").write_text("<!-- table: nonsense -->\n<!-- end -->\n\n<!-- end -->\n")
        check_fails(called("readme_tables.py", "--root", tmp), "nonsense", "attention bf16")


def test_tables_are_those_of_dev_results():
    result = script("readme_tables.py", "--check")
    assert result.returncode == 0, result.stderr


def test_rows_of_the_default_run():
    with scratch("scripts") as tmp:
        log = write_log(tmp / "log") / "log.jsonl"
        executable(tmp / "train_gpt2cu", f'[ "$#" = 2 ] && [ "$1" = -o ] && cp {log} "$2"')
        result = script("default_run.py", root=tmp, COMMIT="abc")
        assert result.returncode == 0 and "no plot, because the sources differ" in result.stdout, result
        rows = rows_of(tmp / "dev" / "results" / "NVIDIA-H200" / "default_run.jsonl")
        assert [(row["step"], row["val_loss_nats"]) for row in rows] == [(50, 2.5), (100, 2.25)], rows
        assert (rows[0]["commit"], rows[0]["text"], rows[0]["dtype"]) == ("abc", "Once\nupon a time", "bf16")
        executable(tmp / "scripts" / "tree.sh", "echo abc clean")
        (tmp / "scripts" / "plot.py").write_text("import sys\nprint(*sys.argv[2:])\nopen(sys.argv[1] + '/log.jsonl')\n")
        result = script("default_run.py", root=tmp)
        plot = tmp / "dev" / "results" / "NVIDIA-H200" / "default_run.png"  # where readme_tables.py looks for it
        assert result.returncode == 0 and result.stdout == f"-o {plot} --title The default run\n", result
        executable(tmp / "train_gpt2cu", "exit 1")
        check_fails(script("default_run.py", root=tmp), "default_run.py: ./train_gpt2cu failed")


def test_plots_by_the_stand_in():
    """Where scripts/plot_results.py writes, what stands where in each plot, and which rows are not plotted."""
    with scratch() as tmp:
        def plotted(plot, bench, rows):
            write_rows(tmp, bench, rows)
            modules, plt, panels = drawing()
            result = called("plot_results.py", plot, "--root", tmp, modules=modules)
            svg = tmp / "dev" / "results" / "A" / f"{plot}.svg"
            assert result.returncode == 0 and result.stdout == f"{svg}\n" and svg.read_text() == "drawn", result
            return panels, args(plt.figure().suptitle)

        rates = [attention_row(kernel=kernel, T=T, B=B, HS=HS, tflops=tflops + T + HS + B, tflops_sustained=tflops / 2, **{"pass": pas})
                 for kernel, tflops in (("naive", 100.0), ("torch_flash", 200.0), ("flash_bf16", 300.0))
                 for T, B in ((2048, 1), (1024, 4), (1024, 32)) for HS in (64, 128) for pas in ("fwd", "bwd")]
        left_out = [attention_row(causal=False, T=64), attention_row(dtype="fp32", T=64), attention_row(ms=None, T=64)]
        panels, _ = plotted("attention_bf16", "attention", rates + left_out)
        for place, HS, title in ("00", 64, "bf16 forward, head size 64"), ("11", 128, "bf16 backward, head size 128"):
            axes = panels[place]
            for i, x in enumerate((300, 200, 100)):
                assert args(axes.plot)[2 * i] == [[1024, 2048], [x + 1024 + HS + 32, x + 2048 + HS + 1]]
                assert args(axes.plot)[2 * i + 1] == [[1024, 2048], [x / 2, x / 2]]
            assert args(axes.set_title) == [[title]] and options(axes.set_ylim, "bottom") == [0]
        assert options(panels["00"].plot, "ls")[::2] == ["-", "--", "-"]
        assert args(plotted("attention_fp32", "attention", rates + left_out)[0]["00"].plot)[0][0] == [64]

        errors = [accuracy_row(tensor=t, T=T, HS=HS, ratio_l2=n + max(T, HS) / min(T, HS), input=name) for name in
                  ("normal", "shifted") for n, t in enumerate(TENSORS) for T in (255, 64) for HS in (64, 128)]
        left_out = [accuracy_row(kernel="naive"), accuracy_row(causal=False), accuracy_row(ratio_l2=None)]
        panels, _ = plotted("accuracy", "accuracy", errors + left_out)
        worst = [[64, 255], [2 + 128 / 64, 2 + 255 / 64]]  # the larger of both head sizes
        assert [at for at in args(panels["02"].plot) if at[0]] == [worst] * 2
        assert [args(panels[f"0{n}"].set_title) for n in range(5)] == [[[f"bf16 {t}"]] for t in TENSORS]

        # A shifted variant stands at the speed of the kernel that it is; hollow says that something was not finite.
        found = [{**r, "not_finite": 0} if r["kernel"] == "wgmma" and "input" in r else r for r in accumulation_rows()]
        panels, _ = plotted("accumulation", "accumulation", found)
        for place, hollow, title in ("00", True, "mma.sync"), ("01", False, "wgmma"):
            axes = panels[place]
            assert [at[:2] for at in args(axes.plot)] == [[4396, 4e-4 * n] for n in (4, 4, 4, 10)]
            assert [face == "white" for face in options(axes.plot, "mfc")] == [hollow] * 4
            assert [at[0] for at in args(axes.annotate)] == ["base", "base, pv16", "pv16+shift"]
            assert args(axes.set_title) == [[title]] and args(axes.set_yscale) == [["log"]]

        def memory(dtype, T, mem_gib, **fields):
            return train_row(**{"dtype": dtype, "B": 1, "T": T, "mem_gib": mem_gib, "recompute": 1, **fields})
        found = [memory("fp32", T, gib) for T, gib in ((8192, 6.5), (4096, 4.0), (16384, 10.0))]
        found.append(memory("bf16", 65536, 17.0))
        others = [memory("bf16", 1024, 99.0, B=4), memory("bf16", 1024, 99.0, kernel="torch_compile")]
        axes = plotted("memory", "train", found + others)[0]["00"]  # a single length has no line
        assert args(axes.plot) == [[[65536], [17]], [[4096, 16384], [4, 10]], [[4096, 8192, 16384], [4, 6.5, 10]]]
        assert options(axes.plot, "label") == ["bf16", "fp32: 0.50 GiB per 1024 tokens"]
        assert args(axes.set_title) == [["Training with B 1, model d12, attention flash, recompute 1, GPU A"]]
        assert options(axes.set_xlim, "left") == options(axes.set_ylim, "bottom") == [0]

        other = ring_row("ring", carry="fp32", ranks=1, tensor="out", mean_error=9, max_error=9, dtype="fp32")
        panels, title = plotted("ring", "ring", [*ring_rows(), other])
        fp32, bf16 = args(panels["00"].plot)[:2]
        assert fp32[:2] == [[0, 1], [1, 1]] and bf16[0] == [0, 1] and [round(y, 6) for y in bf16[1]] == [1, 1.2]
        assert [round(y, 6) for y, in args(panels["00"].axhline)] == [0.6] * 4 and not panels["01"].axhline.called
        assert title == [["Ring attention, T 1024, bf16, GPU A: flat is better"]]

        events = [{"what": "kernel", "name": "forward_kernel<64, true>", "start_ms": 0.5, "ms": 1.5},
                  {"what": "kernel", "name": "merge", "start_ms": 2.0, "ms": 0.25},
                  {"what": "copy", "name": "copy", "start_ms": 1.0, "ms": 0.5}]
        row = attention_row(gpus=2, tokens_per_gpu=16384, layer=6, rank=1, events=events, **{"pass": "forward"})
        panels, title = plotted("ring_timeline", "ring_timeline", [row, {**row, "gpus": 1, "rank": 0}])
        bars = panels["00"].broken_barh
        assert args(bars) == [[[(0.5, 1.5)], [1.6, 0.8]], [[(2.0, 0.25)], [1.6, 0.8]], [[(1.0, 0.5)], [2.6, 0.8]]]
        assert len(set(options(bars, "facecolors"))) == 3 and not panels["10"].broken_barh.called
        assert title[0][0].startswith("Ring of 2, 16384 tokens each")

        dirty = {**ring_rows()[-1], "dirty": True}
        for plot, bench, rows, measure in (("memory", "train", others, "bench_train"),
                                           ("ring", "ring", [dirty], "study_ring"),
                                           ("accumulation", "accumulation", [], "study_accumulation"),
                                           ("accuracy", "accuracy", [], "dev/accuracy")):
            write_rows(tmp, bench, rows)
            nothing = called("plot_results.py", plot, "attention_bf16", "--root", tmp, modules=drawing()[0])
            check_fails(nothing, f"no rows for {plot}.svg", measure)
        nothing = called("plot_results.py", "--root", tmp / "none", modules=drawing()[0])
        check_fails(nothing, "no rows", "bench_attention")
        some = called("plot_results.py", "--root", tmp, modules=drawing()[0])
        assert some.returncode == 0 and some.stderr.count("no rows") == 4 and some.stdout.count(".svg") == 3, some


def test_plots_of_results_by_matplotlib():
    need("matplotlib")
    with scratch() as tmp:
        too_large = [attention_row(kernel="naive", T=2048, ms=None)]
        write_rows(tmp, "attention", too_large + [
            attention_row(kernel=kernel, T=T, HS=HS, **{"pass": pas}) for HS in (64, 128) for pas in ("fwd", "bwd")
            for kernel, T in (("naive", 1024), ("torch_flash", 1024), ("flash_bf16", 2048))])
        write_rows(tmp, "accuracy", [accuracy_row(tensor=tensor, T=T) for tensor in TENSORS for T in (64, 255)])
        written = []
        for _ in range(2):  # the same rows give the same bytes
            result = called("plot_results.py", "--root", tmp)
            assert result.returncode == 0, result.stderr
            paths = [pathlib.Path(line) for line in result.stdout.splitlines()]
            assert [path.name for path in paths] == ["attention_bf16.svg", "accuracy.svg"]
            written.append([path.read_bytes() for path in paths])
        assert written[0] == written[1] and all(svg.startswith(b"<?xml") for svg in written[0])


def trace_of_a_gpu(gpu):
    """As dev/trace.so writes it: a layer's attention, forward and backward, a copy half behind each; GPU 1 starts later."""
    def event(kind, name, start, duration, ranges):
        return {"name": name, "cat": kind, "ph": "X", "pid": gpu, "tid": "stream 7", "ts": start + 40 * gpu,
                "dur": duration, "args": {"gpu": -1 if kind == "range" else gpu, "range": ranges}}
    events = [event("range", "step 5", 0, 9000, "")]
    for at, way in ((1000, "forward"), (5000, "backward")):
        inside = f"step 5 / forward and backward / {way} / layer 6"
        events += [event("kernel", f"{way}_kernel<64, true>", at, 700, inside),
                   event("copy", "copy 50331648 bytes to another GPU", at + 600, 200, inside),
                   event("copy", "copy 50331648 bytes", at, 150, inside),
                   event("kernel", f"{way}_kernel<64, true>", at, 700, inside.replace("6", "7")),
                   event("kernel", "long before", at - 300, 50, inside), event("kernel", "long after", at + 950, 50, inside)]
    return {"traceEvents": events}


def test_timeline_of_a_ring():
    from trace_ring import behind
    kernels = [{"ts": ts, "dur": dur} for ts, dur in ((660, 80), (0, 700), (500, 150))]  # that overlap
    assert behind([{"ts": 600, "dur": 200}, {"ts": 50, "dur": 10}, {"ts": 800, "dur": 9}], kernels) == 150
    with scratch("scripts") as tmp:
        check_fails(script("trace_ring.py", root=tmp), "there is no ./train_gpt2cu")
        for gpu in (0, 1):
            (tmp / f"gpu{gpu}").write_text(json.dumps(trace_of_a_gpu(gpu)))
        executable(tmp / "train_gpt2cu", 'echo "$@" >args\nfor i in 0 1; do cp gpu$i "$TRACE.10$i.json"; done')
        check_fails(script("trace_ring.py", root=tmp), "there is no ./dev/trace.so")
        executable(tmp / "dev" / "trace.so", "")
        result = script("trace_ring.py", "--json", root=tmp)
        assert "--gpus 2 --context-parallel 2 -b 1 -t 32768 --profile 1 " in (tmp / "args").read_text()
        assert "GPU 1, backward: 0.20 ms of travel, 50 % of it behind kernels" in result.stdout, result
        path = next(tmp.glob("dev/results/*/ring_timeline.jsonl"))
        rows = rows_of(path)
        assert [(r["rank"], r["pass"], min(e["start_ms"] for e in r["events"])) for r in rows] == [
            (gpu, way, 0.04 * gpu) for way in ("forward", "backward") for gpu in (0, 1)] and "long" not in path.read_text(), rows
        assert all(r["dirty"] for r in rows)
        (tmp / "kept").mkdir()
        script("trace_ring.py", "--keep", root=tmp, cwd=tmp / "kept")
        assert {p.name for p in (tmp / "kept").iterdir()} == {"trace.100.json", "trace.101.json"}
        check_fails(script("trace_ring.py", "--gpus", "4", root=tmp), "traces of 2 GPUs, not 4")
        check_fails(script("trace_ring.py", "--layer", "8", root=tmp), "no blocks of forward in layer 8")
        executable(tmp / "train_gpt2cu", "echo boom >&2\nexit 1")
        check_fails(script("trace_ring.py", root=tmp), "ended with 1", "boom")
        command = ("plot_results.py", "ring_timeline", "--root", tmp)
        check_fails(called(*command, modules=drawing()[0]), "no rows")  # of sources that nobody knows
        path.write_text(path.read_text().replace('"dirty": true', '"dirty": false'))
        modules, plt, _ = drawing()
        assert called(*command, modules=modules).returncode == 0
        assert args(plt.figure().suptitle)[0][0].startswith("Ring of 2, 16384 tokens each")


def test_timeline_of_a_training_step():
    made = run("make", "dev/trace.so")
    if made.returncode and "cupti" in made.stderr.lower():
        raise Skip("needs CUPTI of CUDA 13")
    assert made.returncode == 0, made.stderr
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


# ----------------------------------------------------------------------------------------------------------------------
# The Makefile's probe

def arch(*names):
    return " ".join(f"-gencode arch=compute_{a},code=sm_{a}" for a in names)


def test_probe_of_gpus():
    """GENCODE by what nvidia-smi says, and by ARCH."""
    none = "-gencode arch=compute_80,code=[sm_80,compute_80]"
    found = {"8.0": arch("80"), "9.0": arch("90a"), "8.0\n8.0\n8.0": arch("80"), "8.6\n9.0": arch("86", "90a"),
             "9.0\n7.5": arch("75", "90a"), "10.0": arch("100"), "12.0": arch("120"), "[N/A]": none,
             "No devices were found": none, "9.0.1\n8\nx8.0\n\n": none}
    cases = [(f"echo '{text}'", expected) for text, expected in found.items()] + [
        ("exit 127", none), ("echo 8.0 >&2; exit 1", none), ("echo 8.6", arch("75", "90a"), "ARCH=75 90a"),
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", none)]
    for smi, expected, *arguments in cases:
        with scratch() as tmp:
            executable(tmp / "nvidia-smi", smi)
            result = run("make", "-pn", "help", *arguments, **before_others(tmp))
            assert re.search(r"^GENCODE :?= *(.*)$", result.stdout, re.M)[1].strip() == expected, smi


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
            executable(tmp / name, "")
        executable(tmp / "cc", '[ "$1" != --list-gpu-code ] || echo sm_75 sm_80 sm_90\n'
                   'while [ "$1" != -o ]; do shift || exit; done\ntouch "$2"; echo "$2"')
        objects = a, b = ["build/data/a.o", "build/layers/b.o"]
        for flags, expected in ([], objects), ([], []), (["EXTRA=-DX"], objects), (["EXTRA=-DX"], []), (
                ["EXTRA=-DX", "MARCH=x86-64"], [a]), (["EXTRA=-DX", "MARCH=x86-64", "ARCH=75"], [b]):
            result = run("make", "-s", f"CXX={tmp}/cc", f"NVCC={tmp}/cc", "NCCL_HOME=none", *objects, *flags, cwd=tmp)
            assert result.returncode == 0 and result.stdout.split() == expected, (flags, result)
        archs = run("make", "-n", "archs", f"NVCC={tmp}/cc", cwd=tmp).stdout.replace("\\\n", "").splitlines()
        lines = {re.search(r"-o (\S+)", line)[1]: line for line in archs if " -o " in line}
        assert {name: re.findall(r"code=sm_(\w+)", line) for name, line in lines.items()} == {
            "build/archs/attention/c.spills.o": ["80", "90a"], "build/archs/attention/c.o": ["75"],
            "build/archs/layers/b.o": ["75", "80", "90a"]}, archs
        for name, line in lines.items():
            assert "-Werror all-warnings" in line and ("-warn-spills" in line) == ("spills" in name), line
        assert run("make", "clean", cwd=tmp).returncode == 0
        assert not (tmp / "build").exists() and not (tmp / "dev" / "test_d").exists()


def links(folder, *names):
    """A PATH without anything else."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": str(folder)}


def test_profile_without_nsys_builds_nothing():
    with scratch() as tmp:
        result = run("make", "profile", **links(tmp, "make", "sh", "grep", "tr", "sort", "find", "nproc", "sed"))
        check_fails(result, "needs nsys (Nsight Systems)", code=2)
        assert "train_gpt2cu" not in result.stdout, result.stdout
        (tmp / "nsys").symlink_to(shutil.which("true"))
        result = run("make", "-n", "profile", **before_others(tmp))
        assert "-lineinfo" in result.stdout or not shutil.which("nvcc"), result
        assert re.search(r"nsys profile .*\n? *\./train_gpt2cu --profile 3", result.stdout.replace("\\\n", "")), result


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons with PyTorch, between kinds of attention, and between numbers of GPUs

def test_losses_beside_pytorch():
    """What scripts/compare_torch.py asks of the trainer and makes of the losses; PyTorch's side needs PyTorch."""
    from compare_torch import apart, judge, trainer_options
    a = SimpleNamespace(B=3, T=128, steps=4, lr=2e-4, weight_decay=0.75, max_norm=0.5, precision="bf16",
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
    check_in_order(command, "-e model -i shard -b 3 -t 128 -x 4 -l 0.0002 -u 0 -k constant",
                   "-c 0.75 --max-norm 0.5 --precision bf16", "--no-shuffle --attention naive")
    assert "--no-tf32" not in command
    a.precision = "fp32"
    assert "--no-tf32" in trainer_options(a, "model", "shard")
    for difference, right in (0.9e-4, True), (1.1e-4, False), (-1.1e-4, False):
        found, ok = judge(a, steps(4.0, 3.0, 2.0 + difference, 1.0), torch, near)
        assert ok == right and found["allowed"] == 1e-4, found
    with refused("4 and 3 steps", error=ValueError):
        apart(torch, torch[1:])


def test_losses_are_compared():
    """On the CPU, where naive and flash are one."""
    built()
    on_cpu = ("--device", "cpu", "--model", "tiny", "--gpus", "2")
    with scratch() as tmp:
        out = tmp / "losses.jsonl"
        result = script("compare_losses.py", *on_cpu, "--shapes", "2x16", "--steps", "3", "--seeds", "2", "--out", out)
        assert result.returncode == 0 and "is within the seeds' spread" in result.stdout, result
        naive, flash = rows_of(out)
        assert (naive["attention"], flash["attention"], naive["B"], naive["T"]) == ("naive", "flash", 2, 16)
        assert naive["loss_min"] < naive["loss"] == flash["loss"] < naive["loss_max"] < 12 and naive["ms"] > 0
        check_fails(script("compare_losses.py", *on_cpu, "--shapes", "2x999999"), "999999")


# Writes and prints what ./train_gpt2cu does. Its losses and rates are those of the environment.
STAND_IN = f"#!{sys.executable}\n" + '''
import json, os, sys
option = dict(zip(sys.argv, sys.argv[1:]))
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
print(*sys.argv[1:], file=open("ran", "a"))
print(gpu, file=open("gpus", "a"))
ranks = option.get("--gpus", "1") + "_" + option.get("--zero", "0")
run = option["--attention"] + "_" + option["--seed"] if "--attention" in option else "ranks_" + ranks
loss = float(os.environ.get(run, 2))
rate = os.environ.get("rate_on_" + gpu, os.environ.get("rate_" + ranks))
print("device             GPU A, 1 GiB\\n  total   %d.0 MiB" % (2048 if ranks.endswith("1") else 4096))
rows = [{"kind": "run", "device": "GPU A", "tokens_per_step": 1}]
for i in range(1, int(option["-x"]) + 1):
    print("step %d/9 | %s tok/s" % (i, rate if i > 10 else "1"))
    rows.append({"kind": "train", "step": i, "step_ms": 3 * i if i > 2 else 999, "loss_nats": loss if i == 11 else 2.0,
                 "grad_norm": 1.0, "lr": 1.0, "tokens_per_s": 1.0, "mfu_percent": 1.0})
rows += [{"kind": "val", "step": 0, "loss_nats": 9.0}, {"kind": "val", "step": i, "loss_nats": loss}]
if "-o" in option:
    with open(option["-o"] + "/log.jsonl", "w") as log:
        log.writelines(json.dumps(row) + "\\n" for row in rows)
'''


@contextlib.contextmanager
def measured_by_stand_in():
    """A folder, and a function that runs a script there, by the stand-in, and gives its result and its rows."""
    with scratch("scripts") as tmp:
        executable(tmp / "train_gpt2cu", STAND_IN)

        def measured(name, *arguments, **variables):
            out = tmp / "rows.jsonl"
            out.unlink(missing_ok=True)
            result = script(name, "--out", out, *arguments, root=tmp, **variables)
            return result, rows_of(out) if out.exists() else []
        yield tmp, measured


def test_losses_outside_the_spread():
    naive, shape = {"naive_1": "2.0", "naive_2": "2.2"}, ("--shapes", "2x16", "--steps", "20", "--seeds", "2")
    with measured_by_stand_in() as (tmp, measured):
        for a, b, flash_a, flash_b, code, word in (
                ("2.0", "NaN", "2.0", "2.0", 1, "OUTSIDE"), ("2.0", "2.2", "2.3", "2.2", 1, "OUTSIDE"),
                ("2.0", "2.2", "1.9", "2.0", 1, "OUTSIDE"), ("2.0", "2.2", "2.1", "NaN", 1, "OUTSIDE"),
                ("2.0", "2.2", "2.3", "2.0", 0, "within")):
            result, rows = measured("compare_losses.py", *shape, naive_1=a, naive_2=b, flash_1=flash_a, flash_2=flash_b)
            assert result.returncode == code and f"loss is {word} the seeds' spread" in result.stdout, result
        assert [(r["attention"], r["ms"]) for r in rows] == [("naive", 34.5), ("flash", 34.5)], rows  # 3·3 … 3·20
        ran = (tmp / "ran").read_text()
        assert "-e d12 -b 2 -t 16 -x 20 -v 20 -s 0 --seed 2 --precision fp32 --attention naive --device cuda" in ran, ran
        assert "--no-tf32" not in ran
        result, rows = measured("compare_losses.py", *shape, "--precision", "bf16", "--no-tf32", **naive, flash_1="2.05", flash_2="2.1")
        ran = (tmp / "ran").read_text()
        check_in_order(ran, "--seed 1 --precision bf16 --attention flash --device cuda", "--no-tf32")
        assert "of one seed they differ by 1.0e-01 at most" in result.stdout, result
        assert (rows[0]["loss"], rows[0]["loss_min"], rows[0]["loss_max"], rows[1]["loss"]) == (2.1, 2.0, 2.2, 2.075), rows
        (tmp / "gpus").unlink()
        result, _ = measured("compare_losses.py", *shape, "--gpus", "2", CUDA_VISIBLE_DEVICES="7,9")
        assert set((tmp / "gpus").read_text().split()) == {"7", "9"}, result  # each run on one of its own


def test_ranks_by_the_stand_in():
    """scripts/scaling.py: losses that differ, rates, all GPUs of the machine, and the table of it."""
    timed = ("--batch", "3", "--tokens", "16", "--steps", "12")
    with measured_by_stand_in() as (tmp, measured):
        for losses in {"ranks_2_1": "2.0021"}, {"ranks_2_0": "1.9979"}, {"ranks_2_0": "NaN"}, {"ranks_1_0": "2.003"}:
            result, rows = measured("scaling.py", "--gpus", "1,2", *timed, **losses)
            check_fails(result, "differ by more than 1e-3: not timed")
            assert {r["what"] for r in rows} == {"losses"} and "of linear" not in result.stdout, rows
        # All GPUs of the machine: the slowest is the last.
        executable(tmp / "nvidia-smi", 'for i in 0 1 2 3; do echo "GPU $i: it (UUID: GPU-1)"; done')
        with mock.patch.dict(os.environ):
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            result, rows = measured("scaling.py", *timed, **before_others(tmp), rate_on_="1000", rate_on_0="960",
                                    rate_on_1="960", rate_on_2="960", rate_on_3="800")
        assert [(r["gpus"], r["zero"], round(r["ms_side_by_side"])) for r in rows if r["what"] == "speed"] == [
            (1, 0, 48), (2, 0, 50), (2, 1, 50), (4, 0, 60), (4, 1, 60)], (result, rows)
        result, rows = measured("scaling.py", "--gpus", "1,2", *timed, CUDA_VISIBLE_DEVICES="7,9", ranks_2_1="2.0019",
                                rate_on_7="960", rate_on_9="800", rate_1_0="1000", rate_2_0="1900", rate_2_1="2200")
        ran = (tmp / "ran").read_text()
        assert "-t 16 -v 0 -s 0 --device cuda --gpus 2 --zero 1 -b 2 -d 64 -x 20 --precision fp32 --no-tf32" in ran, ran
        assert "--gpus 2 --zero 1 -b 3 -x 12 --precision bf16\n" in ran, ran
        assert result.returncode == 0 and [round(r["apart"], 6) for r in rows[:2]] == [0, 0.00095], (result, rows)
        speed = [[round(r[field], 3) for field in ("gpus", "zero", "tok_s", "ms", "ms_side_by_side", "of_linear", "gib")]
                 for r in rows[2:]]
        assert speed == [[1, 0, 1000, 48, 48, 1, 4], [2, 0, 1900, 50.526, 60, 0.95, 4], [2, 1, 2200, 43.636, 60, 1.1, 2]], speed
        write_rows(tmp, "scaling", [{**r, "dirty": False} for r in rows])
        check_in_order(documents_with(tmp, "scaling")[0], "| 1 | – | 1k | 100.0 % | 48.00 | 48.00 | 4.0 | – |",
                       "| 2 | 0 | 2k | 95.0 % | 50.53 | 60.00 | 4.0 | 0e+00 |",
                       "| 2 | 1 | 2k | 110.0 % | 43.64 | 60.00 | 2.0 | 1e-03 |")


def test_ranks_are_compared_and_timed():
    built()
    on_cpu = ("--device", "cpu", "--model", "tiny")
    with scratch() as tmp:
        text, out = tmp / "text.txt", tmp / "scaling.jsonl"
        text.write_text("".join(f"{i} ships sailed to port {i * 7 % 31}.\n" for i in range(300)))
        result = script("scaling.py", *on_cpu, "--batch", "1", "--tokens", "16", "--steps", "12", "--gpus", "1,2",
                        "--data", text, "--out", out)
        assert result.returncode == 0 and "2 GPUs, --zero 1: losses of 20 steps" in result.stdout, result
        rows = rows_of(out)
        assert [(r["what"], r["gpus"], r["zero"]) for r in rows] == [
            ("losses", 2, 0), ("losses", 2, 1), ("speed", 1, 0), ("speed", 2, 0), ("speed", 2, 1)], rows
        assert all(r["apart"] < 1e-4 for r in rows[:2]) and rows[2]["of_linear"] == 1 and rows[4]["tok_s"] > 0
        assert rows[2]["ms_side_by_side"] == rows[2]["ms"] and rows[3]["ms_side_by_side"] > 0
        assert rows[3]["gib"] > rows[4]["gib"] > 0, rows  # half the optimizer's state
        check_fails(script("scaling.py", *on_cpu, "--gpus", "1", "--data", tmp / "none"),
                    "scaling.py: ./train_gpt2cu -e tiny", "ended with 1", f"{tmp / 'none'}: no such file")


# ----------------------------------------------------------------------------------------------------------------------
# Training recipes

def run_recipe(recipe, tmp, program, *arguments, **variables):
    """Runs a copy of the recipe where there is no data, with `program` as ./train_gpt2cu and a make of no effect."""
    (tmp / "scripts").mkdir(exist_ok=True)
    for file in (recipe, SCRIPTS / "longer_context.py", SCRIPTS / "results.py"):
        shutil.copy(file, tmp / "scripts")
    executable(tmp / "make", "")
    write_launcher(tmp / "torchrun", shown=tmp / "launched")
    write_launcher(tmp / "srun")
    executable(tmp / "scontrol", "echo 127.0.0.1; echo elsewhere")
    if re.search("_(gpus|torchrun|slurm)", recipe.name):
        variables = {"CUDA_VISIBLE_DEVICES": "", "SLURM_SUBMIT_DIR": str(tmp), "SLURM_JOB_NODELIST": "[1-2]",
                     "SLURM_JOB_ID": "7", **variables}
    (tmp / "train_gpt2cu").unlink(missing_ok=True)
    (tmp / "train_gpt2cu").symlink_to(program)
    return run(tmp / "scripts" / recipe.name, *arguments, cwd="/", **before_others(tmp), **variables)


def checkpoint(version, max_T, L, C, V, Vp, wte, wpe, rest):
    return struct.pack("<256i", 20240326, version, max_T, V, L, 1, C, Vp, *[0] * 248) + wte + wpe + rest


def long_context_start(path):
    """A checkpoint of one layer and one head, its position embeddings numbered."""
    C = 64

    def floats(values):
        return struct.pack(f"<{len(values)}f", *values)
    path.write_bytes(checkpoint(3, 1024, 1, C, 50257, 50304, bytes(4 * 50304 * C), floats(range(1024 * C)),
                                floats([1.0] * (12 * C * C + 15 * C))))
    return path


def test_recipes_pass_the_trainers_checks():
    """They fail at the missing data and nowhere before it, whatever B: sizes, steps and options are accepted."""
    for recipe in RECIPES:
        for batch in ("", "4"):
            with scratch() as tmp:
                arguments = [long_context_start(tmp / "model.bin")] if "long" in recipe.name else []
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
        show, start = executable(tmp / "show", 'echo "<$*>"'), long_context_start(tmp / "model.bin")
        for recipe in RECIPES:
            is_long, on_gpus = "long" in recipe.name, "gpus" in recipe.name
            result = run_recipe(recipe, tmp, show, *([start] if is_long else ["--seed", "5"]), B="2")
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
            assert given["-b"] == ("1" if is_long and on_gpus else "2") and (is_long or given["--seed"] == "5")
            gpus = ("4", "4" if is_long else None) if on_gpus else (None, None)
            assert (given.get("--gpus"), given.get("--context-parallel")) == gpus, words
            assert int(given["-s"]) % 1000 == 0 and int(given.get("-g", 1)) < int(given["-t"]), words  # samples: seldom, short
            assert int(given["-n"]) in (100, 1000) and int(given["-v"]) == (100 if is_long else 250), words


def test_recipe_of_several_machines():
    recipe, names = SCRIPTS / "run_gpt2_350M_torchrun.sh", ("NODES", "NODE", "GPUS", "MASTER", "PORT")
    given = ["3", "2", "5", "first", "123"]
    for variables, expected in ({}, ["1", "0", "8", "127.0.0.1", "29500"]), (dict(zip(names, given)), given):
        with scratch() as tmp:
            result = run_recipe(recipe, tmp, executable(tmp / "true.sh", ""), **variables)
            assert result.returncode == 0, result
            words = (tmp / "launched").read_text().split()
            launched = dict(zip(words, words[1:]))
            options = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")
            assert [launched[option] for option in options] == expected, words


def test_recipes_arithmetic():
    """Steps and tokens a step in the command are those of the comment, and their product is what it says."""
    def number(text):
        return int(text.replace(" ", ""))
    for recipe in RECIPES:
        text = recipe.read_text()
        steps, per_step, tokens = re.search(r"tokens +([\d ]+) steps · ([\d ]+) tokens = ([\d.e]+)", text).groups()
        steps, per_step = number(steps), number(per_step)
        assert f"-d {per_step} " in text and f"-x {steps} " in text, recipe.name
        assert abs(steps * per_step / float(tokens) - 1) < 0.005, recipe.name
        N, L, C, T = map(number, re.search(r"= 6·([\d ]+) \+ 6·([\d ]+)·([\d ]+)·([\d ]+) = ", text).groups())
        flops, total = map(float, re.search(r"([\d.e]+) a token; +([\d.e]+) in all", text).groups())
        assert abs((6 * N + 6 * L * C * T) / flops - 1) < 0.005, recipe.name
        assert abs(steps * per_step * flops / total - 1) < 0.01, recipe.name
        rate = number(re.search(r"([\d ]+) tokens/s", text)[1])
        duration, unit = re.search(r"time +([\d.]+) (\w+)", text).groups()
        seconds = float(duration) * {"minutes": 60, "hours": 3600, "days": 86400}[unit]
        assert abs(steps * per_step / rate / seconds - 1) < 0.02, recipe.name
        mfu, gpus = re.search(r"which is (\d+) % of (?:an|the (\d+) · 989)", text).groups()
        assert abs(rate * flops / (int(gpus or 1) * 989e12) - int(mfu) / 100) < 0.01, recipe.name
        others = re.findall(r"^#   (\d) GPUs +([\d.]+) hours, [\d.]+ GiB each", text, re.M)
        for n, hours in others:
            expected = steps * per_step / (rate / int(gpus or 1) * int(n) * 0.96) / 3600
            assert abs(expected - float(hours)) < max(0.051, 0.01 * expected), (recipe.name, n, expected)
        assert "long" in recipe.name or gpus or re.findall(r"^#   (\d) GPUs", text, re.M) == ["4", "8"], recipe.name


def test_recipes_are_what_was_measured():
    """Where an H200's step has been measured as the recipe runs it, rate and memory are not far from that."""
    measured = {(row["model"], row["B"], row["T"]): row for row in rows_of(ROOT / "dev/results/NVIDIA-H200/train.jsonl")
                if row["kernel"] == "train_gpt2cu" and
                (row["dtype"], row["attention"], row.get("recompute"), row["gpus"]) == ("bf16", "flash", 1, 1)}
    compared = 0
    for name, model, T in (("124M", "d12", 1024), ("350M", "d24", 1024), ("1558M", "d48", 1024),
                           ("long_context", "d12", 16384)):
        text = next(recipe for recipe in RECIPES if recipe.stem.endswith(name)).read_text()
        rate = int(re.search(r"([\d ]+) tokens/s", text)[1].replace(" ", ""))
        for B, row in [(B, row) for (other, B, other_T), row in measured.items() if (other, other_T) == (model, T)]:
            assert B not in (1, 16, 64) or abs(rate / row["tok_s"] - 1) < 0.2, (name, row)
            at = re.search(rf"([\d.]+)(?: GiB of tensors)? at B={B}\b|B={B} scripts\S+ needs ([\d.]+)", text)
            if at:
                assert 0 < row["mem_gib"] - float(at[1] or at[2]) < 1.5, (name, row)  # the row's is the whole device's
                compared += 1
    assert compared >= 5, compared


def test_long_context_repeats_the_position_embeddings():
    recipe = SCRIPTS / "run_long_context.sh"
    with scratch() as tmp:
        true, model, start = executable(tmp / "true.sh", ""), tmp / "model.bin", tmp / "log_long_context" / "start.bin"
        long_context_start(model)
        result = run_recipe(recipe, tmp, true, model)
        assert result.returncode == 0, result.stderr
        old, new = model.read_bytes(), start.read_bytes()
        wpe, size = 1024 + 50304 * 64 * 4, 1024 * 64 * 4
        assert struct.unpack_from("<8i", new) == (20240326, 3, 16384, 50257, 1, 1, 64, 50304)
        assert new[32:wpe] == old[32:wpe] and new[wpe:] == 16 * old[wpe:wpe + size] + old[wpe + size:]
        again = run_recipe(recipe, tmp, true, tmp / "nowhere.bin")  # one that goes on needs no other start
        assert again.returncode == 0 and start.read_bytes() == new, again
        start.unlink()
        check_fails(run_recipe(recipe, tmp, true, tmp / "nowhere.bin"), "nowhere.bin", "checkpoint")


def test_longer_context():
    """Of fp32 and bf16, to as many positions and to a number that is no multiple of what there is; and of bad files."""
    with scratch() as tmp:
        a, out = tmp / "a.bin", tmp / "out.bin"
        Vp, C, L = 128, 2, 1
        for version, size, max_T in (3, 4, 3), (3, 4, 7), (5, 2, 7):
            wte, wpe, rest = (os.urandom(n * size) for n in (Vp * C, 3 * C, 12 * C * C + 15 * C))
            a.write_bytes(checkpoint(version, 3, L, C, 5, Vp, wte, wpe, rest))
            result = called("longer_context.py", a, out, max_T)
            assert result.returncode == 0, result
            longer = checkpoint(version, max_T, L, C, 5, Vp, wte, (wpe * 3)[:max_T * C * size], rest)
            assert out.read_bytes() == longer, (version, max_T)
        out.unlink()
        (tmp / "short.bin").write_bytes(a.read_bytes()[:300])
        (tmp / "text.bin").write_bytes(b"GPT-2" * 1000)
        for name, target, T, *says in (("short.bin", out, 2048, "short.bin: not a whole", "300 bytes"),
                                       ("text.bin", out, 2048, "text.bin: not a whole"),
                                       ("a.bin", out, 2, "at least the 3 positions"),
                                       ("a.bin", tmp / "none" / "out.bin", 2048, "none/out.bin: cannot write")):
            check_fails(called("longer_context.py", tmp / name, target, T), "longer_context.py: ", *says)
        command = [sys.executable, SCRIPTS / "longer_context.py", a, out, 99999]
        check_fails(run("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command), "out.bin: cannot write", "too large")
        assert not list(tmp.glob("out.bin*"))


# ----------------------------------------------------------------------------------------------------------------------
# What runs the tests, the benchmarks and the sanitizer

def test_runner_of_the_tests():
    """dev/run_tests.sh with few cores and with many: what it counts, and that Ctrl-C leaves nothing behind."""
    programs = {"good": "echo 3 passed, 0 failed, 1 skipped",
                "bad": "echo 1 passed, 2 failed, 0 skipped; exit 1",
                "dies": "echo boom; exit 139",
                "lies": "echo 3 passed, 0 failed, 0 skipped; exit 3",
                "gpu": "echo 5 passed, 0 failed, 0 skipped", "gpu.cu": "",
                "test_program": "echo 1 passed, 0 failed, 0 skipped",
                "hangs": "sleep 60 & echo $! >pid; wait",
                "leaves": "sleep 60 >/dev/null 2>&1 & echo $! >pid\necho 1 passed, 0 failed, 0 skipped",
                "python.py": "#!\nimport signal\n"
                             "assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN, 'deaf to Ctrl-C'\n"
                             "print('2 passed, 0 failed, 0 skipped')\n",
                "slow.py": "#!\nimport os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(60)\n"}
    with scratch() as tmp:
        for name, text in programs.items():
            executable(tmp / name, text)
        runner, few = ROOT / "dev" / "run_tests.sh", ["good", "bad", "dies", "lies", "gpu", "./test_program", "python.py"]
        # What has a .cu file and the program as a whole first, the others beside them.
        many = ["gpu", "./test_program", "good", "bad", "dies", "lies", "python.py"]
        for cores, order in (2, few), (16, many):
            executable(tmp / "nproc", f"echo {cores}")
            path = before_others(tmp)
            result = run(runner, "true", *few, cwd=tmp, **path)
            assert result.returncode == 1 and result.stdout.splitlines()[-1] == "13 passed, 4 failed, 1 skipped", result
            assert [line[3:] for line in result.stdout.splitlines() if line.startswith("== ")][:7] == order, result.stdout
            assert run(runner, "true", "good", "python.py", cwd=tmp, **path).returncode == 0
            interrupt_and_wait(runner, "true", "slow.py", cwd=tmp, **path)
        tools = "sh dirname nproc mktemp mkdir rm basename timeout env touch cat tail sed true"
        no_python, short = links(tmp / "tools", *tools.split()), {"TEST_LIMIT": "1"}
        for tests, archs, variables, code, *says in (
                (["good", "python.py"], "true", no_python, 0, "4 passed, 0 failed, 2 skipped"),
                (["hangs"], "true", {**short, "TEST_PATIENCE": "2"}, 1, "./hangs: no end after 2 s"),
                (["hangs", "good"], "true", short, 1, "./hangs: no end after 1 s", "4 passed, 1 failed, 1"),
                (["leaves"], "sleep 60", short, 1, "sleep 60: no end after 1 s", "1 passed, 1 failed, 0")):
            result = run(runner, archs, *tests, cwd=tmp, **variables)
            assert result.returncode == code and all(part in result.stdout for part in says), result
            wait_for_end_of(tmp / "pid", 5)


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
        for name in ("accuracy study_accumulation study_ring bench_attention bench_layers bench_ring bench_train "
                     "test_attention test_layers test_gpt2 ../python3").split():
            executable(tmp / "dev" / name, 'echo "$(basename "$0") $*" >>ran\necho "$RUN" >>runs\n'
                       'case "$(basename "$0") $*" in $BAD) exit 3 ;; $SLOW) sleep 60 & echo $! >pid; wait ;; esac')
        executable(tmp / "make", "")

        def measure(*parts, gpus=1, **variables):
            executable(tmp / "nvidia-smi", gpus * "echo GPU 0: it\n")
            for name in ("ran", "runs"):
                (tmp / name).unlink(missing_ok=True)
            result = run(tmp / "scripts" / "measure.sh", *parts, **before_others(tmp), **variables)
            ran = [line for line in (tmp / "ran").read_text().splitlines() if line != "python3 -c import torch"]
            assert len(set((tmp / "runs").read_text().split())) == 1 or variables or not ran  # one run: RUN
            return result, ran
        result, ran = measure()
        end = ["python3 scripts/plot_results.py", "python3 scripts/readme_tables.py"]
        assert result.returncode == 0 and "one GPU" in result.stdout, result
        assert ran[:3] == ["test_attention ", "test_layers ", "test_gpt2 "] and ran[-2:] == end
        assert [line for line in ran if "compare_torch" in line] == [
            "python3 scripts/compare_torch.py --json", "python3 scripts/compare_torch.py --json --precision bf16"]
        assert all(re.search("default_run|--json( |$)", line) for line in ran[3:-2]) and len(ran) == 3 + 19 + 2, ran
        _, ran = measure("--no-tests", "ring", "scaling", gpus=4)
        assert ran == ["study_ring --json", "bench_ring --json --gpus 4 --heads 12 --hs 64",
                       "bench_ring --json --gpus 4 --heads 32 --hs 128", "python3 scripts/trace_ring.py --json --gpus 4",
                       "python3 scripts/scaling.py --json", *end]
        result, ran = measure("--no-tests", "accuracy", "study", "layers", BAD="accuracy*64", SLOW="study_accum*", PART_LIMIT="1")
        check_in_order(result.stdout, "--part study: no end after 1 s")
        assert result.returncode == 1 and "failed: accuracy study; no table is written" in result.stderr, result
        assert ran == ["accuracy --json --hs 64", "study_accumulation --json", "bench_layers --json"], ran
        wait_for_end_of(tmp / "pid", 5)
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
        executable(tmp / "make", "")
        executable(tmp / "compute-sanitizer", 'echo "$2 $6" >>ran\necho "========= ERROR SUMMARY: 0 errors"\n'
                   'case "$2 $6" in "synccheck bad"*) exit 1 ;; *slow) printf "$$ " >pid; exec sleep 60 ;; esac')
        path = before_others(tmp)
        result = run(sanitize, **path)
        ran = (tmp / "ran").read_text().splitlines()
        assert result.returncode == 0 and result.stdout.count("\n") == len(ran) == 26, (result, ran)
        assert "racecheck flash_fp16x3 fp32 few blocks" in ran and "memcheck flash_fp16x3 fp32 block" in ran, ran
        result = run(sanitize, "good", "bad one", **path)
        assert result.returncode == 1 and "synccheck  bad one: FAILED" in result.stdout, result
        assert result.stdout.count("0 errors") == 8 and result.stdout.count("FAILED") == 1, result
        interrupt_and_wait(sanitize, "slow", cwd=tmp, **path)


def interrupt_and_wait(*command, cwd, **variables):
    """Ctrl-C once a process has written its number to the file `pid`, and then waits until there is no such process."""
    pid = cwd / "pid"
    pid.unlink(missing_ok=True)
    process = subprocess.Popen(command, cwd=cwd, env={**os.environ, **variables}, stdout=subprocess.DEVNULL,
                               start_new_session=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    wait_for(lambda: pid.exists() and pid.read_text().endswith(" "))
    os.killpg(process.pid, signal.SIGINT)
    process.wait(30)
    wait_for_end_of(pid)


def wait_for_end_of(file, seconds=30):
    """Of the process whose number is in the file. A zombie that nobody has buried yet has ended."""
    def ended():
        try:
            stat = pathlib.Path(f"/proc/{file.read_text().strip()}/stat").read_text()
        except OSError:
            return True
        return stat.rsplit(")", 1)[1].split()[0] == "Z"
    wait_for(ended, seconds)


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing for so long"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
