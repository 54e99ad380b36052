#!/usr/bin/env python3
"""Runs every command that the READMEs show, with small inputs and on the CPU, so that none rots."""
import os
import re
import shlex
import struct
import subprocess
import sys

from harness import ROOT, Skip, built, main, write_launcher, written


def run(*command, **variables):
    env = {**os.environ, **variables}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, errors="replace")


def texts():
    """Every text of the repository by its path."""
    found = {path: path.read_text() for path in ROOT.rglob("*.md") if "build" not in path.relative_to(ROOT).parts}
    assert {ROOT / "README.md", ROOT / "attention" / "README.md", ROOT / "dev" / "README.md"} <= set(found), found
    return found


def commands():
    """The words of each command in a code block, without its comment, each once."""
    blocks = [block for text in texts().values() for block in re.findall(r"^```\n(.*?)^```", text, flags=re.S | re.M)]
    lines = [line.split("  #")[0] for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    is_command = re.compile(r"(make|python3|torchrun|ncu|\./\S+|scripts/\S+)( |$)")
    return [shlex.split(part) for part in dict.fromkeys(parts) if is_command.match(part)]


def header(*values):
    return struct.pack("<256i", *values, *[0] * (256 - len(values)))


def inputs(folder):
    """All files that commands name, made small: by name, the path that takes its place."""
    written(folder / "book.txt", "It was a dark and stormy night; the rain fell in torrents.\n" * 100)
    for name in "train_1", "train_2", "val_1":
        tokens = struct.pack("<5000H", *(i * 7 % 250 for i in range(5000)))
        written(folder / f"{name}.bin", header(20240520, 1, 5000) + tokens)
    single_bytes = b"".join(bytes([1, byte]) for byte in range(256))
    written(folder / "tokenizer.bin", header(20240328, 2, 257, 256) + single_bytes + b"\x0d<|endoftext|>")
    question = struct.pack("<13H", 65535, 26, 0, 1, 2, 2, 84, 104, 1, 101, 2, 105, 115)  # with two endings
    written(folder / "questions.bin", header(20240522, 1, 1, len(question)) + question)
    others = {"gpt2.bin": "run1/model_00000002.bin", "gpt2_124M_bf16.bin": "run1/model_00000002.bin",
              "gpt2_tokenizer.bin": "tokenizer.bin", "hellaswag_val.bin": "questions.bin",
              "data/train_*.bin": "train_*.bin", "data/val_*.bin": "val_*.bin"}
    same = ["book.txt", "run1", "run2", "run3", "run4", "run5"]
    return {name: f"{folder}/{path}" for name, path in [*others.items(), *zip(same, same)]}


def test_trainers_commands(tmp):
    """Alone, by a launcher of two ranks in torchrun's place, and what ncu is to start."""
    built()
    paths, found = inputs(tmp), []
    write_launcher(tmp / "torchrun")
    for command in commands():
        if "./train_gpt2cu" not in command or command[0] == "make":
            continue
        words = [paths.get(word, word) for word in command]
        if words[0] == "ncu":
            words = words[words.index("./train_gpt2cu"):]
        small = {"--device": "cpu", "-e": "tiny", "-b": "2", "-t": "64", "-x": "3" if "-y" in words else "2", "-v": "0",
                 "-s": "0"}
        if "-e" in words:  # the checkpoint that an earlier command left
            del small["-e"]
        if not {"-i", "--generate", "--eval-only"} & set(words):
            small["-i"] = paths["book.txt"]  # instead of the built-in corpus, which has its own tests
        if "--eval-only" in words:
            small["-j"] = paths["book.txt"]
        if "--precision" in words:
            small["--precision"] = "fp32"  # what a CPU has
        for option in small.keys() & set(words):  # it may not be given twice
            at = words.index(option)
            del words[at:at + 2]
        done = run(*words, *sum(small.items(), ()), PATH=f"{tmp}:{os.environ['PATH']}")
        assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}{done.stderr}"
        assert words[0] != "torchrun" or "ranks              2" in done.stdout, f"{command}\n{done.stdout}"
        found.append(command[0])
    assert found.count("./train_gpt2cu") >= 8 and set(found) == {"./train_gpt2cu", "torchrun", "ncu"}, found


