#!/usr/bin/env python3
"""Tests the scripts, what make chooses, and what runs tests and measurements.

make train_gpt2cu && python3 dev/test/test_tools.py [part of a test's name]
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from harness import (
    POINTER,
    ROOT,
    Skip,
    built,
    ended,
    executable,
    main,
    need,
    refused,
    run,
    succeeds,
    unheard,
    unread_pipe,
    written,
)

SCRIPTS = ROOT / "scripts"
RUN_TESTS = ROOT / "dev" / "test" / "run_tests.sh"
sys.path += [str(SCRIPTS), str(ROOT / "dev" / "bench"), str(ROOT / "dev" / "common")]
import results  # noqa: E402


def jsonl(rows, **how):
    return "".join(json.dumps(row, **how) + "\n" for row in rows)


def rows_of(path):
    return [row for _, row in results.json_rows(path)]


def before_others(folder, programs):
    """Writes these programs for sh. Returns the variables with which a process finds them before
    all others."""
    for name, text in programs.items():
        executable(folder / name, text)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def copied_script(folder, name):
    """The path of a copy of scripts/NAME, which takes the folder for the repository."""
    return executable(folder / "scripts" / name, (SCRIPTS / name).read_text())


# --------------------------------------------------------------------------------------------------
# What all tools have in common


def tools():
    """The Python scripts that have a --help."""
    for folder in "data", "dev/bench", "scripts":
        for path in sorted((ROOT / folder).glob("*.py")):
            if "parse_args()" in path.read_text():
                yield path


def test_help_of_every_tool():
    """--help can be written in ASCII, too. If it cannot be written, one line says so."""
    assert len(list(tools())) > 10
    for tool in tools():
        assert "usage: " in run("python3", tool, "--help", PYTHONIOENCODING="ascii").stdout, tool
        for _ in unheard("python3", tool, "--help"):
            pass


def test_work_whose_errors_nobody_reads(tmp):
    """As under 2>&1 | head: work that writes to stderr goes on if nobody reads it."""

    @results.check_stdout()
    def work():
        print("on stderr", file=sys.stderr, flush=True)
        print("on stdout", flush=True)
        written(tmp / "done", "")

    with (
        unread_pipe() as out,
        unread_pipe() as err,
        mock.patch.multiple(sys, stdout=out, stderr=err),
    ):
        with refused(SystemExit, "stdout"):
            work()
    assert (tmp / "done").exists()


def test_work_whose_messages_nobody_reads(tmp):
    """A script and the trainer that it starts do all their work if nobody reads stdout."""
    import default_run

    write_log(tmp / "run")
    executable(tmp / "train_gpt2cu", f"echo first line && echo >done && cp {tmp}/run/log.jsonl $2")
    with (
        unread_pipe() as pipe,
        mock.patch.multiple(sys, stdout=pipe, argv=["default_run.py"]),
        mock.patch.multiple(results, ROOT=tmp, RESULTS=tmp, output_of=lambda *command: ""),
    ):
        with refused(SystemExit, "stdout"):
            default_run.main()
    assert (tmp / "done").exists()
    assert [row["step"] for row in rows_of(tmp / "GPU-A" / "default_run.jsonl")] == [2, 3]


# --------------------------------------------------------------------------------------------------
# Logs of runs


def write_log(folder):
    """Writes the log of a run of three steps and returns the run's folder."""
    run_row = {
        "kind": "run",
        "device": "GPU A",
        "tokens_per_step": 32,
        "floor_nats": 1.5,
        "steps": 3,
        "B": 8,
        "T": 4,
        "precision": "bf16",
    }
    rows = [run_row]
    for step in 1, 2, 3:
        train_row = {
            "kind": "train",
            "step": step,
            "loss_nats": 9 / step,
            "grad_norm": 7 + step,
            "lr": step / 4,
            "tokens_per_s": 100 + step,
        }
        rows.append(train_row)
    for step in 2, 3:
        rows += [
            {"kind": "val", "step": step, "loss_nats": 4 + step, "floor_nats": 1.5},
            {"kind": "sample", "step": step, "text": f"Once\nupon {step}"},
        ]
    written(folder / "log.jsonl", jsonl(rows))
    return folder


