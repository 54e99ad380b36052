#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt2cu, with GPT-2's byte pair encoding (tiktoken).

  sources  →  batches of ~1 MB  →  tokens, on all cores  →  shards of --shard-tokens, in order
  files       cut where no         one <|endoftext|>        val_000000.bin, train_000001.bin, …
              token changes        before each document     in DIR.part, finally renamed to DIR

Only one shard and a few batches per core are in memory. If anything fails, DIR.part is removed, so
that DIR is either complete or does not exist.

A shard has llm.c's format: 256 int32 (magic 20240520, version 1, number of tokens), then the tokens
as uint16, all little endian."""

import argparse
import codecs
import collections
import concurrent.futures
import contextlib
import fcntl
import glob
import os
import re
import shlex
import shutil
import struct
import sys
from pathlib import Path

from prepare_common import (
    CACHE,
    END_OF_TEXT,
    Fail,
    add_ranks_options,
    asking_hub,
    check_fetched,
    check_stdout,
    download,
    encodable,
    json_lines,
    load_ranks,
    make_encoding,
    need,
    progress,
    reading,
    rename,
    run,
    write_file,
    write_tokenizer,
)

SHARD_MAGIC, BATCH_BYTES = 20240520, 1 << 20

# TinyStories' own validation file comes first, because it has a little more than val_tokens.
STORIES = ["TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"]
SHAKESPEARE = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
)
DATASETS = {
    "tinyshakespeare": {"files": lambda: [download(*SHAKESPEARE)], "val_tokens": 32768},
    "tinystories": {
        "files": lambda: hub_files("roneneldan/TinyStories", names=STORIES),
        "val_tokens": 5_000_000,
    },
    "fineweb10B": {"files": lambda: hub_files("HuggingFaceFW/fineweb", "sample/10BT")},
    "fineweb100B": {"files": lambda: hub_files("HuggingFaceFW/fineweb", "sample/100BT")},
    "fineweb-edu": {"files": lambda: hub_files("HuggingFaceFW/fineweb-edu", "sample/10BT")},
}


def hub_files(repository, folder=None, names=None):
    """Paths of these files, or of the folder's, in the hub's cache. Each is downloaded only when it
    is asked for."""
    with asking_hub(repository) as hub:
        of_hub = {"repo_type": "dataset", "revision": hub.HfApi().dataset_info(repository).sha}
        # The listing is in no order.
        listing = [] if names else hub.HfApi().list_repo_tree(repository, folder, **of_hub)
        names = names or sorted(entry.path for entry in listing if entry.path.endswith(".parquet"))
    for name in names:
        with asking_hub(f"{repository}: {name}") as hub:
            yield hub.hf_hub_download(repository, name, **of_hub)


def encode(encoding, texts):
    """Tokens of [(begins a document, text)]. Blank documents have none."""
    tokens = [[]]
    for begins, text in texts:
        if begins and not text.strip():
            continue
        if begins:
            tokens.append([END_OF_TEXT])
        # JSON can hold half a surrogate pair.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens.append(encoding.encode_to_numpy(text, disallowed_special=()))
    return need("numpy").concatenate(tokens).astype("<u2")


def in_order(pool, batches, encoding, ahead):
    """The tokens of each batch, in order, with at most `ahead` batches in flight. tiktoken lets
    threads run in parallel."""
    pending = collections.deque()
    for texts in batches:
        pending.append(pool.submit(encode, encoding, texts))
        if len(pending) > ahead:
            yield pending.popleft().result()
    for future in pending:
        yield future.result()


# The trainer reads plain text by the same rules. A byte order mark at the start of the file is
# dropped. Documents are separated by <|endoftext|> together with at most one line end, \n or \r\n,
# on each side of it; a line end between two separators belongs to the first. Nothing else is
# stripped, not even at the start or the end of the file: a last line end is text.
DOCUMENTS = re.compile(r"(?:\r?\n)?<\|endoftext\|>(?:\r?\n)?")
SPEECHES = re.compile(r"(?<=\n\n)")  # of tinyshakespeare: an empty line ends one, as llm.c has it
# The last place where a cut changes no token: between a visible character and white space, because
# GPT-2's pattern looks ahead only from white space and never looks back. Not after >, which may end
# a separator.
LAST_CUT = re.compile(r"(?s:.*)[^\s>](?=[ \t\r\n])")


def read_text(path, args):
    separator = SPEECHES if args.sources == ["tinyshakespeare"] else DOCUMENTS
    decoder, text, begins, more = codecs.getincrementaldecoder("utf-8-sig")(), "", True, True
    with open(path, "rb") as file:
        while more:
            at, block = file.tell(), file.read(BATCH_BYTES)
            more = bool(block)
            if b"\0" in block:
                raise Fail(
                    f"{path}: no text: a NUL byte at offset {at + block.index(0)}; "
                    "convert it to UTF-8"
                )
            try:
                text += decoder.decode(block, final=not more)
            except UnicodeDecodeError as error:
                offset = file.tell() - len(error.object) + error.start
                byte = error.object[error.start]
                raise Fail(
                    f"{path}: invalid UTF-8 at offset {offset}: found byte 0x{byte:02x}; convert it"
                ) from None
            cut = LAST_CUT.match(text) if more else re.match("(?s:.*)", text)
            if cut and text:
                parts = separator.split(cut.group())
                yield [(begins or i > 0, encodable(part)) for i, part in enumerate(parts)]
                begins, text = False, text[cut.end() :]


def read_jsonl(path, args):
    """An object a line, its text under args.field."""
    begin, texts = 0, []
    for at, found in json_lines(path):
        if at - begin >= BATCH_BYTES:
            yield texts
            begin, texts = at, []
        with reading(
            f"{path}: object at offset {at}",
            f"expected text in {args.field!r}, --field names another",
        ):
            texts.append((True, encodable(found[args.field])))
    yield texts


def read_parquet(path, args):
    """A document a row, its text in the column args.field."""
    with need("pyarrow.parquet").ParquetFile(path) as file:
        for rows in file.iter_batches(batch_size=256, columns=[args.field]):
            yield [(True, encodable(text)) for text in rows.column(0).to_pylist()]


READERS = {".txt": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}


def read_files(paths, args):
    """The batches of all files, lists of (begins a document, text)."""
    for path in paths:
        with reading(path, f"damaged, or no text in the field {args.field!r}"):
            yield from READERS[Path(path).suffix](path, args)


@contextlib.contextmanager
def all_or_nothing(output):
    """Gives an empty folder. At the end it becomes the output, or goes if anything failed."""
    if os.path.lexists(output):
        raise Fail(f"{output}: exists already; remove it or choose another --output")
    part = Path(f"{output}.part")
    part.mkdir(parents=True, exist_ok=True)
    lock = os.open(part, os.O_RDONLY)  # until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of another kind where a file system has no locks
        if isinstance(error, BlockingIOError):
            raise Fail(
                f"{part}: another run writes there; wait for it or choose another --output"
            ) from None
    for left in part.iterdir():  # by a run that was killed
        left.unlink()
    try:
        yield part
        rename(part, output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_shards(folder, batches, val_tokens, args, bar):
    """Cuts the stream of tokens into shards, validation first. Returns the number of tokens."""
    total, shards, data = 0, 0, next(batches, [])
    max_tokens = args.max_tokens or sys.maxsize
    while len(data) and total < max_tokens:
        split, end = ("val", val_tokens) if total < val_tokens else ("train", max_tokens)
        end = min(end, total + args.shard_tokens, max_tokens)
        pieces = []
        while len(data) and total < end:
            piece, data = data[: end - total], data[end - total :]
            pieces.append(piece)
            total += len(piece)
            bar.update(len(piece))
            data = data if len(data) else next(batches, [])
        name, count = f"{split}_{shards:06d}.bin", sum(map(len, pieces))
        write_file(
            folder / name, [struct.pack("<256i", SHARD_MAGIC, 1, count, *[0] * 253), *pieces]
        )
        bar.write(f"{name}: {count:,} tokens", file=sys.stdout)
        shards += 1
    return total


def prepare(args):
    known = DATASETS.get(args.sources[0], {})
    for source in args.sources:
        check_fetched(source)
    with all_or_nothing(args.output) as folder:
        # A token has about four bytes of text.
        tenth = sys.maxsize if known else max(1, sum(map(os.path.getsize, args.sources)) // 40)
        val_tokens = args.val_tokens or known.get("val_tokens") or min(args.shard_tokens, tenth)
        ranks = load_ranks(args)
        write_tokenizer(folder / "gpt2_tokenizer.bin", ranks)
        paths = known["files"]() if known else args.sources
        pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
        batches = in_order(pool, read_files(paths, args), make_encoding(ranks), 3 * args.jobs)
        with progress(total=args.max_tokens, unit=" tokens") as bar:
            total = write_shards(folder, filter(len, batches), val_tokens, args, bar)
        if total <= val_tokens:
            raise Fail(
                f"{args.output}: no tokens left to train on: found {total:,}, "
                f"and {val_tokens:,} go to validation; give more text or a smaller --val-tokens"
            )
    # Unlike Python's, C's glob() takes a backslash for an escape.
    pattern = glob.escape(str(args.output)).replace("\\", r"\\")
    command = [
        "./train_gpt2cu",
        "-i",
        f"{pattern}/train_*.bin",
        "-j",
        f"{pattern}/val_*.bin",
        "--tokenizer",
        f"{args.output}/gpt2_tokenizer.bin",
        "-o",
        "run1",
    ]
    print(f"{args.output}: {total:,} tokens\nnext: {shlex.join(command)}")


def tokens(text):
    """An option's number, 1e8 as well as 100000000."""
    number = float(text)
    if not 1 <= number < 1e15:
        raise ValueError
    return int(number)


