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
import codecs
import collections
import concurrent.futures
import glob
import hashlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import struct
import sys
import threading
from pathlib import Path

from prepare_common import (END_OF_TEXT, Fail, add_ranks_options, commit, download, encodable, fetch, invalid_utf8,
                            json_lines, load_ranks, make_encoding, need, progress, reading, regular, run, sha256_of,
                            write_file, write_tokenizer)
from stdout import guard_stdout

SHARD_MAGIC = 20240520
BATCH_BYTES = 1 << 20
BEGIN = {"source": 0, "position": 0, "skip": 0, "documents": 0, "empty": 0}  # where a shard begins; here the first one

HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
# Files of a fixed address, or (repository, folder, files; None: all .parquet) of the Hugging Face hub, whose listing
# gives their SHA-256. TinyStories' own validation file comes first; it has a little more than the tokens taken. "ready"
# is a repository whose files are shards, named …_val_000000.bin and …_train_000001.bin on.
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
    "fineweb10B": {"hub": ("HuggingFaceFW/fineweb", "sample/10BT", None), "ready": "kjj0/fineweb10B-gpt2"},
    "fineweb100B": {"hub": ("HuggingFaceFW/fineweb", "sample/100BT", None)},
    "fineweb-edu": {"hub": ("HuggingFaceFW/fineweb-edu", "sample/10BT", None), "ready": "kjj0/finewebedu10B-gpt2"},
}


def hub_files(repository, folder, names, ending=".parquet"):
    url = f"{HUB}/api/datasets/{repository}/tree/main/{folder}".rstrip("/")
    with reading(url, "check HF_ENDPOINT or the network"):
        found = {Path(entry["path"]).name: {
            "url": f"{HUB}/datasets/{repository}/resolve/main/{entry['path']}",
            "bytes": int(entry["size"]),
            "sha256": entry.get("lfs", {}).get("oid"),
        } for entry in json.load(fetch(url))}
    names = names or sorted(name for name in found if name.endswith(ending))
    if not names or not set(names) <= set(found):
        raise Fail(f"{url}: expected {', '.join(names) or ending + ' files'}, found {', '.join(found) or 'nothing'}")
    return [found[name] for name in names]


# ---------------------------------------------------------------------------------------------------------- the workers


def start_worker(ranks):
    global encoding
    encoding = make_encoding(ranks)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    # Pool workers outlive a parent that was killed, waiting for work forever: leave with it.
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


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
    return tokens.tobytes(), documents, empty


# ---------------------------------------------------------------------------------------------------------- the readers
# Each yields (position, bytes of the file before it, [(begins a document, text)]) from a position that it once yielded.

# Plain text, here and in the trainer. A byte order mark at the file's beginning is dropped. Between documents stands
# <|endoftext|> with at most one line end before and one behind it, \n or \r\n each. A line end between two of them
# belongs to the first. Nothing else is stripped, even at the file's beginning and end: a last line end is text.
DOCUMENTS = re.compile(r"(?:\r?\n)?<\|endoftext\|>(?:\r?\n)?")
SPEECHES = re.compile(r"(?<=\n\n)")  # an empty line ends one
# The last place where cutting a text changes no token: between a visible character and white space, since GPT-2's
# pattern looks ahead only from white space and never back. Not after >, which may end a separator.
LAST_CUT = re.compile(r"(?s:.*)[^\s>](?=[ \t\r\n])")


NO_TEXT = {rb"\x93NUMPY": "a NumPy array", rb"\xff\xfe\0\0|\0\0\xfe\xff": "UTF-32", rb"\xff\xfe|\xfe\xff": "UTF-16",
           rb"\x1f\x8b": "gzip", rb"PK\x03\x04": "a zip archive", rb"PAR1": "Parquet", rb"(?s:.{7})\0\{": "safetensors"}


def no_text(path, found):
    return Fail(f"{path}: looks like {found}, expected plain text in UTF-8; convert it, or correct its name's end")


