#!/usr/bin/env python3
"""Tests of data/prepare.py and data/hellaswag.py, all offline: on a small list of ranks that is trained here, against
tiktoken's own encoder with the pattern of GPT-2's release. Where libraries are missing, small ones stand in for them.
Run: python3 dev/test_prepare.py [part of a name]"""
import array
import atexit
import base64
import collections
import errno
import hashlib
import http.server
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import Skip, main, need

ROOT = Path(__file__).resolve().parent.parent
PREPARE, HELLASWAG = ROOT / "data" / "prepare.py", ROOT / "data" / "hellaswag.py"
TRAINER = ROOT / "train_gpt2cu"
sys.path.insert(0, str(PREPARE.parent))
END_OF_TEXT = 50256
SEED = int(os.environ.get("SEED", 1))
PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = ("The ship's crew didn't see it: we'll say they've gone north, I'm sure. "
           "Twelve sailors sang in 1789, all of them!\n")
NASTY = ["a", "Zoë", "it's", "we'LL", "12", "...", "<", ">", "|>", "<|", " ", "  ", "\n", "\n\n", "\r\n", "\t",
         "\u3000", "\u00a0", "\x1c", "\u2028", "日本語", "🙂", "e\u0301", "<|endof", "'", "'s", "don't ", "<p> ", "\n<",
         ">\n"]

scratch = Path(tempfile.mkdtemp(prefix="test_prepare."))
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

# Byte pair encoding as tiktoken does it, slowly; its pattern's \p{L} and \p{N} are near enough for the texts here.
STAND_INS = {"tiktoken": r"""
import functools, re
class Encoding:
    def __init__(self, name, *, pat_str, mergeable_ranks, special_tokens):
        for of, near in ((r"[^\s\p{L}\p{N}]", r"(?:[^\s\w]|_)"), (r"\p{L}", r"[^\W\d_]"), (r"\p{N}", r"\d")):
            pat_str = pat_str.replace(of, near)
        self.pattern, self.ranks = re.compile(pat_str), mergeable_ranks
        self.encode_word = functools.lru_cache(None)(self.encode_word)
    def encode_word(self, word):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [(self.ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in self.ranks]
            if not pairs:
                return [self.ranks[part] for part in parts]
            at = min(pairs)[1]
            parts[at:at + 2] = [parts[at] + parts[at + 1]]
    def encode_ordinary(self, text):
        return [token for word in self.pattern.findall(text) for token in self.encode_word(word)]
""", "tqdm": """
class tqdm:
    def __init__(self, iterable=(), **options): self.iterable, self.n = iterable, options.get("initial", 0)
    def __iter__(self): return iter(self.iterable)
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def update(self, n): self.n += n
    def write(text, file): print(text, file=file)
"""}
stand_ins = scratch / "stand_ins"
stand_ins.mkdir()
for library, code in STAND_INS.items():
    if not importlib.util.find_spec(library):
        print(f"without {library}: a stand-in")
        (stand_ins / f"{library}.py").write_text(code)
sys.path.append(str(stand_ins))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(stand_ins)]))

# Ranks: GPT-2's order of the bytes, then merges of the most frequent pair, as byte pair encoding is trained.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE)) for i, byte in enumerate(BYTES)}


def train_merges(text, count):
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(r" ?\w+", text)]
    merges = []
    for _ in range(count):
        pairs = collections.Counter(pair for word in words for pair in zip(word, word[1:]))
        pair = max(pairs, key=lambda p: (pairs[p], p))
        merges.append(pair)
        for word in words:
            for i in range(len(word) - 1, 0, -1):
                if (word[i - 1], word[i]) == pair:
                    word[i - 1:i + 1] = [pair[0] + pair[1]]
    return merges


MERGES = train_merges(LETTERS, 40)
RANKS = {token: rank for rank, token in enumerate([bytes([b]) for b in BYTES] + [a + b for a, b in MERGES])}


