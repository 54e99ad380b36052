#!/usr/bin/env python3
"""Tests of the scripts, of the Makefile's probes, and of what runs tests and measurements.

    make train_gpt2cu && python3 dev/test_tools.py [part of a test's name]
"""
import array
import ast
import calendar
import contextlib
import fnmatch
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

from harness import ROOT, Skip, built, executable, main, need, shell_words, write_launcher, written

SCRIPTS = ROOT / "scripts"
RECIPES = sorted(SCRIPTS.glob("run_*.sh"))
OUTER = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "B", "GPUS", "COMMIT", "TREE", "RUN")  # make's, a user's
FULL_DISK = ("sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable)  # a limit on the size of files stands for it
LIBRARIES = dict.fromkeys(["matplotlib", "matplotlib.pyplot", "matplotlib.ticker", "tensorboard.compat.proto.event_pb2",
                           "tensorboard.summary.writer.record_writer"], mock.MagicMock())  # stand for them
for library in "numpy", "torch":  # neither can be imported twice, and script() forgets what it imported
    with contextlib.suppress(ImportError):
        __import__(library)
refused = unittest.TestCase().assertRaisesRegex
sys.path += [str(SCRIPTS), str(ROOT / "dev")]
import results  # sets RUN


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


def script(name, *arguments, code=0, says=(), modules=(), function=None):
    """Like run(), for a script of ours and in this process. `modules` replaces some, and None is a missing one. A
    `function` may be called instead of the script."""
    path, out, err, ended = SCRIPTS / name, io.StringIO(), io.StringIO(), 0
    argv = [str(path), *map(str, arguments)]
    with mock.patch.multiple(sys, argv=argv, path=sys.path[:], stdout=out, stderr=err), \
            mock.patch.dict(sys.modules, modules) if modules else contextlib.nullcontext():
        try:
            function() if function else runpy.run_path(str(path), run_name="__main__")
        except SystemExit as e:
            ended = e.code or 0
            if isinstance(ended, str):
                print(ended, file=err)
                ended = 1
    return checked(SimpleNamespace(returncode=ended, stdout=out.getvalue(), stderr=err.getvalue()), code, says)


def check_refusals(table, **names):
    """A line of the table is a script with its arguments, its exit code and what it says. Libraries need not be
    installed. {names} are filled in."""
    for line in table.format_map(names).strip().splitlines():
        command, code, *says = re.split(r" *\| +", line)
        script(*command.split(), code=int(code), says=says, modules=LIBRARIES)


def copy_scripts(folder):
    shutil.copytree(SCRIPTS, folder / "scripts", dirs_exist_ok=True)
    written(folder / "data" / "stdout.py", (ROOT / "data" / "stdout.py").read_bytes())


def copied(folder, name):
    """A function that runs this script of a copy of scripts/."""
    copy_scripts(folder)
    return functools.partial(run, sys.executable, folder / "scripts" / name)


def before_others(folder):
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def only(folder, names):
    """A PATH without anything else."""
    folder.mkdir()
    for name in names.split():
        (folder / name).symlink_to(shutil.which(name))
    return {"PATH": str(folder)}


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_stdout_that_fails():
    """Of every tool: on a full disk, closed, into a pipe that nobody reads, in an encoding without its characters."""
    tools = [path for pattern in ("scripts/*.py", "dev/peers*.py", "data/*.py") for path in sorted(ROOT.glob(pattern))
             if path.read_text().startswith("#!")]
    assert len(tools) > 15, tools
    reader, pipe = os.pipe()
    os.close(reader)
    for tool in tools:
        for where, code, says in ((">/dev/full", 1, f"{tool.name}: stdout: "), (">&-", 1, f"{tool.name}: stdout: "),
                                  (f">&{pipe}", 1, ""), (">/dev/null", 0, "")):
            result = subprocess.run(["sh", "-c", f'"$@" {where}', "sh", sys.executable, tool, "--help"], text=True,
                                    stderr=subprocess.PIPE, pass_fds=[pipe],
                                    env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""})
            assert (result.returncode, result.stderr.count("\n")) == (code, bool(says)), (where, result)
            assert result.stderr.startswith(says), (where, result)
    os.close(pipe)


# ----------------------------------------------------------------------------------------------------------------------
# Logs, plots, TensorBoard

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


def drawn(name, *arguments):
    """The figures that a script draws with matplotlib, and what it prints."""
    need("matplotlib")
    import matplotlib.pyplot as plt
    figures = []
    with mock.patch.object(plt, "close", figures.append):
        printed = script(name, *arguments).stdout
    plt.close("all")
    return figures, printed


def texts(found):
    return [text.get_text() for text in found]


def test_smoothing():
    from plot import smooth
    for width, values, expected in ((1, [1, 2, 3, 4], [1, 2, 3, 4]), (2, [1, 5, 3, 4, 5], [1, 3, 4, 4, 4.5]),
                                    (4, [1, 5, 3, 4, 5], [1, 3, 3.6, 4.25, 4]), (2, [2, math.nan, 4], [2, 3, 4])):
        assert smooth(values, width) == expected
    assert math.isnan(smooth([math.nan], 5)[0])


def test_plot_of_runs(tmp):
    """What stands in each panel, what the options do, and where the plot goes."""
    one, two = write_log(tmp / "one's [1]", steps=300), write_log(tmp / "two", steps=40, floor=1.2)
    (figure,), printed = drawn("plot.py", one, two / "log.jsonl", "--title", "Two")
    png, command = printed.strip().split("\nnext: ")
    assert png == str(one / "plot.png")
    assert shell_words(command) == ["python3", "scripts/tensorboard.py", str(one), str(two / "log.jsonl")]
    assert (one / "plot.png").read_bytes().startswith(b"\x89PNG") and figure.get_suptitle() == "Two"
    panels = {"Loss": "loss_nats", "Gradient norm": "grad_norm", "Learning rate": "lr",
              "Tokens per second": "tokens_per_s", "MFU, %": "mfu_percent"}
    for axes, (title, field) in zip(figure.axes, panels.items(), strict=True):
        values = [row[field] for row in rows_of(one / "log.jsonl") if row["kind"] == "train"]
        lines = [line.get_ydata() for line in axes.lines]
        assert axes.get_title("left") == title and list(lines[0]) == values, title
        assert abs(lines[1][9] - sum(values[8:11]) / 3) < 1e-9, title  # three steps: a hundredth
        low, high = axes.get_ylim()
        if title == "Loss":
            assert high < 10 and abs(low - (1.1 - 0.1 * (high - 1.1) / 1.1)) < 1e-9  # the first twentieth may be above
            assert list(lines[2]) == [2 + 25 / step for step in range(50, 301, 50)] and len(lines) == 7
            assert [line[0] for line in lines[5:]] == [1.1, 1.2]
            assert texts(axes.texts) == ["floor 1.1000", "floor 1.2000"]
            assert texts(axes.get_legend().texts) == [f"{one.name}, validation 2.0833", "two", "training, mean of 3 steps",
                                                      "training, each step", "validation"]
        else:
            assert not axes.texts and abs(high / (1.1 * values[-1]) - 1) < 0.01, title
            assert len(lines) == (2 if title == "Learning rate" else 4), title
    for suffix, start in {"svg": b"<?xml", "pdf": b"%PDF"}.items():
        out = tmp / f"out.{suffix}"
        (figure,), printed = drawn("plot.py", two, one, "--smooth", 7, "-o", out)
        assert "training, mean of 7 steps" in texts(figure.axes[0].get_legend().texts) and not figure.get_suptitle()
        assert out.read_bytes().startswith(start) and str(out) in printed and not (two / "plot.png").exists()
    for steps in 1, 40:
        (figure,), _ = drawn("plot.py", write_log(tmp / "short", steps, floor=None, mfu=None))
        assert len(figure.axes[0].lines) == 1  # too short to be smoothed, and no floor
        assert texts(figure.axes[4].texts) == ["n/a: no peak is known for this GPU"]
    drawn("plot.py", tmp / "short", "--smooth", 50)
    script("plot.py", one, "-o", tmp / "no/out.png", code=1, says=["no/out.png", "cannot write: No such file"])


