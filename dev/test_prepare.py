#!/usr/bin/env python3
"""Tests of data/prepare.py and data/hellaswag.py, all offline. The scripts get a small list of ranks, and tiktoken's
own encoder with the pattern of GPT-2's release says what they must write. Where libraries are missing, small ones stand
in for them.
Run: python3 dev/test_prepare.py [part of a name]"""
import array
import base64
import contextlib
import errno
import hashlib
import http.server
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
from unittest import mock

from harness import ROOT, Skip, main, need, new_folder, run_program, written
from stand_ins import stand_in

PREPARE, HELLASWAG = ROOT / "data" / "prepare.py", ROOT / "data" / "hellaswag.py"
sys.path.append(str(PREPARE.parent))
END_OF_TEXT = 50256
SEED = int(os.environ.get("SEED", 1))
PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = ("The ship's crew didn't see it: we'll say they've gone north, I'm sure. "
           "Twelve sailors sang in 1789, all of them!\n")
NASTY = ["a", "Zoë", "it's", "we'LL", "12", "...", "<", ">", "|>", "<|", " ", "  ", "\n", "\n\n", "\r\n", "\t",
         "\u3000", "\u00a0", "\x1c", "\u2028", "日本語", "🙂", "e\u0301", "<|endof", "'", "'s", "don't ", "<p> ", "\n<",
         ">\n"]

stand_in("tiktoken", "tqdm")
new_folder()

# Ranks: GPT-2's order of the bytes, then merges as vocab.bpe writes them. GPT-2's pattern cuts inside three of them.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE)) for i, byte in enumerate(BYTES)}
MERGES = ("H i,Ġ t,Ġt h,e r,Ġth er,Ġther e,' s,' t,r e,' re,v e,' ve,' m,l l,' ll,' d,1 x,! x,Ġ Ġ,"
          "Ġ s,Ġs a,i l,Ġsa il,o r,or s,Ġsail ors,n g,Ġ a,Ġa ll,Ġsa ng,T h,Th e,h e,he y,Ġs h,8 9,a y").split(",")
MERGED = [merge.replace(" ", "").replace("Ġ", " ").encode() for merge in MERGES]
RANKS = {token: rank for rank, token in enumerate([bytes([byte]) for byte in BYTES] + MERGED)}


def tiktoken_file(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def ranks_options(content=tiktoken_file(RANKS), name="ranks.tiktoken"):
    path = written(name, content)
    return ["--ranks", path, "--ranks-sha256", sha256(path.read_bytes())]


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


def start(*arguments, script=PREPARE, environment=None, ranks=None, **options):
    """The script with the ranks of this file, or with other options in place of them."""
    need("tiktoken", "tqdm")
    # A test that runs in the background has inherited SIGINT ignored, and Python would leave it so.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    command = [sys.executable, script, *arguments, *(ranks_options() if ranks is None else ranks)]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, **(environment or {})}, **options)


def run(*arguments, code=0, **options):
    """Standard output of the script, or its one line of error if `code` is not 0."""
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, f"expected exit code {code}, found {process.returncode}:\n{out}{err}"
    assert code != 1 or len(err.splitlines()) == 1, f"expected one line, found:\n{err}"
    return err if code else out


def fails(*arguments, says, code=1, **options):
    err = run(*arguments, code=code, **options)
    missing = [word for word in says if word not in err]
    assert not missing, f"expected {missing} in: {err}"


def read_shard(path):
    raw = path.read_bytes()
    header = struct.unpack("<256i", raw[:1024])
    assert header[:2] == (20240520, 1) and not any(header[3:]), header[:4]
    assert len(raw) == 1024 + 2 * header[2], f"{path}: header says {header[2]} tokens, found {len(raw)} bytes"
    return list(struct.unpack(f"<{header[2]}H", raw[1024:]))


def shards(directory):
    return sorted(Path(directory).glob("*_??????.bin"), key=lambda path: path.name[-10:])


def all_tokens(directory):
    return [token for path in shards(directory) for token in read_shard(path)]


def content(directory):
    assert not list(Path(directory).glob("*.part")), "a partial file was left behind"
    return {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}


def some_documents(count=300, seed=SEED):
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = LETTERS.split() + ["日本語", "🙂", "\n", "\n\n", "  ", "\r\n", "42"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 80))) + "." for _ in range(count)]


def json_lines(objects):
    return "".join(json.dumps(one) + "\n" for one in objects)


