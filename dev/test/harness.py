"""The test harness of the Python scripts, the twin of dev/common/test.h, and what their tests
share. The main program's functions named test_… run in order. One may raise Skip("why"), and one
with a parameter gets an empty folder. An argument selects tests by name. The program's last line is
"N passed, N failed, N skipped". run_tests.sh kills a program that takes too long."""

import atexit
import contextlib
import importlib
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
# GPT-2's order of the bytes, whose first tokens they are: the visible ones, then the others.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = [bytes([byte]) for byte in VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]]


# What Git LFS leaves in the place of a large file that was not fetched.
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 200001024\n"
)


# with refused(Error, "part of its message"): …
refused = unittest.TestCase().assertRaisesRegex


class Skip(Exception):
    pass


def need(*modules):
    """Skips the test that calls it if one of the modules is not installed."""
    for module in modules:
        try:
            __import__(module)
        except ImportError:
            raise Skip(f"needs {module} (scripts/requirements*.txt)") from None


def built(program="train_gpt2cu"):
    """The path of a program that make builds."""
    if not (ROOT / program).exists():
        raise Skip(f"needs ./{program} (make {program})")
    return ROOT / program


def new_folder():
    """Goes into an empty folder, which is removed at the end."""
    folder = tempfile.mkdtemp(prefix="test.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chdir(folder)


def written(path, content):
    """The path of a file with this content."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def header(*values):
    """Of llm.c's files: 256 numbers, these and zeros."""
    return struct.pack("<256i", *values, *[0] * (256 - len(values)))


def tokenizer_file(tokens, magic=20240328):
    """llm.c's, of a vocabulary of GPT-2's size that begins with these tokens."""
    pieces = [*tokens, *[b""] * (50256 - len(tokens)), b"<|endoftext|>"]
    return header(magic, 2, 50257, 50256) + b"".join(
        bytes([len(piece)]) + piece for piece in pieces
    )


def ended(script, *arguments):
    """Runs main() of a script with these arguments, in this process: exit code, stdout, stderr."""
    out, err, code = io.StringIO(), io.StringIO(), 0
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
    if isinstance(code, str):
        return 1, out.getvalue(), f"{code}\n"
    return code, out.getvalue(), err.getvalue()


def succeeds(script, *arguments):
    """What main() of a script prints."""
    code, out, err = ended(script, *arguments)
    assert code == 0, f"{script} {arguments}: {code}: {err}"
    return out


def executable(path, text):
    """The path of a program, of sh's if its text names no other."""
    path = written(path, text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def unread_pipe():
    """Where each write fails, because there is no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


def run(*command, code=0, cwd=ROOT, stdout=subprocess.PIPE, **variables):
    """Runs a command, which has to exit with `code`. Of make's settings and of those for rows, it
    sees only the ones in `variables`."""
    others = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "RUN", "COMMIT", "B")
    env = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**env, **variables},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    assert code == done.returncode, (
        f"{command}\n{done.returncode}, not {code}\n{done.stdout}{done.stderr}"
    )
    return done


def unheard(*command, **options):
    """Runs a command with stdout closed, then into a full disk, then into a pipe without a reader.
    It has to end with exit code 1 and one line. After each run the caller can look at its files."""
    closed = ["sh", "-c", 'exec "$0" "$@" >&-']
    full = open("/dev/full", "w")
    for shell, out in (closed, open(os.devnull, "w")), ([], full), ([], unread_pipe()):
        with out:
            done = run(*shell, *command, code=1, stdout=out, **options)
        assert "stdout" in done.stderr and done.stderr.count("\n") == 1, (command, done.stderr)
        yield


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = skipped = 0
    for name, test in list(vars(sys.modules["__main__"]).items()):
        if not name.startswith("test_") or only not in name:
            continue
        start, result, why = time.time(), "ok  ", ""
        try:
            with tempfile.TemporaryDirectory(prefix="test.") as folder:
                test(Path(folder)) if test.__code__.co_argcount else test()
            passed += 1
        except Skip as skip:
            result, why = "skip", f": {skip}"
            skipped += 1
        except (Exception, SystemExit):  # an assertion, or whatever the code under test raised
            result = "FAIL"
            failed += 1
            traceback.print_exc(file=sys.stdout)
        print(f"{result} {name[5:]} ({time.time() - start:.1f} s){why}", flush=True)
    if not passed + failed + skipped:
        print(f'FAIL no test has "{only}" in its name')
        failed = 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
