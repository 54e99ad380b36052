#!/usr/bin/env python3
"""Tests of the scripts, of the Makefile's probes, and of what runs tests and measurements.

    make train_gpt2cu && python3 dev/test_tools.py [part of a test's name]
"""
import array
import ast
import calendar
import contextlib
import functools
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
import time
import unittest
from types import SimpleNamespace
from unittest import mock

from harness import ROOT, Skip, built, executable, main, need, write_launcher, written

SCRIPTS = ROOT / "scripts"
RECIPES = sorted(SCRIPTS.glob("run_*.sh"))
OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "B", "GPUS", "COMMIT", "TREE", "RUN")  # make's, a user's
FULL_DISK = ("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable)  # a limit on the size of files stands for it
refused = unittest.TestCase().assertRaisesRegex
sys.path += [str(SCRIPTS), str(ROOT / "dev")]


def check_in_order(text, parts):
    """Each part stands in the text, behind the one before it. A line's end counts as a space."""
    text, at = text.replace("\n", " "), 0
    for part in map(str, parts):
        assert part in text[at:], (part, text)
        at = text.index(part, at) + len(part)


def checked(result, code, says):
    """The result, if its exit code and what stderr says in order are these. A failure, code 1, says it in one line."""
    assert code in (None, result.returncode), result
    assert code != 1 or not says or result.stderr.count("\n") == 1, result
    check_in_order(result.stderr, says)
    return result


def run(*command, code=0, says=(), cwd=ROOT, **variables):
    env = {k: v for k, v in os.environ.items() if k not in OUTER} | variables
    result = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    return checked(result, code, says)


def script(name, *arguments, code=0, says=(), real=False, modules=None, function=None):
    """Like run(), for a script of ours and in this process. Stand-ins replace matplotlib and TensorBoard's package,
    unless `real` ones are asked for. `modules` replaces others, and None is a missing one. A `function` may be called
    instead of the script."""
    path, out, err, ended, drawn = SCRIPTS / name, io.StringIO(), io.StringIO(), 0, Drawing()
    replaced = {**drawn.modules, **tensorboard_stand_in(), **(modules or {})}
    argv = [str(path), *map(str, arguments)]
    with mock.patch.multiple(sys, argv=argv, path=sys.path[:], stdout=out, stderr=err), \
            contextlib.nullcontext() if real else mock.patch.dict(sys.modules, replaced):
        try:
            function() if function else runpy.run_path(str(path), run_name="__main__")
        except SystemExit as e:
            ended = e.code or 0
            if isinstance(ended, str):
                print(ended, file=err)
                ended = 1
    result = SimpleNamespace(returncode=ended, stdout=out.getvalue(), stderr=err.getvalue(), drawn=drawn)
    return checked(result, code, says)


def copied(folder, name):
    """A function that runs this script of a copy of scripts/."""
    shutil.copytree(SCRIPTS, folder / "scripts", dirs_exist_ok=True)
    return functools.partial(run, sys.executable, folder / "scripts" / name)


def before_others(folder):
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def only(folder, *names):
    """A PATH without anything else."""
    folder.mkdir()
    for name in names:
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": str(folder)}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# ----------------------------------------------------------------------------------------------------------------------
# Logs, plots, TensorBoard

class Drawing:
    """Stands for matplotlib, which need not be installed, and keeps what is called: of `plt`, of the figure, and of its
    panels by name or by row and column."""
    def __init__(self):
        matplotlib = mock.MagicMock()
        plt, figure = matplotlib.pyplot, matplotlib.figure
        self.modules = {"matplotlib": matplotlib, "matplotlib.pyplot": plt, "matplotlib.ticker": matplotlib.ticker}
        self.parts = {"plt": plt, "figure": figure}
        plt.figure.return_value, plt.subplots.side_effect = figure, self.subplots
        figure.subplot_mosaic.side_effect = lambda rows: {name: self.panel(name) for name in set(sum(rows, []))}
        figure.savefig.side_effect = lambda path, **_: path.write_text("drawn")

    def panel(self, name):
        self.parts[name] = mock.MagicMock()
        self.parts[name].get_ylim.return_value = 0.5, 2.0
        return self.parts[name]

    def subplots(self, rows=1, columns=1, squeeze=True, **_):
        grid = [[self.panel(f"{r}{c}") for c in range(columns)] for r in range(rows)]
        flat = sum(grid, [])
        return self.parts["figure"], grid if not squeeze else flat if len(flat) > 1 else flat[0]

    def __call__(self, what):
        """The positional arguments of each call of "loss.plot", or its option "loss.plot ls". Ranges become lists."""
        method, _, option = what.partition(" ")
        part, method = method.split(".")
        calls = getattr(self.parts[part], method).call_args_list
        if option:
            return [call.kwargs[option] for call in calls if option in call.kwargs]
        return [[list(arg) if isinstance(arg, (range, tuple)) else arg for arg in call.args] for call in calls]


def write_log(folder, steps=100, floor=1.1, mfu=40.0):
    """A log such as ./train_gpt2cu -o writes. Its first row says the floor, or its validations do."""
    rows = [{"kind": "run", "device": "NVIDIA H200", "tokens_per_step": 8192, "steps": steps, "B": 8, "T": 1024,
             "floor_nats": None if steps >= 50 else floor, "precision": "bf16"}]
    for step in range(1, steps + 1):
        rows.append({"kind": "train", "step": step, "loss_nats": 2 + 9 * math.exp(-step / 10), "grad_norm": 1.0 + step,
                     "lr": step * 1e-5, "step_ms": 20.0, "tokens_per_s": 2e5 + step, "mfu_percent": mfu and mfu + step})
        if step % 50 == 0:
            rows.append({"kind": "val", "step": step, "loss_nats": 2 + 25 / step, "floor_nats": floor})
            rows.append({"kind": "sample", "step": step, "text": "Once\nupon a time"})
            rows.append({"kind": "hellaswag", "step": step, "correct": 30, "examples": 40})
    written(folder / "log.jsonl", jsonl(rows))
    return folder


def test_smoothing():
    from plot import smooth
    for width, values, expected in ((1, [1, 2, 3, 4], [1, 2, 3, 4]), (2, [1, 5, 3, 4, 5], [1, 3, 4, 4, 4.5]),
                                    (4, [1, 5, 3, 4, 5], [1, 3, 3.6, 4.25, 4]), (2, [2, math.nan, 4], [2, 3, 4])):
        assert smooth(values, width) == expected
    assert math.isnan(smooth([math.nan], 5)[0])


def test_plot_of_runs(tmp):
    """By the stand-in: where the plot goes, what stands in it, what the options do, and whose names it has."""
    one, two = write_log(tmp / "one", steps=300), write_log(tmp / "two", steps=40, floor=1.2)

    def plot(path, *arguments):
        result = script("plot.py", *arguments)
        check_in_order(result.stdout, [f"{path} next: python3 scripts/tensorboard.py {arguments[0]}"])
        assert path.read_text() == "drawn", result
        return result.drawn
    drawn = plot(one / "plot.png", one, two / "log.jsonl", "--title", "Two")
    (steps, losses), (_, smoothed), validations = drawn("loss.plot")[:3]
    assert steps == list(range(1, 301)) and losses[9] == 2 + 9 * math.exp(-1)
    assert abs(smoothed[9] - sum(losses[8:11]) / 3) < 1e-12 and smoothed[0] == losses[0]  # three steps: a hundredth
    assert validations == [list(range(50, 301, 50)), [2 + 25 / step for step in range(50, 301, 50)]]
    low, high = drawn("loss.set_ylim")[0]
    assert high < 10 and abs(low - (1.1 - 0.1 * (high - 1.1) / 1.1)) < 1e-9  # the first twentieth may be above
    for name, start in ("norm", 1.0), ("speed", 2e5), ("mfu", 40.0):
        assert drawn(f"{name}.plot")[1][1][1] == start + 2, name  # of steps 1 to 3
        assert abs(drawn(f"{name}.set_ylim")[0][1] / (1.1 * (start + 299.5)) - 1) < 1e-6, name
    assert drawn("lr.plot")[0][1] == [i * 1e-5 for i in range(1, 301)]
    assert drawn("loss.axhline") == [[1.1], [1.2]] and drawn("loss.annotate")[0][0] == "floor 1.1000"
    for what, expected in {
            "mfu.text": [], "figure.savefig format": ["png"], "figure.suptitle": [["Two"]],
            "plt.Line2D label": ["one, validation 2.0833", "two", "training, mean of 3 steps", "training, each step",
                                 "validation"],
            "loss.set_title": [["Loss"]], "norm.set_title": [["Gradient norm"]], "lr.set_title": [["Learning rate"]],
            "speed.set_title": [["Tokens per second"]], "mfu.set_title": [["MFU, %"]]}.items():
        assert drawn(what) == expected, what

    drawn = plot(tmp / "out.svg", two, one, "--smooth", "7", "-o", tmp / "out.svg")
    assert "training, mean of 7 steps" in drawn("plt.Line2D label") and not (two / "plot.png").exists()
    assert drawn("figure.savefig format") == ["svg"] and not drawn("figure.suptitle")
    short = write_log(tmp / "short", steps=40, floor=None, mfu=None)
    drawn = plot(short / "plot.png", short)
    assert len(drawn("loss.plot")) == 1 and not drawn("loss.axhline")  # too short to be smoothed
    assert drawn("mfu.text")[0][2] == "n/a: no peak is known for this GPU"
    for out, what in ("out.gif", ".png"), ("no/such/out.png", "cannot write: No such file"):
        script("plot.py", one, "-o", tmp / out, code=1, says=[out, what])


def test_plots_by_matplotlib(tmp):
    """Formats, several runs, and logs that are shorter than what is smoothed; the same rows give the same bytes."""
    need("matplotlib")
    plot = functools.partial(script, "plot.py", real=True)
    a, b = write_log(tmp / "a"), write_log(tmp / "b", steps=250, floor=None, mfu=None)
    for suffix, start in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        plot(a, b / "log.jsonl", "-o", tmp / f"out.{suffix}", "--title", "two runs")
        assert (tmp / f"out.{suffix}").read_bytes().startswith(start)
    plot(b)
    assert (b / "plot.png").stat().st_size > 10000
    for steps in 1, 2:
        plot(write_log(tmp / str(steps), steps), "--smooth", "50")

    write_rows(tmp, "attention", [attention_row(kernel="naive", T=2048, ms=None)] + [  # too large
        attention_row(kernel=kernel, T=T, HS=HS, **{"pass": pas}) for HS in (64, 128) for pas in ("fwd", "bwd")
        for kernel, T in (("naive", 1024), ("torch_flash", 1024), ("flash_bf16", 2048))])
    write_rows(tmp, "accuracy", [accuracy_row(tensor=tensor, T=T) for tensor in TENSORS for T in (64, 255)])
    found = []
    for _ in range(2):
        paths = script("plot_results.py", "--root", tmp, real=True).stdout.splitlines()
        assert [os.path.basename(path) for path in paths] == ["attention_bf16.svg", "accuracy.svg"]
        found.append([pathlib.Path(path).read_bytes() for path in paths])
    assert found[0] == found[1] and all(svg.startswith(b"<?xml") and b">flash_bf16</text>" in svg for svg in found[0])


def test_full_disk_leaves_what_was_there(tmp):
    need("matplotlib", "tensorboard.backend")
    log = write_log(tmp / "run", steps=400)
    for name in "plot.py", "tensorboard.py":
        made = script(name, log, real=True).stdout.splitlines()[0]
        before = {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()}
        run(*FULL_DISK, SCRIPTS / name, log, code=1, says=[made, "cannot write: File too large"])
        assert {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()} == before


def test_logs_that_cannot_be_read(tmp):
    from results import read_log
    path, good = tmp / "log.jsonl", ('{"kind": "train", "step": 1, "loss_nats": 2.0, "grad_norm": 1.0, "lr": 0.1, '
                                     '"tokens_per_s": 9, "mfu_percent": null}\n')
    for bad, what in (("{oops\n", "expected a JSON object"), ("[1]\n", "expected a JSON object"),
                      ('{"step": 2}\n', '"kind"'), ('{"kind": "train", "step": 2}\n', '"loss_nats"'),
                      (good.replace("2.0", '"2.0"'), '"loss_nats" is \'2.0\'')):
        written(path, good + bad + good)
        script("plot.py", tmp, code=1, says=[f"{path}:2: ", what])
    written(path, '{"kind": "val", "step": 0, "loss_nats": 2.0}\n')  # alone it is enough
    assert read_log(tmp)["val"][0]["loss_nats"] == 2
    written(path, good + '{"kind": "tra')  # a row that is being written
    rows = read_log(path)["train"]
    assert len(rows) == 1 and math.isnan(rows[0]["mfu_percent"])
    written(path, "")
    for name in "plot.py", "tensorboard.py":
        script(name, tmp, code=1, says=[f"{name}: {path}", "no steps yet"])
        script(name, tmp / "nowhere", code=1, says=["nowhere", "cannot be read"])


def tensorboard_stand_in():
    """For the package: it writes events as JSON."""
    class Event(dict):
        def SerializeToString(self):
            return json.dumps(self).encode()

    class Summary(dict):
        Value = dict
    it = SimpleNamespace(Event=Event, Summary=Summary, create_summary_metadata=lambda *_: "",
                         make_tensor_proto=lambda text: {"string_val": [text]},
                         RecordWriter=lambda file: SimpleNamespace(write=lambda data: file.write(data + b"\n")))
    return {f"tensorboard.{name}": it for name in (
        "compat.proto.summary_pb2", "compat.proto.event_pb2", "plugins.text.metadata", "util.tensor_util",
        "summary.writer.record_writer")}


def events_of(folder, real):
    """What the events in a folder's only file say, tag → (step, value), and when the losses were."""
    (path,) = folder.iterdir()
    if real:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
        events = list(LegacyEventFileLoader(str(path)).Load())
    else:
        events = [json.loads(line, object_hook=lambda fields: SimpleNamespace(**fields)) for line in path.open()]
    found, times = {}, []
    for e in events[1:]:  # the first one says the version
        for v in e.summary.value:
            value = v.simple_value if v.tag != "sample" else v.tensor.string_val[0]
            found.setdefault(v.tag, []).append((e.step, value.decode() if isinstance(value, bytes) else value))
            times += [e.wall_time] if v.tag == "loss/train" else []
    return found, times


def test_tensorboard_events(tmp, real=False):
    convert = functools.partial(script, "tensorboard.py", real=real)
    log, other = write_log(tmp / "a"), write_log(tmp / "none", mfu=None, floor=None)
    written(log / "tensorboard" / "events.out.tfevents.1.earlier.1", "")  # is replaced
    result = convert(log, other / "log.jsonl")
    a, none = log / "tensorboard", other / "tensorboard"
    assert result.stdout == f"{a}\n{none}\nnext: tensorboard --logdir_spec a:{a},none:{none}\n"
    found, times = events_of(log / "tensorboard", real)
    steps, text = range(1, 101), "    Once\n    upon a time"
    expected = {"loss/train": [(step, 2 + 9 * math.exp(-step / 10)) for step in steps],
                "train/grad_norm": [(step, 1.0 + step) for step in steps],
                "train/lr": [(step, step * 1e-5) for step in steps],
                "speed/tokens_per_s": [(step, 2e5 + step) for step in steps],
                "speed/mfu_percent": [(step, 40.0 + step) for step in steps],
                "loss/val": [(50, 2.5), (100, 2.25)], "loss/floor": [(50, 1.1), (100, 1.1)],
                "hellaswag": [(50, 0.75), (100, 0.75)]}
    assert found.pop("sample") == [(50, text), (100, text)] and set(found) == set(expected)
    for tag, values in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in values], tag
        assert all(abs(a / b - 1) < 1e-6 for (_, a), (_, b) in zip(found[tag], values)), tag  # in fp32
    assert abs(times[-1] - times[0] - 99 * 0.020) < 1e-3 and abs(times[-1] - os.path.getmtime(log / "log.jsonl")) < 1e-3
    tags = events_of(other / "tensorboard", real)[0]
    assert "loss/val" in tags and not {"loss/floor", "speed/mfu_percent"} & set(tags)
    named = convert(f"{log}/tensorboard/..", "-o", tmp / "out")  # as its folder is
    assert named.stdout == f"{tmp / 'out' / 'a'}\nnext: tensorboard --logdir {tmp / 'out'}\n"
    assert len(list((tmp / "out" / "a").iterdir())) == 1
    convert(log, write_log(tmp / "c" / "a"), "-o", tmp / "out", code=1, says=["one folder"])


