#!/usr/bin/env python3
"""Tests of the scripts, of what make chooses, and of what runs tests and measurements.

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
sys.path += [str(SCRIPTS), str(ROOT / "dev" / "bench"), str(ROOT / "dev" / "common")]
import results  # noqa: E402


def jsonl(rows, **how):
    return "".join(json.dumps(row, **how) + "\n" for row in rows)


def rows_of(path):
    return [row for _, row in results.json_rows(path)]


def before_others(folder, programs):
    """Settings of a process that finds these programs of sh before all others."""
    for name, text in programs.items():
        executable(folder / name, text)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


# --------------------------------------------------------------------------------------------------
# What all tools have in common

TOOLS = [
    path
    for folder in ("data", "dev/bench", "scripts")
    for path in sorted((ROOT / folder).glob("*.py"))
    if "parse_args()" in path.read_text() and not path.name.startswith("test_")
]


def test_help_of_every_tool():
    """In ASCII too. If it cannot be written, one line says so."""
    assert len(TOOLS) > 10, TOOLS
    for tool in TOOLS:
        assert "usage: " in run("python3", tool, "--help", PYTHONIOENCODING="ascii").stdout, tool
        for _ in unheard("python3", tool, "--help"):
            pass


def test_work_whose_errors_nobody_reads(tmp):
    """As under 2>&1 | head. A library's progress on stderr ends no work either."""

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
    """The trainer that a script starts comes to its end, and so does the script: rows are there."""
    import default_run

    write_log(tmp / "run")
    executable(tmp / "train_gpt2cu", f"echo first line && echo >done && cp {tmp}/run/log.jsonl $2")
    argv = mock.patch.object(sys, "argv", ["default_run.py"])
    patched = mock.patch.multiple(results, ROOT=tmp, RESULTS=tmp, output_of=lambda *command: "")
    with unread_pipe() as pipe, mock.patch.object(sys, "stdout", pipe), argv, patched:
        with refused(SystemExit, "stdout"):
            default_run.main()
    assert (tmp / "done").exists()
    assert [row["step"] for row in rows_of(tmp / "GPU-A" / "default_run.jsonl")] == [2, 3]


# --------------------------------------------------------------------------------------------------
# Logs of runs


def write_log(folder):
    rows = [
        {
            "kind": "run",
            "device": "GPU A",
            "tokens_per_step": 32,
            "floor_nats": 1.5,
            "steps": 3,
            "B": 8,
            "T": 4,
            "precision": "bf16",
        }
    ]
    rows += [
        {
            "kind": "train",
            "step": i,
            "loss_nats": 9 / i,
            "grad_norm": 7 + i,
            "lr": i / 4,
            "tokens_per_s": 100 + i,
        }
        for i in (1, 2, 3)
    ]
    for step in 2, 3:
        rows += [
            {"kind": "val", "step": step, "loss_nats": 4 + step, "floor_nats": 1.5},
            {"kind": "sample", "step": step, "text": f"Once\nupon {step}"},
        ]
    written(folder / "log.jsonl", jsonl(rows))
    return folder


def test_logs_that_cannot_be_read(tmp):
    path = write_log(tmp) / "log.jsonl"
    good = path.read_text()
    for cut in b'{"kind": "tra', '{"kind": "sample", "text": "ë'.encode()[:-1]:
        written(path, good.encode() + cut)
        assert [r["loss_nats"] for r in results.read_log(tmp)["train"]] == [9, 4.5, 3]
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
    with refused(SystemExit, "log.jsonl: a Git LFS"):
        results.read_log(written(path, POINTER))


def test_texts_with_separators_of_lines(tmp):
    """A row ends at a newline alone. A sample's text may hold Unicode's other separators."""
    rows = rows_of(write_log(tmp) / "log.jsonl")
    for text in "\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\r":
        rows[1]["text"] = text
        written(tmp / "log.jsonl", jsonl(rows, ensure_ascii=False))
        log = results.read_log(tmp)
        assert len(log["train"]) == 3 and log["train"][0]["text"] == text, text


def test_plot_of_a_run(tmp):
    """It is drawn even if nobody reads stdout, and a full disk leaves the old one as it was."""
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
    limit = 'ulimit -f 8; python3 scripts/plot.py "$0"'  # stands for a full disk
    full = run("sh", "-c", limit, log, code=1)
    assert "cannot write: File too large" in full.stderr and path.read_bytes() == before


