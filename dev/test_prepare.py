#!/usr/bin/env python3
"""Tests of data/prepare.py and data/hellaswag.py, all offline. The scripts get a small list of ranks, and tiktoken's
own encoder with the pattern of GPT-2's release says what they must write. Where libraries are missing, small ones stand
in for them.
Run: python3 dev/test_prepare.py [part of a name]"""
import array
import base64
import contextlib
import errno
import functools
import glob
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
from unittest import mock

from harness import ROOT, Skip, built, main, need, new_folder, run_program, shell_words, written
from stand_ins import stand_in

SEED = int(os.environ.get("SEED", 1))
END_OF_TEXT = 50256
PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = ("The ship's crew didn't see it: we'll say they've gone north, I'm sure. "
           "Twelve sailors sang in 1789, all of them!\n")
NASTY = ["a", "Zoë", "it's", "we'LL", "12", "...", "<", ">", "|>", "<|", " ", "  ", "\n", "\n\n", "\r\n", "\t",
         "\u3000", "\u00a0", "\x1c", "\u2028", "日本語", "🙂", "e\u0301", "<|endof", "'", "'s", "don't ", "<p> ", "\n<",
         ">\n"]
QUESTIONS = [{"ind": i, "ctx": f"The sailors sang {'all day ' * i}and they", "label": i % 4,
              "endings": ["gone north.", "didn't see it.", "'ll say 12 🙂.", "sure"]} for i in range(7)]

# Ranks: GPT-2's order of the bytes, then merges as vocab.bpe writes them. GPT-2's pattern cuts inside three of them.
VISIBLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE)) for i, byte in enumerate(BYTES)}
MERGES = ("H i,Ġ t,Ġt h,e r,Ġth er,Ġther e,' s,' t,r e,' re,v e,' ve,' m,l l,' ll,' d,1 x,! x,Ġ Ġ,"
          "Ġ s,Ġs a,i l,Ġsa il,o r,or s,Ġsail ors,n g,Ġ a,Ġa ll,Ġsa ng,T h,Th e,h e,he y,Ġs h,8 9,a y").split(",")
MERGED = [merge.replace(" ", "").replace("Ġ", " ").encode() for merge in MERGES]
RANKS = {token: rank for rank, token in enumerate([bytes([byte]) for byte in BYTES] + MERGED)}

# In an empty folder stands a copy of the scripts, so that what they write by default goes there as well.
MISSING = stand_in("tiktoken", "tqdm")
new_folder()
for script in ROOT.glob("data/*.py"):
    written(f"data/{script.name}", script.read_bytes())
sys.path.append(os.path.abspath("data"))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would pass on that it is ignored
FORMATS = ["txt", "jsonl"] + ["parquet"] * bool(importlib.util.find_spec("pyarrow"))


def sha256(raw):
    return hashlib.sha256(raw).hexdigest()


def tiktoken_file(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def ranks_options(raw=tiktoken_file(RANKS), name="ranks.tiktoken"):
    return ["--ranks", written(name, raw), "--ranks-sha256", sha256(Path(name).read_bytes())]


def run(*command, code=0, says=(), script="prepare", ranks=None, meanwhile=lambda process: None):
    """Runs a script with the ranks of this file, or with the options `ranks` in place of them. It prints all of `says`,
    and if `code` is 1, just one line on stderr. Gives what it prints."""
    command = [sys.executable, f"data/{script}.py", *command, *(ranks_options() if ranks is None else ranks)]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               errors="surrogateescape", start_new_session=True)
    meanwhile(process)
    out, err = process.communicate(timeout=300)  # returns when its workers are gone as well: they hold the pipes
    assert process.returncode == code, f"expected exit code {code}, found {process.returncode}:\n{out}{err}"
    assert code != 1 or len(err.splitlines()) == 1, f"expected one line, found:\n{err}"
    missing = [words for words in says if words not in (err if code else out)]
    assert not missing, f"expected {missing} in: {out}{err}"
    return out


fails = functools.partial(run, code=1)
hellaswag = functools.partial(run, script="hellaswag")


def oracle(ranks=RANKS):
    import tiktoken
    return tiktoken.Encoding("oracle", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens={})


def expected_tokens(documents):
    encoding, tokens = oracle(), []
    for document in documents:
        if document.strip():
            tokens += [END_OF_TEXT] + encoding.encode_ordinary(document)
    return tokens


def paths(name):
    """The shards that prepare.py writes by default of a file with this name."""
    return sorted(Path("data/cache", name).glob("*_??????.bin"), key=lambda path: path.name[-10:])


def read_shard(path):
    header, tokens = path.read_bytes()[:1024], path.read_bytes()[1024:]
    assert header == struct.pack("<256i", 20240520, 1, len(tokens) // 2, *[0] * 253), f"{path}: {header[:16]}"
    return list(struct.unpack(f"<{len(tokens) // 2}H", tokens))


def all_tokens(name):
    return [token for path in paths(name) for token in read_shard(path)]


def content(name):
    folder = Path("data/cache", name)
    assert not list(folder.rglob("*.part")), "a partial file was left behind"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def some_documents(count=300, seed=SEED):
    print(f"seed {seed}")
    chance = random.Random(seed)
    words = LETTERS.split() + ["日本語", "🙂", "\n", "\n\n", "  ", "\r\n", "42"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 80))) + "." for _ in range(count)]


def json_lines(objects):
    return "".join(json.dumps(one) + "\n" for one in objects)


DEEP, LONG = "[" * 100000, "9" * 5000  # more than json's parser and int() take


def write_parquet(path, columns):
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=700)  # several batches a group
    return path