def test_what_commands_write_is_ignored():
    paths = ["run1/log.jsonl", "run2/model_00000500.bin", "run1.svg", "gpt2.bin", "my-gpt2/config.json", "build/tree.cpp",
             "data/cache/train.bin", "log_gpt2_124M/log.jsonl", "profile.nsys-rep"]
    if run("git", "rev-parse").returncode:
        raise Skip("no git")
    assert run("git", "check-ignore", "--no-index", *paths).stdout.split() == paths


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = {word for words in commands() if words[0] == "make" for word in words[1:] if not re.match("-|.*=", word)}
    for target in targets:
        has_source = any((ROOT / f"{target}{end}").exists() for end in (".cu", ".cpp"))
        assert has_source or re.search(rf"^{re.escape(target)}:", makefile, flags=re.M), f"no target {target}"


def test_scripts_have_help():
    """Those of scripts/ and those that are shown; the Python ones where no library is installed (-S)."""
    shown = {word for words in commands() for word in words[:2] if word.endswith((".py", ".sh"))}
    assert len(shown) > 15, shown
    for script in shown | {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")} - {"scripts/results.py"}:
        if script.endswith(".py"):
            done = run("python3", "-S", script, "--help")
            assert done.returncode == 0 and "usage" in done.stdout, f"{script}: {done.stderr}"
        assert script.endswith(".py") or os.access(ROOT / script, os.X_OK), f"{script} is not there or not executable"
    for script, says in ("measure.sh", "exercises"), ("sanitize.sh", "compute-sanitizer"):
        done = run(f"scripts/{script}", "--help")
        assert done.returncode == 0 and says in done.stdout, done


def test_options_of_measuring_programs_exist():
    """In their source, because a machine without a GPU need not have built them."""
    compared, starts = 0, set()
    for words in commands():
        at = 0 if words[0] != "ncu" else next(i for i, word in enumerate(words) if word.startswith("./"))
        program, *given = words[at:]
        if re.match(r"\./dev/(bench_|accuracy|study_)", program):
            source = (ROOT / f"{program}.cu").read_text()
            includes = ["dev/bench.h", *re.findall(r'#include "(dev/.*)"', source)]
            headers = [(ROOT / header).read_text() for header in includes]
            known = re.findall(r'\{"(--[a-z0-9-]+)", "', "".join([source, *headers]))
            used = {word for word in given if word.startswith("--")}
            assert used <= set(known), f"{words}: no {used - set(known)}"
            compared += len(used)
            starts.add(words[0])
    assert compared >= 8 and "ncu" in starts, (compared, starts)


def test_files_that_are_linked_exist():
    for path, text in texts().items():
        for target in re.findall(r"\]\(([^)#]+)\)", re.sub("```.*?```", "", text, flags=re.S)):  # a lambda looks like a link
            assert "://" in target or (path.parent / target).exists(), f"{path}: {target}"


def test_exercises_fit_the_kernels():
    """What each changes is there, and each has a measured answer."""
    sys.path.append(str(ROOT / "scripts"))
    from exercises import EXERCISES
    answers = (ROOT / "attention" / "EXPERIMENTS.md").read_text()
    for number, (name, _, kernel, _, file, edits, asks, because) in enumerate(EXERCISES, 1):
        assert name in asks, asks
        assert all(old in (ROOT / file).read_text() for old in edits), asks
        assert f"| {number}, {kernel} |" in answers and because in answers, asks


def test_pictures_of_the_tutorial():
    """They are what their script draws. Each stands in the text, with words for those who cannot see it."""
    done = run("python3", "scripts/pictures.py", "--check")
    assert done.returncode == 0, done.stderr
    text = (ROOT / "attention" / "README.md").read_text()
    found = re.findall(r"!\[([^]]*)\]\(\.\./dev/results/pictures/([^)]+)\)", text)
    assert {name for _, name in found} == {path.name for path in (ROOT / "dev/results/pictures").iterdir()}, found
    for alt, name in found:
        assert len(alt) >= 30, f"{name}: {alt}"


if __name__ == "__main__":
    main()
