#!/usr/bin/env python3
"""Turns text into token shards that ./train_gpt2cu reads, with GPT-2's byte pair encoding (tiktoken).

  sources  →  batches of ~1 MB  →  tokens, on all cores  →  shards of --shard-tokens, in order
  files       cut where a resumed    one <|endoftext|>       val_000000.bin, train_000001.bin, …
              run can cut as well    before each document    written aside, fsynced, then renamed

A few batches a core are in flight. The stream of tokens depends on the sources alone, not on its batches, so three
numbers a shard in manifest.json are enough to go on after it: the file, the position there where a batch began, and
how many tokens of that batch earlier shards took. The result is the same byte for byte.

A shard is llm.c's: 256 int32 (magic 20240520, version 1, number of tokens), then uint16 tokens, little endian."""
import argparse
import codecs
import collections
import concurrent.futures
import glob
import hashlib
import itertools
import json
import os
import re
import shlex
import struct
import sys
from pathlib import Path

from prepare_common import (END_OF_TEXT, Fail, add_ranks_options, asking_hub, commit, download, encodable, json_lines,
                            load_ranks, make_encoding, need, progress, reading, run, sha256_of, write_file,
                            write_tokenizer)

SHARD_MAGIC, BATCH_BYTES = 20240520, 1 << 20