def write_documents(path, documents):
    """A file of the format that the end of its name says."""
    if path.endswith(".parquet"):
        return write_parquet(path, {"text": documents})
    if path.endswith(".jsonl"):
        return written(path, json_lines({"id": i, "text": document} for i, document in enumerate(documents)) + "\n\n")
    return written(path, "\n<|endoftext|>\n".join(documents))


# ----------------------------------------------------------------------------------------------------------- the tokens


def test_one_stream_of_tokens_in_shards():
    """A case: the sources and options; the documents, how many tokens of these, of validation and of a shard."""
    documents, long = some_documents(), "".join(some_documents(6000))
    assert len(long) > 1 << 20  # cut, not held
    empty = ["", *documents[:9], "  \n ", *documents[9:], ""]
    parts = [write_documents(f"part{i}.{suffix}", documents[100 * i:][:100])
             for i, suffix in enumerate(("txt", "jsonl", "txt"))]
    tenth = sum(path.stat().st_size for path in parts) // 40  # of the tokens, of about four bytes each, for validation
    body = written("body.jsonl", json_lines({"body": document} for document in documents))
    exact = ["--field", "body", "--max-tokens", "1.5e3", "--shard-tokens", "1e3", "--val-tokens", 100]
    cases = [(parts, [], documents, None, tenth, 10**8), ([body], exact, documents, 1500, 100, 1000),
             ([written("small.txt", "The sailors")], [], ["The sailors"], None, 1, 10**8),
             ([written("long.txt", long)], ["--jobs", 2], [long], None, len(long.encode()) // 40, 10**8)]
    for suffix in FORMATS:
        path = write_documents(f"format_{suffix}.{suffix}", empty)
        cases.append(([path], ["--shard-tokens", 5000, "--val-tokens", 7001], empty, None, 7001, 5000))
    for sources, options, texts, most, validation, shard_tokens in cases:
        said, name = run(*sources, *options), Path(sources[0]).stem
        tokens = expected_tokens(texts)[:most]
        splits = ("val", tokens[:validation]), ("train", tokens[validation:])
        pieces = [(split, part[i:][:shard_tokens]) for split, part in splits for i in range(0, len(part), shard_tokens)]
        found = {path.name: read_shard(path) for path in paths(name)}
        assert found == {f"{split}_{i:06d}.bin": piece for i, (split, piece) in enumerate(pieces)}, (name, list(found))
        manifest = json.loads(content(name)["manifest.json"])
        assert manifest["complete"] and manifest["tokens"] == len(tokens), manifest
        assert [shard["sha256"] for shard in manifest["shards"]] == [sha256(path.read_bytes()) for path in paths(name)]
        if not most:  # else it ends within a batch, whose documents are not counted
            full = sum(bool(text.strip()) for text in texts)
            assert [manifest["documents"], manifest["empty"]] == [full, len(texts) - full], manifest
            assert f"documents: {full}, empty ones skipped: {len(texts) - full}\n" in said, said


def test_text_is_cut_where_no_token_changes():
    import prepare
    prepare.encoding = prepare.make_encoding(RANKS)
    chance = random.Random(SEED)
    for trial in range(400):
        documents = ["".join(chance.choices(NASTY, k=chance.randint(0, 60))) for _ in range(chance.randint(1, 4))]
        text = chance.choice(["\n<|endoftext|>\n", "\r\n<|endoftext|>\r\n", "\r<|endoftext|>"]).join(documents)
        path = written("nasty.txt", chance.choice(["", "\ufeff"]) + text)
        documents = text.split("<|endoftext|>")
        documents = [re.sub(r"\r?\n\Z", "", d) if i + 1 < len(documents) else d for i, d in enumerate(documents)]
        expected = expected_tokens([re.sub(r"\A\r?\n", "", d) if i else d for i, d in enumerate(documents)])
        with mock.patch.object(prepare, "BATCH_BYTES", chance.choice([1, 2, 7, 40])):
            batches = list(prepare.read_text(path, 0))
            for position in [0] + [batch[0] for batch in batches]:  # whichever batch a resumed run begins with
                tokens = array.array("H")
                for batch in [*(b for b in batches if b[0] < position), *prepare.read_text(path, position)]:
                    tokens.frombytes(prepare.encode(batch[2])[0])
                assert list(tokens) == expected, f"seed {SEED}, trial {trial}, from {position}: {text!r}"


def test_what_plain_text_means():
    end = "<|endoftext|>"
    for i, (text, *documents) in enumerate((
            (f"\ufeffa\r\nb\r\n{end}\r\nc\r\n\r\n", "a\r\nb", "c\r\n\r\n"),
            (f"\n\n{end}\n\na\n\n{end}\n", "\n", "\na\n", ""), (f"a{end}\n{end}\r\n{end}b", "a", "", "", "b"),
            (f"a\r\n\r\n{end}\r\n\r\nb\r{end}\rc", "a\r\n", "\r\nb\r", "\rc"), (f"\ufeff{end}a{end}", "", "a", ""),
            (f"\ufeff\ufeffa\n{end}\ufeffb", "\ufeffa", "\ufeffb"),
            ("\ufeff\n a b", "\n a b"), (f"a <|endoftext| > {end}{end} b", "a <|endoftext| > ", "", " b"))):
        run(written(f"plain{i}.txt", text), "--val-tokens", 1)
        assert all_tokens(f"plain{i}") == expected_tokens(documents), text
        run(written(f"field{i}.jsonl", json_lines([{"text": text}])), "--val-tokens", 1)
        assert all_tokens(f"field{i}") == expected_tokens([text]), text


def test_known_ids():
    """Worked out by hand. GPT-2 numbers the visible bytes from '!' = 0 on, then the others (' ' = 220), then merges."""
    run(written("known.txt", "Hi there, Hi~\n\u00e9 x's x't x're x've x'm x'll x'd 1x!x  x"), "--val-tokens", 4)
    assert [read_shard(path) for path in paths("known")] == [
        [50256, 256, 261, 11],
        [220, 256, 93, 198, 127, 102, 220, 87, 262, 220, 87, 263, 220, 87, 265, 220, 87, 267, 220, 87, 268, 220, 87,
         270, 220, 87, 271, 220, 16, 87, 0, 87, 220, 220, 87]]
    header = struct.pack("<256I", 20240328, 2, 50257, 50256, *[0] * 252)
    pieces = b"".join(bytes([len(token)]) + token for token in RANKS)
    found = content("known")["gpt2_tokenizer.bin"]
    assert found == header + pieces + bytes(50256 - len(RANKS)) + b"\x0d<|endoftext|>"


def test_hellaswag_file():
    questions = QUESTIONS + [{"ctx": "a", "endings": [""], "label": "0"}] * 65529  # as many as 16 bits can number
    encode, stream, sizes = oracle().encode_ordinary, [], []
    for i, question in enumerate(questions):
        texts = [encode(text) for text in [question["ctx"]] + [" " + ending for ending in question["endings"]]]
        parts = [part for tokens in texts for part in (len(tokens), *tokens)]
        sizes.append(2 * (5 + len(parts)))
        stream += [65535, sizes[-1], i, int(question["label"]), len(question["endings"]), *parts]
    header = struct.pack("<256i", 20240522, 1, 65536, max(sizes), *[0] * 252)
    for name in "hellaswag_val", "other":
        hellaswag(written(f"{name}.jsonl", json_lines(questions)), says=["65,536 examples"])
        found = content("hellaswag")[f"hellaswag_{name.removeprefix('hellaswag_')}.bin"]
        assert found == header + struct.pack(f"<{len(stream)}H", *stream)
        assert "gpt2_tokenizer.bin" in content("hellaswag")
    said = hellaswag(written("one.jsonl", json_lines(QUESTIONS)), "-o", "it's [1] *.bin")
    assert Path(shell_words(said.splitlines()[-1])[-1]).exists(), said


# ------------------------------------------------------------------------------------------------------------ the ranks


VOCAB_BPE = "gpt-2/encodings/main/vocab.bpe"


def cache_name(url):
    return hashlib.sha1(f"https://openaipublic.blob.core.windows.net/{url}".encode()).hexdigest()


def test_forms_of_ranks_are_the_same():
    encoder = {"".join(SHOWN[byte] for byte in token): rank for token, rank in RANKS.items()}
    encoder = ranks_options(json.dumps({**encoder, "<|endoftext|>": END_OF_TEXT}), "encoder.json")
    vocab = ranks_options("\n".join(["#version: 0.2", *MERGES, ""]), "vocab.bpe")
    cached = written(f"cache/{cache_name(VOCAB_BPE)}", tiktoken_file(RANKS))
    path, whole = write_documents("forms.txt", some_documents(30)), None
    for options, place in ((ranks_options(), ""), (vocab, ""), (encoder, ""), (vocab + encoder, ""),
                           (ranks_options()[2:], "TIKTOKEN_CACHE_DIR"), (ranks_options()[2:], "DATA_GYM_CACHE_DIR")):
        with mock.patch.dict(os.environ, {"TIKTOKEN_CACHE_DIR": "", **({place: "cache"} if place else {})}):
            run(path, ranks=options)
            if place:
                fails(path, ranks=[], says=[f"{cached}: wrong SHA-256: expected", f"found {options[1]}"])
        whole = whole or content("forms")
        assert content("forms") == whole, options
        shutil.rmtree("data/cache/forms")


def test_gpt2_ids():
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or tempfile.gettempdir() + "/data-gym-cache")
    urls = [VOCAB_BPE, "gpt-2/encodings/main/encoder.json", "encodings/r50k_base.tiktoken"]
    if not any((cache / cache_name(url)).exists() for url in urls):
        raise Skip("needs GPT-2's ranks in tiktoken's cache directory")
    run(written("hello.txt", "Hello world, it's 2024"), "--val-tokens", 1, ranks=[])
    assert all_tokens("hello") == [50256, 15496, 995, 11, 340, 338, 48609]


def test_stdout():
    path = written("stdout.txt", LETTERS)
    command = [sys.executable, "data/prepare.py", path, *ranks_options(), "-o"]
    full = "/dev/full", 1, "prepare.py: stdout: "
    for folder, where, code, says in ("a", *full), ("b", *full), ("\u00e9", "out", 0, ""), ("\udcff", "out", 0, ""):
        with open(where, "w") as out:
            done = subprocess.run([*command, folder], stdout=out, stderr=subprocess.PIPE, text=True, env={
                **os.environ, "PYTHONUNBUFFERED": "1" if folder == "a" else "", "PYTHONIOENCODING": "ascii"})
        assert done.returncode == code and done.stderr.startswith(says) and done.stderr.count("\n") == code, done
        assert len(list(Path(folder).glob("*_0*.bin"))) == 1 + (folder != "a")  # what is finished stays
    assert b"\xff/val_*.bin" in Path("out").read_bytes()
    run(path, "-o", "a", says=["1 finished shard kept"])


def test_printed_command():
    said = run(written("command.txt", LETTERS), "-o", folder := "it's [1] $x *")
    words = shell_words(said.split("next: ")[1])
    for option, name in ("-i", "train_000001.bin"), ("-j", "val_000000.bin"):
        assert glob.glob(words[words.index(option) + 1]) == [f"{folder}/{name}"], words
    assert Path(words[words.index("--tokenizer") + 1]).exists(), words


# ----------------------------------------------------------------------------------------------------------- restarting


def test_stopped_runs_go_on_byte_for_byte():
    """One process writes the whole. Two write the parts, and something stops them after so many shards more."""
    def fill_disk(process):  # a limit on the size of files stands for it: the shard of validation fits, no other does
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (60000, 60000))

    def kill_worker(process):  # at its start, because once it has nothing left to do nobody misses it
        while not (children := Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()):
            time.sleep(0.002)
        os.kill(int(children[0]), signal.SIGKILL)

    def ctrl_c(process):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does

    path = write_documents("stopped.jsonl", some_documents(24000))
    assert path.stat().st_size > 4 << 20  # several batches
    options = [path, "--val-tokens", 1000, "--shard-tokens", 30000, "-o"]
    run(*options, "data/cache/whole", "--jobs", 1)
    whole, kill, some = content("whole"), subprocess.Popen.kill, len(paths("whole")) // 5
    for more, stop, code, *says in (
            (0, fill_disk, 1, "parts: " + os.strerror(errno.EFBIG), "make room and run again"),
            (0, kill_worker, 1, "prepare.py: a worker was killed"), (1, kill, -signal.SIGKILL),
            (some, ctrl_c, 1, "prepare.py: interrupted; run again"), (some, kill, -signal.SIGKILL)):
        wanted = len(paths("parts")) + more

        def wait_and_stop(process):
            while process.poll() is None and len(paths("parts")) < wanted:
                time.sleep(0.002)
            stop(process)

        run(*options, "data/cache/parts", "--jobs", 2, code=code, says=says, meanwhile=wait_and_stop)
        assert all(whole[path.name] == path.read_bytes() for path in paths("parts")), f"{stop}: a shard differs"
    stamps = {path: path.stat().st_mtime_ns for path in paths("parts")}
    run(*options, "data/cache/parts", says=["finished shards kept"])
    assert content("parts") == whole
    same = sum(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items())
    assert same >= len(stamps) - 1 > 0, f"{same} of {len(stamps)} shards were kept"  # one may have missed the manifest

    # A manifest with other batches: what it skips is longer than one of them.
    manifest = {**json.loads(whole.pop("manifest.json")), "complete": False}
    done = manifest["shards"] = manifest["shards"][:-2]
    skip = sum(shard["tokens"] for shard in done)
    done[-1]["next"] = {"source": 0, "position": 0, "skip": skip, "documents": 0, "empty": 0}
    written("data/cache/parts/manifest.json", json.dumps(manifest))
    for path in paths("parts")[-2:]:
        path.unlink()
    run(*options, "data/cache/parts")
    assert whole.items() <= content("parts").items()