def test_logs_whose_last_line_is_cut(tmp):
    """The line is left out, as that of a run that is still writing."""
    path = write_log(tmp) / "log.jsonl"
    good = path.read_bytes()
    for cut in b'{"kind": "tra', '{"kind": "sample", "text": "ë'.encode()[:-1]:
        written(path, good + cut)
        assert [row["loss_nats"] for row in results.read_log(tmp)["train"]] == [9, 4.5, 3]


def test_logs_that_cannot_be_read(tmp):
    path = write_log(tmp) / "log.jsonl"
    good = path.read_text()
    for bad in (
        "{oops",
        "",
        "\xff",
        '{"step": 2}',
        '{"kind": "val", "step": 2}',
        '{"kind": "val", "step": 2, "loss_nats": ""}',
    ):
        for rest in "", good:
            written(path, f"{good}{bad}\n{rest}".encode("latin-1"))
            with refused(SystemExit, "log.jsonl:9: "):
                results.read_log(path)
    with refused(SystemExit, "log.jsonl: is a Git LFS"):
        results.read_log(written(path, POINTER))


def test_texts_with_line_separators(tmp):
    """Only a newline ends a row. A sample's text may contain Unicode's other line separators."""
    rows = rows_of(write_log(tmp) / "log.jsonl")
    for text in "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r":
        rows[1]["text"] = text
        written(tmp / "log.jsonl", jsonl(rows, ensure_ascii=False))
        log = results.read_log(tmp)
        assert len(log["train"]) == 3 and log["train"][0]["text"] == text, text


def test_plot_of_a_run(tmp):
    """It is written even if nobody reads stdout. If the disk is full, the old plot remains."""
    need("matplotlib")
    log = write_log(tmp / "one's [1]")
    path = log / "plot.png"
    succeeds("plot", log)
    before = path.read_bytes()
    path.unlink()
    for _ in unheard("python3", SCRIPTS / "plot.py", log):
        assert path.read_bytes() == before
        path.unlink()
    written(path, before)
    limited = 'ulimit -f 8; python3 scripts/plot.py "$0"'  # a limit acts like a full disk
    full = run("sh", "-c", limited, log, code=1)
    assert "cannot write: File too large" in full.stderr and path.read_bytes() == before


def test_plot_of_a_run_that_diverged(tmp):
    """Its losses are NaN, which is null in a log."""
    need("matplotlib")
    log = write_log(tmp) / "log.jsonl"
    rows = rows_of(log)
    for row in rows:
        if row["kind"] == "train":
            row["loss_nats"] = None
    written(log, jsonl(rows))
    succeeds("plot", log)
    assert (tmp / "plot.png").exists()


def test_samples_of_the_default_run(tmp):
    """Each has the validation loss of its own step."""
    import default_run

    samples = default_run.samples(results.read_log(write_log(tmp)))
    found = [(row["step"], row["val_loss_nats"], row["text"][-1]) for row in samples]
    assert found == [(2, 6, "2"), (3, 7, "3")], samples


def test_names_of_runs_in_a_plot(tmp):
    """They are drawn as they are, not as TeX formulas. Bytes that are not UTF-8 are replaced."""
    need("matplotlib")
    names = ["-run", "_run", "a$b$c", r"a\$b", r"$\frac", r"\alpha$1$", "é\udcff"]
    runs = [write_log(tmp / name) for name in names]
    succeeds("plot", *runs, "-o", tmp / "-$x$.svg")
    drawn = re.findall(r">(.*), validation 7.0000<", (tmp / "-$x$.svg").read_text(encoding="utf-8"))
    assert drawn == [*names[:-1], "é\ufffd"], drawn


# --------------------------------------------------------------------------------------------------
# Rows of results, and tables


