#!/usr/bin/env python3
"""Turns text into token shards that ./train_gpt2cu reads, with GPT-2's byte pair encoding (tiktoken).

  sources  →  batches of ~1 MB  →  tokens, on all cores  →  shards of --shard-tokens, in order
  files       cut where a resumed    one <|endoftext|>       val_000000.bin, train_000001.bin, …
              run can cut as well    before each document    written aside, fsynced, then renamed

Nothing is ever held whole: a few batches a core are in flight. The stream of tokens depends on the sources alone, not
on how it was cut into batches, so manifest.json needs just three numbers a shard to continue after it: the file, the
position there where a batch began, and how many tokens of that batch earlier shards took. Finished shards are kept
(after a check of their SHA-256), the interrupted one is redone, and the result is the same byte for byte.

A shard is llm.c's: 256 int32 (magic 20240520, version 1, number of tokens), then uint16 tokens, little endian.
Limit: a document of .jsonl and .parquet must fit in memory; one of .txt need not, as long as it has spaces."""
import argparse
import array
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import re
import signal
import struct
import sys
import threading
from pathlib import Path

from prepare_common import (END_OF_TEXT, Fail, add_ranks_options, commit, download, fetch, load_ranks, make_encoding,
                            need, progress, run, sha256_of, write_file, write_tokenizer)

SHARD_MAGIC = 20240520
BATCH_BYTES = 1 << 20

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
# Files of a fixed address, or (repository, folder, files; None: all .parquet) of the Hugging Face hub, whose listing
# gives their SHA-256. TinyStories' own validation file comes first; it has a little more than the tokens taken.
DATASETS = {
    "tinyshakespeare": {
        "files": [{
            "url": "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "bytes": 1115394,
            "sha256": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        }],
        "val_tokens": 32768,
    },
    "tinystories": {
        "hub": ("roneneldan/TinyStories", "", ["TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"]),
        "val_tokens": 5_000_000,
    },
    "fineweb10B": {"hub": ("HuggingFaceFW/fineweb", "sample/10BT", None)},
    "fineweb100B": {"hub": ("HuggingFaceFW/fineweb", "sample/100BT", None)},
    "fineweb-edu": {"hub": ("HuggingFaceFW/fineweb-edu", "sample/10BT", None)},
}


def hub_files(repository, folder, names):
    url = f"{HUB}/api/datasets/{repository}/tree/main/{folder}".rstrip("/")
    try:
        entries = {Path(entry["path"]).name: entry for entry in json.load(fetch(url))}
    except (ValueError, KeyError, TypeError):
        raise Fail(f"{url}: expected a list of files, found something else; check HF_ENDPOINT or the network") from None
    names = names or sorted(name for name in entries if name.endswith(".parquet"))
    if not names or not set(names) <= set(entries):
        raise Fail(f"{url}: expected {', '.join(names) or 'parquet files'}, found {', '.join(entries) or 'nothing'}")
    return [{
        "url": f"{HUB}/datasets/{repository}/resolve/main/{entries[name]['path']}",
        "bytes": entries[name]["size"],
        "sha256": entries[name].get("lfs", {}).get("oid"),
    } for name in names]


# ---------------------------------------------------------------------------------------------------------- the workers