def test_full_disk_leaves_what_was_there(tmp):
    need("matplotlib", "tensorboard.backend")
    log = write_log(tmp / "run", steps=400)
    for name in "plot.py", "tensorboard.py":
        made = script(name, log).stdout.splitlines()[0]
        before = {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()}
        run(*FULL_DISK, SCRIPTS / name, log, code=1, says=[made, "cannot write: File too large"])
        assert {path: path.read_bytes() for path in tmp.rglob("*") if path.is_file()} == before


def test_logs_that_cannot_be_read(tmp):
    path, good = tmp / "log.jsonl", ('{"kind": "train", "step": 1, "loss_nats": 2.0, "grad_norm": 1.0, "lr": 0.1, '
                                     '"tokens_per_s": 9, "mfu_percent": null}\n')
    for bad, what in (("{oops\n", "expected a JSON object"), ("[1]\n", "expected a JSON object"),
                      ('{"step": 2}\n', '"kind"'), ('{"kind": "train", "step": 2}\n', '"loss_nats"'),
                      (good.replace("2.0", '"2.0"'), '"loss_nats" is \'2.0\'')):
        written(path, good + bad + good)
        script("plot.py", tmp, code=1, says=[f"{path}:2: ", what])
    written(path, '{"kind": "val", "step": 0, "loss_nats": 2.0}\n')  # alone it is enough
    assert results.read_log(tmp)["val"][0]["loss_nats"] == 2
    written(path, good + '{"kind": "tra')  # a row that is being written
    rows = results.read_log(path)["train"]
    assert len(rows) == 1 and math.isnan(rows[0]["mfu_percent"])
    written(path, "")
    check_refusals("""
        plot.py {path}           | 1 | plot.py: {path} | no steps yet
        tensorboard.py {path}    | 1 | tensorboard.py: {path} | no steps yet
        plot.py {tmp}/none       | 1 | none | cannot be read
        tensorboard.py {tmp}/x   | 1 | x | cannot be read
    """, tmp=tmp, path=path)


def test_tensorboard_files_hold_the_log(tmp):
    need("tensorboard.backend")  # not scripts/tensorboard.py
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    def events(folder):
        """What the folder's only file says, tag → [(step, value)], and the first and the last time."""
        (path,) = folder.iterdir()
        found, times = {}, []
        for e in list(LegacyEventFileLoader(str(path)).Load())[1:]:  # the first one says the version
            times.append(e.wall_time)
            for v in e.summary.value:
                value = v.tensor.string_val[0].decode() if v.tag == "sample" else v.simple_value
                found.setdefault(v.tag, []).append((e.step, value))
        return found, min(times), max(times)
    log, other = write_log(tmp / "a"), write_log(tmp / "no  $ne", mfu=None, floor=None)
    a, none = log / "tensorboard", other / "tensorboard"
    written(a / "events.out.tfevents.1.earlier.1", "")  # is replaced
    result = script("tensorboard.py", log, other / "log.jsonl")
    folders, command = result.stdout.split("\nnext: ")
    assert folders == f"{a}\n{none}"
    assert shell_words(command) == ["tensorboard", "--logdir_spec", f"a:{a},no  $ne:{none}"]
    found, first, last = events(a)
    assert found.pop("sample") == [(step, "    Once\n    upon a time") for step in (50, 100)]
    assert found.pop("hellaswag") == [(50, 0.75), (100, 0.75)]
    for kind, field, tag in (("train", "loss_nats", "loss/train"), ("train", "grad_norm", "train/grad_norm"),
                             ("train", "lr", "train/lr"), ("train", "tokens_per_s", "speed/tokens_per_s"),
                             ("train", "mfu_percent", "speed/mfu_percent"), ("val", "loss_nats", "loss/val"),
                             ("val", "floor_nats", "loss/floor")):
        expected = [(r["step"], r[field]) for r in rows_of(log / "log.jsonl") if r["kind"] == kind]
        for (step, value), (at, fp32) in zip(expected, found.pop(tag), strict=True):
            assert step == at and abs(fp32 / value - 1) < 1e-6, (tag, step)
    assert not found and abs(last - os.path.getmtime(log / "log.jsonl")) < 1e-3 > abs(last - first - 99 * 0.020)
    tags = events(none)[0]
    assert "loss/val" in tags and not {"loss/floor", "speed/mfu_percent"} & set(tags)
    named = script("tensorboard.py", f"{a}/..", "-o", out := tmp / "o ut")  # as its folder is
    assert named.stdout.startswith(f"{out / 'a'}\n") and shell_words(named.stdout.split("next: ")[1])[2] == str(out)
    assert len(list((out / "a").iterdir())) == 1
    script("tensorboard.py", log, write_log(tmp / "c" / "a"), "-o", out, code=1, says=["one folder"])


# ----------------------------------------------------------------------------------------------------------------------
# What programs need, and what they refuse

def test_benchmarks_say_what_is_wrong():
    for name in "bench_attention", "bench_train", "bench_layers", "study_ring", "study_accumulation", "timeline":
        program = built(f"dev/{name}")
        check_in_order(run(program, "--help").stdout.lower(), [f"usage: {name}", "--json"])
        run(program, "--jsom", code=2, says=["--jsom"])
        assert run(program, CUDA_VISIBLE_DEVICES="", code=1, says=["GPU"]).stderr.count(name) == 1


def test_what_scripts_need_is_named(tmp):
    """A package, a GPU, the trainer; and which arguments are wrong."""
    log = write_log(tmp / "run")
    for module, name, *arguments in (("matplotlib", "plot.py", log), ("matplotlib", "plot_results.py"),
                                     ("tensorboard.compat.proto.event_pb2", "tensorboard.py", log)):
        script(name, *arguments, modules={module: None}, code=1, says=[f"{name}: needs {module.split('.')[0]}: pip install"])
    more, most = [re.findall(r"^(\w+)==", path.read_text(), re.M) for path in sorted(SCRIPTS.glob("requirements*.txt"))]
    assert most and "torch" in more and not set(most) & set(more)
    named = re.findall(r"-c scripts/requirements-more.txt ([a-z_]+)",
                       "".join(path.read_text() for path in [ROOT / "README.md", *ROOT.glob("*/*.py")]))
    assert set(named) <= set(more) and len(set(named)) >= 4, named
    for name in "default_run.py", "scaling.py":
        copied(tmp, name)(code=1, says=[f"{name}: there is no ./train_gpt2cu: make"])
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    for name in "peers.py", "peers_train.py":
        for torch, what in (None, "needs PyTorch"), (no_gpu, "needs a GPU"):
            result = script(f"../dev/{name}", modules={"torch": torch})
            assert result.stdout.startswith(f"skipped: {name} {what}"), result
    built()
    check_refusals("""
        ../dev/peers.py --peers nonsense             | 2 | nonsense | torch_cudnn
        ../dev/peers_train.py --model d13            | 2 | d13 | d48
        ../dev/peers_train.py --shapes 4x1024,4by4   | 2 | 4x1024,4by4 | 16x1024
        ../dev/peers_train.py --shapes 0x1024        | 2 | 0x1024 | 16x1024
        ../dev/peers_train.py --llmc {log}/none      | 2 | {log}/none
        plot.py {log} -o {log}/out.gif               | 1 | out.gif | .png
        plot_results.py memory sound                 | 2 | sound | accumulation
        plot_results.py memory --root {log}          | 1 | no rows for memory.svg | bench_train
        plot_results.py --root {log}                 | 1 | no rows | bench_attention
        scaling.py --gpus 2,4                        | 2 | error: --gpus | 2,4
        scaling.py --steps 5                         | 2 | error: --steps
    """, log=log)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of results, README's tables, and plots of them

def seconds(date):
    return calendar.timegm(time.strptime(date, "%Y-%m-%dT%H:%M:%SZ"))