def test_tensorboard_files_hold_the_log(tmp):
    need("tensorboard.backend")  # not scripts/tensorboard.py
    test_tensorboard_events(tmp, real=True)


# ----------------------------------------------------------------------------------------------------------------------
# What programs need, and what they refuse

def test_benchmarks_say_what_is_wrong():
    for name in "bench_attention", "bench_train", "bench_layers", "study_ring", "study_accumulation", "timeline":
        program = built(f"dev/{name}")
        check_in_order(run(program, "--help").stdout.lower(), [f"usage: {name}", "--json"])
        run(program, "--jsom", code=2, says=["--json"])
        assert run(program, CUDA_VISIBLE_DEVICES="", code=1, says=["GPU"]).stderr.count(name) == 1


def test_what_scripts_need_is_named(tmp):
    """A package, a GPU, the trainer; and which arguments are wrong."""
    log = write_log(tmp / "run")
    for module, name, *arguments in (("matplotlib", "plot.py", log), ("matplotlib", "plot_results.py"),
                                     ("tensorboard.compat.proto.event_pb2", "tensorboard.py", log)):
        script(name, *arguments, modules={module: None}, code=1, says=[f"{name}: needs {module.split('.')[0]}: pip install"])
    more, most = [re.findall(r"^(\w+)==", path.read_text(), re.M) for path in sorted(SCRIPTS.glob("requirements*.txt"))]
    assert most and "torch" in more and not set(most) & set(more)
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("*/*.py")])
    named = re.findall(r"-c scripts/requirements-more.txt ([a-z_]+)", texts)
    assert set(named) <= set(more) and len(set(named)) >= 4, named
    for name in "default_run.py", "compare_losses.py", "scaling.py", "trace_ring.py":
        copied(tmp, name)(code=1, says=[f"{name}: there is no ./train_gpt2cu: make"])
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    for name in "peers.py", "peers_train.py":
        for torch, what in (None, "needs PyTorch"), (no_gpu, "needs a GPU"):
            result = script(f"../dev/{name}", modules={"torch": torch})
            assert result.stdout.startswith(f"skipped: {name} {what}"), result
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
        script(name, *command.split(), code=2, says=says)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of results, README's tables, and plots of them

def seconds(date):
    return calendar.timegm(time.strptime(date, "%Y-%m-%dT%H:%M:%SZ"))


def printed_row(folder, **variables):
    code = "import results; print(results.row('x', 'G', results.toolkit(), ms=2))"
    return ast.literal_eval(run(sys.executable, "-B", "-c", code, PYTHONPATH=str(folder), **variables).stdout)


def test_rows_name_the_sources(tmp):
    """In a small tree of the same folders: with git, with a change in each of its places, and without git."""
    def state(**variables):
        return run(tmp / "scripts" / "tree.sh", **variables).stdout.split()
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*") if path.suffix in (".cu", ".cpp", ".h", ".py", ".sh")}
    assert {"attention", "layers", "scripts"} < folders
    sources = [tmp / "Makefile", tmp / "train_gpt2.cu", *(tmp / folder / "some.h" for folder in folders - {"build"})]
    others = [tmp / "README.md", tmp / "dev" / "results" / "A" / "attention.jsonl"]
    for path in sources + others:
        written(path, "1\n")
    for name in "tree.sh", "results.py":
        shutil.copy(SCRIPTS / name, tmp / "scripts")
    git = ["git", "-C", tmp, "-c", "user.name=A", "-c", "user.email=a@b"]
    for command in ["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]:
        run(*git, *command)
    commit = run(*git, "rev-parse", "--short=12", "HEAD").stdout.strip()
    tree_is = run(tmp / "scripts" / "tree.sh", "--sum").stdout.strip()
    for path in *others, tmp / "dev" / "none.md":
        written(path, "2\n")
    assert state() == state(COMMIT="other", TREE="other") == [commit, "clean"] and len(commit) == 12
    new = ("attention/new.cu", "dev/new.cpp", "scripts/new.py", "scripts/new.sh", "layers/new.cuh", "data/new.txt")
    for path in *sources, *(tmp / name for name in new):
        old = path.read_text() if path.exists() else None
        written(path, "2\n")
        assert state() == [commit, "dirty"], path
        written(path, old) if old else path.unlink()
    clean = printed_row(tmp / "scripts", RUN="r")
    assert (clean["commit"], clean["dirty"], clean["run"], clean["gpu"], clean["ms"]) == (commit, False, "r", "G", 2)
    assert abs(time.time() - seconds(clean["date"])) < 60, clean
    shutil.rmtree(tmp / ".git")  # a copy
    assert state(COMMIT=commit, TREE=tree_is) == [commit, "clean"] and state(COMMIT=commit) == [commit, "dirty"]
    written(sources[0], "2\n")
    assert state(COMMIT=commit, TREE=tree_is) == [commit, "dirty"] and state() == ["unknown", "dirty"]
    dirty = printed_row(tmp / "scripts", COMMIT=commit, TREE=tree_is)
    assert dirty["dirty"] is True and dirty["run"] <= dirty["date"]
    run("make", "-s", "build/tree.cpp")  # what benchmarks link
    here = run(SCRIPTS / "tree.sh").stdout.strip()
    assert f'char built_from[] = "{here}";' in (ROOT / "build" / "tree.cpp").read_text()


def test_rows_name_driver_and_toolkit(tmp):
    executable(tmp / "nvidia-smi", "case $1 in --query-gpu=driver_version) echo 580.65 ;; *) echo other ;; esac")
    executable(tmp / "nvcc", "echo 'Cuda compilation tools, release 13.1, V13.0.48'")
    row = printed_row(SCRIPTS, **before_others(tmp))
    assert (row["driver"], row["cuda"]) == ("580.65", "13.1"), row


def test_rows_of_a_benchmark(tmp):
    program, out = built("dev/bench_layers"), tmp / "rows.jsonl"
    result = run(program, "--layer", "adamw", "--quick", "--out", out, RUN="r", code=None)
    if "GPU" in result.stderr:
        raise Skip("no GPU")
    tree = re.search('"([^"]*)"', (ROOT / "build" / "tree.cpp").read_text())[1].split()
    for r in rows_of(out):
        assert [r["commit"], r["dirty"], r["run"]] == [*tree[:-1], tree[-1] != "clean", "r"], (r, tree)
    assert rows_of(out), result


def row(**fields):
    return {"commit": "0123456789ab", "dirty": False, "run": "1", "date": "2030-01-01T00:00:00Z", "gpu": "GPU A",
            "driver": "1.2", "cuda": "13.0", "kernel": "flash_bf16", "pass": "fwd", "dtype": "bf16", "B": 4, "T": 1024,
            "NH": 12, "HS": 64, "causal": True, "deterministic": True, **fields}


attention_row = functools.partial(row, ms=1.0, tflops=100.0, tflops_sustained=90.0)
train_row = functools.partial(row, kernel="train_gpt2cu", model="d12", gpus=1, attention="flash", ms=8.0, tok_s=5e5,
                              mfu=None, mem_gib=3.5)
accuracy_row = functools.partial(row, input="normal", tensor="out", max_error=1e-3, snr_db=54.0, ratio_max=1.25,
                                 ratio_l2=0.5)
OLD, NEW, BWD = {"run": "1"}, {"run": "2", "date": "2030-02-01T00:00:00Z"}, {"pass": "bwd"}
FP32, NAIVE = {"dtype": "fp32", "kernel": "flash_fp32"}, {"dtype": "fp32", "kernel": "naive"}
TENSORS = ["out", "lse", "dq", "dk", "dv"]


def write_rows(root, name, rows, gpu="A"):
    return written(root / "dev" / "results" / gpu / f"{name}.jsonl", jsonl(rows))


def test_rows_that_tables_show(tmp):
    """Never of a differing tree; of one run wherever they are compared; close ones as the span of three jobs."""
    from readme_tables import close, figure
    from results import read_rows
    dirty, naive = {"dirty": True, "date": "2030-03-01T00:00:00Z"}, {"kernel": "naive"}
    later = {**NEW, "date": "2030-02-01T00:00:01Z"}

    def read(*fields, **query):
        return read_rows(write_rows(tmp, "attention", [attention_row(**f) for f in fields]), **query)
    for fields, query, expected in (
            ([{**OLD, "ms": 1.0}, {**dirty, "ms": 2.0}, {**dirty, **naive}], {}, [("flash_bf16", 1.0)]),
            ([{**NEW, "ms": 1.0}, {**OLD, **naive}, {**OLD, "ms": 9.0}], {}, [("flash_bf16", 1.0)]),  # no old naive
            ([{**NEW, "ms": 1.0}, {**later, "ms": 3.0}, {**NEW, **naive}], {}, [("flash_bf16", 3.0), ("naive", 1.0)]),
            ([{**NEW, "commit": "b", "ms": 4.0}, {**OLD, "run": "2", **naive}], {}, [("flash_bf16", 4.0)]),
            ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"apart": ["T"]}, [("flash_bf16", 1.0), ("naive", 5.0)]),
            ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"T": 1024}, [("naive", 5.0)])):
        assert [(r["kernel"], r["ms"]) for r in read(*fields, **query)] == expected, (fields, query)
    for field in ("kernel pass model dtype attention B T NH HS causal deterministic gpus zero lr tf32 input tensor "
                  "recompute variant carry ranks chunk step").split():
        assert len(read({field: 1}, {field: 2})) == 2, field  # neither replaces the other

    def shown(*ms, others=(10.2,)):
        jobs = read(*({"run": str(i), "ms": x, "date": f"2030-01-0{i + 1}"} for i, x in enumerate(ms)))
        return figure(jobs[0], lambda r: r["ms"], others, "{:.1f}".format)
    three = (9.8, 10.4, 10.0)
    assert shown(*three) == shown(*three, others=(None, 20, 10.29)) == "9.8–10.4"
    assert shown(*three, others=(10.32, 9.69)) == shown(10.0, 10.0, 10.0) == shown(10.0, others=(None,)) == "10.0"
    assert shown(9.9, 10.0) == "≈10.0"
    found = read(*({"run": str(i), "date": f"2030-01-0{i + 1}", "commit": str(i)} for i in range(3)))
    assert len(found[0]["jobs"]) == 1  # of other sources
    assert close(100, 97.1) and close(97.1, 100) and not close(100, 96.9) and not close(96.9, 100)