def tiktoken_file(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def written(name, content):
    path = scratch / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def ranks_options(content=None, name="ranks.tiktoken"):
    path = written(name, tiktoken_file(RANKS) if content is None else content)
    return ["--ranks", str(path), "--ranks-sha256", hashlib.sha256(path.read_bytes()).hexdigest()]


def oracle():
    need("tiktoken", "tqdm")
    import tiktoken
    return tiktoken.Encoding("oracle", pat_str=PUBLISHED_PATTERN, mergeable_ranks=RANKS, special_tokens={})


def expected_tokens(documents):
    encoding, tokens = oracle(), []
    for document in documents:
        if document.strip():
            tokens += [END_OF_TEXT] + encoding.encode_ordinary(document)
    return tokens


def start(*arguments, script=PREPARE, environment=None, **options):
    need("tiktoken", "tqdm")
    # A test that runs in the background has inherited SIGINT ignored, and Python would leave it so.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, **options)


def run(*arguments, code=0, **options):
    """Standard output of the script; its one line of error if `code` is not 0."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"expected exit code {code}, found {process.returncode}:\n{out}{err}"
    if code == 0:
        return out
    assert code == 2 or len(err.splitlines()) == 1, f"expected one line, found:\n{err}"
    return err


def fails(*arguments, says, **options):
    err = run(*arguments, code=options.pop("code", 1), **options)
    missing = [word for word in says if word not in err]
    assert not missing, f"expected {missing} in: {err}"


def read_shard(path):
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    assert header[:2] == (20240520, 1) and not any(header[3:]), header[:4]
    assert len(raw) == 1024 + 2 * header[2], f"{path}: header says {header[2]} tokens, found {len(raw)} bytes"
    return list(struct.unpack(f"<{header[2]}H", raw[1024:]))


def shards(directory):
    return sorted(directory.glob("*_??????.bin"), key=lambda path: path.name[-10:])


def all_tokens(directory):
    return [token for path in shards(directory) for token in read_shard(path)]


def content(directory):
    assert not list(directory.glob("*.part")), "a partial file was left behind"
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def some_documents(count=300, seed=SEED):
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = LETTERS.split() + ["日本語", "🙂", "\n", "\n\n", "  ", "\r\n", "42"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 80))) + "." for _ in range(count)]


def write_documents(suffix, documents, name="documents"):
    if suffix == ".txt":
        return written(name + suffix, "\n<|endoftext|>\n".join(documents))
    if suffix == ".jsonl":
        return written(name + suffix, "".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(documents)))
    need("pyarrow")
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table({"text": documents}), scratch / (name + suffix), row_group_size=100)
    return scratch / (name + suffix)


SUFFIXES = (".txt", ".jsonl", ".parquet")


def each_format(documents, name="documents"):
    for suffix in SUFFIXES:
        try:
            yield suffix[1:], write_documents(suffix, documents, name)
        except Skip as skip:
            print(f"without {suffix}: {skip}")


# ----------------------------------------------------------------------------------------------------------- the tokens


def test_tokens_and_shards_of_every_format():
    documents = some_documents()
    expected = expected_tokens(documents)
    for name, path in each_format(documents):
        out = scratch / f"format_{name}"
        run(path, "-o", out, *ranks_options(), "--shard-tokens", 5000, "--val-tokens", 7001)
        assert all_tokens(out) == expected, name
        names = [p.name for p in shards(out)]
        sizes = [len(read_shard(p)) for p in shards(out)]
        assert names[:3] == ["val_000000.bin", "val_000001.bin", "train_000002.bin"], names
        assert sizes[:2] == [5000, 2001] and set(sizes[2:-1]) == {5000} and 0 < sizes[-1] <= 5000, sizes
        assert read_shard(shards(out)[0])[0] == END_OF_TEXT and expected.count(END_OF_TEXT) == len(documents)
        manifest = json.loads((out / "manifest.json").read_text())
        assert (manifest["complete"], manifest["tokens"], manifest["documents"], manifest["empty"]) == (
            True, len(expected), len(documents), 0), manifest
        for shard in manifest["shards"]:
            assert hashlib.sha256((out / shard["name"]).read_bytes()).hexdigest() == shard["sha256"]


def test_several_files_are_one_stream():
    parts = [some_documents(20, SEED + i) for i in range(3)]
    suffixes = (".txt", ".jsonl", ".txt")
    paths = [write_documents(suffixes[i], parts[i], f"part{i}") for i in range(3)]
    run(*paths, "-o", scratch / "several", *ranks_options())
    assert all_tokens(scratch / "several") == expected_tokens(sum(parts, []))
    tenth = sum(path.stat().st_size for path in paths) // 40  # of the tokens, of about four bytes each, for validation
    assert [path.name for path in shards(scratch / "several")] == ["val_000000.bin", "train_000001.bin"]
    assert len(read_shard(scratch / "several" / "val_000000.bin")) == tenth


def test_text_is_cut_where_no_token_changes():
    need("tiktoken", "tqdm")
    import prepare
    prepare.encoding = prepare.make_encoding(RANKS)
    chance, whole = random.Random(SEED), prepare.BATCH_BYTES
    try:
        for trial in range(400):
            documents = ["".join(chance.choices(NASTY, k=chance.randint(0, 60))) for _ in range(chance.randint(1, 4))]
            text = "\n<|endoftext|>\n".join(documents)
            path = written("nasty.txt", text)
            expected = expected_tokens(re.split(r"\n?<\|endoftext\|>\n?", text))
            prepare.BATCH_BYTES = chance.choice([1, 2, 7, 40])
            batches = list(prepare.read_text(path, 0))
            for position in [0] + [batch[0] for batch in batches]:  # whichever batch a resumed run begins with
                tokens = array.array("H")
                for batch in (b for b in batches if b[0] < position):
                    tokens.frombytes(prepare.encode(batch[2])[0])
                for batch in prepare.read_text(path, position):
                    tokens.frombytes(prepare.encode(batch[2])[0])
                assert list(tokens) == expected, f"seed {SEED}, trial {trial}, from {position}: {text!r}"
    finally:
        prepare.BATCH_BYTES = whole


def test_long_document_is_cut_and_not_held():
    document = "".join(some_documents(6000))
    assert len(document) > 1 << 20
    run(written("long.txt", document), "-o", scratch / "long", *ranks_options(), "--jobs", 2)
    assert all_tokens(scratch / "long") == expected_tokens([document])


def test_tinyshakespeare_is_cut_as_by_llm_c():
    need("tiktoken", "tqdm")
    import prepare
    prepare.encoding = prepare.make_encoding(RANKS)
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\nFirst:\nSure.\n"
    expected = expected_tokens(("<|endoftext|>" + text.replace("\n\n", "\n\n<|endoftext|>")).split("<|endoftext|>"))
    batch, = prepare.read_paragraphs(written("speeches.txt", text), 0)
    assert list(array.array("H", prepare.encode(batch[2])[0])) == expected and expected.count(END_OF_TEXT) == 3


def test_smallest_text():
    run(written("small.txt", "The sailors"), "-o", scratch / "small", *ranks_options())
    assert [read_shard(path) for path in shards(scratch / "small")] == [[END_OF_TEXT], expected_tokens(["The sailors"])[1:]]


def test_default_places():
    for script in (PREPARE, HELLASWAG, PREPARE.parent / "prepare_common.py"):
        written(f"places/data/{script.name}", script.read_bytes())
    cache = scratch / "places" / "data" / "cache"
    run(written("places/book.txt", LETTERS), *ranks_options(), script=scratch / "places" / "data" / PREPARE.name)
    assert all_tokens(cache / "book") == expected_tokens([LETTERS])
    for name in ("hellaswag_val", "other"):
        path = write_examples(f"places/{name}.jsonl", EXAMPLES)
        out = run(path, *ranks_options(), script=scratch / "places" / "data" / HELLASWAG.name)
        assert (cache / "hellaswag" / f"hellaswag_{name.removeprefix('hellaswag_')}.bin").exists(), out


def test_empty_documents_are_counted():
    documents = ["", "one", "  \n ", "two", ""]
    for name, path in each_format(documents, "empty"):
        out = scratch / f"empty_{name}"
        if name == "jsonl":
            path.write_bytes(path.read_bytes() + b"\n\n")  # no documents
        assert "2 documents, 3 empty ones skipped" in run(path, "-o", out, *ranks_options(), "--val-tokens", 1)
        assert all_tokens(out) == expected_tokens(["one", "two"])


def test_max_tokens_and_field():
    documents = some_documents(50)
    path = written("body.jsonl", "".join(json.dumps({"body": d}) + "\n" for d in documents))
    run(path, "-o", scratch / "max", *ranks_options(), "--field", "body", "--max-tokens", "1.5e3",
        "--shard-tokens", "1e3", "--val-tokens", 100)
    assert all_tokens(scratch / "max") == expected_tokens(documents)[:1500]
    assert [len(read_shard(p)) for p in shards(scratch / "max")] == [100, 1000, 400]


def test_forms_of_ranks_are_the_same():
    path = write_documents(".txt", some_documents(30), "forms")
    vocab = "#version: 0.2\n" + "".join(
        " ".join("".join(SHOWN[byte] for byte in half) for half in merge) + "\n" for merge in MERGES)
    encoder = {"".join(SHOWN[byte] for byte in token): rank for token, rank in RANKS.items()}
    encoder = json.dumps({**encoder, "<|endoftext|>": END_OF_TEXT})
    forms = [ranks_options(), ranks_options(vocab, "vocab.bpe"), ranks_options(encoder, "encoder.json")]
    for i, options in enumerate(forms + [forms[1] + forms[2]]):
        run(path, "-o", scratch / f"form{i}", *options)
        assert content(scratch / f"form{i}") == content(scratch / "form0"), options
    for different in {bytes([b]): i for i, b in enumerate(BYTES)}, {**RANKS, b"a": RANKS[b"b"], b"b": RANKS[b"a"]}:
        other = ranks_options(tiktoken_file(different), "other.tiktoken")
        fails(path, "-o", scratch / "forms", *forms[0], *other, says=["other.tiktoken: other ranks than in"])


def test_known_ids():
    """Worked out by hand: GPT-2 numbers the visible bytes from '!' = 0 on, then the others (' ' = 220), then merges."""
    merges = [b"Hi", b" t", b" th", b"er", b" ther", b" there", b"'s", b"'t", b"re", b"'re", b"ve", b"'ve", b"'m", b"ll",
              b"'ll", b"'d", b"1x", b"!x", b"  "]  # the last three lie across what the pattern cuts
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in BYTES] + merges)}
    text = "Hi there, Hi~\n\u00e9 x's x't x're x've x'm x'll x'd 1x!x  x"
    run(written("known.txt", text), "-o", scratch / "known", *ranks_options(tiktoken_file(ranks)), "--val-tokens", 4)
    assert [read_shard(path) for path in shards(scratch / "known")] == [
        [50256, 256, 261, 11],
        [220, 256, 93, 198, 127, 102, 220, 87, 262, 220, 87, 263, 220, 87, 265, 220, 87, 267, 220, 87, 268, 220, 87, 270,
         220, 87, 271, 220, 16, 87, 0, 87, 220, 220, 87]]
    tokenizer = (scratch / "known" / "gpt2_tokenizer.bin").read_bytes()
    assert struct.unpack("<256I", tokenizer[:1024]) == (20240328, 2, 50257, 50256) + (0,) * 252
    pieces = b"".join(bytes([len(token)]) + token for token in ranks)
    assert tokenizer[1024:] == pieces + bytes(50256 - len(ranks)) + b"\x0d<|endoftext|>"


def test_gpt2_ids():
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or tempfile.gettempdir() + "/data-gym-cache")
    urls = ["gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json", "encodings/r50k_base.tiktoken"]
    names = [hashlib.sha1(f"https://openaipublic.blob.core.windows.net/{url}".encode()).hexdigest() for url in urls]
    if not any((cache / name).exists() for name in names):
        raise Skip("needs GPT-2's ranks in tiktoken's cache directory")
    run(written("hello.txt", "Hello world, it's 2024"), "-o", scratch / "gpt2", "--val-tokens", 1)
    assert all_tokens(scratch / "gpt2") == [50256, 15496, 995, 11, 340, 338, 48609]


# ----------------------------------------------------------------------------------------------------------- restarting


def test_parallel_is_serial():
    path = write_documents(".jsonl", some_documents(12000), "parallel")  # several batches
    assert path.stat().st_size > 2 << 20
    for jobs in (1, 3):
        run(path, "-o", scratch / f"jobs{jobs}", *ranks_options(), "--shard-tokens", 50000, "--jobs", jobs)
    assert content(scratch / "jobs1") == content(scratch / "jobs3")


def test_few_batches_are_in_flight():
    """However many there are, and their results come in order."""
    need("tiktoken", "tqdm")
    import prepare
    flying, most = set(), 0

    class Pool:
        def submit(self, _, texts):
            nonlocal most
            flying.add(texts)
            most = max(most, len(flying))
            return self.Future(texts)

        class Future:
            def __init__(self, texts):
                self.texts = texts

            def result(self):
                flying.remove(self.texts)
                return -self.texts

    found = list(prepare.in_order(Pool(), ((f"place {i}", i) for i in range(100)), 7))
    assert found == [(f"place {i}", -i) for i in range(100)] and most == 8 and not flying, (found, most)


def test_files_are_on_disk_before_they_have_their_names():
    import prepare_common
    calls, system = [], prepare_common.os

    class Noted:
        def __getattr__(self, name):
            return getattr(system, name)

        def fsync(self, file):
            calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
            system.fsync(file)

        def replace(self, part, path):
            calls.append("replace")
            system.replace(part, path)

    try:
        prepare_common.os = Noted()
        prepare_common.write_file(written("synced/file", "old"), b"new")
    finally:
        prepare_common.os = system
    assert calls == ["file.part", "replace", "synced"] and (scratch / "synced" / "file").read_bytes() == b"new", calls


def test_killed_run_goes_on_byte_for_byte():
    path = write_documents(".jsonl", some_documents(16000), "killed")
    options = [path, *ranks_options(), "--shard-tokens", 20000, "--jobs", 2]
    run(*options, "-o", scratch / "whole")
    whole, out, killed = content(scratch / "whole"), scratch / "killed", 0
    assert len(whole) > 20
    for wanted in (1, 5, len(whole) // 2):
        process = start(*options, "-o", out, start_new_session=True)
        while process.poll() is None and len(shards(out)) < wanted:
            time.sleep(0.002)
        process.kill()
        process.communicate(timeout=60)  # returns when its workers are gone as well: they hold the pipes
        killed += process.returncode == -signal.SIGKILL
        done = {shard.name: shard.read_bytes() for shard in shards(out)}
        assert all(whole[name] == data for name, data in done.items()), "a shard of an interrupted run differs"
    assert killed >= 2, "the runs ended before they were killed"
    stamps = {shard: shard.stat().st_mtime_ns for shard in shards(out)}
    assert "finished shards kept" in run(*options, "-o", out)
    assert content(out) == whole
    same = sum(shard.stat().st_mtime_ns == stamp for shard, stamp in stamps.items())
    assert same >= len(stamps) - 1, f"{same} of {len(stamps)} shards were kept"  # one may have missed the manifest


def test_ctrl_c_and_a_killed_worker_end_in_one_line():
    path = write_documents(".jsonl", some_documents(64000), "stopped")  # far from done when the first shard is
    options = [path, "-o", scratch / "stopped", *ranks_options(), "--shard-tokens", 20000, "--jobs", 2]
    for says in ("prepare.py: interrupted; run again", "prepare.py: a worker was killed"):
        process = start(*options, start_new_session=True)
        while process.poll() is None and not shards(scratch / "stopped"):
            time.sleep(0.002)
        if "worker" in says:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, process.returncode
        assert err.startswith(says) and len(err.splitlines()) == 1, err
        shutil.rmtree(scratch / "stopped")


def test_resumes_after_any_shard_of_every_format():
    documents = some_documents(1500)
    documents[3] = "".join(documents)  # one that many shards share
    for name, path in each_format(documents, "resume"):
        out = scratch / f"resume_{name}"
        options = [path, "-o", out, *ranks_options(), "--shard-tokens", 30000, "--jobs", 2]
        run(*options)
        whole = content(out)
        manifest = json.loads(whole["manifest.json"])
        for kept in {1, len(manifest["shards"]) // 2, len(manifest["shards"]) - 1, len(manifest["shards"])}:
            for shard in manifest["shards"][kept:]:
                (out / shard["name"]).unlink()
            part = {key: manifest[key] for key in ("settings", "sources", "val_tokens")}
            part.update(shards=manifest["shards"][:kept], complete=False)
            (out / "manifest.json").write_text(json.dumps(part))
            (out / "train_000001.bin.part").write_bytes(b"half a shard")  # a crash leaves such a file
            run(*options)
            (out / "train_000001.bin.part").unlink(missing_ok=True)
            found = content(out)
            assert {n: d for n, d in found.items() if n != "manifest.json"} == {
                n: d for n, d in whole.items() if n != "manifest.json"}, f"{name}, {kept} shards kept"
            assert json.loads(found["manifest.json"]) == manifest


def test_damaged_shard_is_redone():
    path = write_documents(".txt", some_documents(), "damaged")
    options = [path, "-o", scratch / "damaged", *ranks_options(), "--shard-tokens", 4000]
    run(*options)
    whole = content(scratch / "damaged")
    for damage in (lambda p: p.write_bytes(p.read_bytes()[:-2] + b"zz"), Path.unlink):
        damage(shards(scratch / "damaged")[2])
        assert "train_000002.bin: not what was written" in run(*options)
        assert content(scratch / "damaged") == whole
    assert "not what was written" not in run(*options)


def test_other_settings_are_refused():
    path = write_documents(".txt", some_documents(), "settings")
    options = [path, "-o", scratch / "settings", *ranks_options()]
    run(*options)
    fails(*options, "--shard-tokens", 999, says=["manifest.json: made with shard_tokens = 100000000, now it is 999"])
    path.write_text("another text, and it is long enough")
    fails(*options, says=["manifest.json: made with files"])
    (scratch / "settings" / "manifest.json").write_text("{")
    fails(*options, says=["manifest.json: damaged; delete it"])


# ------------------------------------------------------------------------------------------------------------ downloads


class Hub(http.server.BaseHTTPRequestHandler):
    files, listing, ranges = {}, {}, []
    breaks, whole = 0, False  # answers that end after half of the bytes; does it ignore Range, as servers may?

    def do_GET(self):
        if self.path in Hub.listing:
            body, code = json.dumps(Hub.listing[self.path]).encode(), 200
        elif self.path in Hub.files:
            begin = 0 if Hub.whole else int(self.headers.get("Range", "bytes=0-")[6:-1])
            Hub.ranges.append(begin)
            body, code = Hub.files[self.path][begin:], 206 if begin else 200
            code = code if body else 416
        else:
            body, code = b"", 404
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Hub.breaks and self.path in Hub.files:
            Hub.breaks -= 1
            body = body[:len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def with_hub(test):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        test({"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"})
    finally:
        server.shutdown()
        server.server_close()


def publish(repository, folder, files):
    folder = f"{folder}/" if folder else ""
    Hub.files = {f"/datasets/{repository}/resolve/main/{folder}{name}": data for name, data in files.items()}
    Hub.listing = {f"/api/datasets/{repository}/tree/main/{folder}".rstrip("/"): [{
        "path": folder + name, "size": len(data), "lfs": {"oid": hashlib.sha256(data).hexdigest()}
    } for name, data in files.items()]}
    Hub.ranges, Hub.breaks, Hub.whole = [], 0, False


def test_tinystories_from_the_hub():
    parts = [some_documents(400, SEED), some_documents(400, SEED + 1)]
    texts = ["\n<|endoftext|>\n".join(part) for part in parts]
    publish("roneneldan/TinyStories", "", {"README.md": b"-", "TinyStoriesV2-GPT4-train.txt": texts[1].encode(),
                                           "TinyStoriesV2-GPT4-valid.txt": texts[0].encode()})

    def test(environment):
        out = scratch / "stories"
        options = ["tinystories", "-o", out, *ranks_options(), "--val-tokens", 2000]
        Hub.breaks = 1
        fails(*options, says=["download broke off", "run again to go on"], environment=environment)
        run(*options, environment={**environment, "HF_ENDPOINT": environment["HF_ENDPOINT"] + "/"})
        assert Hub.ranges == [0, len(texts[0].encode()) // 2, 0], Hub.ranges
        assert all_tokens(out) == expected_tokens(parts[0] + parts[1])
        assert not list((out / "download").glob("*.part"))
        run(*options, environment={"HF_ENDPOINT": "http://127.0.0.1:1"})  # complete: asks nobody
        options[2] = scratch / "late_stories"  # ended between a download's last byte and its final name
        written("late_stories/download/TinyStoriesV2-GPT4-valid.txt.part", texts[0])
        run(*options, environment=environment)
        assert content(options[2]) == content(out) and Hub.ranges[3] == len(texts[0].encode()), Hub.ranges
        options[2] = scratch / "foreign_stories"
        written("foreign_stories/download/TinyStoriesV2-GPT4-valid.txt", texts[1])
        fails(*options, says=["valid.txt: wrong SHA-256: expected", "delete it"], environment=environment)
        options[2], Hub.breaks, Hub.whole = scratch / "whole_stories", 1, True
        fails(*options, says=["download broke off"], environment=environment)
        run(*options, environment=environment)
        assert content(options[2]) == content(out)
        for name in Hub.files:
            Hub.files[name] = Hub.files[name][:-1] + b"?"
        options[2] = scratch / "other_stories"
        fails(*options, says=["wrong SHA-256: expected", "deleted, run again"], environment=environment)
        assert not list(options[2].glob("download/*")), "a file with the wrong hash was kept"

    with_hub(test)


def test_fineweb_from_the_hub():
    documents = some_documents(100)
    path = write_documents(".parquet", documents, "000_00000")
    publish("HuggingFaceFW/fineweb-edu", "sample/10BT", {"000_00000.parquet": path.read_bytes()})

    def test(environment):
        options = ["fineweb-edu", *ranks_options(), "--val-tokens", 50]
        run(*options, "-o", scratch / "edu", environment=environment)
        assert all_tokens(scratch / "edu") == expected_tokens(documents)
        for name in Hub.files:
            Hub.files[name] = Hub.files[name][:-1] + b"?"
        fails(*options, "-o", scratch / "bad", says=["wrong SHA-256: expected", "found"], environment=environment)
        assert not list(scratch.glob("bad/download/*")), "a file with the wrong hash was kept"
        written("bad/download/000_00000.parquet", b"?")
        fails(*options, "-o", scratch / "bad", says=["parquet: wrong SHA-256", "delete it"], environment=environment)
        Hub.listing.clear()
        fails(*options, "-o", scratch / "bad", says=["cannot download: Not Found"], environment=environment)

    with_hub(test)


def test_tinyshakespeare_by_its_name():
    """A copy of the script that has another address and text for it."""
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\n" * 20
    Hub.files, Hub.ranges, Hub.breaks, Hub.whole = {"/input.txt": text.encode()}, [], 0, False

    def test(environment):
        code = PREPARE.read_text()
        for pattern, new in ((r'"url": "https://raw[^"]*"', f'"url": "{environment["HF_ENDPOINT"]}/input.txt"'),
                             (r'"bytes": 1115394', f'"bytes": {len(text)}'), ("86c4e6aa[0-9a-f]*", hashlib.sha256(text.encode()).hexdigest()),
                             (r'"val_tokens": 32768', '"val_tokens": 50')):
            code, n = re.subn(pattern, new, code)
            assert n == 1, pattern
        script = written("play/prepare.py", code)
        shutil.copy(PREPARE.parent / "prepare_common.py", script.parent)
        run("tinyshakespeare", "-o", scratch / "play" / "out", *ranks_options(), script=script, environment=environment)
        assert all_tokens(scratch / "play" / "out") == expected_tokens(re.split(r"(?<=\n\n)", text))
        assert len(read_shard(scratch / "play" / "out" / "val_000000.bin")) == 50

    with_hub(test)


def test_listing_of_the_hub():
    need("tiktoken", "tqdm")
    import prepare
    names = ["001_00000.parquet", "README.md", "000_00001.parquet", "000_00000.parquet"]  # the hub promises no order
    publish("a/b", "sample", {name: name.encode() for name in names})

    def test(environment):
        hub, prepare.HUB = prepare.HUB, environment["HF_ENDPOINT"]
        try:
            files = prepare.hub_files("a/b", "sample", None)
            assert [file["url"].rsplit("/", 1)[1] for file in files] == sorted(set(names) - {"README.md"}), files
            assert all(file["sha256"] == hashlib.sha256(Path(file["url"]).name.encode()).hexdigest() for file in files)
        finally:
            prepare.HUB = hub

    with_hub(test)
    sizes = {name[7:-1]: known["hub"][1] for name, known in prepare.DATASETS.items() if re.fullmatch(r"fineweb\d+B", name)}
    assert len(sizes) == 2 and all(folder == f"sample/{size}BT" for size, folder in sizes.items()), sizes


def test_no_network():
    out, options = scratch / "away", ["-o", scratch / "away", *ranks_options()]
    away = {"HF_ENDPOINT": "http://127.0.0.1:1", "no_proxy": "127.0.0.1", "https_proxy": "http://127.0.0.1:1",
            "HTTPS_PROXY": "http://127.0.0.1:1", "TIKTOKEN_CACHE_DIR": str(scratch / "no_cache")}
    fails("fineweb10B", *options, says=["cannot download", "check the network"], environment=away)
    fails("tinyshakespeare", *options, says=["input.txt: cannot download"], environment=away)
    fails(written("a.txt", "text"), "-o", out, says=["vocab.bpe: cannot download", "vocab.bpe with --ranks"],
          environment=away)
    options[1] = out / "hellaswag.bin"
    fails("val", *options, says=["hellaswag_val.jsonl: cannot download"], environment=away, script=HELLASWAG)


def test_ranks_from_the_cache():
    name = hashlib.sha1(b"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/vocab.bpe").hexdigest()
    path = written(f"cache/{name}", tiktoken_file(RANKS))
    text, environment = written("cached.txt", LETTERS), {"TIKTOKEN_CACHE_DIR": str(path.parent)}
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    run(text, "-o", scratch / "cached", "--ranks-sha256", sha256, environment=environment)
    run(text, "-o", scratch / "cached", "--ranks-sha256", sha256,
        environment={"TIKTOKEN_CACHE_DIR": "", "DATA_GYM_CACHE_DIR": str(path.parent)})
    assert all_tokens(scratch / "cached") == expected_tokens([LETTERS])
    fails(text, "-o", scratch / "cached", says=[f"{path}: wrong SHA-256: expected", f"found {sha256}"],
          environment=environment)


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors_in_text():
    options = ["-o", scratch / "errors", *ranks_options()]
    good = json.dumps({"text": "good"}) + "\n"
    size = len(good)
    cases = {
        "utf8.txt": (b"good \xff bad", ["utf8.txt: invalid UTF-8 at offset 5: found byte 0xff"]),
        "late.txt": (b"good \n" * 300000 + b"\xe2\x28", ["late.txt: invalid UTF-8 at offset 1800000"]),
        "end.txt": (b"good \xe2\x82", ["end.txt: invalid UTF-8 at offset 5"]),
        "utf8.jsonl": (good.encode() + b'{"text": "\xff"}\n', [f"utf8.jsonl: invalid UTF-8 at offset {size + 10}"]),
        "no.jsonl": (good + '{"body": 1}\n', [f"no.jsonl: object at offset {size} has no field 'text'", "--field"]),
        "type.jsonl": (good + '{"text": 1}\n', [f"type.jsonl: object at offset {size}: 'text' is int, expected a str"]),
        "list.jsonl": ("[1]\n", ["list.jsonl: object at offset 0 has no field 'text'"]),
        "syntax.jsonl": (good + '{"text": \n', [f"syntax.jsonl: not JSON at offset {size + 10}"]),
        "tiny.txt": ("a", ["no tokens left to train on", "--val-tokens"]),
        "empty.txt": ("", ["no tokens left to train on"]),
    }
    for name, (data, says) in cases.items():
        fails(written(name, data), *options, *(["--val-tokens", 2] if "tiny" in name else []), says=says)
        assert not (scratch / "errors" / "manifest.json").exists() or "late" in name, name  # other settings may follow
        assert not list(scratch.glob("errors/*_??????.bin")) or name in ("late.txt", "tiny.txt"), name
        shutil.rmtree(scratch / "errors", ignore_errors=True)
    fails(scratch / "none.txt", *options, says=["none.txt: No such file"])


def test_errors_in_parquet():
    need("pyarrow")
    import pyarrow
    import pyarrow.parquet
    fails(written("no.parquet", "PAR1 no"), "-o", scratch / "errors", *ranks_options(), says=["cannot read as parquet"])
    for name, column, says in (("column", {"body": ["a"]}, ["no column 'text', found body"]),
                               ("type", {"text": [1]}, ["column 'text' is int64, expected string"])):
        path = scratch / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(column), path)
        fails(path, "-o", scratch / "errors", *ranks_options(), says=says)


def test_errors_in_ranks():
    path = written("text.txt", LETTERS)

    def case(content, *says):
        fails(path, "-o", scratch / "errors", *ranks_options(content, "bad.tiktoken"), says=says)

    ranks = list(RANKS.items())
    case(tiktoken_file(dict(ranks + [(b"zzz", 65536)])), "bad.tiktoken: token 65536 does not fit", "at most 65535")
    case(tiktoken_file(dict(ranks + [(b"zzz", END_OF_TEXT)])), "expected different ids below 50256")
    case(tiktoken_file(dict(ranks + [(b"zzz", 7)])), "expected different ids")
    case(tiktoken_file(dict(ranks[1:])), "a single byte has no token")
    case(tiktoken_file(dict(ranks + [(b"z" * 256, 400)])), "token 400 has 256 bytes", "at most 255")
    for content in (b"?!", b"{", b"\xff\n", b"#version\n\xf0\x9f\x99\x82 a", b'{"a": "b"}', b"{}", b"[]"):
        case(content, "bad.tiktoken: ")
    option, name, _, sha256 = ranks_options()
    fails(path, "-o", scratch / "errors", option, name, says=[f"{name}: wrong SHA-256: expected", f"found {sha256}"])


def test_missing_library():
    for module, source in (("tiktoken", "text.txt"), ("tqdm", "text.txt"), ("pyarrow", "a.parquet")):
        written(f"without_{module}/{module}.py", "raise ImportError")
        fails(written(source, LETTERS), "-o", scratch / "errors", *ranks_options(),
              says=[f"library {module} is not installed; pip install -r"],
              environment={"PYTHONPATH": f"{scratch}/without_{module}{os.pathsep}{stand_ins}"})


def test_full_disk():
    path = write_documents(".txt", some_documents(2000), "disk")
    options = [path, *ranks_options(), "--val-tokens", 1000, "--shard-tokens", 50000]
    run(*options, "-o", scratch / "disk_whole")
    # A limit on the size of files stands for the disk: tokenizer and validation fit, the next shard does not.
    fails(*options, "-o", scratch / "disk", says=["disk: " + os.strerror(errno.EFBIG), "make room and run again"],
          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)))
    assert [shard.name for shard in shards(scratch / "disk")] == ["val_000000.bin"], "a partial shard has a final name"
    run(*options, "-o", scratch / "disk")
    assert content(scratch / "disk") == content(scratch / "disk_whole")


def test_usage():
    fails(says=["usage", "SOURCE"], code=2)
    fails("book.pdf", says=["book.pdf: expected one of tinyshakespeare"], code=2)
    fails("tinystories", "a.txt", says=["tinystories cannot be mixed"], code=2)
    fails("a.txt", "--shard-tokens", "0", says=["--shard-tokens: expected a number", "found 0"], code=2)
    fails("a.txt", "--max-tokens", "inf", says=["--max-tokens"], code=2)
    fails("a.txt", "--val-tokens", "some", says=["--val-tokens: expected a number", "found some"], code=2)
    fails("a.txt", "--shard-tokens", "3e9", says=["--shard-tokens below 2^31"], code=2)
    fails("a.txt", "--jobs", "0", says=["--jobs from 1"], code=2)
    fails("a.csv", script=HELLASWAG, says=["a.csv: expected val"], code=2)
    for script in (PREPARE, HELLASWAG):
        assert "examples:" in run("--help", script=script)


# ------------------------------------------------------------------------------------------------------------ hellaswag


EXAMPLES = [{"ind": i, "ctx": f"The sailors sang {'all day ' * i}and they", "label": i % 4,
             "endings": ["gone north.", "didn't see it.", "'ll say 12 🙂.", "sure"]} for i in range(7)]


def write_examples(name, examples):
    return written(name, "".join(json.dumps(example) + "\n" for example in examples))


def test_hellaswag_file():
    path = write_examples("examples.jsonl", EXAMPLES)
    out = scratch / "hella" / "val.bin"
    assert "7 examples" in run(path, "-o", out, *ranks_options(), script=HELLASWAG)
    assert (out.parent / "gpt2_tokenizer.bin").exists()
    raw, encoding = out.read_bytes(), oracle()
    header, stream = struct.unpack("<256i", raw[:1024]), struct.unpack(f"<{len(raw) // 2 - 512}H", raw[1024:])
    assert header[:3] == (20240522, 1, len(EXAMPLES)) and not any(header[4:]), header[:4]
    at, longest = 0, 0
    for i, example in enumerate(EXAMPLES):
        begin_mark, size, index, label, endings = stream[at:at + 5]
        assert (begin_mark, index, label, endings) == (65535, i, example["label"], 4)
        end, longest = at + size // 2, max(longest, size)
        at += 5
        for text in [example["ctx"]] + [" " + ending for ending in example["endings"]]:
            tokens = list(stream[at + 1:at + 1 + stream[at]])
            assert tokens == encoding.encode_ordinary(text), text
            at += 1 + stream[at]
        assert at == end, f"example {i} says {size} bytes"
    assert at == len(stream) and header[3] == longest


def test_hellaswag_errors():
    good = EXAMPLES[0]
    line = len(json.dumps(good)) + 1
    unlabelled = {key: value for key, value in good.items() if key != "label"}
    cases = [(unlabelled, [f"offset {line}: expected ctx", "'label'"]),
             ({**good, "label": 4}, [f"offset {line}: expected text", "label 4"]),
             ({**good, "label": ""}, ["expected ctx, endings and a label"]),
             ({**good, "endings": [1, 2]}, ["endings of text"]),
             ({**good, "ctx": "! " * 40000}, ["at most 65535 bytes"])]
    options = ["-o", scratch / "hella" / "bad.bin", *ranks_options()]
    for example, says in cases:
        fails(write_examples("bad.jsonl", [good, example]), *options, says=["bad.jsonl"] + says, script=HELLASWAG)
    fails(written("bad.jsonl", "{\n"), *options, says=["not JSON at offset 2"], script=HELLASWAG)
    fails(written("bad.jsonl", b'{"ctx": "\xff"}'), *options, says=["invalid UTF-8 at offset 9"], script=HELLASWAG)
    fails(written("bad.jsonl", ""), *options, says=["no examples"], script=HELLASWAG)
    fails(scratch / "none.jsonl", *options, says=["none.jsonl: No such file"], script=HELLASWAG)
    assert not (scratch / "hella" / "bad.bin").exists()
    from hellaswag import Fail, encode_example
    assert list(encode_example(oracle(), 65535, "", "", [""], 0))[2] == 65535  # what 16 bits hold
    try:
        encode_example(oracle(), 65536, "", "", [""], 0)
        raise AssertionError("an index of 17 bits")
    except Fail as e:
        assert "65536 examples" in str(e), e


# ---------------------------------------------------------------------------------------------------------- the trainer


def train(*arguments):
    process = subprocess.run([str(TRAINER), "--device", "cpu", *map(str, arguments)], capture_output=True, text=True,
                             cwd=scratch, timeout=300, errors="replace")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_trainer_reads_shards_and_tokenizer():
    if not TRAINER.exists():
        raise Skip("needs ./train_gpt2cu (make train_gpt2cu)")
    out = scratch / "trainer"
    run(write_documents(".txt", some_documents(), "trainer"), "-o", out, *ranks_options(), "--shard-tokens", 3000)
    # A small model with GPT-2's vocabulary: llm.c's header, then the parameters.
    V, Vp, L, NH, C, max_T = 50257, 50304, 1, 1, 64, 128
    parameters = Vp * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    chance = random.Random(SEED)
    values = array.array("f", [chance.gauss(0, 0.3) for _ in range(9973)]) * (parameters // 9973 + 1)
    model = written("small.bin", struct.pack("<256i", 20240326, 3, max_T, V, L, NH, C, Vp, *[0] * 248) +
                    values[:parameters].tobytes())
    training = ["-e", model, "-i", f"{out}/train_*.bin", "-j", f"{out}/val_*.bin", "-b", 1, "-t", 16, "-x", 1, "-m", 1,
                "-s", 1, "-g", 12, "--prompt", "A"]
    sample = lambda log: re.search(r"\| sample\n---\n(.*)\n---\n", log, re.DOTALL)[1]
    log = train(*training, "--tokenizer", out / "gpt2_tokenizer.bin")
    sampled = sample(log)
    tokens = sum(len(read_shard(path)) for path in out.glob("train_*.bin"))
    assert f"{tokens} tokens" in log and "1 shard" in log, log
    questions = scratch / "questions.bin"
    run(write_examples("questions.jsonl", EXAMPLES), "-o", questions, *ranks_options(), script=HELLASWAG)
    log = train("-e", model, "--eval-only", "-j", f"{out}/val_*.bin", "-b", 1, "-t", 128, "--hellaswag", questions)
    assert re.search(r"hellaswag [0-7] of 7", log), log
    # The same ids without and with the tokenizer: <id> against the bytes of the token. The same of a run's sample.
    options = ["-e", model, "--generate", 12, "--prompt", "A", "--top-k", 50]
    ids, text = train(*options), train(*options, "--tokenizer", out / "gpt2_tokenizer.bin")
    pieces = {rank: token.decode(errors="replace") for token, rank in RANKS.items()}
    for ids, text in [(ids, text), (sample(train(*training)), sampled)]:
        assert re.search(r"<\d+>", ids), ids
        assert text == re.sub(r"<(\d+)>", lambda found: pieces.get(int(found[1]), ""), ids), (ids, text)


if __name__ == "__main__":
    main()