def test_rows_name_the_sources(tmp):
    """In a small tree of the same folders: with git, with a change in each of its places, and without git. Rows name
    driver and toolkit, too."""
    def state(**variables):
        return run(tmp / "scripts" / "tree.sh", **variables).stdout.split()

    def row(**variables):
        code = "import results; print(results.row('x', 'G', results.toolkit(), ms=2))"
        variables = {"PYTHONPATH": str(tmp / "scripts"), **before_others(tmp / "build"), **variables}
        return ast.literal_eval(run(sys.executable, "-B", "-c", code, **variables).stdout)
    smi = "case $1 in --query-gpu=driver_version) echo 580.65 ;; *) echo other ;; esac"
    executable(tmp / "build" / "nvidia-smi", smi)
    executable(tmp / "build" / "nvcc", "echo 'Cuda compilation tools, release 13.1, V13.0.48'")
    folders = {path.parent.name for path in ROOT.glob("[!.]*/*") if path.suffix in (".cu", ".cpp", ".h", ".py", ".sh")}
    assert {"attention", "layers", "scripts"} < folders
    sources = [tmp / "Makefile", tmp / "train_gpt2.cu", *(tmp / folder / "some.h" for folder in folders - {"build"})]
    others = [tmp / "README.md", tmp / "dev" / "results" / "A" / "attention.jsonl"]
    for path in sources + others:
        written(path, "1\n")
    copy_scripts(tmp)
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
    clean = row(RUN="r")
    assert abs(time.time() - seconds(clean.pop("date"))) < 60, clean
    assert clean == {"kind": "x", "commit": commit, "dirty": False, "run": "r", "gpu": "G", "driver": "580.65",
                     "cuda": "13.1", "ms": 2}
    shutil.rmtree(tmp / ".git")  # a copy
    assert state(COMMIT=commit, TREE=tree_is) == [commit, "clean"] and state(COMMIT=commit) == [commit, "dirty"]
    written(sources[0], "2\n")
    assert state(COMMIT=commit, TREE=tree_is) == [commit, "dirty"] and state() == ["unknown", "dirty"]
    dirty = row(COMMIT=commit, TREE=tree_is)
    assert dirty["dirty"] is True and dirty["run"] <= dirty["date"]
    run("make", "-s", "build/tree.cpp")  # what benchmarks link
    here = run(SCRIPTS / "tree.sh").stdout.strip()
    assert f'char built_from[] = "{here}";' in (ROOT / "build" / "tree.cpp").read_text()


def row(**fields):
    return {"commit": "0123456789ab", "dirty": False, "run": "1", "date": "2030-01-01T00:00:00Z", "gpu": "GPU A",
            "driver": "1.2", "cuda": "13.0", "kernel": "flash_bf16", "pass": "fwd", "dtype": "bf16", "B": 4, "T": 1024,
            "NH": 12, "HS": 64, "causal": True, "deterministic": True, **fields}


attention_row = functools.partial(row, ms=1.0, tflops=100.0, tflops_sustained=90.0)
fp32_row = functools.partial(attention_row, dtype="fp32", kernel="naive")
train_row = functools.partial(row, kernel="train_gpt2cu", model="d12", gpus=1, attention="flash", ms=8.0, tok_s=5e5,
                              mfu=None, mem_gib=3.5)
OLD, NEW = {"run": "1"}, {"run": "2", "date": "2030-02-01T00:00:00Z"}
text_row = functools.partial(train_row, ids="text-like", **NEW)


def write_rows(root, name, rows):
    """In dev/results of this root: a name is that of a GPU and of a bench."""
    return written(root / "dev" / "results" / f"{name}.jsonl", jsonl(rows))


def test_rows_that_tables_show(tmp):
    """Never of a differing tree; of one run wherever they are compared; close ones as the span of three jobs."""
    from readme_tables import close, figure
    dirty, naive = {"dirty": True, "date": "2030-03-01T00:00:00Z"}, {"kernel": "naive"}
    later = {**NEW, "date": "2030-02-01T00:00:01Z"}

    def read(*fields, **query):
        return results.read_rows(write_rows(tmp, "A/attention", [attention_row(**f) for f in fields]), **query)
    for fields, query, expected in (
            ([{**OLD, "ms": 1.0}, {**dirty, "ms": 2.0}, {**dirty, **naive}], {}, [("flash_bf16", 1.0)]),
            ([{**NEW, "ms": 1.0}, {**OLD, **naive}, {**OLD, "ms": 9.0}], {}, [("flash_bf16", 1.0)]),  # no old naive
            ([{**NEW, "ms": 1.0}, {**later, "ms": 3.0}, {**NEW, **naive}], {}, [("flash_bf16", 3.0), ("naive", 1.0)]),
            ([{**NEW, "commit": "b", "ms": 4.0}, {**OLD, "run": "2", **naive}], {}, [("flash_bf16", 4.0)]),
            ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"apart": ["T"]}, [("flash_bf16", 1.0), ("naive", 5.0)]),
            ([{**NEW, "T": 64}, {**OLD, **naive, "ms": 5.0}], {"T": 1024}, [("naive", 5.0)])):
        assert [(r["kernel"], r["ms"]) for r in read(*fields, **query)] == expected, (fields, query)
    for field in ("kernel pass model dtype attention B T NH HS causal deterministic gpus zero lr tf32 input tensor "
                  "recompute variant carry ranks step").split():
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
    """Two variants in fp16, a shifted one that is not timed, and bf16 beside the trainer; wgmma and mma.sync. With the
    largest inputs a quarter of wgmma's elements is not finite."""
    found = []
    for kernel, trainer in ("mma.sync", "flash_bf16"), ("wgmma", "flash_bf16_sm90"):
        for T in 1024, 4096:
            for dtype, variant in ("fp16", "base"), ("fp16", "pv16"), ("fp16", "pv16+shift"), ("bf16", "base"):
                error = row(kernel=kernel, dtype=dtype, variant=variant, T=T, NH=2, elements=200, not_finite=0,
                            input="normal", relative_l2=1e-4 * len(variant) * T / 1024, ratio_l2=1.5)
                found += [error, {**error, "input": "huge_qk", "not_finite": 50 * (kernel == "wgmma")}]
                if "shift" not in variant:
                    found.append(attention_row(kernel=kernel, dtype=dtype, variant=variant, T=T, tflops=300.0 + T))
            found.append(attention_row(kernel=trainer, variant="trainer", T=T, tflops=400.0 + T))
    return found


# What README's own rows lack: a GPU beside another, what was not measured, and tables that no page shows.
ROWS = {
    "A/attention": [attention_row(kernel="naive", tflops=40.0, tflops_sustained=None), attention_row(tflops=120.0),
                    attention_row(kernel="torch_flash", tflops=77.0), attention_row(HS=128, tflops=200.0),
                    attention_row(causal=False, tflops=1.0), fp32_row(tflops=4.0), fp32_row(kernel="flash_fp32"),
                    fp32_row(kernel="naive_tf32"), fp32_row(T=65536, ms=None, tflops=None)],
    "B/attention": [attention_row(gpu="GPU B", tflops=7.0), attention_row(gpu="GPU B", **{"pass": "bwd"})],
    # A row without a level has level 0, and a newer one replaces it. Two levels make a column. Peers have none.
    "A/train": [train_row(tok_s=3e5), train_row(recompute=0), train_row(recompute=1, T=4096, B=1),
                train_row(kernel="torch_compile", attention="sdpa", sdpa="torch_cudnn")],
    # Of ids as text has them: a job with peers at one B, an older job, and a newer one without peers.
    "C/train": [text_row(recompute=1), text_row(recompute=0, tok_s=6e5), text_row(recompute=0, B=8),
                text_row(kernel="llm.c", sdpa="cudnn, -ge 2"), text_row(recompute=0, tok_s=9e5, **OLD),
                text_row(kernel="llm.c", sdpa="cudnn", B=16, **OLD),
                train_row(kernel="llm.c", sdpa="cudnn", B=32, **NEW),
                text_row(recompute=0, tok_s=1e5, run="3", date="2030-03-01T00:00:00Z")],
    "A/accuracy": [row(tensor=tensor, input="normal", ratio_max=1.25, ratio_l2=None if tensor == "dv" else 0.5)
                   for tensor in ("out", "lse", "dq", "dk", "dv")],
    # A call that is faster than its yardstick, and a yardstick of another size.
    "A/breakdown": [row(model="d12", attention="flash", recompute=1, call=call, calls=12, ms=ms, lost_ms=lost, tb_s=2.0,
                        tflops=770.0, step_ms=80.0, gemm_tflops_sustained=700.0, copy_tb_s_sustained=4, gemm_size=4096)
                    for call, ms, lost in (("matmul", 60.0, 8.0), ("fast", 0.5, -0.25))],
    "A/default_run": [row(steps=6500, floor_nats=0.1273, step=1300, val_loss_nats=0.4764, text="The badger\nhummed.")],
    "A/accumulation": accumulation_rows(),
    # A newer row that is of no ring.
    "A/ring_speed": [row(**{"pass": "forward"}, gpus=4, tokens_per_gpu=16384, single_ms=3.0, single_ms_sustained=3.3,
                         ms=3.2, ms_sustained=3.4, still_ms=3.1, still_ms_sustained=3.35), row(form="heads", **NEW)]}