def test_rows_that_tables_show(tmp):
    """Those of the newest run, and never any that were measured with uncommitted changes."""
    need("pandas")
    import tables

    about = {"gpu": "A", "commit": "a", "dirty": False}
    old = {**about, "run": "1", "date": "2030", "T": 1, "ms": 1}
    new = {**about, "run": "2", "date": "2031", "T": 1, "ms": 2}

    def shown(*rows, newest_by=(), **where):
        path = written(tmp / "rows.jsonl", jsonl(rows))
        found = tables.newest_rows(path, where, list(newest_by))
        return [row["ms"] for row in found.to_dict("records")]

    assert shown() == []
    assert shown(old, old | {"ms": 3}) == [1, 3]
    assert shown(old, new) == [2]
    assert shown(new, old) == [2]
    assert shown(old, new | {"dirty": True}) == [1]
    assert shown(old, new | {"dirty": None}) == [1]
    assert shown(old, new | {"T": 4}) == [2]
    assert shown(old, new | {"T": 4}, newest_by=["T"]) == [1, 2]
    assert shown(old, new | {"T": 4}, T=1) == [1]


def test_tables_show_dev_results():
    need("pandas")
    succeeds("tables", "--check")


def test_stale_tables(tmp):
    """--check names them, and a call without it rewrites them. Each GPU has a table of its own."""
    need("pandas", "matplotlib")
    about = {
        "dirty": False,
        "commit": "0123456789ab",
        "run": "1",
        "date": "2030-01-02T03:04:05Z",
        "driver": "5",
        "cuda": "13",
        "model": "d12",
        "B": 8,
    }
    for gpu in "A", "B":
        random = {**about, "gpu": gpu, "what": "random", "seconds": 2.3, "read_seconds": 0.0}
        resumed = {**random, "what": "resumed", "seconds": 4.5, "read_seconds": 1.2}
        written(tmp / gpu / "start.jsonl", jsonl([random, resumed]))
    ranks = {**about, "gpu": "A", "gpus": 2, "zero": 1}
    losses = {**ranks, "what": "losses", "apart": 2e-5}
    speed = {
        **ranks,
        "what": "speed",
        "dtype": "bf16",
        "T": 1024,
        "ms": 4.5,
        "ms_side_by_side": 4.25,
        "tok_s": 5e5,
        "of_linear": 0.95,
        "gib": 7.75,
    }
    written(tmp / "A" / "scaling.jsonl", jsonl([losses, speed]))

    # A ladder that no library was measured beside.
    shape = {"dtype": "fp32", "causal": True, "B": 4, "T": 4096, "HS": 64}
    rates = {"ms": 2.0, "tflops": 10.0, "gemm_tflops": 50.0}
    passes = [
        {**about, **shape, **rates, "gpu": "A", "kernel": "naive", "pass": name}
        for name in ("fwd", "bwd")
    ]
    written(tmp / "A" / "attention.jsonl", jsonl(passes))

    names = "start", "scaling", "torch", "ladder fp32"
    old = "".join(f"<!-- table: {name} -->\nold\n<!-- end -->\n" for name in names)
    page = written(tmp / "page.md", old)
    with mock.patch.multiple(results, ROOT=tmp, RESULTS=tmp):
        code, _, err = ended("tables", "--check")
        assert code == 1 and all(f"page.md: {name}" in err for name in names), err
        assert page.read_text() == old
        succeeds("tables")
        succeeds("tables", "--check")

    text = page.read_text()
    for gpu in "A", "B":
        assert f"{gpu}, driver 5, CUDA 13. Measured on 2030-01-02 (commit 0123456)." in text, text
    assert text.count("| d12 | 8 | 2.3 | 4.5 (1.2) |") == 2, text
    assert "| 2 | 1 | 500 | 95 | 4.50 | 4.25 | 7.75 | 2.00e-05 |" in text, text
    assert "no rows for this table: `scripts/measure.sh torch`" in text, text
    assert "| the formula, by cuBLAS | 10 | 20 | – | 10 | 20 | – |" in text, text
    assert "GEMM reaches 50 TFLOP/s." in text, text


def create_repository(folder):
    """Commits all files of the folder."""
    commit = "git -c user.name=A -c user.email=a@b commit -qm first"
    run("sh", "-c", f"git init -q && git add -A && {commit}", cwd=folder)


