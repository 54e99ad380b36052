#!/usr/bin/env python3
"""Tests the commands and links in the READMEs. The trainer's commands are run, with small inputs
and on the CPU."""

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
    """The commands that these regular expressions find in the texts, each once and as a list of
    words, without its comment."""
    parts = {}  # a dictionary keeps their order
    for pattern in shown:
        for page in TEXTS.values():
            for text in re.findall(pattern, page, re.S | re.M):
                for line in text.splitlines():
                    without_comment = line.split("  #")[0]
                    parts.update((part.strip(), None) for part in without_comment.split("&&"))
    is_command = re.compile(r"(make|python3|torchrun|ncu|\./\S+|scripts/\S+)( |$)")
    return [shlex.split(part) for part in parts if is_command.match(part)]


IN_BLOCKS = commands(r"^```\n(.*?)^```")
ALL = commands(r"^```\n(.*?)^```", r"`([^`\n]+)`")


def small_inputs(folder):
    """Small files for all that commands name: {name: path that takes its place}."""
    text = "It was a dark and stormy night; the rain fell in torrents.\n" * 100
    written(folder / "book.txt", text)

    tokens = struct.pack("<5000H", *((i * 7) % 250 for i in range(5000)))
    for name in "train_1", "train_2", "val_1":
        written(folder / f"{name}.bin", header(20240520, 1, 5000) + tokens)

    single_bytes = b"".join(bytes([1, byte]) for byte in range(256))
    end_of_text = b"\x0d<|endoftext|>"
    tokenizer = header(20240328, 2, 257, 256) + single_bytes + end_of_text
    written(folder / "tokenizer.bin", tokenizer)

    # One question with two endings, of which 1 is right; data/hellaswag.py describes the format.
    # After the numbers of tokens, here 2, 1 and 2, the tokens are bytes: "Th", "e" and "is".
    question = struct.pack("<13H", 65535, 26, 0, 1, 2, 2, 84, 104, 1, 101, 2, 105, 115)
    written(folder / "questions.bin", header(20240522, 1, 1, len(question)) + question)

    replaced = {
        "gpt2.bin": "run1/model_00000002.bin",
        "gpt2_124M_bf16.bin": "run1/model_00000002.bin",
        "gpt2_tokenizer.bin": "tokenizer.bin",
        "hellaswag_val.bin": "questions.bin",
        "data/train_*.bin": "train_*.bin",
        "data/val_*.bin": "val_*.bin",
    }
    for name in "book.txt", "run1", "run2", "run3", "run4", "run5", "run6":
        replaced[name] = name
    return {name: f"{folder}/{path}" for name, path in replaced.items()}


def small_options(words, book):
    """Options with which a command runs quickly, and on a CPU."""
    options = {"--device": "cpu", "-t": "64"}
    if "--eval-only" in words:
        options |= {"-b": "2", "-j": book}
    elif "--generate" not in words:
        options |= {"-b": "2", "-v": "0", "-s": "0"}
        if "--profile" not in words:
            options["-x"] = "3" if "-y" in words else "2"
        if "-i" not in words:
            options["-i"] = book  # the built-in corpus has its own tests
    if "-e" not in words:  # else -e names a checkpoint that an earlier command wrote
        options["-e"] = "tiny"
    if "--precision" in words:
        options["--precision"] = "fp32"  # the only one on a CPU
    return options


def test_trainers_commands(tmp):
    """Of a command for torchrun or ncu, the part that these would start."""
    built()
    built("dev/train_threads")
    paths = small_inputs(tmp)
    for command in IN_BLOCKS:
        if "./train_gpt2cu" not in command or command[0] == "make":
            continue
        words = [paths.get(word, word) for word in command]
        words = words[words.index("./train_gpt2cu") :]
        if "--gpus" in words:
            words[0] = "./dev/train_threads"  # ranks without GPUs
        options = small_options(words, paths["book.txt"])
        for name in options.keys() & set(words):  # no option may be given twice
            at = words.index(name)
            del words[at : at + 2]
        for name, value in options.items():
            words += [name, value]
        run(*words)


@functools.cache
def options_of(program):
    """The options of a Python tool, from its --help, or those of a program that needs a GPU, from
    its source."""
    if program.endswith(".py"):
        # -S: without any installed library.
        return re.findall(r"--[a-z-]+", run("python3", "-S", program, "--help").stdout)
    (source,) = (path.read_text() for path in (ROOT / "dev").glob(f"*/{Path(program).name}.cu"))
    headers = [
        (ROOT / name).read_text()
        for name in ["dev/common/bench.h", *re.findall(r'#include "(dev/.*)"', source)]
    ]
    return re.findall(r'\{"(--[a-z0-9-]+)", "', "".join([source, *headers]))


def is_target(word, makefile):
    """Whether make accepts this word: an option, a setting or a target."""
    if re.match(r"-|.*=|build/.*\.o$", word) or re.search(rf"^{re.escape(word)}:", makefile, re.M):
        return True
    sources = (ROOT / "dev").glob(f"*/{Path(word).name}.c*")
    return word.startswith("dev/") and any(sources)


def test_other_commands_name_what_exists():
    """Targets of make, scripts, and the options of scripts and benchmarks."""
    makefile = (ROOT / "Makefile").read_text()
    checked = 0
    for words in ALL:
        if words[0] == "make":
            for target in words[1:]:
                assert is_target(target, makefile), f"no target {target}"
        is_script = re.compile(r"(data|dev/\w+|scripts)/\w+\.(py|sh)$").match
        scripts = [word for word in words[:2] if is_script(word)]
        assert all((ROOT / script).exists() for script in scripts), words

        is_bench = re.compile(r"\./dev/(bench_|accuracy|study_)").match
        benches = [word for word in words if is_bench(word)]
        tools = [script for script in scripts if re.search(r"/(?!test_)\w+\.py", script)]
        for program in tools + benches:
            after = words[words.index(program) + 1 :]
            options = {word for word in after if word.startswith("--")}
            assert options <= set(options_of(program)), words
            checked += 1
    assert checked > 20, checked


def test_links():
    """All linked files exist."""
    for path, text in TEXTS.items():
        without_code = re.sub("```.*?```", "", text, flags=re.S)
        for target in re.findall(r"\[[^]]*\]\(([^)#]+)\)", without_code):
            assert "://" in target or (path.parent / target).exists(), f"{path}: {target}"


if __name__ == "__main__":
    main()