# What stands between which markers, in this order.
SHOWN = """
<!-- table: attention bf16 -->
Attention, bf16, causal, NH 12, TFLOP/s cool / sustained. GPU A, driver 1.2, CUDA 13.0. Measured
| B, T | HS | pass | naive | torch_flash | flash_bf16 |
| 4, 1024 | 64 | fwd | 40 | 77 / ≈90 | 120 / ≈90 |
| 4, 1024 | 128 | fwd | – | – | 200 / 90 |
NH 12, HS 64, TFLOP/s
GPU B
| 4, 1024 | fwd | 7 / 90 |
| 4, 1024 | bwd | 100 / 90 |
<!-- table: attention fp32 -->
| B, T | pass | naive | naive_tf32 | flash_fp32 |
| 4, 1024 | fwd | 4 / ≈90 | ≈100 / ≈90 | ≈100 / ≈90 |
| 4, 65536 | fwd | – | – | – |
<!-- table: plot attention bf16 -->
Not measured yet: `scripts/measure.sh bf16`
<!-- table: torch -->
Not measured yet: `scripts/measure.sh torch`
<!-- table: train -->
| model | dtype | attention | recompute | B | T |
| flash | 0 | 4 | 1024 | ≈500k | ≈8.00 | n/a | 3.5 |
| flash | 1 | 1 | 4096 | 500k |
| torch_compile, cudnn | – | 4 | 1024 | ≈500k |
<!-- table: step -->
| B | train_gpt2cu -r 1 | train_gpt2cu -r 0 | llm.c |
| --- | --: | --: | --: |
| 4 | 500k · 3.5 | 600k · 3.5 | 500k · 1.20× · 3.5 |
<!-- table: accuracy -->
| bf16 | flash_bf16 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / 0.50 | 1.25 / NaN |
<!-- table: breakdown -->
beside a product of 4096³
| matmul | 12 | 60.000 | 75.0 | 770.0 | 110 | 2.00 | 50 | 8.000 |
| fast | 12 | 0.500 | 0.6 | 770.0 | 110 | 2.00 | 50 |  |
| all of these | 24 | 60.500 | 75.6 |  |  |  |  | 8.000 |
<!-- table: default run -->
6500 steps of 4·1024 tokens
Made 2030-01-01 at 0123456.  *Step 1300, validation loss 0.476:* The badger hummed.
<!-- table: accumulation speed -->
| dtype | variant | mma.sync 4, 1024 | mma.sync 4, 4096 | wgmma 4, 1024 | wgmma 4, 4096 |
| fp16 | pv16 | ≈1324 | ≈4396 | ≈1324 | ≈4396 |
| bf16 | base | ≈1324 | ≈4396 | ≈1324 | ≈4396 |
| bf16 | trainer | ≈1424 | ≈4496 | ≈1424 | ≈4496 |
<!-- table: accumulation errors -->
wgmma, NH 2, HS 64
| fp16 | pv16+shift | 1.0e-03 (1.5×) | 4.0e-03 (1.5×) | – | – | – | 25 % ∞ | – |
<!-- table: plot accumulation -->
forward](dev/results/A/accumulation.svg)
<!-- table: ring speed -->
| 4 | 12, 64 | forward | 3.00 | 3.20 | 93.8 / ≈97.1 % | 96.8 / ≈98.5 % |
"""


def check_documents(root, shown):
    """What two documents say after readme_tables.py, which --check asks for before."""
    lines, documents = shown.strip().splitlines(), (root / "README.md", root / "attention" / "README.md")
    for document in documents:
        places = [f"{line}\nold\n<!-- end -->\n" for line in lines if line.startswith("<!--")]
        written(document, f"before\n{''.join(places)}after\n")
    tables_of = functools.partial(script, "readme_tables.py", "--root", root)
    tables_of("--check", code=1, says=["README.md", "readme_tables.py"])
    assert all("old" in document.read_text() for document in documents)  # --check changes nothing
    tables_of()
    tables_of("--check")
    text, other = [document.read_text() for document in documents]
    assert text.startswith("before\n") and text.endswith("after\n") and "old\n" not in text
    assert all(len(line) <= 120 for line in text.splitlines() if line[0:1] != "|"), text
    check_in_order(text, lines)
    assert other.replace("(../dev", "(dev") == text


def test_tables(tmp):
    for name, rows in ROWS.items():
        write_rows(tmp, name, rows)
    written(tmp / "dev" / "results" / "A" / "accumulation.svg", "<svg/>")
    check_documents(tmp, SHOWN)
    (text,) = re.findall("speed -->\n.*(?=<!-- table: accumulation errors)", (tmp / "README.md").read_text(), re.S)
    assert "shift |" not in text, text  # is not timed


def test_tables_of_bad_rows(tmp):
    path = write_rows(tmp, "A/train", [train_row()])
    good = path.read_text()
    for table, bad, says in (("train", "{oops\n", f"{path}:2: "), ("train", "{}\n", f"{path}:2: "),  # no date, no commit
                             ("nonsense", "", "nonsense"),
                             ("quote no.cu", "", "attention/no.cu: no lines between // [quote]")):
        written(path, good + bad)
        written(tmp / "README.md", f"<!-- table: {table} -->\n<!-- end -->\n\n<!-- end -->\n")
        script("readme_tables.py", "--root", tmp, code=1, says=[says])


def test_tables_are_those_of_dev_results():
    """And quotes those of the kernels. Nearly all that readme_tables.py does shows in them."""
    script("readme_tables.py", "--check")


def test_rows_of_a_benchmark(tmp):
    program, out = built("dev/bench_layers"), tmp / "rows.jsonl"
    result = run(program, "--layer", "adamw", "--quick", "--out", out, RUN="r", code=None)
    if "GPU" in result.stderr:
        raise Skip("no GPU")
    tree = re.search('"([^"]*)"', (ROOT / "build" / "tree.cpp").read_text())[1].split()
    for r in rows_of(out):
        assert [r["commit"], r["dirty"], r["run"]] == [*tree[:-1], tree[-1] != "clean", "r"], (r, tree)
    assert rows_of(out), result


def test_memory_of_naive():
    """What the plot computes is what was measured, within 2 %."""
    from plot_results import SQUARES
    shape = ["model", "dtype", "B", "T", "recompute", "ids"]
    rows = results.read_rows(ROOT / "dev" / "results" / "NVIDIA-H200" / "train.jsonl", shape, kernel="train_gpt2cu")
    for naive in results.matching(rows, attention="naive"):
        flash, = results.matching(rows, attention="flash", **{field: naive[field] for field in shape})
        more = SQUARES[naive["model"]] * naive["B"] * naive["T"]**2 * {"bf16": 2, "fp32": 4}[naive["dtype"]] / 2**30
        assert abs((naive["mem_gib"] - flash["mem_gib"]) / more - 1) < 0.02, naive