def test_rows_name_the_sources(tmp):
    """A change of any source makes the tree dirty; a change of a text or a result does not. Without
    git, COMMIT names the commit."""
    script = copied_script(tmp, "tree.sh")
    written(tmp / "a.cu", "1")
    create_repository(tmp)
    for name, state in (
        ("a.md", "clean"),
        ("dev/results/a.py", "clean"),
        ("Makefile", "dirty"),
        ("a.cu", "dirty"),
    ):
        written(tmp / name, "2")
        assert re.fullmatch(rf"\w{{12}} {state}\n", run(script).stdout), name
    shutil.rmtree(tmp / ".git")  # as in a copy of the sources alone
    assert run(script, COMMIT="abc").stdout == "abc clean\n"
    assert run(script).stdout == "unknown dirty\n"
    results.tree.cache_clear()
    with mock.patch.object(results, "output_of", lambda *command: "abc dirty"):
        assert results.row("x", "GPU A")["dirty"]


def test_rows_name_no_other_sources(tmp):
    """If git cannot tell, the tree is "unknown dirty", never another commit and never clean,
    whatever COMMIT is."""
    unknown = "unknown dirty\n"
    ours = tmp / "ours"
    script = copied_script(ours, "tree.sh")
    for folder in ours, tmp:  # our repository is inside another one
        written(folder / "a.cu", folder.name)
        create_repository(folder)
    clean = run("git", "rev-parse", "--short=12", "HEAD", cwd=ours).stdout.strip() + " clean\n"
    assert run(script).stdout == clean
    for name, value in (
        ("GIT_DIR", tmp / ".git"),
        ("GIT_WORK_TREE", tmp),
        ("GIT_INDEX_FILE", tmp / "none"),
    ):
        assert run(script, **{name: str(value)}).stdout == clean, name
    assert run(script, COMMIT="abc", GIT_TEST_ASSUME_DIFFERENT_OWNER="1").stdout == unknown
    without_git = tmp / "tools"
    without_git.mkdir()
    for name in "sh", "dirname":
        (without_git / name).symlink_to(shutil.which(name))
    assert run(script, COMMIT="abc", PATH=str(without_git)).stdout == unknown
    run("git", "config", "status.showUntrackedFiles", "no", cwd=ours)
    written(ours / "b.cu", "new")
    assert run(script).stdout == clean.replace("clean", "dirty")
    shutil.rmtree(ours / ".git")
    (ours / ".git").mkdir()  # not a repository, so git would search the folder above
    assert run(script).stdout == unknown


# --------------------------------------------------------------------------------------------------
# Comparisons with PyTorch and between numbers of GPUs


def test_losses_beside_pytorch():
    """How scripts/compare_torch.py judges losses. This needs no PyTorch."""
    import compare_torch

    fp32 = SimpleNamespace(precision="fp32", max_norm=0.5, tol=1e-4)
    bf16 = SimpleNamespace(precision="bf16", max_norm=0.5)
    # Losses and norms of two steps.
    reference = [(4, 0.6), (3, 0.4)]
    other = [(4, 0.6), (3.01, 0.4)]
    for a, loss, fine in (
        (bf16, 2.981, True),
        (bf16, 2.979, False),
        (bf16, math.nan, False),
        (fp32, 3.00009, True),
        (fp32, 2.99989, False),
        (fp32, math.nan, False),
    ):
        found, ok = compare_torch.judge(a, [(4, 0.6), (loss, 0.4)], reference, other)
        assert ok == fine and found["clipped"] == 1, (a.precision, loss)
        allowed = {"fp32": 1e-4, "bf16": 2 * (3.01 - 3)}[a.precision]
        assert math.isclose(found["allowed"], allowed), found
        assert math.isclose(found["torch_itself"], 3.01 - 3), found
        assert math.isnan(loss) or math.isclose(found["difference"], abs(loss - 3)), found
    never_clipped = [(4, 0.4), (3, 0.4)]
    assert not compare_torch.judge(fp32, never_clipped, reference, other)[1]

    every = SimpleNamespace(
        B=3, T=128, steps=2, lr=2e-4, weight_decay=0.75, max_norm=0.5, attention="naive"
    )
    for precision, strict in ("fp32", True), ("bf16", False):
        every.precision = precision
        options = compare_torch.trainer_options(every, "model", "shard")
        assert ("--no-tf32" in options) == strict, options