def test_rows_of_dev_results_are_honest():
    """A row is not older than the commit that it names. Since rows say so, its sources were the commit's. No row has
    been edited since it was committed."""
    if run("git", "rev-parse", "--is-shallow-repository", code=None).stdout.strip() != "false":
        raise Skip("needs the history")
    committed = {line[:7]: int(line.split()[1]) for line in run("git", "log", "--format=%H %ct").stdout.splitlines()}
    for path in sorted((ROOT / "dev" / "results").glob("*/*.jsonl")):
        for number, r in enumerate(rows_of(path), 1):
            where = f"{path}:{number}: {r['commit']}"
            assert committed.get(r["commit"][:7], math.inf) <= seconds(r["date"]), f"{where}: younger, or nowhere"
            assert r["date"] < "2026-11-22T14" or (r["dirty"] is False and r["run"] <= r["date"]), where
    log = ("git", "log", "--since=2026-11-22T14:00Z", "--format=", "--numstat", "--", "dev/results/*.jsonl")
    for added, removed, name in map(str.split, run(*log).stdout.splitlines()):
        assert "0" in (added, removed), f"{name}: rows were added and removed in one commit: was one edited?"


def accumulation_rows():
    """Two variants in fp16, a shifted one that is not timed, and bf16 beside the trainer; wgmma and mma.sync."""
    found = []
    for kernel, trainer in ("mma.sync", "flash_bf16"), ("wgmma", "flash_bf16_sm90"):
        for T in 1024, 4096:
            for dtype, variant in ("fp16", "base"), ("fp16", "pv16"), ("fp16", "pv16+shift"), ("bf16", "base"):
                error = row(kernel=kernel, dtype=dtype, variant=variant, T=T, NH=2, elements=200, not_finite=0,
                            input="normal", relative_l2=1e-4 * len(variant) * T / 1024, ratio_l2=1.5)
                found += [error, {**error, "input": "huge_qk", "not_finite": 50, "relative_l2": None, "ratio_l2": None}]
                if "shift" not in variant:
                    found.append(attention_row(kernel=kernel, dtype=dtype, variant=variant, T=T, tflops=300.0 + T))
            found.append(attention_row(kernel=trainer, variant="trainer", T=T, tflops=400.0 + T))
    return found


def ring_rows():
    """A study of chunks, and one of rings up to 2 ranks."""
    errors = dict.fromkeys(TENSORS, 1e-3)
    wrong = {"own_lse_dq": 0.4, "own_lse_dk": 0.3, "own_lse_dv": 0.2, "used_sum_dq": 4.5}
    found = [row(study="unchunked", **errors)]
    found += [row(study="chunks", chunk=i, chunks=8, **errors, **wrong) for i in range(2)]
    for carry, ranks, ratio in ("floor", 1, 0.6), ("fp32", 1, 1), ("fp32", 2, 1), ("bf16", 1, 1), ("bf16", 2, 1.2):
        found += [row(study="ring", carry=carry, ranks=ranks, tensor=t, mean_error=6e-5 * ratio, max_error=0.01 * ratio,
                      mean_ratio=ratio, max_ratio=2 * ratio) for t in ("out", "dq", "dk", "dv")]
    return found


def breakdown_rows():
    """B 4 and B 64; "gone" is a call of an older run."""
    call = functools.partial(row, kernel="train_gpt2cu", model="d12", attention="flash", recompute=1, calls=12,
                             tflops=0, tb_s=2.0, gemm_tflops_sustained=700.0, copy_tb_s_sustained=4.0)
    old, new = functools.partial(call, B=64, step_ms=100.0), functools.partial(call, **NEW, step_ms=80.0)
    return [old(call="adamw", ms=9.0, lost_ms=9.0), old(call="gone", ms=50.0, lost_ms=50.0),
            new(B=64, call="adamw", calls=1, ms=2.0, lost_ms=1.0),
            new(B=64, call="matmul", ms=60.0, lost_ms=8.0, tflops=630.0, tb_s=1.0),
            new(B=64, call="clear", ms=1.0, lost_ms=0.5),
            new(B=64, call="fast", ms=0.5, lost_ms=-0.25, tflops=770.0),
            new(B=64, call="attention", ms=12.5, lost_ms=7.25, tflops=350.0),
            new(B=4, call="matmul", ms=60.0, lost_ms=8.0, gemm_size=4096)]


default_run_row = functools.partial(row, steps=6500, B=8, floor_nats=0.1273)
losses_row = functools.partial(train_row, dtype="fp32", tf32=True, steps=400, seeds=3, loss=2.5, loss_min=2.4,
                               loss_max=2.6)
# Rows by GPU and bench, the tables and plots that are asked for, what attention/README.md then says in this order, and
# what it does not say.
TABLES = {
    "attention": ({
        "A/attention": [attention_row(), attention_row(tflops=120.0, **NEW), attention_row(**NEW, HS=128, tflops=200.0),
                        attention_row(**NEW, kernel="torch_flash", tflops=77.0), attention_row(**NEW, causal=False),
                        attention_row(**NEW, kernel="naive", tflops=40.0, tflops_sustained=None)],
        "B/attention": [attention_row(gpu="GPU B", tflops=7.0), attention_row(gpu="GPU B", **BWD)]},
        ["attention bf16"],
        ["Attention, bf16, causal, NH 12, TFLOP/s cool / sustained. GPU A, driver 1.2, CUDA 13.0. Measured",  # HS: two
         "| B, T | HS | pass | naive | torch_flash | flash_bf16 |",
         "| 4, 1024 | 64 | fwd | 40 | 77 / ≈90 | 120 / ≈90 |",
         "| 4, 1024 | 128 | fwd | – | – | 200 / 90 |", "NH 12, HS 64, TFLOP/s", "GPU B", "| 4, 1024 | fwd | 7 / 90 |",
         "| 4, 1024 | bwd | 100 / 90 |"], []),
    # B: a row without a level has level 0, and a newer one replaces it. Two levels make a column. Peers have none.
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
         f"| flash_bf16 |{' 1.0e-03, 54 |' * 5}", "![L2 errors by T", "bf16](../dev/results/A/accuracy.svg)"], []),
    "losses": (
        {"A/losses": [losses_row(attention="flash", ms=20.0), losses_row(attention="naive", ms=20.7)]}, ["losses"],
        ["steps 400, seeds 3", "| d12 | tf32 | 4 | 1024 | naive | 20.70 | 2.5000 | 2.4000 – 2.6000 |",
         "| d12 | tf32 | 4 | 1024 | flash | 20.00 | 2.5000 | 2.4000 – 2.6000 |"], []),
    "torch": ({"A/torch": [train_row(steps=50, lr=1e-4, max_norm=0.5, weight_decay=1.0, clipped=47, difference=0.001,
                                     allowed=0.002, torch_itself=0.0015)]}, ["torch"],
              ["| d12 | bf16 | flash | 0.5 | 47 of 50 | 1 | 1.0e-03 | 2.0e-03 | 1.5e-03 |"], []),
    "default run": ({"A/default_run": [
        default_run_row(step=1300, val_loss_nats=9.0, text="an older run"),
        default_run_row(step=1300, val_loss_nats=0.4764, text="The badger\nhummed. " * 40, **NEW),
        default_run_row(step=6500, val_loss_nats=0.1613, text="The end.", **NEW)]}, ["default run"],
        ["6500 steps of 8·1024 tokens", "*Step 1300, validation loss 0.476:* The badger hummed. The", "…",
         "*Step 6500, validation loss 0.161:* The end."], ["older run", "!["]),  # there is no plot
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
         "forward](../dev/results/A/accumulation.svg)"], ["pv16+shift | ≈1324"]),
    "ring": ({"A/ring": ring_rows(), "A/ring_speed": [row(
        **{"pass": "forward"}, gpus=4, tokens_per_gpu=16384, single_ms=3.0, single_ms_sustained=3.3, ms=3.2,
        ms_sustained=3.4, still_ms=3.1, still_ms_sustained=3.35, hop_ms=0.2, hop_ms_sustained=0.2)]},
        ["ring chunks", "ring errors", "ring speed", "plot ring"],
        ["| bf16 | 1 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 1.0e-03 | 0.40 | 0.30 | 0.20 | 4.50 |",
         "| bf16 | floor | – |", "| bf16 | bf16 | 2 | 7.20e-05 (1.20), 1.2e-02 (2.40) |",
         "| 4 | 12, 64 | forward | 3.00 | 3.20 | 93.8 / ≈97.1 % | 96.8 / ≈98.5 % | 0.20 |",
         "bf16](../dev/results/A/ring.svg)"], [])}


