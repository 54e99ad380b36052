#!/usr/bin/env python3
"""Writes training runs' log.jsonl as TensorBoard event files, each into RUN/tensorboard, replacing earlier ones there.

    python3 scripts/tensorboard.py run1 run2 && tensorboard --logdir_spec a:run1/tensorboard,b:run2/tensorboard
"""
import itertools
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
        found = {tag: row.get(field) for tag, field in TAGS[kind].items()}
        return [Summary.Value(tag=tag, simple_value=v) for tag, v in found.items() if v is not None]
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
    runs = arg.parse_args().runs
    # This folder is where Python looks first, and there `import tensorboard` would find this very file.
    sys.path = [p for p in sys.path if pathlib.Path(p or ".").resolve() != pathlib.Path(__file__).resolve().parent]
    folders = [results.folder_of(run) / "tensorboard" for run in runs]
    try:
        for run, folder in zip(runs, folders):
            write(run, folder)
            print(folder)
    except ImportError:
        results.fail("needs tensorboard: pip install -c scripts/requirements-more.txt tensorboard")
    except OSError as e:
        results.fail(e)
    spec = ",".join(f"{folder.resolve().parent.name}:{folder}" for folder in folders)
    print("next: tensorboard", shlex.join(["--logdir_spec", spec]))


if __name__ == "__main__":
    main()