def read_text(path, position, separator=DOCUMENTS):
    decoder, text, more = codecs.getincrementaldecoder("utf-8")(), "", True
    with open(path, "rb") as file:
        begins = file.read(16)
        for pattern, name in NO_TEXT.items():
            if re.match(pattern, begins):
                raise no_text(path, name)
        start = len(codecs.BOM_UTF8) if begins.startswith(codecs.BOM_UTF8) else 0
        position = max(position, start)
        file.seek(position)
        while more:
            block = file.read(BATCH_BYTES)
            more = bool(block)
            if b"\0" in block:
                raise no_text(path, f"binary data: a NUL byte at offset {file.tell() - len(block) + block.index(0)}")
            try:
                text += decoder.decode(block, final=not more)
            except UnicodeDecodeError as error:
                raise invalid_utf8(path, position + len(text.encode()), error) from None
            cut = LAST_CUT.match(text) if more else re.match("(?s:.*)", text)
            if cut and text:
                parts = separator.split(cut.group())
                yield position, position, [(i > 0 or position == start, part) for i, part in enumerate(parts)]
                position += len(cut.group().encode())
                text = text[cut.end():]


def read_jsonl(path, field, position):
    """An object a line, its text under `field`."""
    begin, texts = position, []
    for at, found in json_lines(path, position):
        if at - begin >= BATCH_BYTES:
            yield begin, begin, texts
            begin, texts = at, []
        try:
            text = found[field]
        except (KeyError, TypeError):
            raise Fail(f"{path}: object at offset {at} has no field {field!r}; name it with --field") from None
        if not isinstance(text, (str, type(None))):
            raise Fail(f"{path}: object at offset {at}: {field!r} is {type(text).__name__}, expected a string")
        texts.append((True, text or ""))
    if texts:
        yield begin, begin, texts


def read_parquet(path, field, position):
    """A document a row, its text in the column `field`; positions are row numbers."""
    parquet, arrow = need("pyarrow.parquet"), need("pyarrow")
    with parquet.ParquetFile(path) as file:
        columns = file.schema_arrow
        if field not in columns.names:
            raise Fail(f"{path}: no column {field!r}, found {', '.join(columns.names)}; name it with --field")
        if columns.field(field).type not in (arrow.string(), arrow.large_string()):
            raise Fail(f"{path}: column {field!r} is {columns.field(field).type}, expected string; name another")
        row, size = 0, os.path.getsize(path)
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            if row + len(batch) > position:
                begin = max(row, position)
                texts = [(True, text or "") for text in batch.column(0)[begin - row:].to_pylist()]
                yield begin, size * row // file.metadata.num_rows, texts
            row += len(batch)


def read(path, field, separator, position):
    suffix = Path(path).suffix
    with reading(path):
        for batch in (read_text(path, position, separator) if suffix == ".txt" else
                      (read_jsonl if suffix == ".jsonl" else read_parquet)(path, field, position)):
            for _, text in batch[2]:
                encodable(path, text)
            yield batch


# ----------------------------------------------------------------------------------------------------------- the shards


def next_shard(manifest):
    """Its name, and how many tokens it takes; 0 if there are enough."""
    shards, settings = manifest["shards"], manifest["settings"]
    total = sum(shard["tokens"] for shard in shards)
    validation = manifest["val_tokens"] - total
    room = min(settings["shard_tokens"], validation if validation > 0 else sys.maxsize,
               (settings["max_tokens"] or sys.maxsize) - total)
    return f"{'val' if validation > 0 else 'train'}_{len(shards):06d}.bin", room


def write_shards(directory, manifest, batches):
    """Cuts the stream of tokens into shards. manifest["shards"] says which are finished and where the next begins."""
    place, data = next(batches)
    while data and (shard := next_shard(manifest))[1]:
        name, room = shard
        file, count = open(regular(directory / f"{name}.part"), "wb"), 0
        file.write(bytes(1024))  # the header, once the count is known
        while data and count < room:
            piece = memoryview(data)[place["skip"] * 2:][:(room - count) * 2]
            file.write(piece)
            count += len(piece) // 2
            place["skip"] += len(piece) // 2
            if place["skip"] * 2 == len(data):
                place, data = next(batches)
        file.seek(0)
        file.write(struct.pack("<256i", SHARD_MAGIC, 1, count, *[0] * 253))
        file.flush()
        sha256 = sha256_of(file.name)
        commit(file, directory / name)
        manifest["shards"].append({"name": name, "tokens": count, "sha256": sha256, "next": dict(place)})
        save_manifest(directory, manifest)
        need("tqdm").tqdm.write(f"{directory / name}: {count:,} tokens", file=sys.stdout)
    return place