def check_documents(root, tables, parts, absent=()):
    """What README.md and attention/README.md say after readme_tables.py, which --check asks for before."""
    documents = (root / "README.md", root / "attention" / "README.md")
    places = "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in tables)
    for document in documents:
        written(document, f"before\n{places}after\n")
    tables_of = functools.partial(script, "readme_tables.py", "--root", root)
    tables_of("--check", code=1, says=["README.md", "readme_tables.py"])
    assert all("old" in document.read_text() for document in documents)  # --check changes nothing
    tables_of()
    tables_of("--check")
    readme, text = [document.read_text() for document in documents]
    assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
    assert all(len(line) <= 120 for line in text.splitlines() if line[0:1] != "|"), text
    check_in_order(text, parts)
    assert readme == text.replace("(../dev", "(dev") and not any(part in text for part in absent), text


def test_tables(tmp):
    """What is between the markers of both documents, and what --check says of it."""
    for name, (rows, tables, parts, absent) in TABLES.items():
        for bench, found in rows.items():
            write_rows(tmp / name, bench[2:], found, gpu=bench[0])
        for plot in "accuracy", "accumulation", "ring":
            written(tmp / name / "dev" / "results" / "A" / f"{plot}.svg", "<svg/>")
        check_documents(tmp / name, tables, parts, absent)


def test_tables_of_bad_rows(tmp):
    check_documents(tmp, ["train"], ["Not measured yet"])
    for bad in "{oops\n", "{}\n":  # the second has no date and commit
        path = written(tmp / "dev" / "results" / "A" / "train.jsonl", jsonl([train_row()]) + bad)
        script("readme_tables.py", "--root", tmp, code=1, says=[f"{path}:2: "])
    written(path, "")
    for name, says in ("nonsense", "nonsense"), ("quote no.cu", "attention/no.cu: no lines between // [quote]"):
        written(tmp / "README.md", f"<!-- table: {name} -->\n<!-- end -->\n\n<!-- end -->\n")
        script("readme_tables.py", "--root", tmp, code=1, says=[says])


def test_quotes(tmp):
    """The lines between a kernel's markers, moved to the left."""
    written(tmp / "attention" / "k.cu", "a\n    // [quote]\n    for (;;)\n        b;\n    // [end]\nc\n")
    readme = written(tmp / "README.md", "<!-- table: quote k.cu -->\nold\n<!-- end -->\n")
    script("readme_tables.py", "--root", tmp, "--check", code=1, says=["README.md"])
    script("readme_tables.py", "--root", tmp)
    assert "-->\n```cpp\nfor (;;)\n    b;\n```\n<!--" in readme.read_text()


def test_tables_are_those_of_dev_results():
    script("readme_tables.py", "--check")


def test_rows_of_the_default_run(tmp):
    default_run, at = copied(tmp, "default_run.py"), tmp / "dev" / "results" / "NVIDIA-H200"
    log = write_log(tmp / "log") / "log.jsonl"
    executable(tmp / "train_gpt2cu", f'[ "$#" = 2 ] && [ "$1" = -o ] && cp {log} "$2"')
    assert "no plot, because the sources differ" in default_run(COMMIT="abc").stdout
    rows = rows_of(at / "default_run.jsonl")
    assert [(r["step"], r["val_loss_nats"]) for r in rows] == [(50, 2.5), (100, 2.25)], rows
    assert (rows[0]["commit"], rows[0]["text"], rows[0]["dtype"]) == ("abc", "Once\nupon a time", "bf16")
    executable(tmp / "scripts" / "tree.sh", "echo abc clean")
    written(tmp / "scripts" / "plot.py",
            "import sys\nsys.stderr.write(str(sys.argv[2:]))\nopen(sys.argv[1] + '/log.jsonl')\n")
    plot = at / "default_run.png"  # where readme_tables.py looks for it
    assert default_run().stderr == str(["-o", str(plot), "--title", "The default run"])
    executable(tmp / "train_gpt2cu", "exit 1")
    default_run(code=1, says=["default_run.py: ./train_gpt2cu failed"])


def test_plots_of_results(tmp):
    """Where scripts/plot_results.py writes, what stands where in each plot, and which rows are not plotted."""
    def plot(name, bench, rows, expected):
        write_rows(tmp, bench, rows)
        result, svg = script("plot_results.py", name, "--root", tmp), tmp / "dev" / "results" / "A" / f"{name}.svg"
        assert result.stdout == f"{svg}\n" and svg.read_text() == "drawn", result
        for what, value in expected.items():
            assert result.drawn(what) == value, (name, what, result.drawn(what))
        return result.drawn

    rates = [attention_row(kernel=kernel, T=T, B=B, HS=HS, tflops=x + T + HS + B, tflops_sustained=x / 2, **way)
             for kernel, x in (("naive", 100.0), ("flash_of_others", 200.0), ("flash_bf16", 300.0))
             for T, B in ((2048, 1), (1024, 4), (1024, 32)) for HS in (64, 128) for way in ({}, BWD)]
    rates += [attention_row(causal=False, T=64), attention_row(dtype="fp32", T=64), attention_row(ms=None, T=64)]
    lines = {HS: [[[1024 * right, 2048 * right], [x + 1024 + HS + 32, x + 2048 + HS + 1]] for x, right in
                  ((300, 2 ** (-1 / 32)), (200, 1), (100, 2 ** (1 / 32)))] for HS in (64, 128)}  # side by side
    drawn = plot("attention_bf16", "attention", rates, {
        "00.plot": lines[64], "00.plot ls": ["-", (0, (4, 4)), "-"], "00.set_ylim bottom": [0],
        "00.set_title": [["bf16 forward, head size 64"]], "11.plot": lines[128], "11.set_ylim bottom": [0],
        "11.set_title": [["bf16 backward, head size 128"]],
        "plt.Line2D label": ["flash_bf16", "flash_of_others", "naive"]})
    for line, x, down in zip(lines[64], (300, 200, 100), drawn("00.vlines"), strict=True):
        assert down[:3] == [line[0], [x / 2, x / 2], line[1]], down  # to sustained
    plot("attention_fp32", "attention", rates, {"00.plot": [[[64], [100]]]})

    errors = [accuracy_row(tensor=t, T=T, HS=HS, ratio_l2=n + max(T, HS) / min(T, HS), input=name) for name in
              ("normal", "shifted") for n, t in enumerate(TENSORS) for T in (255, 64) for HS in (64, 128)]
    errors += [accuracy_row(kernel="naive"), accuracy_row(causal=False), accuracy_row(ratio_l2=None)]
    worst = [[64, 255], [2 + 128 / 64, 2 + 255 / 64]]  # the larger of both head sizes
    plot("accuracy", "accuracy", [*errors, *({**r, "kernel": "flash_bf16_sm90"} for r in errors)], {
        "02.plot": 2 * [worst, [[], []], worst], "02.plot ms": [7, 7, 7, 3, 3, 3],  # the same points: rings around dots
        **{f"0{n}.set_title": [[f"bf16 {t}"]] for n, t in enumerate(TENSORS)}})

    # A shifted variant stands at the speed of the kernel that it is; hollow says that something was not finite.
    sums = [{**r, "not_finite": 0} if r["kernel"] == "wgmma" and "input" in r else r for r in accumulation_rows()]
    drawn = plot("accumulation", "accumulation", sums, {"00.plot mfc": ["white"] * 4})
    assert "white" not in drawn("10.plot mfc")
    for place, title in ("00", "mma.sync"), ("10", "wgmma"):
        assert drawn(f"{place}.plot") == [[4396, 4e-4 * n, "o"] for n in (4, 4, 4, 10)]
        assert [[at[0], at[2][1]] for at in drawn(f"{place}.annotate")] == [
            ["base", 1 / 6], ["base, pv16", 3 / 6], ["pv16+shift", 5 / 6]]  # one below another
        assert drawn(f"{place}.set_title") == [[title]] and drawn(f"{place}.set_yscale") == [["log"]]

    memory = functools.partial(train_row, dtype="bf16", B=1, recompute=1)
    lengths = [memory(dtype="fp32", T=T, mem_gib=gib) for T, gib in ((8192, 6.5), (4096, 4.0), (16384, 10.0))]
    others = [memory(B=4, mem_gib=99.0), memory(kernel="torch_compile", mem_gib=99.0)]
    drawn = plot("memory", "train", [*lengths, memory(T=65536, mem_gib=17.0), *others], {
        "00.plot label": ["naive fp32, computed: flash and the T×T matrices", "flash fp32: 0.50 GiB per 1024 tokens",
                          "flash bf16"], "00.set ylim": [(0, 51)],
        "00.set_title": [["Training with B 1, model d12, recompute 1, GPU A"]]})
    line, (Ts, naive), *points = drawn("00.plot")
    assert line == [[4096, 16384], [4, 10]]
    assert points == [[[4096, 8192, 16384], [4, 6.5, 10], "o"], [[65536], [17], "o"]]
    assert Ts[0] == 1024 and naive[0] == 4 - 1.5 + 13 * 12 * 1024**2 * 4 / 2**30 and naive[-1] < 51, naive

    other = row(study="ring", carry="fp32", ranks=1, tensor="out", mean_error=9, max_error=9, dtype="fp32")
    drawn = plot("ring", "ring", [*ring_rows(), other], {
        "10.axhline": [], "figure.suptitle": [["Ring attention, T 1024, bf16, GPU A: flat is better"]]})
    for (xs, ys), expected in zip(drawn("03.plot"), ([1, 1.2], [1, 1]), strict=True):  # carried in bf16, in fp32
        assert xs == [0, 1] and [round(y, 6) for y in ys] == expected
    assert [round(y, 6) for y, in drawn("03.axhline")] == [0.6]

    events = [{"what": "kernel", "name": "forward_kernel<64, true>", "start_ms": 0.5, "ms": 1.5},
              {"what": "kernel", "name": "merge", "start_ms": 2.0, "ms": 0.25},
              {"what": "copy", "name": "copy", "start_ms": 1.0, "ms": 0.5}]
    of_two = row(gpus=2, tokens_per_gpu=16384, layer=6, rank=1, events=events, **{"pass": "forward"})
    drawn = plot("ring_timeline", "ring_timeline", [of_two, {**of_two, "gpus": 1, "rank": 0}], {
        "00.broken_barh": [[[(0.5, 1.5)], [1.6, 0.8]], [[(2.0, 0.25)], [1.6, 0.8]], [[(1.0, 0.5)], [2.6, 0.8]]],
        "10.broken_barh": [], "figure.suptitle": [["Ring of 2, 16384 tokens each, one layer of GPT-2 124M, GPU A"]]})
    assert len(set(drawn("00.broken_barh facecolors"))) == 3

    for name, bench, rows, measure in (("memory", "train", others, "bench_train"),
                                       ("ring", "ring", [{**ring_rows()[-1], "dirty": True}], "study_ring"),
                                       ("accumulation", "accumulation", [], "study_accumulation"),
                                       ("accuracy", "accuracy", [], "dev/accuracy")):
        write_rows(tmp, bench, rows)
        says = [f"no rows for {name}.svg", measure]
        script("plot_results.py", name, "attention_bf16", "--root", tmp, code=1, says=says)
    script("plot_results.py", "--root", tmp / "none", code=1, says=["no rows", "bench_attention"])
    some = script("plot_results.py", "--root", tmp)
    assert some.stderr.count("no rows") == 4 and some.stdout.count(".svg") == 3, some


