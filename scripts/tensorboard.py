#!/usr/bin/env python3
"""Writes training runs' log.jsonl as TensorBoard event files, each into RUN/tensorboard, replacing earlier ones there.

    python3 scripts/tensorboard.py run1 run2 && tensorboard --logdir_spec a:run1/tensorboard,b:run2/tensorboard
    python3 scripts/tensorboard.py run1 run2 -o events && tensorboard --logdir events
"""
import itertools
import math
import os
import pathlib
import shlex
import sys
import time

import results

TAGS = {"train": {"loss/train": "loss_nats", "train/grad_norm": "grad_norm", "train/lr": "lr",
                  "speed/tokens_per_s": "tokens_per_s", "speed/mfu_percent": "mfu_percent"},
        "val": {"loss/val": "loss_nats", "loss/floor": "floor_nats"}}


def events(rows, end):
    """(wall time, step, Summary) of every row. The log has no clock: its steps' times are counted back from its end."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.text.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    seconds = [r.get("step_ms", 0) / 1e3 for r in rows["train"]]
    times = itertools.accumulate(seconds, initial=end - sum(seconds))
    when = dict(zip([0, *(r["step"] for r in rows["train"])], times))

    def values(kind, row):
        if kind == "hellaswag":
            return [Summary.Value(tag=kind, simple_value=row["correct"] / row["examples"])]
        if kind == "sample":
            text = "    " + row["text"].replace("\n", "\n    ")  # Markdown's way to leave a text as it is
            return [Summary.Value(tag=kind, metadata=create_summary_metadata("", ""), tensor=make_tensor_proto(text))]
        found = {tag: row[field] for tag, field in TAGS[kind].items() if row.get(field) is not None}
        return [Summary.Value(tag=tag, simple_value=v) for tag, v in found.items() if not math.isnan(v)]
    for kind in (*TAGS, "hellaswag", "sample"):
        for row in rows[kind]:
            yield when.get(row["step"], end), row["step"], Summary(value=values(kind, row))


def write(run, folder):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    rows, ended = results.read_log(run), os.path.getmtime(run / "log.jsonl" if run.is_dir() else run)
    folder.mkdir(parents=True, exist_ok=True)
    old = set(folder.glob("events.out.tfevents.*"))
    new = folder / f"events.out.tfevents.{int(time.time())}.{os.uname().nodename}.{os.getpid()}"
    with results.whole(new) as part, open(part, "wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        for wall_time, step, summary in events(rows, ended):
            writer.write(Event(wall_time=wall_time, step=step, summary=summary).SerializeToString())
    for path in old - {new}:
        path.unlink()


def main():
    arg = results.arguments(__doc__)
    arg.add_argument("runs", nargs="+", metavar="RUN", type=pathlib.Path, help="a folder with log.jsonl, or that file")
    arg.add_argument("-o", "--out", type=pathlib.Path, help="write into OUT/<the run's name> instead")
    a = arg.parse_args()
    # This folder is where Python looks first, and there `import tensorboard` would find this very file.
    sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]
    homes = [results.folder_of(run) for run in a.runs]
    folders = [a.out / home.resolve().name if a.out else home / "tensorboard" for home in homes]
    if len(set(folders)) < len(folders):
        results.fail("two runs would go into one folder: convert them one by one")
    try:
        for run, folder in zip(a.runs, folders):
            write(run, folder)
            print(folder)
        spec = ",".join(f"{home.resolve().name}:{folder}" for home, folder in zip(homes, folders))
        one = a.out or len(folders) == 1
        options = ["--logdir", str(a.out or folders[0])] if one else ["--logdir_spec", spec]
        print("next: tensorboard", shlex.join(options))
    except ImportError:
        results.fail("needs tensorboard: pip install -c scripts/requirements-more.txt tensorboard")
    except OSError as e:
        results.fail(e)


if __name__ == "__main__":
    main()
