#!/usr/bin/env python3
"""Turns text into token shards for ./train_gpt2cu, with GPT-2's byte pair encoding (tiktoken).

  sources  →  batches of ~1 MB  →  tokens, on all cores  →  shards of --shard-tokens, in order
  files       cut where no         one <|endoftext|>        val_000000.bin, train_000001.bin, …
              token changes        before each document     in DIR.part, finally renamed to DIR

Only one shard and a few batches per core are held in memory. If anything fails, DIR.part is
removed, so that DIR is either complete or does not exist.

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

SHARD_MAGIC = 20240520
BATCH_BYTES = 1 << 20

# The first tokens are for validation, so TinyStories' own validation file comes first. It has a
# little more than val_tokens.
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
    """Downloads the files `names`, or all .parquet files of the folder, and yields their paths.
    Each is downloaded only when the caller asks for the next path."""
    with asking_hub(repository) as hub:
        sha = hub.HfApi().dataset_info(repository).sha
        version = {"repo_type": "dataset", "revision": sha}
        if not names:
            listing = hub.HfApi().list_repo_tree(repository, folder, **version)
            paths = [entry.path for entry in listing]
            names = sorted(path for path in paths if path.endswith(".parquet"))
    for name in names:
        with asking_hub(f"{repository}: {name}") as hub:
            yield hub.hf_hub_download(repository, name, **version)


def encode(encoding, texts):
    """The tokens of a batch [(begins a document, text), …]. Blank documents are left out."""
    tokens = [[]]  # for an empty batch
    for begins, text in texts:
        if begins and not text.strip():
            continue
        if begins:
            tokens.append([END_OF_TEXT])
        # JSON can contain half of a surrogate pair, which UTF-8 cannot express.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        tokens.append(encoding.encode_to_numpy(text, disallowed_special=()))
    return need("numpy").concatenate(tokens).astype("<u2")


def in_order(pool, batches, encoding, ahead):
    """Yields the tokens of each batch, in order, with at most `ahead` batches in flight. The pool
    has threads, because tiktoken releases the GIL."""
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

# llm.c splits tinyshakespeare into speeches, each of which ends with an empty line.
SPEECHES = re.compile(r"(?<=\n\n)")

# The text up to the last place where a cut changes no token: between a visible character and white
# space, because GPT-2's pattern looks ahead only from white space and never looks back. We do not
# cut after >, which may end a separator.
LAST_CUT = re.compile(r"(?s:.*)[^\s>](?=[ \t\r\n])")


def decode(decoder, path, offset, block):
    """The text of the block of bytes at this offset. An empty block ends the file."""
    if b"\0" in block:
        raise Fail(
            f"{path}: is not text, because there is a zero byte at offset "
            f"{offset + block.index(0)}; convert it to UTF-8"
        )
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        # The object may begin with the last bytes of the previous block.
        begin = offset + len(block) - len(error.object)
        byte = error.object[error.start]
        raise Fail(
            f"{path}: invalid UTF-8 at offset {begin + error.start}: found byte 0x{byte:02x}; "
            "convert it to UTF-8"
        ) from None


def read_text(path, args):
    """The documents of a text file, in batches. A document that a cut divides goes on in the next
    batch."""
    separator = SPEECHES if args.sources == ["tinyshakespeare"] else DOCUMENTS
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""  # what has been read and is in no batch yet
    begins = True  # whether `text` begins a document
    more = True
    with open(path, "rb") as file:
        while more:
            offset = file.tell()
            block = file.read(BATCH_BYTES)
            more = len(block) > 0
            text += decode(decoder, path, offset, block)

            end = len(text)
            if more:
                cut = LAST_CUT.match(text)
                end = cut.end() if cut else 0
            if end == 0:
                continue
            parts = separator.split(text[:end])
            yield [(begins or i > 0, encodable(part)) for i, part in enumerate(parts)]
            begins = False
            text = text[end:]


def read_jsonl(path, args):
    """One document per line: an object with its text in args.field."""
    begin = 0  # the batch's offset in the file
    texts = []
    advice = f"expected text in {args.field!r}; use --field if it is in another field"
    for offset, found in json_lines(path):
        if offset - begin >= BATCH_BYTES:
            yield texts
            begin = offset
            texts = []
        with reading(f"{path}: object at offset {offset}", advice):
            texts.append((True, encodable(found[args.field])))
    yield texts


def read_parquet(path, args):
    """One document per row, its text in the column args.field."""
    with need("pyarrow.parquet").ParquetFile(path) as file:
        for rows in file.iter_batches(batch_size=256, columns=[args.field]):
            yield [(True, encodable(text)) for text in rows.column(0).to_pylist()]


READERS = {".txt": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}


def read_files(paths, args):
    """Yields the batches of all files, lists of (begins a document, text)."""
    for path in paths:
        with reading(path, f"damaged, or no text in the field {args.field!r}"):
            yield from READERS[Path(path).suffix](path, args)


@contextlib.contextmanager
def all_or_nothing(output):
    """Yields an empty folder. It becomes `output` at the end, or is removed if anything failed."""
    if os.path.lexists(output):
        raise Fail(f"{output}: exists already; remove it or choose another --output")
    part = Path(f"{output}.part")
    part.mkdir(parents=True, exist_ok=True)

    lock = os.open(part, os.O_RDONLY)  # held until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Fail(
            f"{part}: another run is writing there; wait for it or choose another --output"
        ) from None
    except OSError:
        pass  # this file system has no locks

    for leftover in part.iterdir():  # of a run that was killed
        leftover.unlink()
    try:
        yield part
        rename(part, output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_shards(folder, batches, val_tokens, args, bar):
    """Cuts the stream of tokens into shards, validation first. Returns the number of tokens."""
    max_tokens = args.max_tokens or sys.maxsize
    total = 0
    shards = 0
    tokens = next(batches, [])  # of the current batch, those that are in no shard yet
    while len(tokens) > 0 and total < max_tokens:
        is_val = total < val_tokens
        end_of_split = min(val_tokens, max_tokens) if is_val else max_tokens
        most = min(args.shard_tokens, end_of_split - total)

        pieces = []
        count = 0
        while len(tokens) > 0 and count < most:
            piece = tokens[: most - count]
            pieces.append(piece)
            count += len(piece)
            bar.update(len(piece))
            tokens = tokens[len(piece) :]
            if len(tokens) == 0:
                tokens = next(batches, [])

        name = f"{'val' if is_val else 'train'}_{shards:06d}.bin"
        header = struct.pack("<256i", SHARD_MAGIC, 1, count, *[0] * 253)
        write_file(folder / name, [header, *pieces])
        bar.write(f"{name}: {count:,} tokens", file=sys.stdout)
        total += count
        shards += 1
    return total


def default_val_tokens(dataset, args):
    """The dataset's own number, else one shard, but at most about a tenth of the user's files."""
    if dataset:
        return dataset.get("val_tokens") or args.shard_tokens
    tokens = sum(map(os.path.getsize, args.sources)) // 4  # about four bytes each
    return min(args.shard_tokens, max(1, tokens // 10))


def prepare(args):
    for source in args.sources:
        check_fetched(source)
    dataset = DATASETS.get(args.sources[0])
    with all_or_nothing(args.output) as folder:
        val_tokens = args.val_tokens or default_val_tokens(dataset, args)
        ranks = load_ranks(args)
        write_tokenizer(folder / "gpt2_tokenizer.bin", ranks)

        paths = dataset["files"]() if dataset else args.sources
        pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
        batches = in_order(pool, read_files(paths, args), make_encoding(ranks), 3 * args.jobs)
        with progress(total=args.max_tokens, unit=" tokens") as bar:
            total = write_shards(folder, filter(len, batches), val_tokens, args, bar)
        if total <= val_tokens:
            raise Fail(
                f"{args.output}: no tokens are left to train on: there are {total:,}, and the "
                f"first {val_tokens:,} are for validation; give more text or a smaller --val-tokens"
            )

    # C's glob() takes a backslash for an escape, Python's does not.
    folder = glob.escape(str(args.output)).replace("\\", r"\\")
    train = shlex.quote(f"{folder}/train_*.bin")
    val = shlex.quote(f"{folder}/val_*.bin")
    tokenizer = shlex.quote(f"{args.output}/gpt2_tokenizer.bin")
    print(f"{args.output}: {total:,} tokens")
    print(f"next: ./train_gpt2cu -i {train} -j {val} --tokenizer {tokenizer} -o run1")


def token_count(text):
    """An option's number, as 1e8 or as 100000000."""
    number = float(text)
    if not 1 <= number < 1e15:
        raise ValueError
    return int(number)