def test_timelines_show_their_rows(tmp):
    """A lane has its row's waits and their share. A picture of other rows is out of date."""
    pictures, path = copied(tmp, "pictures.py"), tmp / "dev" / "results" / "pictures" / "timeline_forward.svg"
    path.parent.mkdir(parents=True)
    for end, wide, share in (600, 61.6, 20), (700, 123.2, 30):
        write_rows(tmp, "timeline", [row(HS=HS, clocks=1000, warp=warp, waits=f"s -50 100, k_full 500 {end}", **way)
                                     for way in ({}, BWD) for HS in (64, 128) for warp in (0, 1, 2, 3, 4, 8, 12)])
        pictures("--check", code=1, says=[f"{path.name}, dev/results/pictures/timeline_backward.svg: not what"])
        pictures()
        for shown in f">{share}%</text>", '246.4" height="32" fill="#E69F00"', f'{wide}" height="20" fill="#009E73"':
            assert path.read_text().count(shown) == 4, (shown, path.read_text())  # of 4 lanes


def test_memory_of_naive():
    """What the plot computes is what was measured, within 2 %."""
    from plot_results import SQUARES
    from results import matching, read_rows
    shape = ["model", "dtype", "B", "T"]
    rows = read_rows(ROOT / "dev" / "results" / "NVIDIA-H200" / "train.jsonl", shape, kernel="train_gpt2cu")
    for naive in matching(rows, attention="naive"):
        flash, = matching(rows, attention="flash", **{field: naive[field] for field in shape})
        more = SQUARES[naive["model"]] * naive["B"] * naive["T"]**2 * {"bf16": 2, "fp32": 4}[naive["dtype"]] / 2**30
        assert abs((naive["mem_gib"] - flash["mem_gib"]) / more - 1) < 0.02, naive


def trace_of_a_gpu(gpu):
    """As dev/trace.so writes it: a layer's attention, both ways, a copy half behind each. GPU 1 starts later."""
    def event(kind, name, start, duration, ranges):
        return {"name": name, "cat": kind, "ts": start + 40 * gpu, "dur": duration,
                "args": {"gpu": -1 if kind == "range" else gpu, "range": ranges}}
    events = [event("range", "step 5", 0, 9000, "")]
    for at, way in (1000, "forward"), (5000, "backward"):
        inside = f"step 5 / forward and backward / {way} / layer 6"
        events += [event("kernel", f"{way}_kernel<64, true>", at, 700, inside),
                   event("copy", "copy 50331648 bytes to another GPU", at + 600, 200, inside),
                   event("copy", "copy 50331648 bytes", at, 150, inside),
                   event("kernel", f"{way}_kernel<64, true>", at, 700, inside.replace("6", "7")),
                   event("kernel", "long before", at - 300, 50, inside),
                   event("kernel", "long after", at + 950, 50, inside)]
    return json.dumps({"traceEvents": events})


def test_timeline_of_a_ring(tmp):
    from trace_ring import behind
    kernels = [{"ts": ts, "dur": dur} for ts, dur in ((660, 80), (0, 700), (500, 150))]  # that overlap
    assert behind([{"ts": 600, "dur": 200}, {"ts": 50, "dur": 10}, {"ts": 800, "dur": 9}], kernels) == 150
    trace_ring = copied(tmp, "trace_ring.py")
    for gpu in 0, 1:
        written(tmp / f"gpu{gpu}", trace_of_a_gpu(gpu))
    executable(tmp / "train_gpt2cu", 'echo "$@" >args\nfor i in 0 1; do cp gpu$i "$TRACE.10$i.json"; done')
    trace_ring(code=1, says=["there is no ./dev/trace.so"])
    executable(tmp / "dev" / "trace.so", "")
    assert "GPU 1, backward: 0.20 ms of travel, 50 % of it behind kernels" in trace_ring("--json").stdout
    assert "--gpus 2 --context-parallel 2 -b 1 -t 32768 --profile 1 " in (tmp / "args").read_text()
    path = next(tmp.glob("dev/results/*/ring_timeline.jsonl"))
    rows = rows_of(path)
    assert [(r["rank"], r["pass"], min(e["start_ms"] for e in r["events"]), r["dirty"]) for r in rows] == [
        (gpu, way, 0.04 * gpu, True) for way in ("forward", "backward") for gpu in (0, 1)], rows
    assert "long" not in path.read_text(), rows
    (tmp / "kept").mkdir()
    trace_ring("--keep", cwd=tmp / "kept")
    assert {p.name for p in (tmp / "kept").iterdir()} == {"trace.100.json", "trace.101.json"}
    trace_ring("--gpus", "4", code=1, says=["traces of 2 GPUs, not 4"])
    trace_ring("--layer", "8", code=1, says=["no blocks of forward in layer 8"])
    executable(tmp / "train_gpt2cu", "echo boom >&2\nexit 1")
    trace_ring(code=1, says=["ended with 1", "boom"])
    plot = functools.partial(script, "plot_results.py", "ring_timeline", "--root", tmp)
    plot(code=1, says=["no rows"])  # of sources that nobody knows
    written(path, path.read_text().replace('"dirty": true', '"dirty": false'))
    assert plot().drawn("figure.suptitle")[0][0].startswith("Ring of 2, 16384 tokens each")


def test_timeline_of_a_training_step(tmp):
    made = run("make", "dev/trace.so", code=None)
    if made.returncode and "cupti" in made.stderr.lower():
        raise Skip("needs CUPTI of CUDA 13")
    assert made.returncode == 0, made.stderr
    result = run("./train_gpt2cu", "-e", "tiny", "-b", "1", "--profile", "1", "-v", "0", "-s", "0",
                 CUDA_INJECTION64_PATH=str(ROOT / "dev" / "trace.so"), TRACE=str(tmp / "trace"))
    if "using the CPU" in result.stderr:
        raise Skip("no GPU")
    (path,) = tmp.glob("trace.*.json")
    kernels = [e for e in json.loads(path.read_text())["traceEvents"] if e["cat"] == "kernel"]
    for way in "forward", "backward":
        assert any(e["args"]["range"].endswith(f"{way} / layer 3") and e["dur"] > 0 for e in kernels), result.stderr


# ----------------------------------------------------------------------------------------------------------------------
# The Makefile

def arch(*names):
    return " ".join(f"-gencode arch=compute_{a},code=sm_{a}" for a in names)


def variable(name, *arguments, cwd=ROOT, **variables):
    """The value that the Makefile gives a variable; None if it gives none."""
    printed = run("make", "-pn", "help", *arguments, cwd=cwd, **variables).stdout
    found = re.search(rf"^{name} :?= *(.*)$", printed, re.M)
    return found and found[1].strip()


