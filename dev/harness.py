"""The test harness of the Python scripts, dev/test.h's twin, and what their tests share. Functions named test_… of the
main program run in order. One may raise Skip("why"), and one with a parameter gets an empty folder. An argument
selects by name. The program ends in "N passed, N failed, N skipped". A test fails after LIMIT times TEST_PATIENCE."""
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
LIMIT = 120 * float(os.environ.get("TEST_PATIENCE", 1))  # seconds of a test


class Skip(Exception):
    pass


def out_of_time(*_):
    signal.setitimer(signal.ITIMER_REAL, 5)  # again, should a handler swallow it
    raise TimeoutError(f"no end after {LIMIT:g} s")


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


def shell_words(command):
    """What a shell makes of a command that was printed."""
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True)
    return done.stdout.split("\0")[:-1]


def executable(path, text):
    """The path of a program, of sh's if its text names no other."""
    path = written(path, text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(*command, code=0, cwd=ROOT, **variables):
    """How a command ended, if with this exit code. Of make's settings and of those for rows it has only `variables`."""
    others = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARCH", "RUN", "COMMIT", "TREE", "B", "GPUS")
    env = {name: value for name, value in os.environ.items() if name not in others}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env={**env, **variables}, capture_output=True,
                          text=True, errors="replace")
    assert code == done.returncode, f"{command}\n{done.returncode}, not {code}\n{done.stdout}{done.stderr}"
    return done


def run_program(name, *arguments):
    """Standard output of a program that make builds."""
    return run(built(name), *arguments, cwd=None).stdout


def main():
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    passed = failed = skipped = 0
    signal.signal(signal.SIGALRM, out_of_time)
    for name, test in list(vars(sys.modules["__main__"]).items()):
        if not name.startswith("test_") or only not in name:
            continue
        start, result, why = time.time(), "ok  ", ""
        signal.setitimer(signal.ITIMER_REAL, LIMIT)
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
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"{result} {name[5:]} ({time.time() - start:.1f} s){why}", flush=True)
    if not passed + failed + skipped:
        print(f'FAIL no test has "{only}" in its name')
        failed = 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed else 0)