def start_worker(ranks):
    global encoding
    encoding = make_encoding(ranks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Pool workers outlive a parent that was killed, waiting for work forever: leave with it.
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def workers(jobs, ranks):
    pool = concurrent.futures.ProcessPoolExecutor(jobs, initializer=start_worker, initargs=(ranks,))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # waiting for workers that a signal hit can last for ever
        raise
    pool.shutdown()


def encode(texts):
    """Tokens of [(begins a document, text)] as bytes; documents and empty documents in it."""
    tokens, documents, empty = array.array("H"), 0, 0
    for begins, text in texts:
        if begins and not text.strip():
            empty += 1
            continue
        if begins:
            documents += 1
            tokens.append(END_OF_TEXT)
        tokens.extend(encoding.encode_ordinary(text))
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes(), documents, empty


# ---------------------------------------------------------------------------------------------------------- the readers
# Each yields (position, bytes of the file before it, [(begins a document, text)]) from a position that it once yielded.

SEPARATOR = re.compile(r"\n?<\|endoftext\|>\n?")
# The last place where cutting a text changes no token: between a visible character and white space, since GPT-2's
# pattern looks ahead only from white space and never back. Not after >, which may end a separator.
LAST_CUT = re.compile(r"(?s:.*)[^\s>](?=[ \t\r\n])")


def invalid_utf8(path, offset, error):
    byte = error.object[error.start]
    return Fail(f"{path}: invalid UTF-8 at offset {offset + error.start}: found byte 0x{byte:02x} ({error.reason}); "
                "convert the file to UTF-8")


def read_text(path, position):
    """One document, or several with <|endoftext|> between them."""
    with open(path, "rb") as file:
        file.seek(position)
        raw, more = b"", True
        while more:
            block = file.read(BATCH_BYTES)
            raw, more = raw + block, bool(block)
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                if not more or error.reason != "unexpected end of data":
                    raise invalid_utf8(path, position, error) from None
                text = raw[:error.start].decode()  # the rest of that character is in the next block
            cut = LAST_CUT.match(text) if more else re.match("(?s:.*)", text)
            if cut and raw:
                parts = SEPARATOR.split(cut.group())
                yield position, position, [(i > 0 or position == 0, part) for i, part in enumerate(parts)]
                used = len(cut.group().encode())
                raw, position = raw[used:], position + used


def read_paragraphs(path, position):
    """A document ends after an empty line; llm.c cuts tinyshakespeare into speeches this way. Small files only."""
    speeches = re.split(r"(?<=\n\n)", Path(path).read_bytes()[position:].decode())
    yield position, position, [(True, speech) for speech in speeches]


def read_jsonl(path, field, position):
    """An object a line, its text under `field`."""
    with open(path, "rb") as file:
        file.seek(position)
        texts, begin, at = [], position, position
        for line in file:
            try:
                text = json.loads(line.decode())[field] if line.strip() else None
                if not isinstance(text, (str, type(None))):
                    raise Fail(f"{path}: object at offset {at}: {field!r} is {type(text).__name__}, expected a string")
            except UnicodeDecodeError as error:
                raise invalid_utf8(path, at, error) from None
            except json.JSONDecodeError as error:
                raise Fail(f"{path}: not JSON at offset {at + error.pos}: {error.msg}; one object a line") from None
            except (KeyError, TypeError, IndexError):
                raise Fail(f"{path}: object at offset {at} has no field {field!r}; name it with --field") from None
            texts += [(True, text or "")] if line.strip() else []
            at += len(line)
            if at - begin >= BATCH_BYTES:
                yield begin, begin, texts
                texts, begin = [], at
        if texts:
            yield begin, begin, texts


def read_parquet(path, field, position):
    """A document a row, its text in the column `field`; positions are row numbers."""
    parquet = need("pyarrow.parquet")
    arrow = need("pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow
            if field not in columns.names:
                raise Fail(f"{path}: no column {field!r}, found {', '.join(columns.names)}; name it with --field")
            if columns.field(field).type not in (arrow.string(), arrow.large_string()):
                raise Fail(f"{path}: column {field!r} is {columns.field(field).type}, expected string; name another")
            row, size = 0, os.path.getsize(path)
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= position:  # all before the position
                    row += rows
                    continue
                for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=[field]):
                    skip = min(max(position - row, 0), len(batch))
                    texts = [(True, text or "") for text in batch.column(0)[skip:].to_pylist()]
                    if texts:
                        yield row + skip, size * row // file.metadata.num_rows, texts
                    row += len(batch)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise Fail(f"{path}: cannot read as parquet: {str(error).splitlines()[0]}; get the file again") from None


def open_source(path, field, paragraphs, position):
    suffix = Path(path).suffix
    if suffix == ".txt":
        return (read_paragraphs if paragraphs else read_text)(path, position)
    return (read_jsonl if suffix == ".jsonl" else read_parquet)(path, field, position)


# ----------------------------------------------------------------------------------------------------------- the shards


class Shards:
    """Cuts the stream of tokens into shards; manifest["shards"] says which are finished and where the next begins."""

    def __init__(self, directory, manifest):
        self.directory, self.manifest, self.file = directory, manifest, None
        self.total = sum(shard["tokens"] for shard in manifest["shards"])  # in finished shards

    def begin(self):
        """Opens the next shard; False if there are enough tokens."""
        val_left = self.manifest["val_tokens"] - self.total
        settings = self.manifest["settings"]
        self.limit = min(settings["shard_tokens"], val_left if val_left > 0 else sys.maxsize,
                         (settings["max_tokens"] or sys.maxsize) - self.total)
        if self.limit == 0:
            return False
        split = "val" if val_left > 0 else "train"
        self.path = self.directory / f"{split}_{len(self.manifest['shards']):06d}.bin"
        self.part = self.path.with_name(self.path.name + ".part")
        self.file, self.tokens = open(self.part, "w+b"), 0
        self.file.write(bytes(1024))  # the header, once the count is known
        return True

    def write(self, data, place):
        """Tokens of the batch at `place`, from place["skip"] on; False once there are enough."""
        while place["skip"] * 2 < len(data):
            if not self.file and not self.begin():
                return False
            piece = data[place["skip"] * 2:][:(self.limit - self.tokens) * 2]
            self.file.write(piece)
            self.tokens += len(piece) // 2
            place["skip"] += len(piece) // 2
            if self.tokens == self.limit:
                self.finish(place)
        return True

    def finish(self, place):
        self.file.seek(0)
        self.file.write(struct.pack("<256i", SHARD_MAGIC, 1, self.tokens, *[0] * 253))
        self.file.flush()
        sha256 = sha256_of(self.part)
        commit(self.file, self.part, self.path)
        self.file = None
        self.total += self.tokens
        shard = {"name": self.path.name, "tokens": self.tokens, "sha256": sha256, "next": dict(place)}
        self.manifest["shards"].append(shard)
        save_manifest(self.directory, self.manifest)
        need("tqdm").tqdm.write(f"{self.path}: {self.tokens:,} tokens", file=sys.stdout)


def save_manifest(directory, manifest):
    write_file(directory / "manifest.json", json.dumps(manifest, indent=1).encode() + b"\n")


def load_manifest(directory, settings):
    """What an earlier run with the same settings has done, or a new manifest."""
    path = directory / "manifest.json"
    if not path.exists():
        return {"settings": settings, "sources": settings["files"], "shards": [], "complete": False}
    try:
        manifest = json.loads(path.read_bytes())
        was, shards = manifest["settings"], manifest["shards"]
        paths = [directory / shard["name"] for shard in shards]
        broken = next((i for i, shard in enumerate(shards)
                       if not paths[i].exists() or sha256_of(paths[i]) != shard["sha256"]), None)
    except (ValueError, KeyError, TypeError):
        raise Fail(f"{path}: damaged; delete it to begin anew") from None
    for key, value in settings.items():
        if was.get(key) != value:
            raise Fail(f"{path}: made with {key} = {was.get(key)}, now it is {value}; choose another --output, or "
                       "delete it to begin anew")
    if broken is not None:
        print(f"{paths[broken]}: not what was written; shards are made anew from here on")
        manifest.update(shards=shards[:broken], complete=False)
    return manifest


# ---------------------------------------------------------------------------------------------------------- the program


def in_order(pool, batches, ahead):
    """(place, result) of each batch, with at most `ahead` of them in flight."""
    pending = collections.deque()
    for place, texts in batches:
        pending.append((place, pool.submit(encode, texts)))
        if len(pending) > ahead:
            place, future = pending.popleft()
            yield place, future.result()
    for place, future in pending:
        yield place, future.result()


def prepare(args):
    dataset = args.sources[0] if args.sources[0] in DATASETS else None
    known = DATASETS.get(dataset, {})
    directory = args.output or Path(__file__).parent / "cache" / (dataset or Path(args.sources[0]).stem)
    need("tqdm")
    ranks = load_ranks(args.ranks, args.ranks_sha256)
    make_encoding(ranks)  # here an error is a line, in a worker a page

    local = None if dataset else [(os.path.basename(path), os.stat(path)) for path in args.sources]
    manifest = load_manifest(directory, {
        "dataset": dataset,
        "files": local and [{"name": name, "bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for name, s in local],
        "field": args.field,
        "ranks": hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest(),
        "shard_tokens": args.shard_tokens,
        "val_tokens": args.val_tokens,
        "max_tokens": args.max_tokens,
    })
    # A run that goes on keeps its list of files: the hub is not asked again.
    sources = manifest["sources"] = manifest["sources"] or known.get("files") or hub_files(*known["hub"])
    total_bytes = sum(source["bytes"] for source in sources)
    tenth = max(1, total_bytes // 40)  # of the tokens, of about four bytes each
    manifest["val_tokens"] = args.val_tokens or known.get("val_tokens") or min(args.shard_tokens, tenth)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "gpt2_tokenizer.bin", ranks)

    shards = manifest["shards"]
    if shards:
        print(f"{directory}: {len(shards)} finished {'shard' if len(shards) == 1 else 'shards'} kept", flush=True)
    start = shards[-1]["next"] if shards else {"source": 0, "position": 0, "skip": 0, "documents": 0, "empty": 0}
    counts = {key: start[key] for key in ("documents", "empty")}

    def batches():
        before = sum(source["bytes"] for source in sources[:start["source"]])
        for i in range(start["source"], len(sources)):
            url = sources[i].get("url")
            path = args.sources[i] if not url else download(url, directory / "download" / Path(url).name,
                                                            sources[i]["sha256"])
            begin = start["position"] if i == start["source"] else 0
            for position, read, texts in open_source(path, args.field, dataset == "tinyshakespeare", begin):
                bar.update(before + read - bar.n)
                skip = start["skip"] if (i, position) == (start["source"], start["position"]) else 0
                yield {"source": i, "position": position, "skip": skip}, texts
            before += sources[i]["bytes"]
        bar.update(total_bytes - bar.n)

    if not manifest["complete"]:
        writer = Shards(directory, manifest)
        with progress(total=total_bytes, unit="B", desc="tokenising") as bar, workers(args.jobs, ranks) as pool:
            for place, (data, documents, empty) in in_order(pool, batches(), 3 * args.jobs):
                if not writer.write(data, dict(place, **counts)):
                    break
                counts["documents"] += documents
                counts["empty"] += empty
        if writer.file:
            writer.finish({"source": len(sources), "position": 0, "skip": 0, **counts})
        if writer.total <= manifest["val_tokens"]:
            (directory / "manifest.json").unlink(missing_ok=True)
            raise Fail(f"{directory}: no tokens left to train on: expected more than {manifest['val_tokens']:,}, which "
                       f"go to validation, found {writer.total:,}; give more text or a smaller --val-tokens")
        manifest.update(complete=True, tokens=writer.total, **counts)
        save_manifest(directory, manifest)
    print(f"{manifest['tokens']:,} tokens, {manifest['documents']:,} documents, {manifest['empty']:,} empty ones "
          f"skipped\n./train_gpt2cu -i '{directory}/train_*.bin' -j '{directory}/val_*.bin' "
          f"--tokenizer {directory}/gpt2_tokenizer.bin")


def tokens(text):
    """An option's number of tokens, 1e8 as well as 100000000."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"expected a number of tokens from 1, such as 1e8, found {text}")
    return int(number)


def main():
    parser = argparse.ArgumentParser(
        description="Turns text into token shards for ./train_gpt2cu, with GPT-2's byte pair encoding.",
        epilog="""examples:
  python3 data/prepare.py tinyshakespeare                           the smallest: a megabyte
  python3 data/prepare.py fineweb-edu --max-tokens 1e9              as much of a large one as wanted
  python3 data/prepare.py book.txt notes.txt -o data/cache/books    local text
  python3 data/prepare.py crawl_*.jsonl --field content --jobs 8    an object a line, the text under "content"
  python3 data/prepare.py book.txt --ranks vocab.bpe                without network

Interrupted? The same command goes on. In a .txt file <|endoftext|> separates documents. HF_ENDPOINT names a mirror of
the Hugging Face hub. Needs: pip install -r scripts/requirements.txt""",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", metavar="SOURCE",
                        help=f"one of {', '.join(DATASETS)}; or .txt, .jsonl and .parquet files")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="default: data/cache/ and the source's name")
    parser.add_argument("--shard-tokens", type=tokens, default=10**8, metavar="N", help="default: 1e8")
    parser.add_argument("--val-tokens", type=tokens, metavar="N",
                        help="the first N tokens are for validation (default: a shard, but about a tenth at most)")
    parser.add_argument("--max-tokens", type=tokens, metavar="N", help="stop after so many (default: all)")
    parser.add_argument("--field", default="text", help="of .jsonl and .parquet files (default: text)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, metavar="N", help="processes (default: every core)")
    add_ranks_options(parser)
    args = parser.parse_args()
    for source in args.sources:
        if source in DATASETS and len(args.sources) > 1:
            parser.error(f"{source} cannot be mixed with other sources")
        if source not in DATASETS and Path(source).suffix not in (".txt", ".jsonl", ".parquet"):
            parser.error(f"{source}: expected one of {', '.join(DATASETS)}, or a .txt, .jsonl or .parquet file")
    if args.shard_tokens >= 2**31 or args.jobs < 1:
        parser.error(f"expected --shard-tokens below 2^31 and --jobs from 1, found {args.shard_tokens} and {args.jobs}")
    run(prepare, args)


if __name__ == "__main__":
    main()