def test_plots_are_those_of_dev_results(tmp):
    """The same rows give the same bytes. A plot that some rows are missing for is named."""
    need("matplotlib")
    import matplotlib
    if f"matplotlib=={matplotlib.__version__} " not in (SCRIPTS / "requirements.txt").read_text():
        raise Skip("needs the matplotlib of scripts/requirements.txt")
    folder = tmp / "dev" / "results"
    shutil.copytree(ROOT / "dev" / "results", folder, ignore=shutil.ignore_patterns("*.svg"))
    for bench, other in ("attention", {"causal": False}), ("train", {"kernel": "torch_compile", "B": 1, "mem_gib": 99}):
        path = folder / "NVIDIA-H200" / f"{bench}.jsonl"
        written(path, path.read_text() + jsonl([{**rows_of(path)[-1], "T": 64, **other}]))  # is in no plot
    result = script("plot_results.py", "--root", tmp)
    expected = {path.relative_to(ROOT): path.read_bytes() for path in ROOT.glob("dev/results/[!p]*/*.svg")}
    assert {path.relative_to(tmp): path.read_bytes() for path in tmp.glob("dev/results/*/*.svg")} == expected
    assert set(result.stdout.split()) == {str(tmp / path) for path in expected}
    os.remove(folder / "NVIDIA-H200" / "accumulation.jsonl")
    missing = "no rows for accumulation.svg: run ./dev/study_accumulation --json first"
    script("plot_results.py", "accumulation", "attention_fp32", "--root", tmp, code=1, says=[missing])


def test_plot_of_accumulation(tmp):
    """A shifted variant stands at the speed of the kernel that it is; hollow says that something was not finite."""
    write_rows(tmp, "A/accumulation", accumulation_rows())
    (figure,), _ = drawn("plot_results.py", "accumulation", "--root", tmp)
    for axes, title, face in zip(figure.axes, ("mma.sync", "wgmma"), ("#0072B2", "white"), strict=True):
        points = [line.get_xydata().tolist()[0] for line in axes.lines]
        assert points == [[4396, 4e-4 * n] for n in (4, 4, 4, 10)] and axes.lines[3].get_markerfacecolor() == face
        assert axes.get_title("left") == title and axes.get_yscale() == "log"
        assert [(note.get_text(), note.xyann[1]) for note in axes.texts] == [
            ("base", 1 / 6), ("base, pv16", 3 / 6), ("pv16+shift", 5 / 6)]  # one below another


def test_pictures_out_of_date(tmp):
    """dev/test_readme.py compares them all. Here --check sees that one has changed and another is gone."""
    pictures, folder = copied(tmp, "pictures.py"), tmp / "dev" / "results"
    shutil.copytree(ROOT / "dev" / "results", folder)
    written(folder / "pictures" / "roles.svg", "<svg/>")
    (folder / "pictures" / "turns.svg").unlink()
    pictures("--check", code=1, says=["results/pictures/turns.svg, dev/results/pictures/roles.svg: not what"])
    pictures()
    pictures("--check")


def test_rows_of_the_default_run(tmp):
    default_run, at = copied(tmp, "default_run.py"), tmp / "dev" / "results" / "NVIDIA-H200"
    log = write_log(tmp / "log") / "log.jsonl"
    executable(tmp / "train_gpt2cu", f'[ "$#" = 2 ] && [ "$1" = -o ] && cp {log} "$2"')
    assert "no plot, because the sources differ" in default_run(COMMIT="abc").stdout
    rows = rows_of(at / "default_run.jsonl")
    assert [(r["step"], r["val_loss_nats"]) for r in rows] == [(50, 2.5), (100, 2.25)], rows
    assert (rows[0]["commit"], rows[0]["text"], rows[0]["dtype"]) == ("abc", "Once\nupon a time", "bf16")
    executable(tmp / "scripts" / "tree.sh", "echo abc clean")
    written(tmp / "scripts" / "plot.py", "import sys\nsys.exit(str(sys.argv[2:]))\n")
    made = ["-o", str(at / "default_run.png"), "--title", "The default run"]  # where readme_tables.py looks for it
    assert default_run(code=1).stderr == f"{made}\ndefault_run.py: no plot; the rows are written\n"
    executable(tmp / "train_gpt2cu", "exit 1")
    default_run(code=1, says=["default_run.py: ./train_gpt2cu failed"])


# ----------------------------------------------------------------------------------------------------------------------
# The Makefile

def variable(name, *arguments, cwd=ROOT, **variables):
    """The value that the Makefile gives a variable; None if it gives none."""
    printed = run("make", "-pn", "help", *arguments, cwd=cwd, **variables).stdout
    found = re.search(rf"^{name} :?= *(.*)$", printed, re.M)
    return found and found[1].strip()


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


def test_one_toolkit_is_chosen(tmp):
    """CUDA_HOME, or the nvcc that NVCC names, on the PATH, or where toolkits are, the newest first. All that is compiled
    and linked with is of that one."""
    text = (ROOT / "Makefile").read_text()
    written(tmp / "Makefile", text.replace("/usr/local", f"{tmp}/local").replace("/opt", f"{tmp}/opt"))
    for name in "train_gpt2.cu", "run/a.cpp":
        written(tmp / name, "")

    def toolkit(place):
        written(tmp / place / "include" / "cuda_runtime.h", "")
        return executable(tmp / place / "bin" / "nvcc", "")
    (tmp / "path").mkdir()
    tools = only(tmp / "tools", "make sh g++ grep tr sort find nproc sed ls mkdir")["PATH"]
    for found, given, code, expected in (  # a folder of this one, or what make says
            (None, [], 2, "CUDA_HOME"), (None, ["NVCC=none/nvcc"], 2, "none/nvcc"),
            (None, ["CUDA_HOME=none"], 2, "none"), ("opt/cuda", [], 0, "opt/cuda"),
            ("local/cuda-9.2", [], 0, "local/cuda-9.2"), ("local/cuda-12.8", [], 0, "local/cuda-12.8"),
            ("local/cuda", [], 0, "local/cuda"), ("A", [], 0, "local/cuda"), ("path/nvcc", [], 0, "A"),
            ("B", ["CUDA_HOME={}/B"], 0, "B"), (None, ["NVCC={}/B/bin/nvcc"], 0, "B"),
            (None, ["NVCC=ccache {}/B/bin/nvcc"], 0, "B"), (None, ["NVCC=nvcc"], 0, "A"),
            (None, ["NVCC={}/B/bin/nvcc", "CUDA_HOME={}/B"], 0, "B"), (None, ["NVCC=nvcc", "CUDA_HOME={}/B"], 2, "B"),
            (None, ["CUDA_HOME=path"], 2, "path/bin/nvcc"), (None, ["CUDA_HOME=none"], 2, "none")):
        if found == "path/nvcc":
            (tmp / found).symlink_to("../A/bin/nvcc")  # as a system has it in /usr/bin
        elif found:
            toolkit(found)
        given = [value.format(tmp) for value in given]
        in_environment = dict(value.split("=") for value in given)
        for arguments, variables in (given, {}), ([], in_environment):
            result = run("make", "-nB", "train_gpt2cu", *arguments, cwd=tmp, code=code,
                         **{"PATH": f"{tools}:{tmp}/path", "CUDA_HOME": "", "NVCC": "", **variables})
            if code:
                assert expected in result.stderr, result
                continue
            places = set(re.findall(rf"{tmp}/((?:local/|opt/)?[\w.-]+)/(?:bin|include|lib64|lib|extras)", result.stdout))
            assert places == {expected} and f"-rpath,{tmp}/{expected}/lib64" in result.stdout, (given, result)