def test_plot_of_a_run_that_diverged(tmp):
    """A loss that is NaN is null in the log."""
    need("matplotlib")
    log = write_log(tmp) / "log.jsonl"
    rows = [{**row, "loss_nats": None} if row["kind"] == "train" else row for row in rows_of(log)]
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
    """They are drawn as they are, not as formulas of TeX, and so are names that are not UTF-8."""
    need("matplotlib")
    names = ["-run", "_run", "a$b$c", r"a\$b", r"$\frac", r"\alpha$1$", "é\udcff"]
    runs = [write_log(tmp / name) for name in names]
    succeeds("plot", *runs, "-o", tmp / "-$x$.svg")
    drawn = re.findall(r">(.*), validation 7.0000<", (tmp / "-$x$.svg").read_text(encoding="utf-8"))
    assert drawn == [*names[:-1], "é\ufffd"], drawn


# --------------------------------------------------------------------------------------------------
# Rows of results, and tables


def test_rows_that_tables_show(tmp):
    """Those of the newest run, and never any of changed sources."""
    need("pandas")
    import tables

    def shown(*rows, apart=(), **where):
        row = {
            "gpu": "A",
            "commit": "a",
            "dirty": False,
            "run": "1",
            "date": "2030",
            "T": 1,
            "ms": 1,
        }
        path = written(tmp / "rows.jsonl", jsonl({**row, **fields} for fields in rows))
        found = tables.newest_rows(path, where, list(apart))
        return [row["ms"] for row in found.to_dict("records")]

    newer = {"run": "2", "date": "2031", "ms": 2}
    assert shown() == []
    assert shown({}, {"ms": 3}) == [1, 3]
    assert shown({}, newer) == shown(newer, {}) == [2]
    assert shown({}, {**newer, "dirty": True}) == shown({}, {**newer, "dirty": None}) == [1]
    assert shown({}, {**newer, "T": 4}) == [2]
    assert shown({}, {**newer, "T": 4}, apart=["T"]) == [1, 2]
    assert shown({}, {**newer, "T": 4}, T=1) == [1]


def test_tables_are_those_of_dev_results():
    need("pandas")
    succeeds("tables", "--check")