def test_probe_of_gpus(tmp):
    """GENCODE by what nvidia-smi says, and by ARCH."""
    none = "-gencode arch=compute_80,code=[sm_80,compute_80]"
    for smi, expected, *arguments in (
            ("echo 8.0", arch("80")), ("echo 9.0", arch("90a")), ("echo '8.0\n8.0\n8.0'", arch("80")),
            ("echo '8.6\n9.0'", arch("86", "90a")), ("echo '9.0\n7.5'", arch("75", "90a")),
            ("echo 10.0", arch("100")), ("echo 12.0", arch("120")), ("echo '[N/A]'", none),
            ("echo No devices were found", none), ("echo '9.0.1\n8\nx8.0\n\n'", none), ("exit 127", none),
            ("echo 8.0 >&2; exit 1", none), ("echo 8.6", arch("75", "90a"), "ARCH=75 90a"),
            ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", none)):
        executable(tmp / "nvidia-smi", smi)
        assert variable("GENCODE", *arguments, **before_others(tmp)) == expected, smi


def test_probe_of_nccl(tmp):
    """Where a header and a library are that can be linked, in lib or lib64; NCCL_HOME=none is an answer too."""
    def probed(home):
        return variable("NCCLFLAGS", f"NCCL_HOME={home}"), variable("LDLIBS", f"NCCL_HOME={home}")
    written(tmp / "include" / "nccl.h", "")
    (tmp / "lib64").mkdir()
    run("g++", "-shared", "-o", tmp / "lib64" / "libnccl.so.2", "-x", "c++", "/dev/null")
    flags, libraries = probed(tmp)
    assert "-DHAVE_NCCL" in flags and f"{tmp}/include" in flags, flags
    for part in f"-L{tmp}/lib64 -Xlinker -rpath,{tmp}/lib64", "-l:libnccl.so.2":  # found by the linker and when it runs
        assert part in libraries, libraries
    flags_without, libraries = probed("none")
    assert not flags_without and "nccl" not in libraries, (flags_without, libraries)
    (tmp / "lib64").rename(tmp / "lib")
    assert probed(tmp)[0] == flags


def test_nvcc_is_found(tmp):
    """On the PATH or where toolkits are, the newest first. If it is nowhere, a build says so in one line."""
    text = (ROOT / "Makefile").read_text()
    written(tmp / "Makefile", text.replace("/usr/local", f"{tmp}/local").replace("/opt", f"{tmp}/opt"))
    written(tmp / "train_gpt2.cu", "")
    tools = only(tmp / "tools", "make", "sh", "grep", "tr", "sort", "find", "nproc", "sed", "ls", "mkdir")
    options = {"cwd": tmp, "CUDA_HOME": str(tmp / "home"), **tools}
    run("make", code=2, says=["there is no nvcc: install the CUDA Toolkit", "NVCC=", "Stop."], **options)
    run("make", "NVCC=/no/nvcc", code=2, says=["there is no /no/nvcc"], **options)
    for place in "opt/cuda", "local/cuda-9.2", "local/cuda-12.8", "local/cuda-13.0", "local/cuda", "home":
        nvcc = str(executable(tmp / place / "bin" / "nvcc", ""))
        assert variable("NVCC", **options) == nvcc and variable("NVCC", "NVCC=sh", **options) == "sh"
    assert variable("NVCC", **{**options, "PATH": f"{options['PATH']}:{tmp}/opt/cuda/bin"}) == "nvcc"


def test_host_compilers(tmp):
    """nvcc takes the same one as the Makefile does, and neither takes clang."""
    for cxx, ccbin in ("g++", ""), ("ccache g++", ""), ("g++-12", "-ccbin g++-12"):
        assert variable("CCBIN", f"CXX={cxx}", "NCCL_HOME=none") == ccbin, cxx
    clang = executable(tmp / "c++", "echo Debian clang version 14.0.6")
    run("make", f"CXX={clang}", code=2, says=[f"{clang} is clang", "name a g++"])


def test_all_cores_at_work():
    cores = run("nproc").stdout.strip()
    for arguments, jobs in ([], [f"-j{cores}"]), (["-j1"], ["-j1"]), (["-sj7"], ["-j7"]), (["clean", "all"], []):
        assert re.findall(r"-j\d+", variable("MAKEFLAGS", *arguments)) == jobs, arguments


def test_other_flags_compile_anew(tmp):
    """By a copy of the Makefile, few sources, and a stand-in for both compilers. `make archs` and `make clean`, too."""
    make = functools.partial(run, "make", cwd=tmp)
    shutil.copy(ROOT / "Makefile", tmp)
    for name in ("data/a.cpp", "layers/b.cu", "attention/c.cu", "dev/test_d.cpp", "dev/test_d", "train_gpt2.cu",
                 "dev/dump_gradients.cu", "dev/encode.cpp"):
        written(tmp / name, "")
    cc = executable(tmp / "cc", '[ "$1" != --list-gpu-code ] || echo sm_75 sm_80 sm_90\nall="$*"\n'
                    'while [ "$1" != -o ]; do shift || exit; done\ntouch "$2"\n'
                    'case $all in *-Werror*) echo "$2:strict" ;; *) echo "$2" ;; esac')
    executable(tmp / "dev" / "run_tests.sh", "exec $1")
    objects = a, b = ["build/data/a.o", "build/layers/b.o"]
    for flags, expected in ([], objects), ([], []), (["EXTRA=-DX"], objects), (["EXTRA=-DX"], []), (
            ["EXTRA=-DX", "MARCH=x86-64"], [a]), (["EXTRA=-DX", "MARCH=x86-64", "ARCH=75"], [b]):
        result = make("-sj1", f"CXX={cc}", f"NVCC={cc}", "NCCL_HOME=none", *objects, *flags)
        assert result.stdout.split() == expected, (flags, result)
    # make train_gpt2cu, then make test: each object is made once, in make test with warnings as errors.
    for target, strict in (["train_gpt2cu"], []), (["test"], ["build/dev/", "archs/"]):
        made = make("-s", f"CXX={cc}", f"NVCC={cc}", "NCCL_HOME=none", *target).stdout.split()
        for name in made:
            assert name.endswith(":strict") == (".o" in name and any(part in name for part in strict)), made
        assert len(made) >= 4 and (b in made) == (target == ["train_gpt2cu"]), made
    archs = make("-nB", "archs", f"NVCC={cc}").stdout.replace("\\\n", "").splitlines()
    lines = {re.search(r"-o (\S+)", line)[1]: line for line in archs if " -o " in line}
    assert {name: re.findall(r"code=sm_(\w+)", line) for name, line in lines.items()} == {
        "build/archs/attention/c.spills.o": ["80", "90a"], "build/archs/attention/c.o": ["75"],
        "build/archs/layers/b.o": ["75", "80", "90a"]}, archs
    for name, line in lines.items():
        assert "-Werror all-warnings" in line and ("-warn-spills" in line) == ("spills" in name), line
    make("clean")
    assert not (tmp / "build").exists() and not (tmp / "dev" / "test_d").exists()


def test_profile_without_nsys_builds_nothing(tmp):
    tools = only(tmp / "tools", "make", "sh", "grep", "tr", "sort", "find", "nproc", "sed")
    assert "train_gpt2cu" not in run("make", "profile", code=2, says=["needs nsys (Nsight Systems)"], **tools).stdout
    (tmp / "nsys").symlink_to(shutil.which("true"))
    result = run("make", "-n", "profile", **before_others(tmp))
    assert "-lineinfo" in result.stdout or not shutil.which("nvcc"), result
    assert re.search(r"nsys profile .*\n? *\./train_gpt2cu --profile 3", result.stdout.replace("\\\n", "")), result


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons with PyTorch, between kinds of attention, and between numbers of GPUs

def test_peers_of_training_side_by_side(tmp):
    """A pretended ./dev/bench_train, pretended figures of PyTorch with two backends, a pretended llm.c, and memory that
    ends."""
    import peers_train
    ours = {"kernel": "train_gpt2cu", "gpu": "GPU A", "cuda": "13", "attention": "flash", "B": 4, "T": 1024, "ms": 8.0,
            "tok_s": 5e5, "mfu": 40.0, "mem_gib": 3.5}
    peer = {"gpu": "GPU A", "ms": 10.0, "tok_s": 4e5, "mem_gib": 5.0, "loss": 9.0}
    figures = {("torch_flash", 4): peer, ("torch_cudnn", 4): {**peer, "ms": 16.0, "tok_s": 2.5e5},
               ("torch_flash", 64): "out of memory", ("torch_cudnn", 64): {**peer, "ms": 160.0}}
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True), version=SimpleNamespace(cuda="13.0"),
                            __version__="2.15")
    executable(tmp / "dev" / "bench_train", f"""case "$4" in
        4x1024) echo '{json.dumps(ours)}' >"$8" ;;
        *) echo "the model needs 200 GiB" >&2; exit 1 ;;
    esac""")
    written(tmp / "llm.c" / "Makefile", "train_gpt2cu:\n\ttest $(USE_CUDNN) = 1 && cp source $@\n")
    step = "step 1/9 | loss 9.5 (+nanz)| norm 1 (+nanz)| lr 1e-04 | {}.00 ms | 9.0% bf16 MFU | 9 tok/s"
    executable(tmp / "llm.c" / "source", f"""echo 'device memory usage: 2048 MiB / 9999 MiB'
    case "${{18}}" in
        0) yes '{step.format(4000)}' ;;
        1) echo 'cuda: out of memory'; exit 1 ;;
        2) yes '{step.format(2000)}' ;;
    esac""")
    out, pretended = tmp / "rows.jsonl", lambda _, size, sdpa, B, T: figures[sdpa, B]
    with mock.patch.multiple(peers_train, ROOT=tmp, in_a_fresh_process=pretended):
        printed = script("../dev/peers_train.py", "--shapes", "4x1024,64x1024", "--llmc", tmp / "llm.c", "--out", out,
                         function=peers_train.main, modules={"torch": torch}).stdout
    lines = [line.split() for line in printed.splitlines()[2:]]
    llmc = [line for line in lines if line[0] == "llm.c"]
    assert llmc[1][-4:] == "skipped: out of memory".split() and len(llmc) == 6
    lines = [line for line in lines if line not in llmc]
    assert [words[0] for words in lines] == 2 * ["train_gpt2cu", "torch_compile", "torch_compile"] + [str(out)]
    assert lines[1][1:4] == ["torch_flash", "4", "1024"] and [words[-1] for words in lines[1:3]] == ["1.25", "2.00"]
    assert lines[3][-4:] == lines[4][-4:] == "skipped: out of memory".split() and lines[5][-2:] == ["n/a", "5.00"]
    first, faster, plain, long, _ = rows_of(out)
    assert first == ours and [r["sdpa"] for r in (faster, long)] == ["torch_flash", "torch_cudnn"]
    assert tuple(plain[field] for field in ("kernel", "sdpa", "ms", "mem_gib")) == ("llm.c", "cudnn, -ge 2", 2000, 2)
    assert [faster[field] for field in ("kind", "kernel", "dtype", "mfu")] == ["train", "torch_compile", "bf16", 32.0]
    assert long["mfu"] is None and long["B"] == 64


def test_the_peer_is_gpt2_and_trains():
    need("torch")
    import torch
    from peers_train import VP, Wrong, check_losses, gpt2, random_batch, training_step
    torch.manual_seed(1)
    L, C, max_T = 2, 64, 32
    model = gpt2(torch, L, 2, C, max_T)
    assert sum(p.numel() for p in model.parameters()) == VP * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    batch = random_batch(torch, 2, 16)
    assert batch.shape == (2, 2, 16) and (batch[1].view(-1)[:-1] == batch[0].view(-1)[1:]).all()
    train = training_step(torch, model, batch)
    check_losses([train() for _ in range(20)])
    for wrong in [math.nan, 2], [10.8, math.nan], [10.8, 10.9], [5, 4]:
        refused(Wrong, "expected from ln V", check_losses, wrong)


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
    check_in_order(command, ["-e model -i shard -b 3 -t 128 -x 4 -l 0.0002 -u 0 -k constant",
                             "-c 0.75 --max-norm 0.5 --precision bf16", "--no-shuffle --attention naive"])
    assert "--no-tf32" not in command
    a.precision = "fp32"
    assert "--no-tf32" in trainer_options(a, "model", "shard")
    for difference, right in (0.9e-4, True), (1.1e-4, False), (-1.1e-4, False):
        found, ok = judge(a, steps(4.0, 3.0, 2.0 + difference, 1.0), torch, near)
        assert ok == right and found["allowed"] == 1e-4, found
    refused(ValueError, "4 and 3 steps", apart, torch, torch[1:])


def test_losses_are_compared(tmp):
    """On the CPU, where naive and flash are one."""
    built()
    compare = functools.partial(script, "compare_losses.py", "--device", "cpu", "--model", "tiny", "--gpus", "2")
    result = compare("--shapes", "2x16", "--steps", "3", "--seeds", "2", "--out", tmp / "rows.jsonl")
    assert "is within the seeds' spread" in result.stdout, result
    naive, flash = rows_of(tmp / "rows.jsonl")
    assert (naive["attention"], flash["attention"], naive["B"], naive["T"]) == ("naive", "flash", 2, 16)
    assert naive["loss_min"] < naive["loss"] == flash["loss"] < naive["loss_max"] < 12 and naive["ms"] > 0
    compare("--shapes", "2x999999", code=1, says=["999999"])