def test_other_flags_compile_anew(tmp):
    """By a copy of the Makefile, few sources, and a stand-in for both compilers. `make archs` and `make clean`, too."""
    shutil.copy(ROOT / "Makefile", tmp)
    for name in ("data/a.cpp", "layers/b.cu", "attention/c.cu", "dev/test_d.cpp", "dev/test_d", "train_gpt2.cu",
                 "dev/dump_gradients.cu", "dev/encode.cpp"):
        written(tmp / name, "")
    cc = executable(tmp / "cc", '[ "$1" != --list-gpu-code ] || echo sm_75 sm_80 sm_90\nall="$*"\n'
                    'while [ "$1" != -o ]; do shift || exit; done\ntouch "$2"\n'
                    'case $all in *-Werror*) echo "$2:strict" ;; *) echo "$2" ;; esac')
    make = functools.partial(run, "make", f"CXX={cc}", f"NVCC={cc}", "NCCL_HOME=none", cwd=tmp, CUDA_HOME="")
    executable(tmp / "dev" / "run_tests.sh", "exec $1")
    objects = a, b = ["build/data/a.o", "build/layers/b.o"]
    for flags, expected in ([], objects), ([], []), (["EXTRA=-DX"], objects), (["EXTRA=-DX"], []), (
            ["EXTRA=-DX", "MARCH=x86-64"], [a]), (["EXTRA=-DX", "MARCH=x86-64", "ARCH=75"], [b]):
        assert make("-sj1", *objects, *flags).stdout.split() == expected, flags
    # make train_gpt2cu, then make test: each object is made once, in make test with warnings as errors.
    for target, strict in ("train_gpt2cu", []), ("test", ["build/dev/", "archs/"]):
        made = make("-s", target).stdout.split()
        for name in made:
            assert name.endswith(":strict") == (".o" in name and any(part in name for part in strict)), made
        assert len(made) >= 4 and (b in made) == (target == "train_gpt2cu"), made
    archs = make("-nB", "archs").stdout.replace("\\\n", "").splitlines()
    lines = {re.search(r"-o (\S+)", line)[1]: line for line in archs if " -o " in line}
    assert {name: re.findall(r"code=sm_(\w+)", line) for name, line in lines.items()} == {
        "build/archs/attention/c.spills.o": ["80", "90a"], "build/archs/attention/c.o": ["75"],
        "build/archs/layers/b.o": ["75", "80", "90a"]}, archs
    for name, line in lines.items():
        assert "-Werror all-warnings" in line and ("-warn-spills" in line) == ("spills" in name), line
    make("clean")
    assert not (tmp / "build").exists() and not (tmp / "dev" / "test_d").exists()


# ----------------------------------------------------------------------------------------------------------------------
# Comparisons with PyTorch, between kinds of attention, and between numbers of GPUs

def test_peers_of_training_side_by_side(tmp):
    """A pretended ./dev/bench_train, pretended figures of PyTorch with two backends, a pretended llm.c, and memory that
    ends."""
    import peers_train
    ours = {"kernel": "train_gpt2cu", "gpu": "GPU A", "cuda": "13", "attention": "flash", "recompute": 7777, "B": 4,
            "T": 1024, "ms": 8.0, "tok_s": 5e5, "mfu": 40.0, "mem_gib": 3.5}
    peer = {"gpu": "GPU A", "ms": 10.0, "tok_s": 4e5, "mem_gib": 5.0, "loss": 9.0}
    figures = {("torch_flash", 4): peer, ("torch_cudnn", 4): {**peer, "ms": 16.0, "tok_s": 2.5e5},
               ("torch_flash", 64): "out of memory", ("torch_cudnn", 64): {**peer, "ms": 160.0}}
    torch = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True), version=SimpleNamespace(cuda="13.0"),
                            __version__="2.15")
    executable(tmp / "dev" / "bench_train", f"""case "$4 $7" in
        "4x1024 -r") echo '{json.dumps(ours)}' | sed "s/7777/$8/" >"${{10}}" ;;
        *) echo "the model needs 200 GiB" >&2; exit 1 ;;
    esac""")
    step = "step 1/9 | loss 9.5 (+nanz)| norm 1 (+nanz)| lr 1e-04 | {}.00 ms | 9.0% bf16 MFU | 9 tok/s"
    llmc = executable(tmp / "llmc", f"""echo 'device memory usage: 2048 MiB / 9999 MiB'
    cp "$2" {tmp}/shard
    case "${{18}}" in
        0) yes '{step.format(4000)}' ;;
        1) echo 'cuda: out of memory'; exit 1 ;;
        2) yes '{step.format(2000)}' ;;
    esac""")
    out, peers = tmp / "rows.jsonl", lambda _, size, sdpa, B, T: figures[sdpa, B]
    with mock.patch.multiple(peers_train, ROOT=tmp, in_a_fresh_process=peers):
        printed = script("../dev/peers_train.py", "--shapes", "4x1024,64x1024", "--llmc", llmc, "--out", out,
                         function=peers_train.main, modules={"torch": torch}).stdout
    # Each line's first and last two words: name and attention, a ratio, or that it ran out of memory.
    shown = [(*words[:2], *words[-2:]) for words in (line.split() for line in printed.splitlines()[2:])]
    no_room = "of", "memory"
    assert shown == [
        *2 * [("train_gpt2cu", "flash,", "40.0", "3.50")], ("torch_compile", "torch_flash", "5.00", "1.25"),
        ("torch_compile", "torch_cudnn", "5.00", "2.00"), ("llm.c", "cudnn,", "2.00", "488.28"),
        ("llm.c", "cudnn,", *no_room), ("llm.c", "cudnn,", "2.00", "244.14"),
        *2 * [("train_gpt2cu", "flash,", *no_room)],
        ("torch_compile", "torch_flash", *no_room), ("torch_compile", "torch_cudnn", "n/a", "5.00"),
        ("llm.c", "cudnn,", "n/a", "2.00"), ("llm.c", "cudnn,", *no_room), ("llm.c", "cudnn,", "n/a", "2.00"),
        (str(out), str(out))], shown
    *both, faster, plain, long, _ = rows_of(out)
    assert both == [{**ours, "recompute": 1}, {**ours, "recompute": 0}]
    assert [r["sdpa"] for r in (faster, long)] == ["torch_flash", "torch_cudnn"]
    assert tuple(plain[field] for field in ("kernel", "sdpa", "ms", "mem_gib")) == ("llm.c", "cudnn, -ge 2", 2000, 2)
    assert [faster[field] for field in ("kind", "kernel", "dtype", "mfu")] == ["train", "torch_compile", "bf16", 32.0]
    assert long["mfu"] is None and long["B"] == 64 and {r["ids"] for r in rows_of(out)[2:]} == {"text-like"}
    tokens = array.array("H", (tmp / "shard").read_bytes()[1024:])  # the commonest, 100 of them, and rare ones
    shares = [sum(id < n for id in tokens) / len(tokens) for n in (1, 100, 20000)]
    weights = [1 / (id + 2.7) for id in range(50257)]
    for n, share in zip((1, 100, 20000), shares):
        assert abs(share - sum(weights[:n]) / sum(weights)) < 0.002, (n, share)


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
    assert ok and {name: round(value, 9) for name, value in found.items()} == {
        "difference": 0.019, "allowed": 0.02, "torch_itself": 0.01, "clipped": 2}
    for ours in (steps(4.0, 3.0, 2.0, 0.979), steps(4.021, 3.0, 2.0, 1.0), steps(4.0, math.nan, 2.0, 1.0),
                 steps(math.nan, 3.0, 2.0, 1.0), steps(4.0, 3.0, 2.0, 1.0, norms=(0.6, 0.5, 0.4, 0.3))):
        assert not judge(a, ours, torch, near)[1], ours
    assert not judge(a, torch, torch, steps(4.0, math.nan, 2.0, 1.0))[1]
    expected = ("-e model -i shard -b 3 -t 128 -x 4 -l 0.0002 -u 0 -k constant -v 0 -s 0 -c 0.75 --max-norm 0.5 "
                "--precision bf16 --no-shuffle --attention naive")
    assert " ".join(map(str, trainer_options(a, "model", "shard"))) == expected
    a.precision = "fp32"
    assert trainer_options(a, "model", "shard")[-1] == "--no-tf32"
    for difference, right in (0.9e-4, True), (1.1e-4, False), (-1.1e-4, False):
        found, ok = judge(a, steps(4.0, 3.0, 2.0 + difference, 1.0), torch, near)
        assert ok == right and found["allowed"] == 1e-4, found
    refused(ValueError, "4 and 3 steps", apart, torch, torch[1:])


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


