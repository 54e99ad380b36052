#!/usr/bin/env python3
"""Tests the commands and links in the READMEs. The trainer's commands run, on small inputs and on
the CPU."""

import functools
import re
import shlex
import struct
from pathlib import Path

from harness import ROOT, built, header, main, run, written

TEXTS = {
    path: path.read_text()
    for path in ROOT.rglob("*.md")
    if not {"build", "CHANGELOG.md"} & set(path.relative_to(ROOT).parts)
}


def commands(*shown):
    """The words of every command in the text that these regular expressions match, without its
    comment; each command once."""
    found = [
        text
        for pattern in shown
        for page in TEXTS.values()
        for text in re.findall(pattern, page, re.S | re.M)
    ]
    parts = [
        part.strip()
        for text in found
        for line in text.splitlines()
        for part in line.split("  #")[0].split("&&")
    ]
    is_command = re.compile(r"(make|python3|torchrun|ncu|\./\S+|scripts/\S+)( |$)")
    return [shlex.split(part) for part in dict.fromkeys(parts) if is_command.match(part)]


BLOCKS = commands(r"^```\n(.*?)^```")
ALL = commands(r"^```\n(.*?)^```", r"`([^`\n]+)`")


def inputs(folder):
    """All files that commands name, made small: by name, the path that takes its place."""
    written(
        folder / "book.txt", "It was a dark and stormy night; the rain fell in torrents.\n" * 100
    )
    for name in "train_1", "train_2", "val_1":
        tokens = struct.pack("<5000H", *(i * 7 % 250 for i in range(5000)))
        written(folder / f"{name}.bin", header(20240520, 1, 5000) + tokens)
    single_bytes = b"".join(bytes([1, byte]) for byte in range(256))
    written(
        folder / "tokenizer.bin",
        header(20240328, 2, 257, 256) + single_bytes + b"\x0d<|endoftext|>",
    )
    # With two endings.
    question = struct.pack("<13H", 65535, 26, 0, 1, 2, 2, 84, 104, 1, 101, 2, 105, 115)
    written(folder / "questions.bin", header(20240522, 1, 1, len(question)) + question)
    others = {
        "gpt2.bin": "run1/model_00000002.bin",
        "gpt2_124M_bf16.bin": "run1/model_00000002.bin",
        "gpt2_tokenizer.bin": "tokenizer.bin",
        "hellaswag_val.bin": "questions.bin",
        "data/train_*.bin": "train_*.bin",
        "data/val_*.bin": "val_*.bin",
    }
    same = ["book.txt", "run1", "run2", "run3", "run4", "run5"]
    return {name: f"{folder}/{path}" for name, path in [*others.items(), *zip(same, same)]}


def test_trainers_commands(tmp):
    """What torchrun and ncu are to start, too."""
    built()
    built("dev/train_threads")
    paths = inputs(tmp)
    for command in BLOCKS:
        if "./train_gpt2cu" not in command or command[0] == "make":
            continue
        words = [paths.get(word, word) for word in command]
        words = words[words.index("./train_gpt2cu") :]
        if "--gpus" in words:  # of which a CPU has none
            words[0] = "./dev/train_threads"
        small = {"--device": "cpu", "-t": "64"}
        if "--eval-only" in words:
            small |= {"-b": "2", "-j": paths["book.txt"]}
        elif "--generate" not in words:
            small |= {"-b": "2", "-x": "3" if "-y" in words else "2", "-v": "0", "-s": "0"}
            if "-i" not in words:
                small["-i"] = paths["book.txt"]  # the built-in corpus has its own tests
        if "--profile" in words:
            del small["-x"]
        if "-e" not in words:  # else it is a checkpoint that an earlier command left
            small["-e"] = "tiny"
        if "--precision" in words:
            small["--precision"] = "fp32"  # what a CPU has
        for option in small.keys() & set(words):  # it may not be given twice
            at = words.index(option)
            del words[at : at + 2]
        run(*words, *sum(small.items(), ()))


@functools.cache
def options_of(program):
    """The options of a Python tool, run without any installed library (-S), or those in the source
    of a program that needs a GPU."""
    if program.endswith(".py"):
        return re.findall(r"--[a-z-]+", run("python3", "-S", program, "--help").stdout)
    (source,) = (path.read_text() for path in (ROOT / "dev").glob(f"*/{Path(program).name}.cu"))
    headers = [
        (ROOT / name).read_text()
        for name in ["dev/common/bench.h", *re.findall(r'#include "(dev/.*)"', source)]
    ]
    return re.findall(r'\{"(--[a-z0-9-]+)", "', "".join([source, *headers]))


def test_other_commands_name_what_exists():
    """Targets of make, scripts, and options of both scripts and benchmarks."""
    makefile, checked = (ROOT / "Makefile").read_text(), 0
    for words in ALL:
        for target in words[1:] if words[0] == "make" else ():
            has_source = target.startswith("dev/") and any(
                (ROOT / "dev").glob(f"*/{Path(target).name}.c*")
            )
            known = has_source or re.search(rf"^{re.escape(target)}:", makefile, re.M)
            assert known or re.match(r"-|.*=|build/.*\.o$", target), f"no target {target}"
        scripts = [
            word for word in words[:2] if re.match(r"(data|dev/\w+|scripts)/\w+\.(py|sh)$", word)
        ]
        assert all((ROOT / script).exists() for script in scripts), words
        benches = [word for word in words if re.match(r"\./dev/(bench_|accuracy|study_)", word)]
        for program in [
            script for script in scripts if re.search(r"/(?!test_)\w+\.py", script)
        ] + benches:
            after = words[words.index(program) + 1 :]
            assert {word for word in after if word.startswith("--")} <= set(options_of(program)), (
                words
            )
            checked += 1
    assert checked > 20, checked


def test_links():
    """What is linked exists."""
    for path, text in TEXTS.items():
        without_code = re.sub("```.*?```", "", text, flags=re.S)
        for target in re.findall(r"\[[^]]*\]\(([^)#]+)\)", without_code):
            assert "://" in target or (path.parent / target).exists(), f"{path}: {target}"


if __name__ == "__main__":
    main()