# Writes and prints what ./train_gpt2cu does. Its losses and rates are those of the environment.
TRAINER = f"#!{sys.executable}\n" + '''
import json, os, sys
option = dict(zip(sys.argv, sys.argv[1:]))
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
print(*sys.argv[1:], file=open("ran", "a"))
print(gpu, file=open("gpus", "a"))
ranks = option.get("--gpus", "1") + "_" + option.get("--zero", "0")
run = option["--attention"] + "_" + option["--seed"] if "--attention" in option else "ranks_" + ranks
loss = float(os.environ.get(run, 2))
rate = os.environ.get("rate_on_" + gpu, os.environ.get("rate_" + ranks))
print("device             GPU A, 1 GiB\\nmemory             %d.0 MiB" % (2048 if ranks.endswith("1") else 4096))
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


def measured_by_stand_in(tmp, name, *options):
    """A function that runs a script with these and other options beside the stand-in, and gives its result and rows."""
    executable(tmp / "train_gpt2cu", TRAINER)
    measure = copied(tmp, name)

    def measured(*more, **variables):
        out = written(tmp / "rows.jsonl", "")
        return measure("--out", out, *options, *more, **variables), rows_of(out)
    return measured


def test_losses_outside_the_spread(tmp):
    measured = measured_by_stand_in(tmp, "compare_losses.py", "--shapes", "2x16", "--steps", "20", "--seeds", "2")
    for a, b, flash_a, flash_b, code, word in (
            ("2.0", "NaN", "2.0", "2.0", 1, "OUTSIDE"), ("2.0", "2.2", "2.3", "2.2", 1, "OUTSIDE"),
            ("2.0", "2.2", "1.9", "2.0", 1, "OUTSIDE"), ("2.0", "2.2", "2.1", "NaN", 1, "OUTSIDE"),
            ("2.0", "2.2", "2.3", "2.0", 0, "within")):
        result, rows = measured(naive_1=a, naive_2=b, flash_1=flash_a, flash_2=flash_b, code=code)
        assert f"loss is {word} the seeds' spread" in result.stdout, result
    assert [(r["attention"], r["ms"]) for r in rows] == [("naive", 34.5), ("flash", 34.5)], rows  # 3·3 … 3·20
    ran = (tmp / "ran").read_text()
    assert "-e d12 -b 2 -t 16 -x 20 -v 20 -s 0 --seed 2 --precision fp32 --attention naive --device cuda" in ran, ran
    assert "--no-tf32" not in ran
    result, (naive, flash) = measured("--precision", "bf16", "--no-tf32", naive_1="2.0", naive_2="2.2", flash_1="2.05",
                                      flash_2="2.1")
    says = ["--seed 1 --precision bf16 --attention flash --device cuda", "--no-tf32"]
    check_in_order((tmp / "ran").read_text(), says)
    assert "of one seed they differ by 1.0e-01 at most" in result.stdout, result
    assert (naive["loss"], naive["loss_min"], naive["loss_max"], flash["loss"]) == (2.1, 2.0, 2.2, 2.075), naive
    (tmp / "gpus").unlink()
    measured("--gpus", "2", CUDA_VISIBLE_DEVICES="7,9")
    assert set((tmp / "gpus").read_text().split()) == {"7", "9"}  # each run on one of its own


def test_ranks_by_the_stand_in(tmp):
    """scripts/scaling.py: losses that differ, rates, all GPUs of the machine, and the table of it."""
    measured = measured_by_stand_in(tmp, "scaling.py", "--batch", "3", "--tokens", "16", "--steps", "12")
    for losses in {"ranks_2_1": "2.0021"}, {"ranks_2_0": "1.9979"}, {"ranks_2_0": "NaN"}, {"ranks_1_0": "2.003"}:
        result, rows = measured("--gpus", "1,2", code=1, says=["differ by more than 1e-3: not timed"], **losses)
        assert {r["what"] for r in rows} == {"losses"} and "of linear" not in result.stdout, rows
    # All GPUs of the machine: the slowest is the last.
    executable(tmp / "nvidia-smi", 'for i in 0 1 2 3; do echo "GPU $i: it (UUID: GPU-1)"; done')
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        result, rows = measured(**before_others(tmp), rate_on_="1000", rate_on_0="960", rate_on_1="960",
                                rate_on_2="960", rate_on_3="800")
    assert [(r["gpus"], r["zero"], round(r["ms_side_by_side"])) for r in rows if r["what"] == "speed"] == [
        (1, 0, 48), (2, 0, 50), (2, 1, 50), (4, 0, 60), (4, 1, 60)], (result, rows)
    _, rows = measured("--gpus", "1,2", CUDA_VISIBLE_DEVICES="7,9", ranks_2_1="2.0019", rate_on_7="960",
                       rate_on_9="800", rate_1_0="1000", rate_2_0="1900", rate_2_1="2200")
    ran = (tmp / "ran").read_text()
    assert "-t 16 -v 0 -s 0 --device cuda --gpus 2 --zero 1 -b 2 -d 64 -x 20 --precision fp32 --no-tf32" in ran, ran
    assert "--gpus 2 --zero 1 -b 3 -x 12 --precision bf16\n" in ran, ran
    assert [round(r["apart"], 6) for r in rows[:2]] == [0, 0.00095], rows
    fields = ("gpus", "zero", "tok_s", "ms", "ms_side_by_side", "of_linear", "gib")
    assert [[round(r[field], 3) for field in fields] for r in rows[2:]] == [
        [1, 0, 1000, 48, 48, 1, 4], [2, 0, 1900, 50.526, 60, 0.95, 4], [2, 1, 2200, 43.636, 60, 1.1, 2]], rows
    write_rows(tmp, "scaling", [{**r, "dirty": False} for r in rows])
    check_documents(tmp, ["scaling"], ["| 1 | – | 1k | 100.0 % | 48.00 | 48.00 | 4.0 | – |",
                                       "| 2 | 0 | 2k | 95.0 % | 50.53 | 60.00 | 4.0 | 0e+00 |",
                                       "| 2 | 1 | 2k | 110.0 % | 43.64 | 60.00 | 2.0 | 1e-03 |"])


def test_ranks_are_compared_and_timed(tmp):
    built()
    scaling, out = functools.partial(script, "scaling.py", "--device", "cpu", "--model", "tiny"), tmp / "scaling.jsonl"
    text = written(tmp / "text.txt", "".join(f"{i} ships sailed to port {i * 7 % 31}.\n" for i in range(300)))
    result = scaling("--batch", 1, "--tokens", 16, "--steps", 12, "--gpus", "1,2", "--data", text, "--out", out)
    assert "2 GPUs, --zero 1: losses of 20 steps" in result.stdout, result
    rows = rows_of(out)
    assert [(r["what"], r["gpus"], r["zero"]) for r in rows] == [
        ("losses", 2, 0), ("losses", 2, 1), ("speed", 1, 0), ("speed", 2, 0), ("speed", 2, 1)], rows
    assert all(r["apart"] < 1e-4 for r in rows[:2]) and rows[2]["of_linear"] == 1 and rows[4]["tok_s"] > 0
    assert rows[2]["ms_side_by_side"] == rows[2]["ms"] and rows[3]["ms_side_by_side"] > 0
    assert rows[3]["gib"] > rows[4]["gib"] > 0, rows  # half the optimizer's state
    scaling("--gpus", "1", "--data", tmp / "none", code=1,
            says=["scaling.py: ./train_gpt2cu -e tiny", "ended with 1", f"{tmp / 'none'}: no such file"])


# ----------------------------------------------------------------------------------------------------------------------
# Training recipes

def run_recipe(recipe, tmp, program, *arguments, **more):
    """Runs a copy of the recipe where there is no data, with `program` as ./train_gpt2cu and a make of no effect."""
    shutil.copytree(SCRIPTS, tmp / "scripts", dirs_exist_ok=True)
    executable(tmp / "make", "")
    write_launcher(tmp / "torchrun", shown=tmp / "launched")
    write_launcher(tmp / "srun")
    executable(tmp / "scontrol", "echo 127.0.0.1; echo elsewhere")
    if re.search("_(gpus|torchrun|slurm)", recipe.name):
        more = {"CUDA_VISIBLE_DEVICES": "", "SLURM_SUBMIT_DIR": str(tmp), "SLURM_JOB_NODELIST": "[1-2]",
                "SLURM_JOB_ID": "7", **more}
    if not (tmp / "train_gpt2cu").exists():
        (tmp / "train_gpt2cu").symlink_to(program)
    return run(tmp / "scripts" / recipe.name, *arguments, cwd="/", **before_others(tmp), **more)


def checkpoint(version, max_T, L, C, V, Vp, wte, wpe, rest):
    return struct.pack("<256i", 20240326, version, max_T, V, L, 1, C, Vp, *[0] * 248) + wte + wpe + rest


def long_context_start(path):
    """A checkpoint of one layer and one head, its position embeddings numbered."""
    C, Vp = 64, 50304
    wpe, rest = array.array("f", range(1024 * C)), array.array("f", [1.0]) * (12 * C * C + 15 * C)
    return written(path, checkpoint(3, 1024, 1, C, 50257, Vp, bytes(4 * Vp * C), wpe.tobytes(), rest.tobytes()))


def test_recipes_pass_the_trainers_checks(tmp):
    """They fail at the missing data and nowhere before it, whatever B: sizes, steps and options are accepted."""
    start = long_context_start(tmp / "model.bin")
    for recipe in RECIPES:
        for batch in "", "4":
            folder = tmp / f"{recipe.stem}{batch}"
            result = run_recipe(recipe, folder, built(), *[start] * ("long" in recipe.name), B=batch, code=1)
            check_in_order(result.stderr, ["data/cache/fineweb", "data/prepare.py"])


# Start, data, T, tokens a step, steps, learning rate, its warm-up and end. They are those of llm.c's recipes, and ours
# for long contexts.
SETTINGS = {"124M": "d12 fineweb10B 1024 524288 19073 6e-4 700 0",
            "350M": "d24 fineweb100B 1024 524288 60000 3e-4 700 0",
            "774M": "d36 fineweb100B 1024 524288 30000 2.5e-4 700 0",
            "1558M": "d48 fineweb100B 1024 1048576 32000 6e-4 700 0.1",
            "context": "log_long_context/start.bin fineweb10B 16384 524288 1000 1e-4 100 0",
            "context_gpus": "log_long_context_gpus/start.bin fineweb10B 262144 524288 500 1e-4 50 0"}


def test_recipes_settings(tmp):
    show, start = executable(tmp / "show", 'echo "<$*>"'), long_context_start(tmp / "model.bin")
    for recipe in RECIPES:
        is_long, on_gpus = "long" in recipe.name, "gpus" in recipe.name
        result = run_recipe(recipe, tmp / recipe.stem, show, *([start] if is_long else ["--seed", "5"]), B="2")
        words = re.search("<(.*)>", result.stdout)[1].split()
        given = dict(zip(words, words[1:]))
        name = recipe.stem.removeprefix("run_").split("_")
        expected = SETTINGS["_".join(name[1:]) if is_long else name[1]].split()
        found = [given["-e"], given["-i"].split("/")[2], *(given[o] for o in ("-t", "-d", "-x", "-l", "-u", "-q"))]
        assert found == expected and [given[o] for o in ("-c", "-k", "-nk", "-y")] == ["0.1", "cosine", "2", "1"], words
        assert given["-j"] == given["-i"].replace("train", "val") and given["--tokenizer"].split("/")[2] == expected[1]
        per_validation = int(given["-m"]) * int(given["-b"]) * int(given["-t"])
        assert per_validation in ((64 * 16384, 4 * 262144) if is_long else (10240 * 1024,)), words
        assert given["-b"] == ("1" if is_long and on_gpus else "2") and (is_long or given["--seed"] == "5")
        gpus = ("4", "4" if is_long else None) if on_gpus else (None, None)
        assert (given.get("--gpus"), given.get("--context-parallel")) == gpus, words
        assert int(given["-s"]) % 1000 == 0 and int(given.get("-g", 1)) < int(given["-t"])  # samples are rare and short
        assert int(given["-n"]) in (100, 1000) and int(given["-v"]) == (100 if is_long else 250), words


def test_recipe_of_several_machines(tmp):
    given = {"NODES": "3", "NODE": "2", "GPUS": "5", "MASTER": "first", "PORT": "123"}
    for variables, expected in ({}, ["1", "0", "8", "127.0.0.1", "29500"]), (given, list(given.values())):
        run_recipe(SCRIPTS / "run_gpt2_350M_torchrun.sh", tmp, shutil.which("true"), **variables)
        words = (tmp / "launched").read_text().split()
        launched = dict(zip(words, words[1:]))
        options = ("--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port")
        assert [launched[option] for option in options] == expected, words


def number(text):
    return int(text.replace(" ", ""))


def test_recipes_arithmetic():
    """Steps and tokens a step in the command are those of the comment, and their product is what it says."""
    for recipe in RECIPES:
        text = recipe.read_text()

        def said(pattern):
            return re.search(pattern, text).groups()

        def near(computed, in_text, tolerance):
            assert abs(computed / float(in_text) - 1) < tolerance, (recipe.name, computed, in_text)
        steps, per_step, tokens = said(r"tokens +([\d ]+) steps · ([\d ]+) tokens = ([\d.e]+)")
        steps, per_step = number(steps), number(per_step)
        assert f"-d {per_step} " in text and f"-x {steps} " in text, recipe.name
        near(steps * per_step, tokens, 0.005)
        N, L, C, T = map(number, said(r"= 6·([\d ]+) \+ 6·([\d ]+)·([\d ]+)·([\d ]+) = "))
        flops, total = map(float, said(r"([\d.e]+) a token; +([\d.e]+) in all"))
        near(6 * N + 6 * L * C * T, flops, 0.005)
        near(steps * per_step * flops, total, 0.01)
        rate = number(*said(r"([\d ]+) tokens/s"))
        duration, unit = said(r"time +([\d.]+) (\w+)")
        near(steps * per_step / rate / {"minutes": 60, "hours": 3600, "days": 86400}[unit], duration, 0.02)
        mfu, gpus = said(r"which is (\d+) % of (?:an|the (\d+) · 989)")
        assert abs(rate * flops / (int(gpus or 1) * 989e12) - int(mfu) / 100) < 0.01, recipe.name
        others = re.findall(r"^#   (\d) GPUs +([\d.]+) hours, [\d.]+ GiB each", text, re.M)
        for n, hours in others:
            expected = steps * per_step / (rate / int(gpus or 1) * int(n) * 0.96) / 3600
            assert abs(expected - float(hours)) < max(0.051, 0.01 * expected), (recipe.name, n, expected)
        assert "long" in recipe.name or gpus or [n for n, _ in others] == ["4", "8"], recipe.name


def test_recipes_are_what_was_measured():
    """Where an H200's step has been measured as the recipe runs it, rate and memory are not far from that."""
    as_recipes = {"kernel": "train_gpt2cu", "dtype": "bf16", "attention": "flash", "recompute": 1, "gpus": 1}
    measured = {(r["model"], r["B"], r["T"]): r for r in rows_of(ROOT / "dev/results/NVIDIA-H200/train.jsonl")
                if as_recipes.items() <= r.items()}
    compared = 0
    for name, model, T in (("gpt2_124M", "d12", 1024), ("gpt2_350M", "d24", 1024), ("gpt2_1558M", "d48", 1024),
                           ("long_context", "d12", 16384)):
        text = (SCRIPTS / f"run_{name}.sh").read_text()
        rate = number(re.search(r"([\d ]+) tokens/s", text)[1])
        for B, r in [(B, r) for (other, B, other_T), r in measured.items() if (other, other_T) == (model, T)]:
            assert B not in (1, 16, 64) or abs(rate / r["tok_s"] - 1) < 0.2, (name, r)
            at = re.search(rf"([\d.]+)(?: GiB of tensors)? at B={B}\b|B={B} scripts\S+ needs ([\d.]+)", text)
            if at:
                assert 0 < r["mem_gib"] - float(at[1] or at[2]) < 1.5, (name, r)  # the row's is the whole device's
                compared += 1
    assert compared >= 5, compared


def test_long_context_repeats_the_position_embeddings(tmp):
    recipe, true = SCRIPTS / "run_long_context.sh", shutil.which("true")
    model, start = long_context_start(tmp / "model.bin"), tmp / "log_long_context" / "start.bin"
    run_recipe(recipe, tmp, true, model)
    script("longer_context.py", model, tmp / "expected.bin", 16384)
    new = start.read_bytes()
    assert new == (tmp / "expected.bin").read_bytes() and len(new) > len(model.read_bytes())
    run_recipe(recipe, tmp, true, tmp / "nowhere.bin")  # one that goes on needs no other start
    assert start.read_bytes() == new
    start.unlink()
    run_recipe(recipe, tmp, true, tmp / "nowhere.bin", code=1, says=["nowhere.bin", "checkpoint"])


def test_longer_context(tmp):
    """Of fp32 and bf16, to as many positions and to a number that is no multiple of what there is; and of bad files."""
    a, out = tmp / "a.bin", tmp / "out.bin"
    Vp, C, L = 128, 2, 1
    for version, size, max_T in (3, 4, 3), (3, 4, 7), (5, 2, 7):
        wte, wpe, rest = (os.urandom(n * size) for n in (Vp * C, 3 * C, 12 * C * C + 15 * C))
        written(a, checkpoint(version, 3, L, C, 5, Vp, wte, wpe, rest))
        script("longer_context.py", a, out, max_T)
        longer = checkpoint(version, max_T, L, C, 5, Vp, wte, (wpe * 3)[:max_T * C * size], rest)
        assert out.read_bytes() == longer, (version, max_T)
    out.unlink()
    short, text = written(tmp / "short.bin", a.read_bytes()[:300]), written(tmp / "text.bin", "GPT-2" * 1000)
    for source, target, T, *says in ((short, out, 2048, "short.bin: not a whole", "300 bytes"),
                                     (text, out, 2048, "text.bin: not a whole"),
                                     (a, out, 2, "at least the 3 positions"),
                                     (a, tmp / "none" / "out.bin", 2048, "none/out.bin: cannot write")):
        script("longer_context.py", source, target, T, code=1, says=["longer_context.py: ", *says])
    run(*FULL_DISK, SCRIPTS / "longer_context.py", a, out, 99999, code=1, says=["out.bin: cannot write", "too large"])
    assert not list(tmp.glob("out.bin*"))


# ----------------------------------------------------------------------------------------------------------------------
# What runs the tests, the benchmarks and the sanitizer

def test_runner_of_the_tests(tmp):
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
    for name, text in programs.items():
        executable(tmp / name, text)
    runner, few = ROOT / "dev" / "run_tests.sh", ["good", "bad", "dies", "lies", "gpu", "./test_program", "python.py"]
    # What has a .cu file and the program as a whole first, the others beside them.
    many = ["gpu", "./test_program", "good", "bad", "dies", "lies", "python.py"]
    for cores, order in (2, few), (16, many):
        executable(tmp / "nproc", f"echo {cores}")
        path = before_others(tmp)
        lines = run(runner, "true", *few, cwd=tmp, code=1, **path).stdout.splitlines()
        assert lines[-1] == "13 passed, 4 failed, 1 skipped", lines
        assert [line[3:] for line in lines if line.startswith("== ")][:7] == order, lines
        run(runner, "true", "good", "python.py", cwd=tmp, **path)
        interrupt_and_wait(runner, "true", "slow.py", cwd=tmp, **path)
    tools = "sh dirname nproc mktemp mkdir rm basename timeout env touch cat tail sed true"
    no_python, short = only(tmp / "tools", *tools.split()), {"TEST_LIMIT": "1"}
    for tests, archs, variables, code, *says in (
            (["good", "python.py"], "true", no_python, 0, "4 passed, 0 failed, 2 skipped"),
            (["hangs"], "true", {**short, "TEST_PATIENCE": "2"}, 1, "./hangs: no end after 2 s"),
            (["hangs", "good"], "true", short, 1, "./hangs: no end after 1 s", "4 passed, 1 failed, 1"),
            (["leaves"], "sleep 60", short, 1, "sleep 60: no end after 1 s", "1 passed, 1 failed, 0")):
        check_in_order(run(runner, archs, *tests, cwd=tmp, code=code, **variables).stdout, says)
        wait_for_end_of(tmp / "pid", 5)


def test_tests_have_limits_and_names(tmp):
    """Those of dev/test.h and dev/harness.py: a limit that is hit, and a name that no test has."""
    some = written(tmp / "some.py", "import time, harness\ndef test_quick(): pass\ndef test_slow(): time.sleep(9)\n"
                   "harness.main()\n")
    for program in [sys.executable, some], [built("dev/test_job")]:
        result = run(*program, PYTHONPATH=str(ROOT / "dev"), TEST_PATIENCE="0.0001", code=1)
        assert "no end after 0.012 s" in result.stdout, result
        assert re.search(r"\nFAIL \w+[: ].*\n[1-9] passed, 1 failed, 0 skipped\n$", result.stdout, re.S), result
        result = run(*program, "nonsense", PYTHONPATH=str(ROOT / "dev"), code=1)
        check_in_order(result.stdout, ['no test has "nonsense"', "0 passed, 1 failed, 0 skipped"])


def test_measuring_in_parts(tmp):
    """scripts/measure.sh with stand-ins for all that it runs. A part that fails or hangs is named, the others run all
    the same, and no table is written."""
    for path in SCRIPTS / "measure.sh", ROOT / "dev" / "within.sh":
        executable(tmp / path.relative_to(ROOT), path.read_text())
    for name in ("accuracy study_accumulation study_ring bench_attention bench_layers bench_ring bench_train "
                 "test_attention test_layers test_gpt2 timeline ../python3").split():
        executable(tmp / "dev" / name, 'echo "$(basename "$0") $*" >>ran\necho "$RUN" >>runs\n'
                   'case "$(basename "$0") $*" in $BAD) exit 3 ;; $SLOW) sleep 60 & echo $! >pid; wait ;; esac')
    executable(tmp / "make", "")

    def measure(*parts, gpus=1, **more):
        executable(tmp / "nvidia-smi", gpus * "echo GPU 0: it\n")
        for name in "ran", "runs":
            written(tmp / name, "")
        result = run(tmp / "scripts" / "measure.sh", *parts, **before_others(tmp), **more)
        ran = [line for line in (tmp / "ran").read_text().splitlines() if line != "python3 -c import torch"]
        assert len(set((tmp / "runs").read_text().split())) == 1 or more  # one run: RUN
        return result, ran
    result, ran = measure()
    end = [f"python3 scripts/{name}.py" for name in ("plot_results", "pictures", "readme_tables")]
    assert "one GPU" in result.stdout and ran[:3] == ["test_attention ", "test_layers ", "test_gpt2 "], (result, ran)
    assert [line for line in ran if "compare_torch" in line] == [
        "python3 scripts/compare_torch.py --json", "python3 scripts/compare_torch.py --json --precision bf16"]
    assert all(re.search("default_run|--json( |$)", line) for line in ran[3:-3]) and len(ran) == 3 + 22 + 3, ran
    assert ran[-3:] == end
    _, ran = measure("--no-tests", "ring", "scaling", gpus=4)
    assert ran == ["study_ring --json", "bench_ring --json --gpus 4 --heads 12 --hs 64",
                   "bench_ring --json --gpus 4 --heads 32 --hs 128", "python3 scripts/trace_ring.py --json --gpus 4",
                   "python3 scripts/scaling.py --json", *end]
    result, ran = measure("--no-tests", "accuracy", "study", "layers", BAD="accuracy*64", SLOW="study_accum*",
                          PART_LIMIT="1", code=1, says=["failed: accuracy study; no table is written"])
    check_in_order(result.stdout, ["--part study: no end after 1 s"])
    assert ran == ["accuracy --json --hs 64", "study_accumulation --json", "bench_layers --json"], ran
    wait_for_end_of(tmp / "pid", 5)
    result, ran = measure("--no-tests", "fp32", "torch", "train", BAD="*import?torch")
    assert "no PyTorch" in result.stdout, result
    assert [line.split(" --")[0] for line in ran[:6]] == ["bench_attention"] * 2 + ["bench_train"] * 4, ran
    _, ran = measure("layers", "layer", code=2, says=["layer: expected"])
    assert not ran
    _, ran = measure("layers", BAD="test_layers*", code=3)
    assert ran == ["test_attention ", "test_layers "], ran


def test_sanitizer_of_the_kernels(tmp):
    """scripts/sanitize.sh with a stand-in for compute-sanitizer: what it runs, its exit code, and Ctrl-C."""
    sanitize = executable(tmp / "scripts" / "sanitize.sh", (SCRIPTS / "sanitize.sh").read_text())
    executable(tmp / "make", "")
    executable(tmp / "compute-sanitizer", 'echo "$2 $6" >>ran\necho "========= ERROR SUMMARY: 0 errors"\n'
               'case "$2 $6" in "synccheck bad"*) exit 1 ;; *slow) printf "$$ " >pid; exec sleep 60 ;; esac')
    path = before_others(tmp)
    said, ran = run(sanitize, **path).stdout, (tmp / "ran").read_text().splitlines()
    assert said.count("\n") == len(ran) == 26, (said, ran)
    assert "racecheck flash_fp16x3 fp32 few blocks" in ran and "memcheck flash_fp16x3 fp32 block" in ran, ran
    said = run(sanitize, "good", "bad one", code=1, **path).stdout
    assert "synccheck  bad one: FAILED" in said and said.count("0 errors") == 8 and said.count("FAILED") == 1, said
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
    """Of the process whose number is in the file. A zombie that nobody has buried yet has no program."""
    program = pathlib.Path("/proc", file.read_text().strip(), "exe")
    wait_for(lambda: not program.exists(), seconds)


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing for so long"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