def pretended(text_and_log):
    """Replaces what runs ./train_gpt2cu by a function of the command's options in one string, and of its GPU."""
    def train(*options, CUDA_VISIBLE_DEVICES=None):
        time.sleep(0.01)  # so that another thread takes the next run
        return text_and_log(" ".join(map(str, options)), CUDA_VISIBLE_DEVICES)
    return mock.patch.multiple(results, train=train, run_trainer=train, need=lambda *_: None)


def test_ranks_by_the_stand_in(tmp):
    """scripts/scaling.py: losses that differ, rates, all GPUs of the machine or those that CUDA shows, and the table."""
    command = "-e d12 -t 16 -v 0 -s 0 --device cuda --gpus {} --zero {} -b "
    strict, timed = command + "2 -d 64 -x 20 --precision fp32 --no-tf32", command + "3 -x 12 --precision bf16"
    ranks, rates = ((1, 0), (2, 0), (2, 1)), {"0": 960, "1": 800, "7": 960, "9": 800}

    def measured(*losses, code=0, says=()):
        last = {strict.format(*of): loss for of, loss in zip(ranks, losses)}
        rate = {timed.format(*of): rate for of, rate in zip(ranks, (1000, 1900, 2200))}

        def train(options, gpu):
            mib = 2048 if "--zero 1" in options else 4096
            text = f"device             GPU A, 1 GiB\nmemory             {mib}.0 MiB\n" + 10 * "step 1/9 | 1 tok/s\n"
            log = {"train": 19 * [{"loss_nats": 2.0}] + [{"loss_nats": last.get(options)}]}
            assert options in {**last, **rate}, options
            return text + 2 * f"step 11/9 | {rates.get(gpu, rate.get(options))} tok/s\n", log
        out = written(tmp / "rows.jsonl", "")
        with pretended(train):
            result = script("scaling.py", "--batch", 3, "--tokens", 16, "--steps", 12, "--out", out,
                            code=code, says=says)
        return result, rows_of(out)
    executable(tmp / "nvidia-smi", 'for i in 0 1; do echo "GPU $i: it (UUID: GPU-1)"; done')
    for visible in {"CUDA_VISIBLE_DEVICES": "7,9"}, before_others(tmp):
        with mock.patch.dict(os.environ):
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            os.environ.update(visible)
            for losses in (2, 2, 2.0021), (2, 1.9979, 2), (2, math.nan, 2), (2.003, 2, 2):
                result, rows = measured(*losses, code=1, says=["differ by more than 1e-3: not timed"])
                assert {r["what"] for r in rows} == {"losses"} and "of linear" not in result.stdout, rows
            _, rows = measured(2, 2, 2.0019)
        assert [round(r["apart"], 6) for r in rows[:2]] == [0, 0.00095], rows
        fields = ("gpus", "zero", "tok_s", "ms", "ms_side_by_side", "of_linear", "gib")
        assert [[round(r[field], 3) for field in fields] for r in rows[2:]] == [  # the slowest GPU is the last
            [1, 0, 1000, 48, 48, 1, 4], [2, 0, 1900, 50.526, 60, 0.95, 4], [2, 1, 2200, 43.636, 60, 1.1, 2]], rows
    write_rows(tmp, "A/scaling", [{**r, "dirty": False} for r in rows])
    check_documents(tmp, """
<!-- table: scaling -->
| 1 | – | 1k | 100.0 % | 48.00 | 48.00 | 4.0 | – |
| 2 | 0 | 2k | 95.0 % | 50.53 | 60.00 | 4.0 | 0e+00 |
| 2 | 1 | 2k | 110.0 % | 43.64 | 60.00 | 2.0 | 1e-03 |
""")


# ----------------------------------------------------------------------------------------------------------------------
# Training recipes

def run_recipe(recipe, tmp, program, *arguments, **more):
    """Runs a copy of the recipe where there is no data, with `program` as ./train_gpt2cu and a make of no effect."""
    copy_scripts(tmp)
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


# The options of each recipe with B=2. They are those of llm.c's recipes, and ours for long contexts.
SETTINGS = {
    "gpt2_124M": ("fineweb10B", "-e d12 -b 2 -t 1024 -d 524288 -x 19073 -l 6e-4 -u 700 -q 0 -s 2000 -g 144"),
    "gpt2_350M": ("fineweb100B", "-e d24 -b 2 -t 1024 -d 524288 -x 60000 -l 3e-4 -u 700 -q 0 -s 5000 -g 144"),
    "gpt2_774M": ("fineweb100B", "-e d36 -b 2 -t 1024 -d 524288 -x 30000 -l 2.5e-4 -u 700 -q 0 -s 5000 -g 144"),
    "gpt2_1558M": ("fineweb100B", "-e d48 -b 2 -t 1024 -d 1048576 -x 32000 -l 6e-4 -u 700 -q 0.1 -s 5000 -g 384"),
    "long_context": ("fineweb10B", "-t 16384 -d 524288 -x 1000 -l 1e-4 -u 100 -q 0 -v 100 -m 32 -b 2 -s 0 -n 100"),
    "long_context_gpus": ("fineweb10B", "-t 262144 -d 524288 -x 500 -l 1e-4 -u 50 -q 0 -v 100 -m 4 -b 1 -s 0 -n 100 "
                          "--gpus 4 --context-parallel 4")}


def test_recipes_settings(tmp):
    """And how torchrun is asked for machines and ranks."""
    show, start = executable(tmp / "show", 'echo "<$*>"'), long_context_start(tmp / "model.bin")

    def options(words):
        """As pairs, sorted: an option and its value."""
        return sorted(zip(words[::2], words[1::2], strict=True))
    for recipe in RECIPES:
        name = recipe.stem.removeprefix("run_")
        long = name.startswith("long")
        result = run_recipe(recipe, tmp / name, show, *([start] if long else ["--seed", "5"]), B="2")
        data, expected = SETTINGS.get(name) or SETTINGS["_".join(name.split("_")[:2])]
        expected += f" -i data/cache/{data}/train_*.bin -j data/cache/{data}/val_*.bin -c 0.1 -k cosine -nk 2 -y 1"
        expected += f" --tokenizer data/cache/{data}/gpt2_tokenizer.bin"
        expected += f" -e log_{name}/start.bin -o log_{name}" if long else " -v 250 -m 5120 -n 1000 --seed 5 -o log_"
        expected += "" if long else "_".join(name.split("_")[:2]) + " --gpus 4" * name.endswith("_gpus")
        assert options(re.search("<(.*)>", result.stdout)[1].split()) == options(expected.split()), recipe
    given = {"NODES": "3", "NODE": "2", "GPUS": "5", "MASTER": "first", "PORT": "123"}
    for variables, expected in ({}, "1 0 8 127.0.0.1 29500"), (given, "3 2 5 first 123"):
        run_recipe(SCRIPTS / "run_gpt2_350M_torchrun.sh", tmp, show, **variables)
        command = "--no-python --nnodes {} --node-rank {} --nproc-per-node {} --master-addr {} --master-port {} ./train"
        assert (tmp / "launched").read_text().startswith(command.format(*expected.split())), expected


# What a recipe's comment says of its arithmetic.
FIGURES = r"""tokens +(?P<steps>[\d ]+) steps · (?P<per_step>[\d ]+) tokens = (?P<tokens>[\d.e]+)
= 6·(?P<N>[\d ]+) \+ 6·(?P<L>[\d ]+)·(?P<C>[\d ]+)·(?P<T>[\d ]+) =
(?P<flops>[\d.e]+) a token; +(?P<all>[\d.e]+) in all
time +(?P<time>[\d.]+) (?P<unit>\w+) at (?P<rate>[\d ]+) tokens/s
which is (?P<mfu>\d+) % of (?:an|the (?P<gpus>\d+) · 989)"""