def test_goes_on_after_any_shard_of_every_format():
    documents = some_documents(1500)
    documents[3] = "".join(documents)  # one that many shards share
    for suffix in FORMATS:
        path, name = write_documents(f"resume_{suffix}.{suffix}", documents), f"resume_{suffix}"
        options, anew = [path, "--jobs", 2, "--shard-tokens", 30000], "not what was written; shards are made anew"
        run(*options)
        whole, shards, manifest = content(name), paths(name), f"data/cache/{name}/manifest.json"
        for i, shard in enumerate([shards[1], shards[len(shards) // 2], shards[-1], shards[0]]):
            if i % 2:
                shard.unlink()
            else:
                shard.write_bytes(shard.read_bytes()[:-2] + b"zz")
            written(f"{shard}.part", b"half a shard")  # a crash leaves such a file
            run(*options, says=[f"{shard.name}: {anew}"])
            assert content(name) == whole, shard
        unfinished = {**json.loads(whole["manifest.json"]), "complete": False}  # with all shards
        for key in ("tokens", "documents", "empty"):
            del unfinished[key]
        written(manifest, json.dumps(unfinished))
        assert anew not in run(*options) and content(name) == whole
    fails(*options[:-1], 999, says=["manifest.json: made with shard_tokens = 30000, now it is 999"])
    with open(path, "ab") as file:
        file.write(b"\n")
    fails(*options, says=["manifest.json: made with files"])


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
        prepare_common.write_file(written("synced/file", "old"), [b"new"])
    assert calls == ["file.part", "replace", "synced"] and Path("synced/file").read_bytes() == b"new", calls


# ------------------------------------------------------------------------------------------------------------ downloads


class Hub(http.server.BaseHTTPRequestHandler):
    files, ranges = {}, []  # content by path, and where each answer began
    breaks = ignores_range = False  # answers end after half of the bytes; always begin with the first

    def do_GET(self):
        data = Hub.files.get(self.path)
        begin = 0 if Hub.ignores_range else int(self.headers.get("Range", "bytes=0-")[6:-1])
        body = (data or b"")[begin:]
        self.send_response(404 if data is None else 416 if not body else 206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if not self.path.startswith("/api/"):
            Hub.ranges.append(begin)
            body = body[:len(body) // 2] if Hub.breaks else body
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def hub(repository, folder, files):
    """A server with these files in a folder of a repository, which the scripts ask. Gives its address."""
    Hub.files = {f"/datasets/{repository}/resolve/main/{folder}{name}": data for name, data in files.items()}
    listing = [{"path": folder + name, "size": len(data), "lfs": {"oid": sha256(data)}} for name, data in files.items()]
    Hub.files[f"/api/datasets/{repository}/tree/main/{folder}".rstrip("/")] = json.dumps(listing).encode()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with mock.patch.dict(os.environ, HF_ENDPOINT=url + "/", no_proxy="127.0.0.1"):
        yield url
    server.shutdown()
    server.server_close()


def test_tinystories_from_the_hub():
    documents = some_documents(800)
    valid, train = ("\n<|endoftext|>\n".join(part).encode() for part in (documents[:400], documents[400:]))
    name, options = "TinyStoriesV2-GPT4-valid.txt", ["tinystories", "--val-tokens", 2000, "-o"]
    files = {"README.md": b"-", "TinyStoriesV2-GPT4-train.txt": train, name: valid}
    with hub("roneneldan/TinyStories", "", files):
        for out, ignores_range in ("tinystories", False), ("again", True):
            with mock.patch.multiple(Hub, breaks=True, ignores_range=ignores_range):
                fails(*options, f"data/cache/{out}", says=["download broke off", "run again to go on"])
            with mock.patch.object(Hub, "ignores_range", ignores_range):
                run(*options, f"data/cache/{out}")
        stories = content("tinystories")
        assert all_tokens("tinystories") == expected_tokens(documents) and content("again") == stories
        written(f"data/cache/late/download/{name}.part", valid)  # stopped after a download's last byte
        run(*options, "data/cache/late")
        assert content("late") == stories
        assert Hub.ranges == [0, len(valid) // 2, 0, 0, 0, 0, len(valid), 0], Hub.ranges
        written(f"foreign/download/{name}", train)
        fails(*options, "foreign", says=["valid.txt: wrong SHA-256: expected", "delete it"])
        Hub.files = {path: data if path.startswith("/api/") else data[:-1] + b"?" for path, data in Hub.files.items()}
        fails(*options, "other", says=["wrong SHA-256: expected", "found", "deleted, run again"])
        assert not list(Path("other/download").iterdir()), "a file with the wrong hash was kept"
        Hub.files = {}
        fails(*options, "other", says=["cannot download: Not Found"])
        run(*options, "data/cache/tinystories")  # complete: asks nobody


def test_ready_shards():
    def shard(tokens, magic=20240520, version=1, count=None):
        return struct.pack("<256i", magic, version, count or tokens, *[0] * 253) + bytes(range(200)) * (tokens // 100)

    names = ["val_000000.bin", *(f"train_{i:06d}.bin" for i in range(1, 4))]
    files = {f"fineweb_{name}": shard(100 + 100 * i) for i, name in enumerate(names)}
    options, out = ["fineweb10B", "--ready"], Path("data/cache/fineweb10B")
    Hub.ranges.clear()
    with hub("kjj0/fineweb10B-gpt2", "", {".gitattributes": b"-", **files}):
        with mock.patch.object(Hub, "breaks", True):
            fails(*options, says=["fineweb_val_000000.bin: download broke off: expected 1224 bytes, found 612"])
        run(*options, "--shards", 2, says=["train_000002.bin: 300 tokens"])
        assert Hub.ranges == [0, 612, 0, 0] and not (out / names[3]).exists(), Hub.ranges
        run(*options, "--shards", 9)
        Hub.files = {}
        run(*options)  # all are there: asks nobody
        found = content("fineweb10B")
        assert [found[name] for name in names] == list(files.values()) and "gpt2_tokenizer.bin" in found
        fails("fineweb10B", says=["manifest.json: made with dataset = None"])  # does not mix
        (out / names[3]).unlink()
        fails(*options, says=["train_000003.bin: cannot download: Not Found"])
        written(out / names[3], shard(700))
        fails(*options, says=["train_000003.bin: wrong SHA-256: expected", "delete it to get it again"])
    for i, wrong in enumerate((shard(5, 1), shard(0, version=2), shard(100, count=6), shard(100)[:-1], b"", b"<html>")):
        with hub("kjj0/fineweb10B-gpt2", "", {"fineweb_val_000000.bin": wrong}):
            fails(*options, "-o", f"ready{i}", says=["val_000000.bin: no shard: expected magic, version"])
            assert not list(Path(f"ready{i}").glob("*000*")), i


def test_fineweb_from_the_hub():
    need("pyarrow")
    import prepare
    documents = some_documents(100)
    raw = Path(write_documents("fineweb.parquet", documents)).read_bytes()
    with hub("HuggingFaceFW/fineweb-edu", "sample/10BT/", {"000_00000.parquet": raw}):
        run("fineweb-edu", "--val-tokens", 50)
    assert all_tokens("fineweb-edu") == expected_tokens(documents)
    found = [text for batch in prepare.read_parquet("fineweb.parquet", "text", 70) for _, text in batch[2]]
    assert found == documents[70:], "a manifest with other batches"


def test_listing_of_the_hub():
    import prepare
    names = ["001_00000.parquet", "README.md", "000_00001.parquet", "000_00000.parquet"]  # the hub promises no order
    with hub("a/b", "sample/", {name: name.encode() for name in names}) as url, mock.patch.object(prepare, "HUB", url):
        files = prepare.hub_files("a/b", "sample", None)
        for wrong in ("<", "null", '{"a": 1}', "[1]", '[{"path": 1}]', '[{"path": "a", "size": null}]',
                      '[{"path": "a", "size": 1, "lfs": null}]', '[{"path": "a", "size": Infinity}]', DEEP):
            Hub.files["/api/datasets/HuggingFaceFW/fineweb/tree/main/sample/100BT"] = wrong.encode()
            fails("fineweb100B", says=["sample/100BT: damaged (check HF_ENDPOINT or the network)"])
    assert [file["url"].rsplit("/", 1)[1] for file in files] == sorted(set(names) - {"README.md"}), files
    assert all(file["sha256"] == sha256(Path(file["url"]).name.encode()) for file in files)
    for size in ("10B", "100B"):
        assert prepare.DATASETS[f"fineweb{size}"]["hub"][1] == f"sample/{size}T"


def test_tinyshakespeare_by_its_name():
    """The script with another address and text for it. llm.c cuts this text into speeches."""
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\n" * 20 + "First:\nSure.\n"
    with hub("a/b", "", {"input.txt": text.encode()}) as url:
        url += "/datasets/a/b/resolve/main/input.txt"
        file = {"url": url, "bytes": len(text), "sha256": sha256(text.encode())}
        written("data/play.py", f"""import prepare
if __name__ == "__main__":
    prepare.DATASETS["tinyshakespeare"].update(files=[{file}], val_tokens=50)
    prepare.main()
""")
        run("tinyshakespeare", script="play")
    expected = expected_tokens(text.replace("\n\n", "\n\n<|endoftext|>").split("<|endoftext|>"))
    assert all_tokens("tinyshakespeare") == expected and expected.count(END_OF_TEXT) == 41
    assert len(read_shard(paths("tinyshakespeare")[0])) == 50


def test_no_network():
    nobody = "http://127.0.0.1:1"
    away = {"HF_ENDPOINT": nobody, "no_proxy": "127.0.0.1", "https_proxy": nobody, "HTTPS_PROXY": nobody}
    with mock.patch.dict(os.environ, away, TIKTOKEN_CACHE_DIR="no_cache"):
        fails("fineweb100B", says=["cannot download", "check the network"])
        fails("tinyshakespeare", "-o", "away", says=["input.txt: cannot download"])
        fails(written("a.txt", "text"), ranks=[], says=["vocab.bpe: cannot download", "--ranks"])
        hellaswag("val", "-o", "away/h.bin", code=1, says=["hellaswag_val.jsonl: cannot download"])


# --------------------------------------------------------------------------------------------------------------- errors


def test_errors_in_text():
    good = json_lines([{"text": "good"}])
    at = len(good)
    for name, raw, *says in (
            ("utf8.txt", b"good \xff bad", "utf8.txt: invalid UTF-8 at offset 5: found byte 0xff"),
            ("late.txt", b"good \n" * 300000 + b"\xe2\x28", "late.txt: invalid UTF-8 at offset 1800000"),
            ("end.txt", b"good \xe2\x82", "end.txt: invalid UTF-8 at offset 5"),
            *((f"no{i}.txt", raw, f"no{i}.txt: looks like", what) for i, (raw, what) in enumerate((
                (b"\x93NUMPY\1\0v\0{'", "NumPy"), (b"\2" + bytes(7) + b"{}", "safetensors"), (b"\x1f\x8b\b", "gzip"),
                (b"PK\3\4", "zip"), (b"PAR1 a", "Parquet"), ("\ufeffa".encode("utf-16"), "UTF-16"),
                (b"\xfe\xff\0a", "UTF-16"), (b"\xff\xfe\0\0a\0\0\0", "UTF-32"), (b"\0\0\xfe\xff", "UTF-32"),
                (b"good \n" * 300000 + b"\0 a", "a NUL byte at offset 1800000")))),
            ("utf8.jsonl", good.encode() + b'{"text": "\xff"}\n', f"utf8.jsonl: invalid UTF-8 at offset {at + 10}"),
            ("no.jsonl", good + '{"body": 1}\n', f"no.jsonl: object at offset {at} has no field 'text'", "--field"),
            ("type.jsonl", good + '{"text": 1}\n', f"type.jsonl: object at offset {at}: 'text' is int, expected a"),
            ("list.jsonl", "[1]\n", "list.jsonl: object at offset 0 has no field 'text'"),
            ("syntax.jsonl", good + '{"text": \n', f"syntax.jsonl: not JSON at offset {at + 10}"),
            *((f"{i}.jsonl", good + raw, f"{i}.jsonl: not JSON at offset {at}") for i, raw in enumerate((DEEP, LONG))),
            ("inf.jsonl", 'null\n{"text": Infinity}', "inf.jsonl: object at offset 0 has no"),
            ("space.txt", "a" + " " * 3000000, "space.txt: 400,000 white spaces in a row"),
            ("tiny.txt", "a", "no tokens left to train on", "--val-tokens"),
            ("empty.txt", "", "no tokens left to train on")):
        fails(written(name, raw), "--val-tokens", 2, "-o", "errors", says=says)
        late = len(raw) > 1 << 20  # a batch or more
        assert late or not Path("errors/manifest.json").exists(), name  # other settings may follow
        assert late or name == "tiny.txt" or not list(Path("errors").glob("*_0*.bin")), name
        shutil.rmtree("errors", ignore_errors=True)
    fails("none.txt", says=["none.txt: No such file"])
    for i, make in enumerate((os.mkfifo, os.mkdir, functools.partial(os.symlink, "/dev/zero"))):
        make(name := f"no{i}.jsonl")
        for script, *command in ("prepare", name), ("prepare", "end.txt", "--ranks", name), ("hellaswag", name):
            fails(*command, script=script, says=[f"{name}: expected a file"])
    fails(written("many.txt", LETTERS * 400), "--shard-tokens", 1, says=["at most 10,000 shards, found 11,300"])
    text = '{"text": "The \\ud800"}\n'
    run(written("\udcff.jsonl", text), "--val-tokens", 1)  # neither is UTF-8
    assert all_tokens("\udcff") == expected_tokens(["The \ufffd"])


def test_errors_in_a_manifest():
    path, manifest = written("manifest.txt", LETTERS), Path("data/cache/manifest/manifest.json")
    run(path)
    good = manifest.read_text()
    for old, new in (('"skip": 0', '"skip": -1'), ('"tokens": ', '"tokens": 1.5'), ('"next": {', '"next": 0, "a": {'),
                     ('"position": 0', '"position": Infinity'), ('"settings": {', '"settings": [], "a": {'),
                     ('"sources": [', '"sources": 1, "a": ['), (good, "null"), (good, "{"), (good, DEEP), (good, LONG)):
        written(manifest, good.replace(old, new))
        fails(path, says=["manifest.json: damaged (delete it to begin anew)"])


def test_errors_in_parquet():
    need("pyarrow")
    raw = Path(write_parquet("page.parquet", {"text": some_documents(9)})).read_bytes()
    for path, *says in ((write_parquet("column.parquet", {"body": ["a"]}), "no column 'text', found body"),
                        (write_parquet("type.parquet", {"text": [1]}), "column 'text' is int64, expected string"),
                        (written("no.parquet", "PAR1 no"), "no.parquet: damaged (get the file again): "),
                        (written("page.parquet", raw[:4] + bytes(300) + raw[304:]), "page.parquet: damaged (get")):
        fails(path, says=says)


def test_errors_in_hellaswag():
    good = QUESTIONS[0]
    at = len(json_lines([good]))
    second = [({"ctx": "", "endings": ["", ""]}, "bad.jsonl", f"offset {at}: expected ctx", "'label'"),
              ({**good, "label": 4}, f"offset {at}: expected text", "label 4"),
              *(({**good, "label": label}, "expected ctx, endings") for label in ("", None, float("inf"), 1.5)),
              *(({**good, "endings": endings}, "1 to 64 endings of text")
                for endings in (None, 5, "abcd", {"a": 1, "b": 2}, [None] * 4, ["a"] * 65)),
              ({**good, "ctx": ""}, "expected text"), ({**good, "ctx": None}, "expected text"),
              ({**good, "endings": [1, 2]}, "endings of text"), ({**good, "ctx": " " * 10**6}, "white spaces in a row"),
              ({**good, "ctx": "! " * 40000}, "at most 65535 bytes")]
    cases = [(json_lines([good, question]), *says) for question, *says in second]
    cases += [("{\n", "not JSON at offset 2"), (b'{"ctx": "\xff"}', "invalid UTF-8 at offset 9"), ("", "no examples"),
              (DEEP, "not JSON at offset 0"), (LONG, "not JSON at offset 0"),
              ('{"ctx": "a", "endings": [""], "label": 0}\n' * 65537, "65536 examples")]
    for raw, *says in cases:
        hellaswag(written("bad.jsonl", raw), "-o", "bad.bin", code=1, says=says)
    hellaswag("none.jsonl", "-o", "bad.bin", code=1, says=["none.jsonl: No such file"])
    assert not Path("bad.bin").exists()


def test_errors_in_ranks():
    path = written("text.txt", LETTERS)
    cases = [({**RANKS, b"zzz": 65536}, "bad.tiktoken: ", "65536"), ({**RANKS, b"zzz": END_OF_TEXT}, "below 50256"),
             ({**RANKS, b"zzz": 7}, "different ids"), (dict(list(RANKS.items())[1:]), "a single byte has no token"),
             ({**RANKS, b"z" * 256: 400}, "token 400 has 256 bytes", "at most 255")]
    cases = [(tiktoken_file(ranks), *says) for ranks, *says in cases]
    cases += [(b'{"version": "1.0", "model": {}}', "bad.tiktoken: damaged (give GPT-2's merges.txt, vocab.bpe, ")]
    cases += [(raw, "bad.tiktoken: ") for raw in (
        b"?!", b"{", b"\xff\n", b"#version\n\xf0\x9f\x99\x82 a", b'{"a": "b"}', b"{}", b"[]",
        b'{"a": null}', b'{"a": Infinity}', b'{"a": -1}', b'{"a": ' + DEEP.encode(), b'{"a": ' + LONG.encode() + b"}")]
    for raw, *says in cases:
        fails(path, ranks=ranks_options(raw, "bad.tiktoken"), says=says)
    for different in {bytes([b]): i for i, b in enumerate(BYTES)}, {**RANKS, b"a": RANKS[b"b"], b"b": RANKS[b"a"]}:
        other = ranks_options(tiktoken_file(different), "other.tiktoken")
        fails(path, ranks=ranks_options() + other, says=["other.tiktoken: other ranks than in"])
    found = ranks_options()[3]
    says = "ranks.tiktoken: wrong SHA-256: expected", f"found {found}; give GPT-2's merges.txt"
    fails(path, ranks=ranks_options()[:2], says=says)


def test_missing_library():
    for module, source in (("tiktoken", "text.txt"), ("tqdm", "text.txt"), ("pyarrow", "a.parquet")):
        written(f"without_{module}/{module}.py", "raise ImportError")
        path = f"without_{module}{os.pathsep}{os.environ['PYTHONPATH']}"
        option = "-c" if module == "pyarrow" else "-r"
        with mock.patch.dict(os.environ, PYTHONPATH=path):
            fails(written(source, LETTERS), says=[f"needs {module}: pip install {option} scripts/requirements"])


def test_usage():
    for command, *says in (("", "usage", "SOURCE"), ("book.pdf", "book.pdf: expected one of tinyshakespeare"),
                           ("tinystories a.txt", "tinystories cannot be mixed"),
                           ("a.txt --shard-tokens 0", "--shard-tokens: expected a number", "found 0"),
                           ("a.txt --max-tokens inf", "--max-tokens"),
                           ("a.txt --val-tokens some", "--val-tokens: expected a number", "found some"),
                           *((words, "--ready goes with fineweb10B, fineweb-edu and --shards alone") for words in (
                               "tinystories --ready", "a.txt --shards 3", "fineweb10B --ready --max-tokens 1e9")),
                           ("a.txt --shard-tokens 3e9", "--shard-tokens below 2^31"),
                           ("a.txt --jobs 0", "--jobs from 1")):
        run(*command.split(), says=says, code=2)
    hellaswag("a.csv", says=["a.csv: expected val"], code=2)
    for script in ("prepare", "hellaswag"):
        run("--help", script=script, says=["examples:", "merges.txt"])


# ---------------------------------------------------------------------------------------------------------- the trainer


def test_trainer_reads_shards_and_tokenizer():
    run(write_documents("trainer.txt", some_documents()), "-o", "trainer", "--shard-tokens", 3000)
    hellaswag(written("questions.jsonl", json_lines(QUESTIONS)), "-o", "questions.bin")
    # A small model with GPT-2's vocabulary: llm.c's header, then the parameters.
    V, Vp, L, NH, C, max_T = 50257, 50304, 1, 1, 64, 128
    parameters = Vp * C + max_T * C + L * (12 * C * C + 13 * C) + 2 * C
    chance = random.Random(SEED)
    values = array.array("f", [chance.gauss(0, 0.3) for _ in range(9973)]) * (parameters // 9973 + 1)
    header = struct.pack("<256i", 20240326, 3, max_T, V, L, NH, C, Vp, *[0] * 248)
    model = written("small.bin", header + values[:parameters].tobytes())
    train = lambda *arguments: run_program("train_gpt2cu", "--device", "cpu", "-e", model, "-b", 1, "-j",
                                           "trainer/val_*.bin", "--prompt", "A", *arguments)
    answers = train("--eval-only", "-t", 128, "--hellaswag", "questions.bin")
    assert re.search(r"hellaswag [0-7] of 7", answers), answers
    # The command that is printed, run by a shell.
    os.symlink(built(), "train_gpt2cu")
    said = run("trainer.txt", "-o", "my [1] *\\'x", "--shard-tokens", 3000)
    done = subprocess.run(f"{said.split('next: ')[1].strip()} --device cpu -e {model} -b 1 -t 16 -x 0", shell=True,
                          capture_output=True, text=True)
    assert done.returncode == 0 and len(re.findall(r"\d+ shards?", done.stdout)) == 2, done
    # The same ids without and with the tokenizer: <id> against the bytes of the token.
    pieces = {rank: token.decode(errors="replace") for token, rank in RANKS.items()}
    training = ["-i", "trainer/train_*.bin", "-t", 16, "-x", 1, "-m", 1, "-s", 1, "-g", 12]
    for command, sample in (["--generate", 12, "--top-k", 50], "(.*)"), (training, r"\| sample\n---\n(.*)\n---\n"):
        logs = train(*command), train(*command, "--tokenizer", "trainer/gpt2_tokenizer.bin")
        ids, text = (re.search(sample, log, re.DOTALL)[1] for log in logs)
        assert re.search(r"<\d+>", ids), ids
        assert text == re.sub(r"<(\d+)>", lambda found: pieces.get(int(found[1]), ""), ids), (ids, text)
    tokens = sum(len(read_shard(path)) for path in Path("trainer").glob("train_*.bin"))
    assert f"{tokens} tokens" in logs[0] and "1 shard" in logs[0], logs[0]
    # Text, in bytes and in tokens. A model's file does not say which it knows.
    book, warning = written("book.txt", LETTERS), "small.bin: text goes to this model byte by byte"
    tokens = 1 + len(oracle().encode_ordinary(LETTERS))
    for command, says in ((["-i", book, "-t", 8, "-x", 0], f"text file, {tokens} BPE tokens"),
                          (["-j", book, "-t", 8, "--eval-only"], "val loss"), (["--generate", 1, "--prompt", "A"], "A"),
                          ([*training, "--prompt", "A\udcff"], "--prompt: invalid UTF-8 at offset 1: found byte 0xff")):
        for more, expected in ([], warning), (["--tokenizer", "trainer/gpt2_tokenizer.bin"], says):
            words = [built(), "--device", "cpu", "-e", model, "-b", 1, *command, *more]
            done = subprocess.run(list(map(str, words)), capture_output=True, text=True, errors="replace")
            assert expected in done.stdout + done.stderr and (warning in done.stderr) == (not more), (words, done)
            assert done.returncode == ("invalid" in expected), (words, done)


def test_trainer_encodes_as_tiktoken():
    """Every character among others, then nasty text, with random merges that would cross from one word to another."""
    if "tiktoken" in MISSING:
        raise Skip("needs tiktoken (scripts/requirements.txt)")
    import prepare_common
    chance = random.Random(SEED)
    single = [bytes([byte]) for byte in BYTES]
    pairs = chance.sample([a + b for a in single for b in single], 30000)
    fours = {chance.choice(pairs) + chance.choice(pairs) for _ in range(19000)}
    ranks = {token: rank for rank, token in enumerate(single + pairs + sorted(fours))}
    prepare_common.write_tokenizer(Path("pairs.bin"), ranks)
    characters = [chr(c) for c in (*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200), 0x10FFFF)]
    text = "".join(f"{c}a {c}1{c}! {c}{c}\n" for c in characters)
    text += "".join(chance.choice(NASTY if chance.random() < 0.7 else characters) for _ in range(100000))
    found = run_program("dev/encode", "pairs.bin", written("nasty.txt", text)).split()
    for i, (id, expected) in enumerate(zip(map(int, found), oracle(ranks).encode_ordinary(text), strict=True)):
        assert id == expected, f"seed {SEED}, token {i}: {id}, tiktoken has {expected}"


if __name__ == "__main__":
    main()