def test_peers_of_training():
    """The fastest backend is recorded. One that does not train is an error. Token ids have roughly
    the frequencies of text."""
    import peers_train

    figures = {"gpu": "GPU A", "cuda": "13", "ms": 10, "tok_s": 4e5, "mem_gib": 5, "loss": 9}
    tried = [("slow", {**figures, "ms": 16}), ("fast", figures), ("none", "out of memory")]
    ours = {"mfu": 40, "tok_s": 5e5}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        (found,) = peers_train.fastest("peer", "d12", 4, 1024, ours, tried)
    assert (found["sdpa"], found["mfu"], found["ids"]) == ("fast", 32, "text-like"), found
    assert " 1.25\n" in out.getvalue(), out.getvalue()  # 5e5 / 4e5, ours/peer

    for wrong in [math.nan, 2], [10.8, math.nan], [10.8, 10.9], [5, 4]:
        with refused(peers_train.Wrong, "expected"):
            peers_train.check_losses(wrong)

    ids = peers_train.text_ids(100000)
    weights = [1 / (id + 2.7) for id in range(50257)]
    found = sum(id < 100 for id in ids) / len(ids)
    expected = sum(weights[:100]) / sum(weights)
    assert abs(found - expected) < 0.005, (found, expected)


def test_figures_of_llmc(tmp):
    """The mean over 5 s of steps, after a warm-up of 3 s."""
    import peers_train

    steps = [("9.5", ms) for ms in (1500, 1500, 2000, 1000, 2000)] + [("7.5", 9999)]
    lines = [
        "| device memory usage: 1536 MiB / 80000 MiB",
        *(f"step 1/9 | loss {loss} (+0z) | norm 1 | {ms} ms | 9 tok/s" for loss, ms in steps),
    ]
    program = executable(tmp / "llmc", "".join(f"echo '{line}'\n" for line in lines))
    found = peers_train.llmc_figures(program, "d12", 0, 2, 8)
    assert found == {"ms": 5000 / 3, "tok_s": 16 / (5 / 3), "mem_gib": 1.5, "loss": 7.5}, found


def test_ranks_are_compared_and_timed(tmp):
    """scripts/scaling.py with faked runs: nothing is timed if losses differ, and only the later
    steps count."""

    def run_trainer(options):
        rate = 900 * options["--gpus"]
        steps = 10 * "step 1/9 | 1 tok/s\n" + 2 * f"step 11/9 | {rate} tok/s\n"
        return "memory  2048.0 MiB\n" + steps

    for loss, code, timed in (2.0021, 1, 0), (math.nan, 1, 0), (2.0019, 0, 3):

        def train(options, loss=loss):
            losses = {1: 2, 2: loss}  # by the number of GPUs
            train_row = {"loss_nats": losses[options["--gpus"]]}
            return {"run": [{"device": "GPU A"}], "train": [train_row]}

        out = tmp / f"{loss}.jsonl"
        options = {"--gpus": "1,2", "--device": "cpu", "--batch": 3, "--tokens": 16, "--out": out}
        faked = {"need_trainer": lambda: None, "train": train, "run_trainer": run_trainer}
        with mock.patch.multiple(results, **faked):
            done = ended("scaling", *results.option_words(options))
        speeds = [row for row in rows_of(out) if row["what"] == "speed"]
        assert done[0] == code and len(speeds) == timed, done
    last = speeds[-1]
    assert last["gpu"] == "GPU A" and last["gpus"] == 2, last
    assert round(last["tok_s"]) == 1800 and last["of_linear"] == 1, last