@check_stdout()
def main():
    parser = argparse.ArgumentParser(
        description="Turns text into token shards for ./train_gpt2cu, "
        "with GPT-2's byte pair encoding.",
        epilog="DIR appears only once it is complete; a run that fails keeps only its downloads. "
        "In a .txt file <|endoftext|> separates documents. "
        "HF_ENDPOINT names a mirror of the Hugging Face hub. README.md has examples. "
        "Needs: pip install -r scripts/requirements.txt",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=f"one of {', '.join(DATASETS)}; or .txt, .jsonl and .parquet files",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="default: data/cache/ and the source's name",
    )
    parser.add_argument(
        "--shard-tokens", type=tokens, default=10**8, metavar="N", help="default: 1e8"
    )
    parser.add_argument(
        "--val-tokens",
        type=tokens,
        metavar="N",
        help="the first N tokens are for validation (default: a shard, but about a tenth at most)",
    )
    parser.add_argument(
        "--max-tokens", type=tokens, metavar="N", help="stop after so many (default: all)"
    )
    parser.add_argument(
        "--field", default="text", help="of .jsonl and .parquet files (default: text)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="threads (default: one a core)",
    )
    add_ranks_options(parser)
    args = parser.parse_args()
    for source in args.sources:
        if (source not in DATASETS or len(args.sources) > 1) and Path(source).suffix not in READERS:
            parser.error(
                f"{source}: expected one of {', '.join(DATASETS)} alone, "
                f"or {', '.join(READERS)} files"
            )
    if args.shard_tokens >= 2**31 or args.jobs < 1:
        parser.error(
            "expected --shard-tokens below 2^31 and --jobs from 1, "
            f"found {args.shard_tokens} and {args.jobs}"
        )
    args.output = args.output or CACHE / Path(args.sources[0]).stem
    run(prepare, args)


if __name__ == "__main__":
    main()
