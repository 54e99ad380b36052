#!/usr/bin/env python3
"""Runs every command that the READMEs and the scripts' help show, with small inputs and on the CPU, so that none rots."""
import os
import re
import shlex
import struct
import subprocess
import tempfile

from harness import Skip, main, write_launcher

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = "--device cpu -e tiny -b 2 -t 64 -x 2 -v 0 -s 0".split()  # an option given twice has its last value


def run(command, **more):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", **more)


def texts():
    """Every text of the repository by its name."""
    names = subprocess.run(["find", ".", "-name", "*.md", "-not", "-path", "./build/*"], cwd=ROOT, capture_output=True, text=True)
    found = {}
    for name in names.stdout.split():
        with open(os.path.join(ROOT, name), encoding="utf-8") as f:
            found[name] = f.read()
    assert {"./README.md", "./attention/README.md", "./dev/README.md"} <= set(found), found
    return found


def commands():
    """The lines of all code blocks that are commands, without their comments, each once."""
    blocks = [block for text in texts().values() for block in re.findall(r"^```\n(.*?)^```", text, flags=re.S | re.M)]
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return list(dict.fromkeys(part for part in parts if re.match(r"(make|python3|torchrun|ncu|\./\S+|scripts/\S+)( |$)", part)))


def write_shard(path, tokens):
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        f.write(struct.pack(f"<{len(tokens)}H", *tokens))


class Workplace:
    """A folder with everything that README's commands name, and the names to put in their place."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        at = self.folder.name
        with open(f"{at}/book.txt", "w", encoding="utf-8") as f:
            f.write("It was a dark and stormy night; the rain fell in torrents.\n" * 100)
        for name in ("train_1", "train_2", "val_1"):
            write_shard(f"{at}/{name}.bin", [i * 7 % 250 for i in range(5000)])
        with open(f"{at}/tokenizer.bin", "wb") as f:  # of single bytes
            f.write(struct.pack("<256I", 20240328, 2, 257, 256, *[0] * 252))
            f.write(b"".join(bytes([1, byte]) for byte in range(256)) + b"\x0d<|endoftext|>")
        with open(f"{at}/questions.bin", "wb") as f:  # one, with two endings
            question = struct.pack("<13H", 65535, 26, 0, 1, 2, 2, 84, 104, 1, 101, 2, 105, 115)
            f.write(struct.pack("<256i", 20240522, 1, 1, len(question), *[0] * 252) + question)
        self.names = {"gpt2.bin": f"{at}/run1/model_00000002.bin", "gpt2_tokenizer.bin": f"{at}/tokenizer.bin",
                      "hellaswag_val.bin": f"{at}/questions.bin", "book.txt": f"{at}/book.txt",
                      "data/train_*.bin": f"{at}/train_*.bin", "data/val_*.bin": f"{at}/val_*.bin",
                      "run1": f"{at}/run1", "run2": f"{at}/run2", "gpt2_124M_bf16.bin": f"{at}/run1/model_00000002.bin"}

    def place(self, word):
        if word.startswith("run2/model_"):
            return f"{self.folder.name}/run2/model_00000002.bin"
        return self.names.get(word, word)


def trainer_commands():
    return [c for c in commands() if c.startswith("./train_gpt2cu")]


def test_trainer_commands_of_the_readme():
    if not os.access(os.path.join(ROOT, "train_gpt2cu"), os.X_OK):
        raise Skip("train_gpt2cu is not built")
    work = Workplace()
    found = trainer_commands()
    assert len(found) >= 8, found
    for command in found:
        words = [work.place(word) for word in shlex.split(command)]
        small = list(SMALL)
        if "-i" not in words and "--generate" not in words and "--eval-only" not in words:
            small += ["-i", work.names["book.txt"]]  # instead of the built-in corpus, which has its own tests
        if "--eval-only" in words:
            small += ["-j", work.names["book.txt"]]
        if words.count("-e"):  # the checkpoint that the first command left
            at = small.index("-e")
            del small[at:at + 2]
        if "-y" in words:
            small[small.index("-x") + 1] = "3"
        if "--precision" in words:
            at = words.index("--precision")  # what a CPU has
            words[at + 1] = "fp32"
        done = run(words + small)
        assert done.returncode == 0, f"{command}\n{done.stdout[-500:]}{done.stderr}"


def test_launchers_of_the_readme():
    """With a launcher of two ranks in torchrun's place."""
    if not os.access(os.path.join(ROOT, "train_gpt2cu"), os.X_OK):
        raise Skip("train_gpt2cu is not built")
    work = Workplace()
    write_launcher(os.path.join(work.folder.name, "torchrun"))
    found = [c for c in commands() if c.startswith("torchrun")]
    assert found
    for command in found:
        done = run([*shlex.split(command), *SMALL, "-i", work.names["book.txt"]],
                   env={**os.environ, "PATH": f"{work.folder.name}:{os.environ['PATH']}"})
        assert done.returncode == 0 and "ranks              2" in done.stdout, f"{command}\n{done.stdout[-500:]}{done.stderr}"