def save_manifest(directory, manifest):
    write_file(directory / "manifest.json", [json.dumps(manifest).encode(), b"\n"])


def load_manifest(directory, settings):
    """What an earlier run with the same settings has done, or a new manifest."""
    path = directory / "manifest.json"
    if not path.exists():
        return {"settings": settings, "sources": settings.get("files"), "shards": [], "complete": False}
    with reading(path, "delete it to begin anew"):
        manifest = json.loads(path.read_bytes())
        was, shards = manifest["settings"], manifest["shards"]
        for key, value in settings.items():
            if was.get(key) != value:
                raise Fail(f"{path}: made with {key} = {was.get(key)}, now it is {value}; choose another --output, or "
                           "delete it to begin anew")
        numbers = [manifest[key] for key in ("tokens", "documents", "empty") if manifest["complete"]]
        numbers += [source["bytes"] for source in manifest["sources"]] + [shard["tokens"] for shard in shards]
        numbers += [len(source["url"]) for source in manifest["sources"] if "ready" in settings]
        numbers += [shard["next"][key] for shard in shards for key in BEGIN]
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise ValueError("a number is wrong")
        paths = [directory / shard["name"] for shard in shards]
        broken = next((i for i, shard in enumerate(shards)
                       if not paths[i].exists() or sha256_of(paths[i]) != shard["sha256"]), None)
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


def wrong_shard(path):
    """What is wrong with the header of a shard that others made, or nothing."""
    with open(path, "rb") as file:
        found = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
    expected = SHARD_MAGIC, 1, (os.path.getsize(path) - 1024) / 2
    return found != expected and f"no shard: expected magic, version and, by its size, tokens {expected}, found {found}"


def take_ready(args, directory, repository, ranks):
    """Downloads the shards for validation and at most args.shards others. The list of files is kept, as in prepare."""
    manifest = load_manifest(directory, {"ready": repository})
    files = manifest["sources"] = manifest["sources"] or hub_files(repository, "", None, ".bin")
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "gpt2_tokenizer.bin", ranks)
    save_manifest(directory, manifest)
    for split, most in (("val", None), ("train", args.shards)):
        for file in [file for file in files if f"_{split}_" in file["url"]][:most]:
            name = Path(file["url"]).name.split("_", 1)[-1]
            path = download(file["url"], directory / name, file.get("sha256"), wrong_shard)
            print(f"{path}: {(path.stat().st_size - 1024) // 2:,} tokens", flush=True)