def test_figures_of_scaling(tmp):
    """Compared with figures computed by hand, from the tokens per second that faked runs print. A
    GPU has 48 tokens per step."""
    together = {(1, 0): 1000, (2, 0): 1600, (2, 1): 1500, (4, 0): 2000, (4, 1): 3000}
    alone = {"3": 800, "5": 600, "7": 480, "9": 960}  # by the number of the GPU

    def run_trainer(options, CUDA_VISIBLE_DEVICES=None):
        gpus, zero = options["--gpus"], options["--zero"]
        rate = alone.get(CUDA_VISIBLE_DEVICES, together[gpus, zero])
        rates = [1] * 10 + [rate / 4, rate, 9 * rate]
        steps = "".join(f"step 1/13 | {rate} tok/s\n" for rate in rates)
        return f"memory  {1536 * gpus} MiB\n{steps}"

    def train(options):
        return {"run": [{"device": "GPU A"}], "train": [{"loss_nats": 2}]}

    out = tmp / "rows.jsonl"
    options = {"--gpus": "1,2,4", "--batch": 3, "--tokens": 16, "--out": out}
    faked = {"need_trainer": lambda: None, "train": train, "run_trainer": run_trainer}
    with (
        mock.patch.multiple(results, **faked),
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="3,5,7,9"),
    ):
        text = succeeds("scaling", *results.option_words(options))
    columns = "gpus", "zero", "ms", "ms_side_by_side", "tok_s", "of_linear", "gib"
    speeds = [row for row in rows_of(out) if row["what"] == "speed"]
    found = [[round(row[name], 9) for name in columns] for row in speeds]
    assert found == [
        [1, 0, 48, 48, 1000, 1, 1.5],
        [2, 0, 60, 80, 1600, 0.8, 3],
        [2, 1, 64, 80, 1500, 0.75, 3],
        [4, 0, 96, 100, 2000, 0.5, 6],
        [4, 1, 64, 100, 3000, 0.75, 6],
    ], found
    assert re.findall(r"[\d.]+%", text) == ["100.0%", "80.0%", "75.0%", "50.0%", "75.0%"], text


# --------------------------------------------------------------------------------------------------
# Training recipes


