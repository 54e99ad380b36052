"""The test harness for Python, like dev/common/test.h for C++, and what the tests share.

main() runs the program's functions that are named test_…, in order. A test may raise Skip("why").
A test with a parameter gets an empty folder. An argument selects tests by a part of their name. The
program's last line is "N passed, N failed, N skipped". run_tests.sh kills a program that takes too
long."""

import atexit
import contextlib
import importlib
import inspect
import io
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

# GPT-2's first tokens are the 256 bytes: first those that Latin-1 shows as visible characters.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
INVISIBLE = [byte for byte in range(256) if byte not in VISIBLE]
BYTES = [bytes([byte]) for byte in VISIBLE + INVISIBLE]

# What Git LFS leaves in place of a large file that was not fetched.
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 200001024\n"
)

# with refused(Error, "part of its message"): …
refused = unittest.TestCase().assertRaisesRegex


class Skip(Exception):
    pass


def need(*modules):
    """Skips the calling test if one of the modules is not installed."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError:
            raise Skip(f"needs {module} (scripts/requirements*.txt)") from None


def whole_program_needs(*modules):
    """Ends the program, as one skipped test, if one of the modules is not installed."""
    try:
        need(*modules)
    except Skip as why:
        print(f"all of this file {why}")
        print("0 passed, 0 failed, 1 skipped")
        sys.exit(0)


def built(program="train_gpt2cu"):
    """The path of a program that make builds."""
    if not (ROOT / program).exists():
        raise Skip(f"needs ./{program} (make {program})")
    return ROOT / program


def new_folder():
    """Changes to an empty folder, which is removed at exit."""
    folder = tempfile.mkdtemp(prefix="test.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chdir(folder)


def written(path, content):
    """Writes a file and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def header(*values):
    """The header of llm.c's files: 256 numbers, which begin with these. The others are 0."""
    return struct.pack("<256i", *values, *[0] * (256 - len(values)))


def tokenizer_file(tokens, magic=20240328):
    """llm.c's tokenizer file for a vocabulary of GPT-2's size that begins with these tokens."""
    missing = [b""] * (50256 - len(tokens))
    vocabulary = [*tokens, *missing, b"<|endoftext|>"]
    content = b"".join(bytes([len(token)]) + token for token in vocabulary)
    return header(magic, 2, 50257, 50256) + content


def ended(script, *arguments):
    """Runs main() of a script with these arguments, in this process. Returns exit code, stdout and
    stderr."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    argv = [f"{script}.py", *map(str, arguments)]
    with (
        mock.patch.object(sys, "argv", argv),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("os._exit", sys.exit),
    ):
        try:
            importlib.import_module(script).main()
        except SystemExit as end:
            code = end.code or 0
    if isinstance(code, str):  # sys.exit("message")
        return 1, out.getvalue(), f"{code}\n"
    return code, out.getvalue(), err.getvalue()


def succeeds(script, *arguments):
    """Runs main() of a script, which must succeed, and returns what it prints."""
    code, out, err = ended(script, *arguments)
    assert code == 0, f"{script} {arguments}: {code}: {err}"
    return out


def executable(path, text):
    """Writes a program and returns its path. It is a program for sh if its text names no other."""
    if not text.startswith("#!"):
        text = f"#!/bin/sh\n{text}\n"
    path = written(path, text)
    path.chmod(0o755)
    return path


def unread_pipe():
    """A pipe without a reader, so that each write fails."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def run(*command, code=0, cwd=ROOT, stdout=subprocess.PIPE, **variables):
    """Runs a command, which must exit with `code`. Of the variables that make, rows and recipes
    use, it sees only those in `variables`."""
    hidden = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "RUN", "COMMIT", "B")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert done.returncode == code, (
        f"{command}\nexpected exit code {code}, found {done.returncode}\n{done.stdout}{done.stderr}"
    )
    return done


def unheard(*command, **options):
    """Runs a command with stdout closed, then into a full disk, then into a pipe without a reader.
    It must exit with 1 and one line on stderr. Yields after each run, so that the caller can check
    the files."""
    closing = ["sh", "-c", 'exec "$0" "$@" >&-']
    for shell, out in (
        (closing, open(os.devnull, "w")),
        ([], open("/dev/full", "w")),
        ([], unread_pipe()),
    ):
        with out:
            done = run(*shell, *command, code=1, stdout=out, **options)
        assert "stdout" in done.stderr and done.stderr.count("\n") == 1, (command, done.stderr)
        yield


def run_test(test):
    """Returns the result, "ok", "skip" or "FAIL", and why a test was skipped."""
    try:
        if inspect.signature(test).parameters:
            with tempfile.TemporaryDirectory(prefix="test.") as folder:
                test(Path(folder))
        else:
            test()
    except Skip as why:
        return "skip", f": {why}"
    except (Exception, SystemExit):  # an assertion, or whatever the code under test raised
        traceback.print_exc(file=sys.stdout)
        return "FAIL", ""
    return "ok", ""


def main():
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    for name, test in list(vars(sys.modules["__main__"]).items()):
        if not name.startswith("test_") or part not in name:
            continue
        start = time.time()
        result, why = run_test(test)
        counts[result] += 1
        seconds = time.time() - start
        print(f"{result:4} {name.removeprefix('test_')} ({seconds:.1f} s){why}", flush=True)
    if not any(counts.values()):
        print(f'FAIL no test has "{part}" in its name')
        counts["FAIL"] = 1
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    sys.exit(1 if counts["FAIL"] else 0)