def write_documents(name, documents):
    """A file of a format that the end of its name says."""
    if name.endswith(".txt"):
        return written(name, "\n<|endoftext|>\n".join(documents))
    if name.endswith(".jsonl"):
        return written(name, json_lines({"id": i, "text": document} for i, document in enumerate(documents)))
    return write_parquet(name, {"text": documents})


def write_parquet(name, columns):
    need("pyarrow")
    import pyarrow
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(columns), name, row_group_size=700)  # several batches a group
    return Path(name)


def each_format(documents, name):
    """Name and file of each format that can be written here."""
    for suffix in (".txt", ".jsonl", ".parquet"):
        try:
            yield f"{name}_{suffix[1:]}", write_documents(name + suffix, documents)
        except Skip as skip:
            print(f"without {suffix}: {skip}")


# ----------------------------------------------------------------------------------------------------------- the tokens


def test_tokens_and_shards_of_every_format():
    documents = some_documents()
    expected = expected_tokens(documents)
    assert expected[0] == END_OF_TEXT and expected.count(END_OF_TEXT) == len(documents)
    for out, path in each_format(["", *documents[:9], "  \n ", *documents[9:], ""], "format"):
        if path.suffix == ".jsonl":
            path.write_bytes(path.read_bytes() + b"\n\n")  # no documents
        said = run(path, "-o", out, "--shard-tokens", 5000, "--val-tokens", 7001)
        assert f" {len(documents)} documents, 3 empty ones skipped" in said, said
        assert all_tokens(out) == expected, out
        names = [path.name for path in shards(out)]
        sizes = [len(read_shard(path)) for path in shards(out)]
        assert names[:3] == ["val_000000.bin", "val_000001.bin", "train_000002.bin"], names
        assert sizes[:2] == [5000, 2001] and set(sizes[2:-1]) == {5000} and 0 < sizes[-1] <= 5000, sizes
        manifest = json.loads(Path(out, "manifest.json").read_text())
        found = [manifest[key] for key in ("complete", "tokens", "documents", "empty")]
        assert found == [True, len(expected), len(documents), 3], manifest
        for shard in manifest["shards"]:
            assert sha256(Path(out, shard["name"]).read_bytes()) == shard["sha256"]