def prepare(args):
    dataset = args.sources[0] if args.sources[0] in DATASETS else None
    known = DATASETS.get(dataset, {})
    directory = args.output or Path(__file__).parent / "cache" / (dataset or Path(args.sources[0]).stem)
    need("tqdm")
    ranks = load_ranks(args.ranks, args.ranks_sha256)
    if args.ready:
        return take_ready(args, directory, known["ready"], ranks)
    make_encoding(ranks)  # here an error is a line, in a worker a page

    local = None if dataset else [(os.path.basename(path), os.stat(regular(path))) for path in args.sources]
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
    about = min(total_bytes // 4, args.max_tokens or sys.maxsize)  # tokens, of about four bytes each
    if about > 10000 * args.shard_tokens:  # the manifest is written anew with each
        raise Fail(f"--shard-tokens: expected at most 10,000 shards, found {about // args.shard_tokens:,}; give more")
    tenth = max(1, total_bytes // 40)
    manifest["val_tokens"] = args.val_tokens or known.get("val_tokens") or min(args.shard_tokens, tenth)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "gpt2_tokenizer.bin", ranks)

    shards = manifest["shards"]
    if shards:
        print(f"{directory}: {len(shards)} finished {'shard' if len(shards) == 1 else 'shards'} kept", flush=True)
    start = shards[-1]["next"] if shards else BEGIN
    separator = SPEECHES if dataset == "tinyshakespeare" else DOCUMENTS  # as llm.c has it

    def texts_of_batches():
        position = start["position"]
        for i in range(start["source"], len(sources)):
            before, url = sum(source["bytes"] for source in sources[:i]), sources[i].get("url")
            path = args.sources[i] if not url else download(url, directory / "download" / Path(url).name,
                                                            sources[i]["sha256"])
            for position, bytes_read, texts in read(path, args.field, separator, position):
                bar.update(before + bytes_read - bar.n)
                yield {"source": i, "position": position}, texts
            position = 0
        bar.update(total_bytes - bar.n)

    def tokens_of_batches(pool):
        """(place, tokens) of each batch that has some, and the end's place without any."""
        skip, counts = start["skip"], {key: start[key] for key in ("documents", "empty")}
        for place, (data, documents, empty) in in_order(pool, texts_of_batches(), 3 * args.jobs):
            place.update(counts, skip=min(skip, len(data) // 2))
            skip -= place["skip"]
            if place["skip"] * 2 < len(data):
                yield place, data
            counts = {"documents": counts["documents"] + documents, "empty": counts["empty"] + empty}
        yield {"source": len(sources), "position": 0, "skip": 0, **counts}, b""

    if not manifest["complete"]:
        pool = concurrent.futures.ProcessPoolExecutor(args.jobs, initializer=start_worker, initargs=(ranks,))
        with progress(total=total_bytes, unit="B", desc="tokenising") as bar:
            end = write_shards(directory, manifest, tokens_of_batches(pool))
        pool.shutdown(cancel_futures=True)  # not where something is raised, because a killed worker never ends
        total = sum(shard["tokens"] for shard in shards)
        if total <= manifest["val_tokens"]:
            (directory / "manifest.json").unlink(missing_ok=True)
            raise Fail(f"{directory}: no tokens left to train on: expected more than {manifest['val_tokens']:,}, which "
                       f"go to validation, found {total:,}; give more text or a smaller --val-tokens")
        manifest.update(complete=True, tokens=total, documents=end["documents"], empty=end["empty"])
        save_manifest(directory, manifest)
    pattern = glob.escape(str(directory)).replace("\\", r"\\")  # C's glob() takes one for an escape
    command = ["./train_gpt2cu", "-i", f"{pattern}/train_*.bin", "-j", f"{pattern}/val_*.bin", "--tokenizer",
               f"{directory}/gpt2_tokenizer.bin", "-o", "run1"]
    print(f"{manifest['tokens']:,} tokens, documents: {manifest['documents']:,}, empty ones skipped: "
          f"{manifest['empty']:,}\nnext: {shlex.join(command)}")


def tokens(text):
    """An option's number, 1e8 as well as 100000000."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"expected a number from 1, such as 1e8, found {text}")
    return int(number)


def main():
    guard_stdout()
    parser = argparse.ArgumentParser(
        description="Turns text into token shards for ./train_gpt2cu, with GPT-2's byte pair encoding.",
        epilog="""examples:
  python3 data/prepare.py tinyshakespeare                           the smallest: a megabyte
  python3 data/prepare.py fineweb-edu --max-tokens 1e9              as much of a large one as wanted
  python3 data/prepare.py fineweb10B --ready --shards 10            its tokens as others made them, 200 MB a shard
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
    ready = {name: known["ready"] for name, known in DATASETS.items() if "ready" in known}
    parser.add_argument("--ready", action="store_true", help="download shards that others made, on huggingface.co ("
                        f"{', '.join(f'{name}: {of}' for name, of in ready.items())}; licence of the text: ODC-By 1.0)")
    parser.add_argument("--shards", type=tokens, metavar="N", help="with --ready: N to train on at most (default: all)")
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
    if args.sources[0] not in ready or args.val_tokens or args.max_tokens if args.ready else args.shards:
        parser.error(f"--ready goes with {', '.join(ready)} and --shards alone, and --shards with it")
    if args.shard_tokens >= 2**31 or args.jobs < 1:
        parser.error(f"expected --shard-tokens below 2^31 and --jobs from 1, found {args.shard_tokens} and {args.jobs}")
    run(prepare, args)


if __name__ == "__main__":
    main()
