#!/usr/bin/env python3
"""Trains for a long time: does memory stay flat, and is nothing lost when the run is killed again and again?

    make && python3 scripts/soak.py --minutes 20                       # one run with checkpoints; memory every 5 s
    python3 scripts/soak.py --kill 20 --steps 20000                    # killed 20 times, 3 to 20 s after each start
    python3 scripts/soak.py --kill 5 --steps 200 --device cpu -e tiny  # the trainer's options come last

A run that is killed (SIGKILL) is resumed. Another goes to the same step without being disturbed, and every byte of the
last checkpoint and every loss in both logs must be the same. Exit code 1: something was lost, or memory grew by more
than 2 % after the first fifth of the time. Up to six checkpoints lie in $TMPDIR. It looks at the memory of one process
and of the first GPU.
"""
import filecmp
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from results import ROOT, arguments, fail, need, output_of, read_log

runs = []  # all that were started


def start(folder, *options):
    with open(folder / "output.txt", "a") as output:
        runs.append(subprocess.Popen([ROOT / "train_gpt2cu", "-o", folder / "run", *map(str, options)], stdout=output,
                                     stderr=subprocess.STDOUT))
    return runs[-1]


def ended(run, folder, *codes):
    """Waits for its end. Another exit code than these is the end of this script."""
    if run.wait() not in codes:
        said = "".join((folder / "output.txt").read_text().splitlines()[-1:])
        fail(f"the run ended with {run.returncode}: {said}")


def losses(folder):
    return {row["step"]: row["loss_nats"] for row in read_log(folder / "run")["train"]}


def memory(pid):
    """MiB of the process in host memory, and of everybody on the first GPU. 0 is unknown."""
    host = re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())  # none of one that just ended
    device = output_of("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0")
    return int(host[1]) // 1024 if host else 0, int(device) if device.isdecimal() else 0


def soak(a, folder):
    run, begin, samples = start(folder, "-x", 10**8, "-n", a.every, "-nk", 2, *a.options), time.monotonic(), []
    while run.poll() is None and time.monotonic() - begin < 60 * a.minutes:
        time.sleep(min(5, 60 * a.minutes / 20))
        samples.append(memory(run.pid))
    run.send_signal(signal.SIGINT)
    ended(run, folder, 128 + signal.SIGINT)
    steps = max(losses(folder), default=0)
    if not samples or steps == 0:
        fail("not one step was made: raise --minutes")
    warm, most = [[max(column) for column in zip(*part)] for part in (samples[:len(samples) // 5 + 1], samples)]
    print(f"{steps} steps, {steps // a.every} checkpoints and one at the end. MiB of host and device: at most "
          f"{warm[0]} and {warm[1]} in the first fifth, {most[0]} and {most[1]} in all")
    return any(now > 1.02 * then for then, now in zip(warm, most))


def kill(a, folder):
    kills, code = 0, None
    while code is None:
        run = start(folder, "-x", a.steps, "-n", a.every, "-nk", 2, "-y", 1, *a.options)
        try:
            code = run.wait(random.uniform(*a.seconds) if kills < a.kill else None)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
            kills += 1
    ended(run, folder, 0)
    if kills < a.kill:
        fail(f"the run ended after {kills} of {a.kill} kills: raise --steps")
    calm = folder / "calm"
    calm.mkdir()
    ended(start(calm, "-x", a.steps, "-n", a.every, "-nk", 2, *a.options), calm, 0)
    names = [f"{kind}_{a.steps:08}.bin" for kind in ("model", "state")]
    different = [n for n in names if not filecmp.cmp(folder / "run" / n, calm / "run" / n, shallow=False)]
    killed, undisturbed = losses(folder), losses(calm)
    apart = [s for s in range(1, a.steps + 1) if s not in undisturbed or killed.get(s) != undisturbed[s]]
    print(f"{a.steps} steps with {kills} kills beside {a.steps} undisturbed ones: "
          f"{len(different)} of {len(names)} files and {len(apart)} losses differ")
    return different or apart


def main():
    arg = arguments(__doc__)
    arg.add_argument("--minutes", type=float, default=20, help="of the run whose memory is watched (default: 20)")
    arg.add_argument("--kill", type=int, metavar="N", default=0, help="kill and resume a run so many times")
    arg.add_argument("--steps", type=int, default=20000, help="of a run that is killed (default: %(default)s)")
    arg.add_argument("--every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    arg.add_argument("--seconds", type=float, nargs=2, default=(3, 20), metavar=("FROM", "TO"),
                     help="from a start to its kill (default: 3 20)")
    a, a.options = arg.parse_known_args()
    need("train_gpt2cu")
    with tempfile.TemporaryDirectory(prefix="soak.") as folder:
        try:
            return 1 if (kill if a.kill else soak)(a, pathlib.Path(folder)) else 0
        finally:  # also when this is interrupted, because a run goes on for ever
            for run in runs:
                run.kill()
                run.wait()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