def test_recipes_pass_the_trainers_checks(tmp):
    """The program fails because the data is missing, and not before, under torchrun and Slurm,
    too."""
    # Instead of a launcher: writes its arguments to a file, and starts one rank.
    launcher = """echo "$@" >"$(basename "$0").ran"
        while [ $1 != ./train_gpt2cu ]; do shift; done
        exec "$@" """
    programs = {"make": "", "torchrun": launcher, "srun": launcher, "scontrol": "echo localhost"}
    variables = {
        **before_others(tmp, programs),
        "SLURM_SUBMIT_DIR": str(tmp),
        "SLURM_JOB_NODELIST": "1",
        "SLURM_JOB_ID": "7",
        "LAUNCH": "torchrun --no-python",
        "B": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    shutil.copytree(SCRIPTS, tmp / "scripts")
    (tmp / "train_gpt2cu").symlink_to(built())
    for path in SCRIPTS.glob("run_*.sh"):
        err = run(tmp / "scripts" / path.name, cwd="/", code=1, **variables).stderr
        assert "data/cache/fineweb" in err and "data/prepare.py" in err, (path, err)
    assert (tmp / "torchrun.ran").read_text().startswith("--no-python ./train_gpt2cu -e d24 ")


# --------------------------------------------------------------------------------------------------
# What make chooses, and what runs tests, benchmarks and the sanitizer

# An nvcc whose --dryrun names the toolkit that it is in.
NVCC = """here=$(dirname "$0")
echo "#$ TOP=$here/.."
echo "#$ INCLUDES=\\"-I$here/../include\\""
echo "#$ LIBRARIES= \\"-L$here/../lib64/stubs\\" \\"-L$here/../lib64\\"" """


def test_one_toolkit_is_chosen(tmp):
    """CUDA_HOME's, else the one on the PATH, else one in the usual places. If there is none, make
    says so."""
    makefile = (ROOT / "Makefile").read_text()
    makefile = makefile.replace("/usr/local", f"{tmp}/local").replace("/opt", f"{tmp}/opt")
    written(tmp / "Makefile", makefile)
    written(tmp / "train_gpt2.cu", "")
    (tmp / "tools").mkdir()
    for name in "make sh g++ grep tr sort find nproc sed ls mkdir dirname env".split():
        (tmp / "tools" / name).symlink_to(shutil.which(name))
    executable(tmp / "silent" / "bin" / "nvcc", "")
    executable(tmp / "failing" / "bin" / "nvcc", "echo 'nvcc fatal: no such g++'; exit 1")
    # Each case adds the toolkit that is to be found, and those of earlier cases stay.
    for found, home, says in (
        (None, "", "there is no nvcc"),
        ("local/cuda", "", ""),
        ("path", "", ""),
        ("B", f"{tmp}/B", ""),
        (None, f"{tmp}/none", "no folder"),
        (None, f"{tmp}/silent", "silent"),
        (None, f"{tmp}/failing", 'it says "nvcc fatal: no such g++"'),
        (None, f"{tmp}/two words", "two words: "),
    ):
        if found:
            executable(tmp / found / "bin" / "nvcc", NVCC)
        variables = {"PATH": f"{tmp}/tools:{tmp}/path/bin", "CUDA_HOME": home, "NVCC": ""}
        done = run("make", "-nB", "train_gpt2cu", cwd=tmp, code=2 if says else 0, **variables)
        if says:
            assert says in done.stderr and done.stderr.count("\n") == 1, done
            continue
        used = set(re.findall(rf"{tmp}/((?:local/)?\w+)/(?:include|lib64)", done.stdout))
        assert used == {found}, done
        if home:
            assert f"{home}/bin/nvcc -" in done.stdout, done


def test_programs_find_the_libraries_of_their_toolkit(tmp):
    """Wherever the libraries are, and however nvcc is named. The loader must not use its cache,
    which would hide a wrong path."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not os.path.exists(nvcc) or not loader.exists():
        raise Skip("needs nvcc and x86-64's loader")
    dryrun = run(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null").stderr
    top = re.search(r"TOP=(.*)", dryrun)
    if not top:
        raise Skip("needs NVIDIA's toolkit, which is in a folder of its own")
    toolkit = Path(top[1]).resolve()
    # Toolkits without a lib64. nvcc reads the profile that is next to it.
    for home in tmp / "conda", tmp / "two words":
        (home / "bin").mkdir(parents=True)
        for file in toolkit.glob("bin/*"):
            (home / "bin" / file.name).symlink_to(file)
        for name in "nvvm", "include", "lib", "targets":
            (home / name).symlink_to(toolkit / name)
    home = tmp / "conda"
    wrapper = executable(tmp / "bin" / "nvcc", f'exec {home}/bin/nvcc "$@"')
    shutil.copy(ROOT / "Makefile", tmp)
    main = "int main() { return cublasCreate(nullptr) == 0; }"
    written(tmp / "train_gpt2.cu", f"#include <cublas_v2.h>\n{main}\n")
    for way in (
        {"CUDA_HOME": f"{home}"},
        {"NVCC": f"{wrapper}"},
        {"NVCC": f"{home}/bin/nvcc -DNOTHING"},
        {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
    ):
        variables = {"CUDA_HOME": "", "NVCC": "", "LD_LIBRARY_PATH": "", "ARCH": "80", **way}
        run("make", "-B", "NCCL_HOME=none", "train_gpt2cu", cwd=tmp, **variables)
        listing = [loader, "--inhibit-cache", "--list", "./train_gpt2cu"]
        found = run(*listing, cwd=tmp, LD_LIBRARY_PATH="")
        assert f"=> {home}/" in re.search("libcublas.so.*", found.stdout)[0], (way, found)
    done = run("make", "train_gpt2cu", cwd=tmp, code=2, CUDA_HOME=f"{tmp}/two words", NVCC="")
    assert f"{tmp}/two words: " in done.stderr and done.stderr.count("\n") == 1, done


def test_all_cores_are_used(tmp):
    """make and run_tests.sh use all cores, whatever OpenMP's variables say. nproc obeys these, and
    torchrun and Slurm set them."""
    programs = {
        "nproc": "echo ${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-16}}",
        "threads": "echo threads $OMP_NUM_THREADS; echo 1 passed, 0 failed, 0 skipped",
    }
    path = before_others(tmp, programs)
    makefile = written(tmp / "Makefile", f"include {ROOT}/Makefile\n$(info flags $(MAKEFLAGS))\n")
    for few in "OMP_NUM_THREADS", "OMP_THREAD_LIMIT":
        done = run("make", "-f", makefile, "help", cwd=tmp, **{few: "1"}, **path)
        assert re.search("^flags.* -j16( |$)", done.stdout, re.M), done
        done = run(RUN_TESTS, "true", "threads", cwd=tmp, **{few: "1"}, **path)
        # It runs in the background, as on 16 cores.
        assert "threads 2\n" in done.stdout, done


def test_programs_with_kernels_keep_most_cores(tmp):
    """dev/kernels is built from dev/test/kernels.cu. Others run beside it, on two threads."""
    says = "echo threads of $0: $OMP_NUM_THREADS.; echo 1 passed, 0 failed, 0 skipped"
    programs = "dev/kernels", "dev/plain"
    path = before_others(tmp, {"nproc": "echo 16", **dict.fromkeys(programs, says)})
    written(tmp / "dev" / "test" / "kernels.cu", "")
    done = run(RUN_TESTS, "true", *programs, cwd=tmp, OMP_NUM_THREADS="9", **path)
    assert "threads of ./dev/kernels: 9.\n" in done.stdout, done
    assert "threads of ./dev/plain: 2.\n" in done.stdout, done


def test_runner_of_the_tests(tmp):
    """What dev/test/run_tests.sh and the Python harness count, and that nothing runs for ever or is
    left behind."""
    programs = {
        "good": "echo 3 passed, 0 failed, 1 skipped",
        "bad": "echo 1 passed, 2 failed, 0 skipped; exit 1",
        # Each of the next four counts as one failure.
        "dies": "echo boom; exit 139",
        "lies": "echo 3 passed, 0 failed, 0 skipped; exit 3",
        "hangs": "sleep 60 & echo $! >pid; wait",
        "hangs.py": "import time\ntime.sleep(60)",
        "python.py": f"""#!{sys.executable}
import sys
sys.path.append('{ROOT}/dev/test')
import harness
def test_a(): pass
def test_b(): assert 0
harness.main()""",
    }
    path = before_others(tmp, {**programs, "nproc": "echo $CORES"})
    limits = {"TEST_LIMIT": "3", "TEST_PATIENCE": "1"}
    for cores in "2", "16":
        # The command, "false", is a failure, too.
        done = run(RUN_TESTS, "false", *programs, cwd=tmp, code=1, CORES=cores, **limits, **path)
        assert done.stdout.endswith("\n5 passed, 8 failed, 1 skipped\n"), done.stdout
        assert done.stdout.count(": did not end") == 2, done.stdout
        assert not os.path.exists(f"/proc/{(tmp / 'pid').read_text().strip()}/exe")
    run(RUN_TESTS, "true", "good", cwd=tmp, CORES="2", **path)
    for part, code in ("test_a", 0), ("test_b", 1), ("nonsense", 1):
        run(tmp / "python.py", part, code=code)


def test_measuring_in_parts(tmp):
    """Each benchmark runs, with the same RUN. After a failure nothing else does, tables.py
    included."""
    script = copied_script(tmp, "measure.sh")
    # In the order in which measure.sh runs them.
    benches = (
        "bench_attention accuracy study_accumulation study_ring bench_ring bench_train".split()
    )
    scripts = [f"scripts/{name}.py" for name in ("default_run", "start", "scaling", "tables")]
    for name in benches:  # python3, below, records what runs
        executable(tmp / "dev" / name, f'exec python3 {name} "$@"')
    programs = {
        "make": "",
        "nvidia-smi": "echo GPU 0; echo GPU 1",
        "python3": """[ "$1" = -c ] && exit 1  # there is no PyTorch
            echo "$RUN $*" >>ran
            case $* in $BAD) exit 3 ;; esac""",
    }
    path = before_others(tmp, programs)
    for parts, bad, code, expected in (
        ([], "", 0, [*benches, *scripts]),
        (["ring", "rin"], "", 2, []),
        (["ring", "accuracy"], "bench_ring*", 3, ["study_ring", "bench_ring"]),
    ):
        written(tmp / "ran", "")
        run(script, *parts, code=code, BAD=bad, **path)
        ran = [line.split(" ") for line in (tmp / "ran").read_text().splitlines()]
        assert list(dict.fromkeys(program for _, program, *_ in ran)) == expected, (parts, ran)
        runs = {run_name for run_name, *_ in ran}
        assert "" not in runs and len(runs) == (1 if expected else 0), ran


def test_sanitizer_of_the_kernels(tmp):
    script = copied_script(tmp, "sanitize.sh")
    finds_bad = 'case "$2 $6" in synccheck?bad) exit 1 ;; esac'  # by tool and test
    path = before_others(tmp, {"make": "", "compute-sanitizer": finds_bad})
    run(script, "good", **path)
    run(script, "bad", "good", code=123, **path)  # xargs's exit code


if __name__ == "__main__":
    main()