@check_stdout()
def main():
    parser = argparse.ArgumentParser(
        description="Turns text into token shards for ./train_gpt2cu, "
        "with GPT-2's byte pair encoding.",
        epilog="DIR is created only once it is complete; a run that fails keeps only its "
        "downloads. In a .txt file <|endoftext|> separates documents. Set HF_ENDPOINT to use a "
        "mirror of the Hugging Face hub. README.md has examples. "
        "Needs: pip install -r scripts/requirements.txt",
    )
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help=f"a dataset to download ({', '.join(DATASETS)}), "
        "or any .txt, .jsonl and .parquet files",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the shards (default: data/cache/NAME, with the first source's name)",
    )
    parser.add_argument(
        "--shard-tokens",
        type=token_count,
        default=10**8,
        metavar="N",
        help="tokens per shard (default: 1e8)",
    )
    parser.add_argument(
        "--val-tokens",
        type=token_count,
        metavar="N",
        help="use the first N tokens for validation "
        "(default: one shard, but at most about a tenth of your files)",
    )
    parser.add_argument(
        "--max-tokens",
        type=token_count,
        metavar="N",
        help="stop after N tokens (default: take all)",
    )
    parser.add_argument(
        "--field",
        default="text",
        help="field of .jsonl objects and .parquet rows that holds the text (default: text)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of threads (default: one per core)",
    )
    add_ranks_options(parser)
    args = parser.parse_args()
    for source in args.sources:
        is_dataset = source in DATASETS and len(args.sources) == 1
        if not is_dataset and Path(source).suffix not in READERS:
            parser.error(
                f"{source}: expected one of {', '.join(DATASETS)} by itself, "
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