def test_stale_tables(tmp):
    """They are named, and written only without --check. Each GPU has a table of its own."""
    need("pandas", "matplotlib")
    measured = {
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
        random = {**measured, "gpu": gpu, "what": "random", "seconds": 2.3, "read_seconds": 0.0}
        resumed = {**random, "what": "resumed", "seconds": 4.5, "read_seconds": 1.2}
        written(tmp / gpu / "start.jsonl", jsonl([random, resumed]))
    losses = {**measured, "gpu": "A", "what": "losses", "gpus": 2, "zero": 1, "apart": 2e-5}
    speed = {
        **losses,
        "what": "speed",
        "dtype": "bf16",
        "T": 1024,
        "ms": 4.5,
        "ms_side_by_side": 4.25,
        "tok_s": 5e5,
        "of_linear": 0.95,
        "gib": 7.75,
    }
    del speed["apart"]
    written(tmp / "A" / "scaling.jsonl", jsonl([losses, speed]))

    names = "start", "scaling", "torch"
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
        assert f"{gpu}, driver 5, CUDA 13. Measured 2030-01-02 at 0123456." in text, text
    assert text.count("| d12 | 8 | 2.3 | 4.5 (1.2) |") == 2, text
    assert "| 2 | 1 | 500 | 95 | 4.50 | 4.25 | 7.75 | 2.00e-05 |" in text, text
    assert "Not measured yet: `scripts/measure.sh torch`" in text, text


def test_rows_name_the_sources(tmp):
    """A change of any source makes the tree dirty, a change of a text or a result does not. Without
    git, COMMIT names the commit."""
    script = executable(tmp / "scripts" / "tree.sh", (SCRIPTS / "tree.sh").read_text())
    written(tmp / "a.cu", "1")
    run(
        "sh",
        "-c",
        "git init -q && git add -A && git -c user.name=A -c user.email=a@b commit -qm first",
        cwd=tmp,
    )
    for name, state in (
        ("a.md", "clean"),
        ("dev/results/a.py", "clean"),
        ("Makefile", "dirty"),
        ("a.cu", "dirty"),
    ):
        written(tmp / name, "2")
        assert re.fullmatch(rf"\w{{12}} {state}\n", run(script).stdout), name
    shutil.rmtree(tmp / ".git")  # a copy
    assert (
        run(script, COMMIT="abc").stdout == "abc clean\n"
        and run(script).stdout == "unknown dirty\n"
    )
    results.tree.cache_clear()
    with mock.patch.object(results, "output_of", lambda *command: "abc dirty"):
        assert results.row("x", "GPU A")["dirty"]


def test_rows_name_no_other_sources(tmp):
    """If git cannot tell, the tree is "unknown dirty", never another commit and never clean,
    whatever COMMIT is."""
    ours, unknown = tmp / "ours", "unknown dirty\n"
    script = executable(ours / "scripts" / "tree.sh", (SCRIPTS / "tree.sh").read_text())
    commit = "git init -q && git add -A && git -c user.name=A -c user.email=a@b commit -qm first"
    for folder in ours, tmp:  # one repository is in a folder of another
        written(folder / "a.cu", folder.name)
        run("sh", "-c", commit, cwd=folder)
    clean = run("git", "rev-parse", "--short=12", "HEAD", cwd=ours).stdout.strip() + " clean\n"
    assert run(script).stdout == clean
    for name, value in (
        ("GIT_DIR", tmp / ".git"),
        ("GIT_WORK_TREE", tmp),
        ("GIT_INDEX_FILE", tmp / "none"),
    ):
        assert run(script, **{name: str(value)}).stdout == clean, name
    assert run(script, COMMIT="abc", GIT_TEST_ASSUME_DIFFERENT_OWNER="1").stdout == unknown
    (tmp / "tools").mkdir()  # without git
    for name in "sh", "dirname":
        (tmp / "tools" / name).symlink_to(shutil.which(name))
    assert run(script, COMMIT="abc", PATH=str(tmp / "tools")).stdout == unknown
    run("git", "config", "status.showUntrackedFiles", "no", cwd=ours)
    written(ours / "b.cu", "new")
    assert run(script).stdout == clean.replace("clean", "dirty")
    shutil.rmtree(ours / ".git")
    (ours / ".git").mkdir()  # of no use, and git would go on to the folder above
    assert run(script).stdout == unknown


# --------------------------------------------------------------------------------------------------
# Comparisons with PyTorch and between numbers of GPUs


def test_losses_beside_pytorch():
    """What scripts/compare_torch.py makes of the losses. PyTorch's side needs PyTorch."""
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
    """The fastest backend is recorded, and none that does not train. Ids have roughly the
    frequencies of text."""
    import peers_train

    figures = {"gpu": "GPU A", "cuda": "13", "ms": 10, "tok_s": 4e5, "mem_gib": 5, "loss": 9}
    tried = [("slow", {**figures, "ms": 16}), ("fast", figures), ("none", "out of memory")]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        (found,) = peers_train.fastest("peer", "d12", 4, 1024, {"mfu": 40, "tok_s": 5e5}, tried)
    assert (found["sdpa"], found["mfu"], found["ids"]) == ("fast", 32, "text-like"), found
    assert " 1.25\n" in out.getvalue(), out.getvalue()  # 5e5 / 4e5, ours/peer
    for wrong in [math.nan, 2], [10.8, math.nan], [10.8, 10.9], [5, 4]:
        with refused(peers_train.Wrong, "expected"):
            peers_train.check_losses(wrong)
    ids, weights = peers_train.text_ids(100000), [1 / (id + 2.7) for id in range(50257)]
    assert abs(sum(id < 100 for id in ids) / len(ids) - sum(weights[:100]) / sum(weights)) < 0.005


def test_figures_of_llmc(tmp):
    """The mean of the steps that take 5 s, after those that take 3 s."""
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
    """They fail at the missing data and nowhere before it, torchrun's and Slurm's ranks too."""
    one_rank = (
        'echo "$@" >"$(basename "$0").ran"; '
        'while [ $1 != ./train_gpt2cu ]; do shift; done; exec "$@"'
    )
    shutil.copytree(SCRIPTS, tmp / "scripts")
    (tmp / "train_gpt2cu").symlink_to(built())
    more = {
        **before_others(
            tmp, {"make": "", "torchrun": one_rank, "srun": one_rank, "scontrol": "echo localhost"}
        ),
        "SLURM_SUBMIT_DIR": str(tmp),
        "SLURM_JOB_NODELIST": "1",
        "SLURM_JOB_ID": "7",
        "LAUNCH": "torchrun --no-python",
        "B": "4",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for path in SCRIPTS.glob("run_*.sh"):
        done = run(tmp / "scripts" / path.name, cwd="/", code=1, **more)
        assert "data/cache/fineweb" in done.stderr and "data/prepare.py" in done.stderr, (
            path,
            done.stderr,
        )
    assert (tmp / "torchrun.ran").read_text().startswith("--no-python ./train_gpt2cu -e d24 ")


# --------------------------------------------------------------------------------------------------
# What make chooses, and what runs tests, benchmarks and the sanitizer

# What nvcc --dryrun says of its toolkit, which is the one that it is called in.
NVCC = """here=$(dirname "$0"); for line in "TOP=$here/.." "INCLUDES=\\"-I$here/../include\\"" \\
    "LIBRARIES= \\"-L$here/../lib64/stubs\\" \\"-L$here/../lib64\\""; do echo "#$ $line"; done"""


def test_one_toolkit_is_chosen(tmp):
    """CUDA_HOME's, else the PATH's, else where toolkits are; make says so where there is none."""
    makefile = (
        (ROOT / "Makefile")
        .read_text()
        .replace("/usr/local", f"{tmp}/local")
        .replace("/opt", f"{tmp}/opt")
    )
    written(tmp / "Makefile", makefile)
    written(tmp / "train_gpt2.cu", "")
    (tmp / "tools").mkdir()
    for name in "make sh g++ grep tr sort find nproc sed ls mkdir dirname env".split():
        (tmp / "tools" / name).symlink_to(shutil.which(name))
    executable(tmp / "silent" / "bin" / "nvcc", "")
    executable(tmp / "failing" / "bin" / "nvcc", "echo 'nvcc fatal: no such g++'; exit 1")
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
        settings = {"PATH": f"{tmp}/tools:{tmp}/path/bin", "CUDA_HOME": home, "NVCC": ""}
        done = run("make", "-nB", "train_gpt2cu", cwd=tmp, code=2 if says else 0, **settings)
        places = set(re.findall(rf"{tmp}/((?:local/)?\w+)/(?:include|lib64)", done.stdout))
        assert says in done.stderr and (says or places == {found}), done
        assert not says or done.stderr.count("\n") == 1, done
        assert not (found and home) or f"{home}/bin/nvcc -" in done.stdout, done


def test_programs_find_the_libraries_of_their_toolkit(tmp):
    """Wherever these are, and however nvcc is named. The loader's cache would hide a wrong path."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    loader = Path("/lib64/ld-linux-x86-64.so.2")
    if not os.path.exists(nvcc) or not loader.exists():
        raise Skip("needs nvcc and x86-64's loader")
    dryrun = run(nvcc, "--dryrun", "-x", "cu", "-c", "/dev/null").stderr
    top = re.search(r"TOP=(.*)", dryrun)
    if not top:
        raise Skip("needs NVIDIA's toolkit, which is in a folder of its own")
    toolkit = Path(top[1]).resolve()
    # Both are without lib64. nvcc reads the profile that is next to it.
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
    for settings in (
        {"CUDA_HOME": f"{home}"},
        {"NVCC": f"{wrapper}"},
        {"NVCC": f"{home}/bin/nvcc -DNOTHING"},
        {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"},
    ):
        settings = {"CUDA_HOME": "", "NVCC": "", "LD_LIBRARY_PATH": "", "ARCH": "80", **settings}
        run("make", "-B", "NCCL_HOME=none", "train_gpt2cu", cwd=tmp, **settings)
        found = run(
            loader, "--inhibit-cache", "--list", "./train_gpt2cu", cwd=tmp, LD_LIBRARY_PATH=""
        )
        assert f"=> {home}/" in re.search("libcublas.so.*", found.stdout)[0], (settings, found)
    done = run("make", "train_gpt2cu", cwd=tmp, code=2, CUDA_HOME=f"{tmp}/two words", NVCC="")
    assert f"{tmp}/two words: " in done.stderr and done.stderr.count("\n") == 1, done


def test_all_cores_are_used(tmp):
    """Whatever OpenMP's variables say, which nproc obeys and torchrun and Slurm set."""
    path = before_others(
        tmp,
        {
            "nproc": "echo ${OMP_NUM_THREADS:-${OMP_THREAD_LIMIT:-16}}",
            "threads": "echo threads $OMP_NUM_THREADS; echo 1 passed, 0 failed, 0 skipped",
        },
    )
    makefile = written(tmp / "Makefile", f"include {ROOT}/Makefile\n$(info flags $(MAKEFLAGS))\n")
    for few in "OMP_NUM_THREADS", "OMP_THREAD_LIMIT":
        done = run("make", "-f", makefile, "help", cwd=tmp, **{few: "1"}, **path)
        assert re.search("^flags.* -j16( |$)", done.stdout, re.M), done
        done = run(
            ROOT / "dev" / "test" / "run_tests.sh", "true", "threads", cwd=tmp, **{few: "1"}, **path
        )
        assert "threads 2\n" in done.stdout, done  # it runs beside others, as with 16 cores


def test_programs_with_kernels_keep_most_cores(tmp):
    """dev/kernels is built from dev/test/kernels.cu. Others run beside it, on two threads."""
    says = "echo threads of $0: $OMP_NUM_THREADS.; echo 1 passed, 0 failed, 0 skipped"
    programs = "dev/kernels", "dev/plain"
    path = before_others(tmp, {"nproc": "echo 16", **dict.fromkeys(programs, says)})
    written(tmp / "dev" / "test" / "kernels.cu", "")
    runner = ROOT / "dev" / "test" / "run_tests.sh"
    done = run(runner, "true", *programs, cwd=tmp, OMP_NUM_THREADS="9", **path)
    assert "threads of ./dev/kernels: 9.\n" in done.stdout, done
    assert "threads of ./dev/plain: 2.\n" in done.stdout, done


def test_runner_of_the_tests(tmp):
    """dev/test/run_tests.sh and a harness: what they count, and that nothing runs for ever or is
    left behind."""
    harness = (
        f"#!{sys.executable}\nimport sys\nsys.path.append('{ROOT}/dev/test')\nimport harness\n"
    )
    path = before_others(
        tmp,
        {
            "good": "echo 3 passed, 0 failed, 1 skipped",
            "bad": "echo 1 passed, 2 failed, 0 skipped; exit 1",
            "dies": "echo boom; exit 139",
            "lies": "echo 3 passed, 0 failed, 0 skipped; exit 3",
            "nproc": "echo $CORES",
            "hangs": "sleep 60 & echo $! >pid; wait",
            "hangs.py": "import time\ntime.sleep(60)",
            "python.py": f"{harness}def test_a(): pass\ndef test_b(): assert 0\nharness.main()",
        },
    )
    for cores in "2", "16":
        done = run(
            ROOT / "dev" / "test" / "run_tests.sh",
            "false",
            "good",
            "bad",
            "dies",
            "lies",
            "hangs",
            "hangs.py",
            "python.py",
            cwd=tmp,
            code=1,
            TEST_LIMIT="3",
            TEST_PATIENCE="1",
            CORES=cores,
            **path,
        )
        assert done.stdout.endswith("\n5 passed, 8 failed, 1 skipped\n"), done.stdout
        assert done.stdout.count(": no end") == 2, done.stdout
        assert not os.path.exists(f"/proc/{(tmp / 'pid').read_text().strip()}/exe")
    run(ROOT / "dev" / "test" / "run_tests.sh", "true", "good", cwd=tmp, CORES="2", **path)
    for part, code in ("test_a", 0), ("test_b", 1), ("nonsense", 1):
        run(tmp / "python.py", part, code=code)


def test_measuring_in_parts(tmp):
    """Each benchmark runs, with the same RUN. No table is written after one that fails."""
    script = executable(tmp / "scripts" / "measure.sh", (SCRIPTS / "measure.sh").read_text())
    benches = [
        "bench_attention",
        "accuracy",
        "study_accumulation",
        "study_ring",
        "bench_ring",
        "bench_train",
    ]
    others = [f"scripts/{name}.py" for name in ("default_run", "start", "scaling", "tables")]
    for name in benches:
        executable(tmp / "dev" / name, f'exec python3 {name} "$@"')
    path = before_others(
        tmp,
        {
            "make": "",
            "nvidia-smi": "echo GPU 0; echo GPU 1",
            "python3": """[ "$1" = -c ] && exit 1
        echo "$RUN $*" >>ran; case $* in $BAD) exit 3 ;; esac""",
        },
    )
    for parts, bad, code, expected in (
        ([], "", 0, [*benches, *others]),
        (["ring", "rin"], "", 2, []),
        (["ring", "accuracy"], "bench_ring*", 3, ["study_ring", "bench_ring"]),
    ):
        written(tmp / "ran", "")
        run(script, *parts, code=code, BAD=bad, **path)
        ran = [line.split(" ") for line in (tmp / "ran").read_text().splitlines()]
        assert list(dict.fromkeys(words[1] for words in ran)) == expected, (parts, ran)
        assert len({words[0] for words in ran} - {""}) == bool(ran), ran


def test_sanitizer_of_the_kernels(tmp):
    sanitize = executable(tmp / "scripts" / "sanitize.sh", (SCRIPTS / "sanitize.sh").read_text())
    path = before_others(
        tmp, {"make": "", "compute-sanitizer": 'case "$2 $6" in synccheck?bad) exit 1; esac'}
    )
    run(sanitize, "good", **path)
    run(sanitize, "bad", "good", code=123, **path)  # as xargs ends


if __name__ == "__main__":
    main()