# A dataset has files with a fixed address, or "hub" names a repository of the Hugging Face hub, a folder and files there.
# Without files it takes all that end in .parquet. TinyStories' own validation file comes first, because it has a little
# more than the tokens taken. "ready" is a repository of shards, named …_val_000000.bin and …_train_000001.bin on.
SHAKESPEARE = {"url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
               "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}
STORIES = ["TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"]
DATASETS = {
    "tinyshakespeare": {"files": [SHAKESPEARE], "val_tokens": 32768},
    "tinystories": {"hub": ("roneneldan/TinyStories", None, STORIES), "val_tokens": 5_000_000},
    "fineweb10B": {"hub": ("HuggingFaceFW/fineweb", "sample/10BT", None), "ready": "kjj0/fineweb10B-gpt2"},
    "fineweb100B": {"hub": ("HuggingFaceFW/fineweb", "sample/100BT", None)},
    "fineweb-edu": {"hub": ("HuggingFaceFW/fineweb-edu", "sample/10BT", None), "ready": "kjj0/finewebedu10B-gpt2"},
}
READY = {name: known["ready"] for name, known in DATASETS.items() if "ready" in known}


def hub_files(repository, folder=None, paths=None, ending=".parquet"):
    """These files, or all of the folder that end so, as they are now. The hub promises no order."""
    with asking_hub(repository) as hub:
        of_hub = {"repo_type": "dataset", "revision": hub.HfApi().dataset_info(repository).sha}
        listing = [] if paths else hub.HfApi().list_repo_tree(repository, folder, **of_hub)
        paths = paths or sorted(entry.path for entry in listing if entry.path.endswith(ending))
    return [{"repo_id": repository, "filename": path, **of_hub} for path in paths]


def encode(encoding, texts):
    """Tokens of [(begins a document, text)]. Blank documents have none."""
    tokens = [[]]
    for begins, text in texts:
        if begins and not text.strip():
            continue
        if begins:
            tokens.append([END_OF_TEXT])
        try:
            tokens.append(encoding.encode_to_numpy(text, disallowed_special=()))
        except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold
            tokens.append(encoding.encode_ordinary(text))
    return need("numpy").concatenate(tokens).astype("<u2")


def in_order(pool, batches, encoding, ahead):
    """(place, tokens) of each batch, with at most `ahead` of them in flight. tiktoken lets threads run side by side."""
    pending = collections.deque()
    for place, texts in batches:
        pending.append((place, pool.submit(encode, encoding, texts)))
        if len(pending) > ahead:
            place, future = pending.popleft()
            yield place, future.result()
    for place, future in pending:
        yield place, future.result()


# Each yields (position, [(begins a document, text)]) from a position that it once yielded.

# Plain text, here and in the trainer. A byte order mark at the file's beginning is dropped. Between documents stands
# <|endoftext|> with at most one line end before and one behind it, \n or \r\n each. A line end between two of them
# belongs to the first. Nothing else is stripped, even at the file's beginning and end: a last line end is text.
DOCUMENTS = re.compile(r"(?:\r?\n)?<\|endoftext\|>(?:\r?\n)?")
# The last place where cutting a text changes no token: between a visible character and white space, since GPT-2's
# pattern looks ahead only from white space and never back. Not after >, which may end a separator.
LAST_CUT = re.compile(r"(?s:.*)[^\s>](?=[ \t\r\n])")


def read_text(path, position, _, separator=DOCUMENTS):
    decoder, text, more = codecs.getincrementaldecoder("utf-8")(), "", True
    with open(path, "rb") as file:
        start = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
        position = max(position, start)
        file.seek(position)
        while more:
            at, block = file.tell(), file.read(BATCH_BYTES)
            more = bool(block)
            if b"\0" in block:
                raise Fail(f"{path}: no text: a NUL byte at offset {at + block.index(0)}; convert it to UTF-8")
            try:
                text += decoder.decode(block, final=not more)
            except UnicodeDecodeError as error:
                offset, byte = position + len(text.encode()) + error.start, error.object[error.start]
                raise Fail(f"{path}: invalid UTF-8 at offset {offset}: found byte 0x{byte:02x}; convert it") from None
            cut = LAST_CUT.match(text) if more else re.match("(?s:.*)", text)
            if cut and text:
                parts = separator.split(cut.group())
                yield position, [(i > 0 or position == start, encodable(part)) for i, part in enumerate(parts)]
                position += len(cut.group().encode())
                text = text[cut.end():]


def read_speeches(path, position, _):
    return read_text(path, position, _, re.compile(r"(?<=\n\n)"))  # an empty line ends one, as llm.c has it


def read_jsonl(path, position, field):
    """An object a line, its text under `field`."""
    begin, texts = position, []
    for at, found in json_lines(path, position):
        if at - begin >= BATCH_BYTES:
            yield begin, texts
            begin, texts = at, []
        with reading(f"{path}: object at offset {at}", f"expected text in {field!r}, --field names another"):
            texts.append((True, encodable(found[field])))
    yield begin, texts


def read_parquet(path, position, field):
    """A document a row, its text in the column `field`; positions are row numbers."""
    with need("pyarrow.parquet").ParquetFile(path) as file:
        row = 0
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            if row + len(batch) > position:
                begin = max(row, position)
                yield begin, [(True, encodable(text)) for text in batch.column(0)[begin - row:].to_pylist()]
            row += len(batch)


READERS = {".txt": read_text, ".jsonl": read_jsonl, ".parquet": read_parquet}


def save_manifest(directory, manifest):
    write_file(directory / "manifest.json", [json.dumps(manifest).encode(), b"\n"])


def load_manifest(directory, settings):
    """What an earlier run with the same settings has done, or a new manifest."""
    path = directory / "manifest.json"
    if not path.exists():
        return {"settings": settings, "sources": settings.get("files"), "shards": []}
    with reading(path, "damaged; delete it to begin anew"):
        manifest = json.loads(path.read_bytes())
        changed = [key for key in settings if manifest["settings"].get(key) != settings[key]]
        if changed:
            raise Fail(f"{path}: made with another {', '.join(changed)}; choose another --output, or delete it to "
                       "begin anew")
        for i, shard in enumerate(manifest["shards"]):
            file = directory / shard["name"]
            if not file.exists() or sha256_of(file) != shard["sha256"]:
                print(f"{file}: not what was written; shards are made anew from here on", flush=True)
                del manifest["shards"][i:]
                break
    return manifest


def write_shards(directory, manifest, batches, skip, bar):
    """Cuts the stream of tokens into shards, without the first `skip` of them. manifest["shards"] says which are
    finished and where the next begins."""
    shards, val_tokens = manifest["shards"], manifest["val_tokens"]
    shard_tokens, max_tokens = manifest["settings"]["shard_tokens"], manifest["settings"]["max_tokens"] or sys.maxsize
    total = sum(shard["tokens"] for shard in shards)
    place, data = next(batches)
    while len(data) and total < max_tokens:
        split, end = ("val", val_tokens) if total < val_tokens else ("train", sys.maxsize)
        room, count = min(shard_tokens, end - total, max_tokens - total), 0
        name = f"{split}_{len(shards):06d}.bin"
        file = open(directory / f"{name}.part", "wb")
        file.write(bytes(1024))  # the header, once the count is known
        while len(data) and count < room:
            piece = data[skip:skip + room - count]
            file.write(piece.data)
            bar.update(len(piece))
            count += len(piece)
            skip += len(piece)
            if skip >= len(data):
                skip -= len(data)
                place, data = next(batches)
        file.seek(0)
        file.write(struct.pack("<256i", SHARD_MAGIC, 1, count, *[0] * 253))
        commit(file, directory / name)
        sha256 = sha256_of(directory / name)
        total += count
        shards.append({"name": name, "tokens": count, "sha256": sha256, "next": {**place, "skip": skip}})
        save_manifest(directory, manifest)
        bar.write(f"{directory / name}: {count:,} tokens", file=sys.stdout)
    return total


def take_ready(directory, repository, most):
    """Downloads the shards for validation and at most so many others."""
    save_manifest(directory, load_manifest(directory, {"ready": repository}))
    files = hub_files(repository, ending=".bin")
    for split, most in (("_val_", None), ("_train_", most)):
        for file in [file for file in files if split in file["filename"]][:most]:
            path = directory / file["filename"].split("_", 1)[-1]
            if not path.exists():
                os.replace(download(directory / "download", **file), path)
            print(f"{path}: {(path.stat().st_size - 1024) // 2:,} tokens", flush=True)


def prepare(args):
    dataset = args.sources[0] if args.sources[0] in DATASETS else None
    known = DATASETS.get(dataset, {})
    directory = args.output or Path(__file__).parent / "cache" / (dataset or Path(args.sources[0]).stem)
    local = None if dataset else [(os.path.basename(path), os.stat(path)) for path in args.sources]
    ranks = load_ranks(args)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "gpt2_tokenizer.bin", ranks)
    if args.ready:
        return take_ready(directory, known["ready"], args.shards)
    manifest = load_manifest(directory, {
        "dataset": dataset,
        "files": local and [{"name": name, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for name, s in local],
        "ranks": hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest(),
        **{key: getattr(args, key) for key in ("field", "shard_tokens", "val_tokens", "max_tokens")},
    })
    sources = manifest["sources"] = manifest["sources"] or known.get("files") or hub_files(*known["hub"])
    tenth = max(1, sum(s.st_size for _, s in local) // 40) if local else sys.maxsize  # a token has about four bytes
    manifest["val_tokens"] = args.val_tokens or known.get("val_tokens") or min(args.shard_tokens, tenth)
    shards = manifest["shards"]
    start = shards[-1]["next"] if shards else {"source": 0, "position": 0, "skip": 0}

    def texts_of_batches():
        position = start["position"]
        for i in range(start["source"], len(sources)):
            path = args.sources[i] if local else download(directory / "download", **sources[i])
            reader = read_speeches if dataset == "tinyshakespeare" else READERS[Path(path).suffix]
            with reading(path, f"damaged, or no text in the field {args.field!r}"):
                for position, texts in reader(path, position, args.field):
                    yield {"source": i, "position": position}, texts
            position = 0

    pool = concurrent.futures.ThreadPoolExecutor(args.jobs)
    batches = in_order(pool, texts_of_batches(), make_encoding(ranks), 3 * args.jobs)
    some = (batch for batch in batches if len(batch[1]))
    batches = itertools.chain(some, [({"source": len(sources), "position": 0}, [])])
    with progress(total=args.max_tokens, initial=sum(shard["tokens"] for shard in shards), unit=" tokens") as bar:
        total = write_shards(directory, manifest, batches, start["skip"], bar)
    pool.shutdown(cancel_futures=True)
    if total <= manifest["val_tokens"]:
        (directory / "manifest.json").unlink(missing_ok=True)
        raise Fail(f"{directory}: no tokens left to train on: found {total:,}, and {manifest['val_tokens']:,} go to "
                   "validation; give more text or a smaller --val-tokens")
    pattern = glob.escape(str(directory)).replace("\\", r"\\")  # C's glob() takes one for an escape
    command = ["./train_gpt2cu", "-i", f"{pattern}/train_*.bin", "-j", f"{pattern}/val_*.bin", "--tokenizer",
               f"{directory}/gpt2_tokenizer.bin", "-o", "run1"]
    print(f"{total:,} tokens\nnext: {shlex.join(command)}")


def tokens(text):
    """An option's number, 1e8 as well as 100000000."""
    number = float(text)
    if not 1 <= number < 1e15:
        raise ValueError
    return int(number)


def main():
    parser = argparse.ArgumentParser(
        description="Turns text into token shards for ./train_gpt2cu, with GPT-2's byte pair encoding.",
        epilog="Interrupted? The same command goes on. In a .txt file <|endoftext|> separates documents. HF_ENDPOINT "
        "names a mirror of the Hugging Face hub. README.md has examples. Needs: pip install -r scripts/requirements.txt")
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help=f"one of {', '.join(DATASETS)}; or .txt, .jsonl and .parquet files")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: data/cache/ and the source's name")
    parser.add_argument("--shard-tokens", type=tokens, default=10**8, metavar="N", help="default: 1e8")
    parser.add_argument("--val-tokens", type=tokens, metavar="N",
                        help="the first N tokens are for validation (default: a shard, but about a tenth at most)")
    parser.add_argument("--max-tokens", type=tokens, metavar="N", help="stop after so many (default: all)")
    parser.add_argument("--ready", action="store_true", help="download shards that others made, on huggingface.co ("
                        f"{', '.join(f'{name}: {of}' for name, of in READY.items())}; licence of the text: ODC-By 1.0)")
    parser.add_argument("--shards", type=tokens, metavar="N", help="with --ready: N to train on at most (default: all)")
    parser.add_argument("--field", default="text", help="of .jsonl and .parquet files (default: text)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="threads (default: one a core)")
    add_ranks_options(parser)
    args = parser.parse_args()
    for source in args.sources:
        if (source not in DATASETS or len(args.sources) > 1) and Path(source).suffix not in READERS:
            parser.error(f"{source}: expected one of {', '.join(DATASETS)} alone, or {', '.join(READERS)} files")
    if args.sources[0] not in READY or args.val_tokens or args.max_tokens if args.ready else args.shards:
        parser.error(f"--ready goes with {', '.join(READY)} and --shards alone, and --shards with it")
    if args.shard_tokens >= 2**31 or args.jobs < 1:
        parser.error(f"expected --shard-tokens below 2^31 and --jobs from 1, found {args.shard_tokens} and {args.jobs}")
    run(prepare, args)


if __name__ == "__main__":
    main()