def test_local_text_in_one_stream_of_shards():
    """Each case has sources, options, the documents in them, how many tokens of these, and all sizes but the last."""
    documents, long = some_documents(60), "".join(some_documents(6000))
    assert len(long) > 1 << 20  # cut, not held
    parts = [write_documents(f"part{i}{suffix}", documents[20 * i:][:20])
             for i, suffix in enumerate((".txt", ".jsonl", ".txt"))]
    body = written("body.jsonl", json_lines({"body": document} for document in documents))
    exact = ["--field", "body", "--max-tokens", "1.5e3", "--shard-tokens", "1e3", "--val-tokens", 100]
    tenth = sum(path.stat().st_size for path in parts) // 40  # of the tokens, of about four bytes each, for validation
    for out, sources, options, texts, most, sizes in (
            ("several", parts, [], documents, None, [tenth]), ("exact", [body], exact, documents, 1500, [100, 1000]),
            ("small", [written("small.txt", "The sailors")], [], ["The sailors"], None, [1]),
            ("long", [written("long.txt", long)], ["--jobs", 2], [long], None, [len(long.encode()) // 40])):
        run(*sources, "-o", out, *options)
        expected = expected_tokens(texts)[:most]
        assert all_tokens(out) == expected, out
        found = {path.name: len(read_shard(path)) for path in shards(out)}
        assert list(found.values()) == sizes + [len(expected) - sum(sizes)], found
        assert list(found) == ["val_000000.bin", "train_000001.bin", "train_000002.bin"][:len(found)], found


def test_text_is_cut_where_no_token_changes():
    import prepare
    oracle()
    prepare.encoding = prepare.make_encoding(RANKS)
    chance = random.Random(SEED)
    for trial in range(400):
        documents = ["".join(chance.choices(NASTY, k=chance.randint(0, 60))) for _ in range(chance.randint(1, 4))]
        text = "\n<|endoftext|>\n".join(documents)
        path = written("nasty.txt", text)
        expected = expected_tokens(re.split(r"\n?<\|endoftext\|>\n?", text))
        with mock.patch.object(prepare, "BATCH_BYTES", chance.choice([1, 2, 7, 40])):
            batches = list(prepare.read_text(path, 0))
            for position in [0] + [batch[0] for batch in batches]:  # whichever batch a resumed run begins with
                tokens = array.array("H")
                for batch in [*(b for b in batches if b[0] < position), *prepare.read_text(path, position)]:
                    tokens.frombytes(prepare.encode(batch[2])[0])
                assert list(tokens) == expected, f"seed {SEED}, trial {trial}, from {position}: {text!r}"


def test_default_places():
    for script in PREPARE.parent.glob("*.py"):
        written(f"places/data/{script.name}", script.read_bytes())
    run(written("places/book.txt", LETTERS), script=Path("places/data/prepare.py"))
    assert all_tokens("places/data/cache/book") == expected_tokens([LETTERS])
    for name in ("hellaswag_val", "other"):
        path = written(f"places/{name}.jsonl", json_lines(EXAMPLES))
        out = run(path, script=Path("places/data/hellaswag.py"))
        assert Path(f"places/data/cache/hellaswag/hellaswag_{name.removeprefix('hellaswag_')}.bin").exists(), out


def test_forms_of_ranks_are_the_same():
    path = write_documents("forms.txt", some_documents(30))
    encoder = {"".join(SHOWN[byte] for byte in token): rank for token, rank in RANKS.items()}
    encoder = ranks_options(json.dumps({**encoder, "<|endoftext|>": END_OF_TEXT}), "encoder.json")
    vocab = ranks_options("\n".join(["#version: 0.2", *MERGES, ""]), "vocab.bpe")
    for i, options in enumerate([ranks_options(), vocab, encoder, vocab + encoder]):
        run(path, "-o", f"form{i}", ranks=options)
        assert content(f"form{i}") == content("form0"), options
    for different in {bytes([b]): i for i, b in enumerate(BYTES)}, {**RANKS, b"a": RANKS[b"b"], b"b": RANKS[b"a"]}:
        other = ranks_options(tiktoken_file(different), "other.tiktoken")
        fails(path, "-o", "forms", ranks=ranks_options() + other, says=["other.tiktoken: other ranks than in"])


def test_known_ids():
    """Worked out by hand. GPT-2 numbers the visible bytes from '!' = 0 on, then the others (' ' = 220), then merges."""
    text = "Hi there, Hi~\n\u00e9 x's x't x're x've x'm x'll x'd 1x!x  x"
    run(written("known.txt", text), "-o", "known", "--val-tokens", 4)
    assert [read_shard(path) for path in shards("known")] == [
        [50256, 256, 261, 11],
        [220, 256, 93, 198, 127, 102, 220, 87, 262, 220, 87, 263, 220, 87, 265, 220, 87, 267, 220, 87, 268, 220, 87,
         270, 220, 87, 271, 220, 16, 87, 0, 87, 220, 220, 87]]
    tokenizer = Path("known/gpt2_tokenizer.bin").read_bytes()
    assert struct.unpack("<256I", tokenizer[:1024]) == (20240328, 2, 50257, 50256) + (0,) * 252
    pieces = b"".join(bytes([len(token)]) + token for token in RANKS)
    assert tokenizer[1024:] == pieces + bytes(50256 - len(RANKS)) + b"\x0d<|endoftext|>"


def cache_name(url):
    return hashlib.sha1(f"https://openaipublic.blob.core.windows.net/{url}".encode()).hexdigest()


VOCAB_BPE = "gpt-2/encodings/main/vocab.bpe"


def test_gpt2_ids():
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or tempfile.gettempdir() + "/data-gym-cache")
    urls = [VOCAB_BPE, "gpt-2/encodings/main/encoder.json", "encodings/r50k_base.tiktoken"]
    if not any((cache / cache_name(url)).exists() for url in urls):
        raise Skip("needs GPT-2's ranks in tiktoken's cache directory")
    run(written("hello.txt", "Hello world, it's 2024"), "-o", "gpt2", "--val-tokens", 1, ranks=[])
    assert all_tokens("gpt2") == [50256, 15496, 995, 11, 340, 338, 48609]


# ----------------------------------------------------------------------------------------------------------- restarting


def test_parallel_is_serial():
    path = write_documents("parallel.jsonl", some_documents(12000))  # several batches
    assert path.stat().st_size > 2 << 20
    for jobs in (1, 3):
        run(path, "-o", f"jobs{jobs}", "--shard-tokens", 50000, "--jobs", jobs)
    assert content("jobs1") == content("jobs3")


def test_few_batches_are_in_flight():
    """However many there are, and their results come in order."""
    import prepare
    submitted, found, most = [], [], 0
    pool = mock.Mock(submit=lambda _, texts: submitted.append(texts) or mock.Mock(result=lambda: -texts))
    for result in prepare.in_order(pool, ((f"place {i}", i) for i in range(100)), 7):
        most = max(most, len(submitted) - len(found))
        found.append(result)
    assert found == [(f"place {i}", -i) for i in range(100)] and most == 8, (found, most)


def test_files_are_on_disk_before_they_have_their_names():
    import prepare_common
    calls, replace = [], os.replace
    synced = lambda file: calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
    replaced = lambda part, path: calls.append("replace") or replace(part, path)
    with mock.patch("os.fsync", synced), mock.patch("os.replace", replaced):
        prepare_common.write_file(written("synced/file", "old"), b"new")
    assert calls == ["file.part", "replace", "synced"] and Path("synced/file").read_bytes() == b"new", calls


def stop(wanted, how, *options):
    """Starts a run, stops it when it has `wanted` shards, and gives its exit code and errors."""
    process = start(*options, start_new_session=True)
    while process.poll() is None and len(shards(options[2])) < wanted:
        time.sleep(0.002)
    how(process)
    _, err = process.communicate(timeout=60)  # returns when its workers are gone as well: they hold the pipes
    return process.returncode, err


def test_killed_run_goes_on_byte_for_byte():
    path = write_documents("killed.jsonl", some_documents(16000))
    options = ["--shard-tokens", 20000, "--jobs", 2]
    run(path, "-o", "whole", *options)
    whole, killed = content("whole"), 0
    assert len(whole) > 20
    for wanted in (1, 5, len(whole) // 2):
        code, _ = stop(wanted, subprocess.Popen.kill, path, "-o", "killed", *options)
        killed += code == -signal.SIGKILL
        assert all(whole[shard.name] == shard.read_bytes() for shard in shards("killed")), "an interrupted run differs"
    assert killed >= 2, "the runs ended before they were killed"
    stamps = {shard: shard.stat().st_mtime_ns for shard in shards("killed")}
    assert "finished shards kept" in run(path, "-o", "killed", *options)
    assert content("killed") == whole
    same = sum(shard.stat().st_mtime_ns == stamp for shard, stamp in stamps.items())
    assert same >= len(stamps) - 1, f"{same} of {len(stamps)} shards were kept"  # one may have missed the manifest


def test_ctrl_c_and_a_killed_worker_end_in_one_line():
    def kill_worker(run):
        os.kill(int(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[0]), signal.SIGKILL)

    def ctrl_c(run):
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does

    path = write_documents("stopped.jsonl", some_documents(64000))  # far from done when the first shard is
    for how, says in (ctrl_c, "interrupted; run again"), (kill_worker, "a worker was killed"):
        code, err = stop(1, how, path, "-o", "stopped", "--shard-tokens", 20000, "--jobs", 2)
        assert code == 1 and err.startswith(f"prepare.py: {says}") and len(err.splitlines()) == 1, (code, err)
        shutil.rmtree("stopped")


def test_resumes_after_any_shard_of_every_format():
    documents = some_documents(1500)
    documents[3] = "".join(documents)  # one that many shards share
    for out, path in each_format(documents, "resume"):
        options = [path, "-o", out, "--shard-tokens", 30000, "--jobs", 2]
        run(*options)
        whole = content(out)
        manifest = json.loads(whole.pop("manifest.json"))
        done = manifest["shards"]
        for kept in {1, len(done) // 2, len(done) - 1, len(done)}:
            for shard in done[kept:]:
                Path(out, shard["name"]).unlink()
            part = {key: manifest[key] for key in ("settings", "sources", "val_tokens")}
            written(f"{out}/manifest.json", json.dumps({**part, "shards": done[:kept], "complete": False}))
            half = written(f"{out}/train_000001.bin.part", b"half a shard")  # a crash leaves such a file
            run(*options)
            half.unlink(missing_ok=True)
            found = content(out)
            assert json.loads(found.pop("manifest.json")) == manifest
            assert found == whole, f"{out}, {kept} shards kept"


def test_damaged_shards_and_other_settings():
    path = write_documents("damaged.txt", some_documents())
    options = [path, "-o", "damaged", "--shard-tokens"]
    run(*options, 4000)
    whole = content("damaged")
    for damage in (lambda shard: shard.write_bytes(shard.read_bytes()[:-2] + b"zz"), Path.unlink):
        damage(shards("damaged")[2])
        assert "train_000002.bin: not what was written" in run(*options, 4000)
        assert content("damaged") == whole
    assert "not what was written" not in run(*options, 4000)
    fails(*options, 999, says=["manifest.json: made with shard_tokens = 4000, now it is 999"])
    path.write_text("another text, and it is long enough")
    fails(*options, 4000, says=["manifest.json: made with files"])
    written("damaged/manifest.json", "{")
    fails(*options, 4000, says=["manifest.json: damaged; delete it"])


# ------------------------------------------------------------------------------------------------------------ downloads


class Hub(http.server.BaseHTTPRequestHandler):
    files = {}
    ranges = []  # where each answer began
    breaks, whole = 0, False  # `breaks` answers end after half of the bytes. If `whole`, the server ignores Range.

    def do_GET(self):
        data, listing = Hub.files.get(self.path), self.path.startswith("/api/")
        begin = 0 if listing or Hub.whole else int(self.headers.get("Range", "bytes=0-")[6:-1])
        body = (data or b"")[begin:]
        self.send_response(404 if data is None else 416 if not body else 206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if data is not None and not listing:
            Hub.ranges.append(begin)
            if Hub.breaks:
                Hub.breaks -= 1
                body = body[:len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub(files, repository=None, folder=""):
    """A server with these files, as a folder of a repository if one is named. Gives the scripts' environment."""
    Hub.files, Hub.ranges, Hub.breaks, Hub.whole = {f"/{name}": data for name, data in files.items()}, [], 0, False
    if repository:
        listing = [{"path": folder + name, "size": len(data), "lfs": {"oid": sha256(data)}}
                   for name, data in files.items()]
        Hub.files = {f"/datasets/{repository}/resolve/main/{folder}{name}": data for name, data in files.items()}
        Hub.files[f"/api/datasets/{repository}/tree/main/{folder}".rstrip("/")] = json.dumps(listing).encode()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"}
    finally:
        server.shutdown()
        server.server_close()


def test_tinystories_from_the_hub():
    parts = [some_documents(400, SEED), some_documents(400, SEED + 1)]
    valid, train = ("\n<|endoftext|>\n".join(part).encode() for part in parts)
    name = "TinyStoriesV2-GPT4-valid.txt"
    files = {"README.md": b"-", "TinyStoriesV2-GPT4-train.txt": train, name: valid}
    with hub(files, "roneneldan/TinyStories") as environment:
        options = ["tinystories", "--val-tokens", 2000, "-o"]
        Hub.breaks = 1
        fails(*options, "stories", says=["download broke off", "run again to go on"], environment=environment)
        run(*options, "stories", environment={**environment, "HF_ENDPOINT": environment["HF_ENDPOINT"] + "/"})
        assert Hub.ranges == [0, len(valid) // 2, 0], Hub.ranges
        stories = content("stories")
        assert all_tokens("stories") == expected_tokens(parts[0] + parts[1])
        assert not list(Path("stories/download").glob("*.part"))
        run(*options, "stories", environment={"HF_ENDPOINT": "http://127.0.0.1:1"})  # complete: asks nobody
        written(f"late/download/{name}.part", valid)  # ended between a download's last byte and its final name
        run(*options, "late", environment=environment)
        assert content("late") == stories and Hub.ranges[3] == len(valid), Hub.ranges
        written(f"foreign/download/{name}", train)
        fails(*options, "foreign", says=["valid.txt: wrong SHA-256: expected", "delete it"], environment=environment)
        Hub.breaks, Hub.whole = 1, True
        fails(*options, "whole_stories", says=["download broke off"], environment=environment)
        run(*options, "whole_stories", environment=environment)
        assert content("whole_stories") == stories
        Hub.files = {path: data if path.startswith("/api/") else data[:-1] + b"?" for path, data in Hub.files.items()}
        says = ["wrong SHA-256: expected", "found", "deleted, run again"]
        fails(*options, "other", says=says, environment=environment)
        assert not list(Path("other/download").iterdir()), "a file with the wrong hash was kept"
        Hub.files.clear()
        fails(*options, "other", says=["cannot download: Not Found"], environment=environment)


def test_fineweb_from_the_hub():
    documents = some_documents(100)
    files = {"000_00000.parquet": write_documents("000_00000.parquet", documents).read_bytes()}
    with hub(files, "HuggingFaceFW/fineweb-edu", "sample/10BT/") as environment:
        run("fineweb-edu", "--val-tokens", 50, "-o", "edu", environment=environment)
    assert all_tokens("edu") == expected_tokens(documents)


def test_tinyshakespeare_by_its_name():
    """A copy of the script that has another address and text for it. llm.c cuts this text into speeches."""
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\n" * 20 + "First:\nSure.\n"
    with hub({"input.txt": text.encode()}) as environment:
        code = PREPARE.read_text()
        for pattern, new in ((r'"https://raw[^"]*"', f'"{environment["HF_ENDPOINT"]}/input.txt"'),
                             (r'"bytes": 1115394', f'"bytes": {len(text)}'),
                             ("86c4e6aa[0-9a-f]*", sha256(text.encode())), (r"32768", "50")):
            code, n = re.subn(pattern, new, code)
            assert n == 1, pattern
        shutil.copy(PREPARE.with_name("prepare_common.py"), written("play/prepare.py", code).parent)
        run("tinyshakespeare", "-o", "play/out", script=Path("play/prepare.py"), environment=environment)
    expected = expected_tokens(text.replace("\n\n", "\n\n<|endoftext|>").split("<|endoftext|>"))
    assert all_tokens("play/out") == expected and expected.count(END_OF_TEXT) == 41
    assert len(read_shard(shards("play/out")[0])) == 50


def test_listing_of_the_hub():
    import prepare
    names = ["001_00000.parquet", "README.md", "000_00001.parquet", "000_00000.parquet"]  # the hub promises no order
    with hub({name: name.encode() for name in names}, "a/b", "sample/") as environment:
        with mock.patch.object(prepare, "HUB", environment["HF_ENDPOINT"]):
            files = prepare.hub_files("a/b", "sample", None)
    assert [file["url"].rsplit("/", 1)[1] for file in files] == sorted(set(names) - {"README.md"}), files
    assert all(file["sha256"] == sha256(Path(file["url"]).name.encode()) for file in files)
    for size in ("10B", "100B"):
        assert prepare.DATASETS[f"fineweb{size}"]["hub"][1] == f"sample/{size}T"


def test_no_network():
    away = {"HF_ENDPOINT": "http://127.0.0.1:1", "no_proxy": "127.0.0.1", "https_proxy": "http://127.0.0.1:1",
            "HTTPS_PROXY": "http://127.0.0.1:1", "TIKTOKEN_CACHE_DIR": "no_cache"}
    text, path = written("a.txt", "text"), "away/hellaswag.bin"
    fails("fineweb10B", "-o", "away", says=["cannot download", "check the network"], environment=away)
    fails("tinyshakespeare", "-o", "away", says=["input.txt: cannot download"], environment=away)
    fails(text, "-o", "away", says=["vocab.bpe: cannot download", "vocab.bpe with --ranks"], environment=away, ranks=[])
    fails("val", "-o", path, says=["hellaswag_val.jsonl: cannot download"], environment=away, script=HELLASWAG)


def test_ranks_from_the_cache():
    path = written(f"cache/{cache_name(VOCAB_BPE)}", tiktoken_file(RANKS))
    options = [written("cached.txt", LETTERS), "-o", "cached"]
    accepted = ["--ranks-sha256", sha256(path.read_bytes())]
    run(*options, ranks=accepted, environment={"TIKTOKEN_CACHE_DIR": "cache"})
    run(*options, ranks=accepted, environment={"TIKTOKEN_CACHE_DIR": "", "DATA_GYM_CACHE_DIR": "cache"})
    assert all_tokens("cached") == expected_tokens([LETTERS])
    fails(*options, ranks=[], says=[f"{path}: wrong SHA-256: expected", f"found {accepted[1]}"],
          environment={"TIKTOKEN_CACHE_DIR": "cache"})


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors_in_text():
    good = json_lines([{"text": "good"}])
    size = len(good)
    for name, data, *says in (
            ("utf8.txt", b"good \xff bad", "utf8.txt: invalid UTF-8 at offset 5: found byte 0xff"),
            ("late.txt", b"good \n" * 300000 + b"\xe2\x28", "late.txt: invalid UTF-8 at offset 1800000"),
            ("end.txt", b"good \xe2\x82", "end.txt: invalid UTF-8 at offset 5"),
            ("utf8.jsonl", good.encode() + b'{"text": "\xff"}\n', f"utf8.jsonl: invalid UTF-8 at offset {size + 10}"),
            ("no.jsonl", good + '{"body": 1}\n', f"no.jsonl: object at offset {size} has no field 'text'", "--field"),
            ("type.jsonl", good + '{"text": 1}\n', f"type.jsonl: object at offset {size}: 'text' is int, expected a"),
            ("list.jsonl", "[1]\n", "list.jsonl: object at offset 0 has no field 'text'"),
            ("syntax.jsonl", good + '{"text": \n', f"syntax.jsonl: not JSON at offset {size + 10}"),
            ("tiny.txt", "a", "no tokens left to train on", "--val-tokens"),
            ("empty.txt", "", "no tokens left to train on")):
        fails(written(name, data), "-o", "errors", *(["--val-tokens", 2] if name == "tiny.txt" else []), says=says)
        assert not Path("errors/manifest.json").exists() or name == "late.txt", name  # other settings may follow
        assert not shards("errors") or name in ("late.txt", "tiny.txt"), name
        shutil.rmtree("errors", ignore_errors=True)
    fails("none.txt", "-o", "errors", says=["none.txt: No such file"])


def test_errors_in_parquet():
    for path, *says in ((write_parquet("column.parquet", {"body": ["a"]}), "no column 'text', found body"),
                        (write_parquet("type.parquet", {"text": [1]}), "column 'text' is int64, expected string"),
                        (written("no.parquet", "PAR1 no"), "cannot read as parquet")):
        fails(path, "-o", "errors", says=says)


def test_errors_in_ranks():
    path = written("text.txt", LETTERS)
    cases = [(tiktoken_file({**RANKS, b"zzz": 65536}), "bad.tiktoken: token 65536 does not fit", "at most 65535"),
             (tiktoken_file({**RANKS, b"zzz": END_OF_TEXT}), "expected different ids below 50256"),
             (tiktoken_file({**RANKS, b"zzz": 7}), "expected different ids"),
             (tiktoken_file(dict(list(RANKS.items())[1:])), "a single byte has no token"),
             (tiktoken_file({**RANKS, b"z" * 256: 400}), "token 400 has 256 bytes", "at most 255")]
    for raw in (b"?!", b"{", b"\xff\n", b"#version\n\xf0\x9f\x99\x82 a", b'{"a": "b"}', b"{}", b"[]"):
        cases.append((raw, "bad.tiktoken: "))
    for raw, *says in cases:
        fails(path, "-o", "errors", ranks=ranks_options(raw, "bad.tiktoken"), says=says)
    option, name, _, found = ranks_options()
    fails(path, "-o", "errors", ranks=[option, name], says=[f"{name}: wrong SHA-256: expected", f"found {found}"])


def test_missing_library():
    for module, source in (("tiktoken", "text.txt"), ("tqdm", "text.txt"), ("pyarrow", "a.parquet")):
        written(f"without_{module}/{module}.py", "raise ImportError")
        path = f"without_{module}{os.pathsep}{os.environ['PYTHONPATH']}"
        fails(written(source, LETTERS), "-o", "errors", environment={"PYTHONPATH": path},
              says=[f"library {module} is not installed; pip install -r"])


def test_full_disk():
    options = [write_documents("disk.txt", some_documents(2000)), "--val-tokens", 1000, "--shard-tokens", 50000, "-o"]
    run(*options, "disk_whole")
    # A limit on the size of files stands for the disk: tokenizer and validation fit, the next shard does not.
    fails(*options, "disk", says=["disk: " + os.strerror(errno.EFBIG), "make room and run again"],
          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000)))
    assert [shard.name for shard in shards("disk")] == ["val_000000.bin"], "a partial shard has a final name"
    run(*options, "disk")
    assert content("disk") == content("disk_whole")


def test_usage():
    for arguments, *says in (((), "usage", "SOURCE"), (("book.pdf",), "book.pdf: expected one of tinyshakespeare"),
                             (("tinystories", "a.txt"), "tinystories cannot be mixed"),
                             (("a.txt", "--shard-tokens", "0"), "--shard-tokens: expected a number", "found 0"),
                             (("a.txt", "--max-tokens", "inf"), "--max-tokens"),
                             (("a.txt", "--val-tokens", "some"), "--val-tokens: expected a number", "found some"),
                             (("a.txt", "--shard-tokens", "3e9"), "--shard-tokens below 2^31"),
                             (("a.txt", "--jobs", "0"), "--jobs from 1")):
        fails(*arguments, says=says, code=2)
    fails("a.csv", script=HELLASWAG, says=["a.csv: expected val"], code=2)
    for script in (PREPARE, HELLASWAG):
        assert "examples:" in run("--help", script=script)


# ------------------------------------------------------------------------------------------------------------ hellaswag


EXAMPLES = [{"ind": i, "ctx": f"The sailors sang {'all day ' * i}and they", "label": i % 4,
             "endings": ["gone north.", "didn't see it.", "'ll say 12 🙂.", "sure"]} for i in range(7)]


def test_hellaswag_file():
    out = run(written("examples.jsonl", json_lines(EXAMPLES)), "-o", "hella/val.bin", script=HELLASWAG)
    assert "7 examples" in out and Path("hella/gpt2_tokenizer.bin").exists()
    raw, encode = Path("hella/val.bin").read_bytes(), oracle().encode_ordinary
    stream, sizes = [], []
    for i, example in enumerate(EXAMPLES):
        texts = [encode(text) for text in [example["ctx"]] + [" " + ending for ending in example["endings"]]]
        parts = [part for tokens in texts for part in (len(tokens), *tokens)]
        sizes.append(2 * (5 + len(parts)))
        stream += [65535, sizes[-1], i, example["label"], 4, *parts]
    assert struct.unpack("<256i", raw[:1024]) == (20240522, 1, len(EXAMPLES), max(sizes)) + (0,) * 252
    assert list(struct.unpack(f"<{len(raw) // 2 - 512}H", raw[1024:])) == stream


def test_hellaswag_errors():
    good = EXAMPLES[0]
    line = len(json_lines([good]))
    unlabelled = {key: value for key, value in good.items() if key != "label"}
    cases = [(json_lines([good, example]), "bad.jsonl", *says) for example, *says in (
        (unlabelled, f"offset {line}: expected ctx", "'label'"),
        ({**good, "label": 4}, f"offset {line}: expected text", "label 4"),
        ({**good, "label": ""}, "expected ctx, endings and a label"),
        ({**good, "endings": [1, 2]}, "endings of text"), ({**good, "ctx": "! " * 40000}, "at most 65535 bytes"))]
    cases += [("{\n", "not JSON at offset 2"), (b'{"ctx": "\xff"}', "invalid UTF-8 at offset 9"), ("", "no examples")]
    for raw, *says in cases:
        fails(written("bad.jsonl", raw), "-o", "hella/bad.bin", says=says, script=HELLASWAG)
    fails("none.jsonl", "-o", "hella/bad.bin", says=["none.jsonl: No such file"], script=HELLASWAG)
    assert not Path("hella/bad.bin").exists()
    from hellaswag import Fail, encode_example
    assert list(encode_example(oracle(), 65535, "", "", [""], 0))[2] == 65535  # what 16 bits hold
    try:
        encode_example(oracle(), 65536, "", "", [""], 0)
        raise AssertionError("an index of 17 bits")
    except Fail as e:
        assert "65536 examples" in str(e), e


# ---------------------------------------------------------------------------------------------------------- the trainer


def test_trainer_reads_shards_and_tokenizer():
    run(write_documents("trainer.txt", some_documents()), "-o", "trainer", "--shard-tokens", 3000)
    train = lambda *arguments: run_program("train_gpt2cu", "--device", "cpu", *arguments)
    # A small model with GPT-2's vocabulary: llm.c's header, then the parameters.
    V, Vp, L, NH, C, max_T = 50257, 50304, 1, 1, 64, 128
    parameters = Vp * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    chance = random.Random(SEED)
    values = array.array("f", [chance.gauss(0, 0.3) for _ in range(9973)]) * (parameters // 9973 + 1)
    header = struct.pack("<256i", 20240326, 3, max_T, V, L, NH, C, Vp, *[0] * 248)
    model = ["-e", written("small.bin", header + values[:parameters].tobytes())]
    validation, tokenizer = ["-j", "trainer/val_*.bin", "-b", 1], ["--tokenizer", "trainer/gpt2_tokenizer.bin"]
    sampling = ["-s", 1, "-g", 12, "--prompt", "A"]
    training = [*model, "-i", "trainer/train_*.bin", *validation, "-t", 16, "-x", 1, "-m", 1, *sampling]
    log = train(*training, *tokenizer)
    tokens = sum(len(read_shard(path)) for path in shards("trainer") if path.name.startswith("train"))
    assert f"{tokens} tokens" in log and "1 shard" in log, log
    run(written("questions.jsonl", json_lines(EXAMPLES)), "-o", "questions.bin", script=HELLASWAG)
    answers = train(*model, "--eval-only", *validation, "-t", 128, "--hellaswag", "questions.bin")
    assert re.search(r"hellaswag [0-7] of 7", answers), answers
    # The same ids without and with the tokenizer: <id> against the bytes of the token. The same of a run's sample.
    sample = lambda log: re.search(r"\| sample\n---\n(.*)\n---\n", log, re.DOTALL)[1]
    generate = [*model, "--generate", 12, "--prompt", "A", "--top-k", 50]
    pieces = {rank: token.decode(errors="replace") for token, rank in RANKS.items()}
    for ids, text in ((train(*generate), train(*generate, *tokenizer)), (sample(train(*training)), sample(log))):
        assert re.search(r"<\d+>", ids), ids
        assert text == re.sub(r"<(\d+)>", lambda found: pieces.get(int(found[1]), ""), ids), (ids, text)


if __name__ == "__main__":
    main()