def test_profilers_commands_of_the_readme():
    """What ncu is to start runs, where it needs no GPU; nsys is started by make profile."""
    if not os.access(os.path.join(ROOT, "train_gpt2cu"), os.X_OK):
        raise Skip("train_gpt2cu is not built")
    work = Workplace()
    found = [shlex.split(command) for command in commands() if command.startswith("ncu")]
    programs = [words[next(i for i, word in enumerate(words) if word.startswith("./")):] for words in found]
    assert {words[0] for words in programs} == {"./train_gpt2cu", "./dev/bench_attention"}, programs
    for words in programs:
        if words[0] == "./train_gpt2cu":
            done = run([*words[:1], *SMALL, *words[1:], "-i", work.names["book.txt"]])
            assert done.returncode == 0, f"{words}\n{done.stderr}"


def test_make_targets_of_the_readme_exist():
    with open(os.path.join(ROOT, "Makefile"), encoding="utf-8") as f:
        makefile = f.read()
    for command in commands():
        if not command.startswith("make"):
            continue
        for target in [word for word in shlex.split(command)[1:] if "=" not in word and not word.startswith("-")]:
            source = re.search(rf"^{re.escape(target)}:", makefile, flags=re.M) or any(
                os.path.exists(os.path.join(ROOT, target + end)) for end in (".cu", ".cpp"))
            assert source, f"{command}: no target {target}"


def test_scripts_of_the_readme_have_help():
    for command in commands():
        words = shlex.split(command)
        if words[0] == "python3":
            script = words[1]
        elif words[0].startswith("scripts/"):
            script = words[0]
            assert os.access(os.path.join(ROOT, script), os.X_OK), f"{script} is not there or not executable"
            continue
        else:
            continue
        done = run(["python3", "-S", script, "--help"])  # -S: where no library is installed
        assert done.returncode == 0 and "usage" in done.stdout, f"{command}: {done.stderr}"


def test_options_of_measuring_programs_exist():
    """In their source, because a machine without a GPU need not have built them."""
    compared = 0
    for command in commands():
        words = shlex.split(command)
        words = words[next((i for i, word in enumerate(words) if word.startswith("./dev/")), 0):]  # without ncu and its own
        if re.match(r"\./dev/(bench_|accuracy|study_)", words[0]):
            with open(os.path.join(ROOT, words[0] + ".cu"), encoding="utf-8") as f:
                known = set(re.findall(r'\{"(--[a-z0-9-]+)", "', f.read()))
            used = {word for word in words if word.startswith("--")}
            assert used <= known, f"{command}: no {used - known}"
            compared += len(used)
    assert compared >= 8, compared


def test_parts_of_measuring():
    script = os.path.join("scripts", "measure.sh")
    done = run([script, "--help"])
    assert done.returncode == 0 and "losses" in done.stdout, done.stderr
    done = run([script, "accuracy", "nonsense"])
    assert done.returncode == 2 and "nonsense: expected" in done.stderr, done.stderr


def test_files_of_the_readme_exist():
    for name, text in texts().items():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert os.path.exists(os.path.join(ROOT, os.path.dirname(name), target)), f"{name}: {target}"


def test_pictures_of_the_tutorial():
    """They are what their script draws. Each stands in the text, with words for those who cannot see it."""
    done = run(["python3", "scripts/pictures.py", "--check"])
    assert done.returncode == 0, done.stderr
    found = re.findall(r"!\[([^]]*)\]\(pictures/([^)]+)\)", texts()["./attention/README.md"])
    assert sorted(name for _, name in found) == sorted(os.listdir(os.path.join(ROOT, "attention", "pictures"))), found
    for alt, name in found:
        assert len(alt) >= 30, f"{name}: {alt}"


if __name__ == "__main__":
    main()