def number(text):
    return float(text.replace(" ", ""))


def test_recipes_arithmetic():
    """Steps and tokens a step in the command are those of the comment, and what follows from them is what it says."""
    for recipe in RECIPES:
        text = recipe.read_text()
        if "LAUNCH=" in text:
            continue  # starts another recipe
        said = re.search(FIGURES.replace("\n", ".*?"), text, re.S).groupdict(default="1")
        seconds = {"minutes": 60, "hours": 3600, "days": 86400}[said.pop("unit")]
        f = SimpleNamespace(**{name: number(value) for name, value in said.items()})
        assert f"-d {f.per_step:.0f} " in text and f"-x {f.steps:.0f} " in text, recipe.name
        trained = f.steps * f.per_step
        for computed, in_text, tolerance in (
                (trained, f.tokens, 0.005), (6 * f.N + 6 * f.L * f.C * f.T, f.flops, 0.005),
                (trained * f.flops, f.all, 0.01), (trained / f.rate / seconds, f.time, 0.02),
                (f.rate * f.flops / f.gpus / 989e12, f.mfu / 100, 0.02)):
            assert abs(computed / in_text - 1) < tolerance, (recipe.name, computed, in_text)
        others = re.findall(r"^#   (\d) GPUs +([\d.]+) hours, [\d.]+ GiB each", text, re.M)
        for n, hours in others:
            expected = trained / (f.rate / f.gpus * int(n) * 0.96) / 3600
            assert abs(expected - float(hours)) < max(0.051, 0.01 * expected), (recipe.name, n, expected)
        assert "long" in recipe.name or [n for n, _ in others] == ["4", "8"], recipe.name


def test_recipes_are_what_was_measured():
    """Where an H200's step has been measured as the recipe runs it, rate and memory are not far from that."""
    compared = 0
    as_recipes = {"kernel": "train_gpt2cu", "dtype": "bf16", "attention": "flash", "recompute": 1, "gpus": 1}
    rows = [r for r in rows_of(ROOT / "dev/results/NVIDIA-H200/train.jsonl") if as_recipes.items() <= r.items()]
    for name, model, T in (("gpt2_124M", "d12", 1024), ("gpt2_350M", "d24", 1024), ("gpt2_1558M", "d48", 1024),
                           ("long_context", "d12", 16384)):
        text = (SCRIPTS / f"run_{name}.sh").read_text()
        rate = number(re.search(r"([\d ]+) tokens/s", text)[1])
        for B, r in {r["B"]: r for r in rows if (r["model"], r["T"]) == (model, T)}.items():  # the newest
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
    written(tmp / "short.bin", a.read_bytes()[:300])
    written(tmp / "text.bin", "GPT-2" * 1000)
    check_refusals("""
        longer_context.py {tmp}/short.bin {tmp}/out.bin 2048   | 1 | longer_context.py: | not a whole | 300 bytes
        longer_context.py {tmp}/text.bin {tmp}/out.bin 2048    | 1 | text.bin: not a whole
        longer_context.py {tmp}/a.bin {tmp}/out.bin 2          | 1 | at least the 3 positions
        longer_context.py {tmp}/a.bin {tmp}/none/out.bin 2048  | 1 | none/out.bin: cannot write
    """, tmp=tmp)
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
    no_python = only(tmp / "tools", "sh dirname nproc mktemp mkdir rm basename timeout env touch cat tail sed true")
    short = {"TEST_LIMIT": "1"}
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
    for limit, *program in ("0.012", sys.executable, some), ("0.03", built("dev/test_job")):
        result = run(*program, PYTHONPATH=str(ROOT / "dev"), TEST_PATIENCE="0.0001", code=1)
        assert f"no end after {limit} s" in result.stdout, result
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

    tests, json = ["test_attention", "test_layers", "test_gpt2"], ["*--json*"]
    end = [f"python3 scripts/{name}.py" for name in ("plot_results", "pictures", "readme_tables")]
    compare_torch = [f"python3 scripts/compare_torch.py --json{more}" for more in ("", " --precision bf16")]
    bench_ring = [f"bench_ring --json --gpus 4 --heads {heads}" for heads in ("12 --hs 64", "32 --hs 128")]
    stuck = {"BAD": "accuracy*64", "SLOW": "study_accum*", "PART_LIMIT": "1"}
    for parts, variables, code, says, expected in (
            ("", {}, 0, "one GPU", [*tests, *15 * json, "*default_run.py", *compare_torch, *3 * json, *end]),
            ("--no-tests ring scaling", {"GPUS": 4}, 0, "",
             ["study_ring --json", *bench_ring, "python3 scripts/scaling.py --json", *end]),
            ("--no-tests accuracy study layers", stuck, 1, "study: no end after 1 s … failed: accuracy study; no table",
             ["accuracy --json --hs 64", "study_accumulation --json", "bench_layers --json"]),
            ("--no-tests fp32 torch train", {"BAD": "*import?torch"}, 0, "no PyTorch",
             [*2 * ["bench_attention *"], *4 * ["bench_train *"], *end]),
            ("layers layer", {}, 2, "layer: expected", []), ("layers", {"BAD": "test_layers*"}, 3, "", tests[:2])):
        executable(tmp / "nvidia-smi", variables.pop("GPUS", 1) * "echo GPU 0: it\n")
        for name in "ran", "runs":
            written(tmp / name, "")
        command = ("sh", "-c", 'exec "$@" 2>&1', "sh", tmp / "scripts" / "measure.sh")
        result = run(*command, *parts.split(), code=code, **before_others(tmp), **variables)
        ran = [line.strip() for line in (tmp / "ran").read_text().splitlines() if not line.endswith("import torch")]
        assert len(ran) == len(expected) and all(map(fnmatch.fnmatch, ran, expected)), (parts, ran)
        assert len(set((tmp / "runs").read_text().split())) == bool(ran), "several values of RUN"
        check_in_order(result.stdout, says.split(" … "))
    wait_for_end_of(tmp / "pid", 5)


def test_soak():
    """A run that is killed loses nothing, and what is lost is seen, here a loss and the bytes of another seed."""
    built()
    import soak
    small = "--kill 2 --steps 60 --every 3 --seconds .1 .3 --device cpu -e tiny -b 1 -t 16 -v 0 -s 0".split()
    said = script("soak.py", *small).stdout
    assert "60 steps with 2 kills" in said and "0 of 2 files and 0 losses differ" in said
    start = soak.start

    def other_seed(folder, *options):
        return start(folder, *options, *(["--seed", 2] if folder.name == "calm" else []))
    with mock.patch.object(soak, "start", other_seed):
        result = script("soak.py", *small, code=1, function=lambda: sys.exit(soak.main()))
    assert "2 of 2 files and 60 losses differ" in result.stdout, result
    script("soak.py", *small[2:], "--kill", 9, "--steps", 2, "--seconds", 60, 60, code=1, says=["after 0 of 9 kills: raise --steps"])
    script("soak.py", "--minutes", .02, "-e", "none", code=1, says=["the run ended with 2", "none"])


def test_sanitizer_of_the_kernels(tmp):
    """scripts/sanitize.sh with a stand-in for compute-sanitizer: what it runs, its exit code, and Ctrl-C."""
    sanitize = executable(tmp / "scripts" / "sanitize.sh", (SCRIPTS / "sanitize.sh").read_text())
    executable(tmp / "make", "")
    executable(tmp / "compute-sanitizer", 'echo "$2 $6" >>ran\necho "========= ERROR SUMMARY: 0 errors"\n'
               'case "$2 $6" in "synccheck bad"*) exit 1 ;; *slow) printf "$$ " >pid; exec sleep 60 ;; esac')
    path = before_others(tmp)
    said, ran = run(sanitize, **path).stdout, (tmp / "ran").read_text().splitlines()
    assert said.count("\n") == len(ran) == 26, (said, ran)
    assert "racecheck flash_fp16x3 fp32 few" in ran and "memcheck flash_fp16x3 fp32 pieces" in ran, ran
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
