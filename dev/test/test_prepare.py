#!/usr/bin/env python3
"""Tests data/prepare.py and data/hellaswag.py, offline. The scripts get a short list of merges.
tiktoken's own encoder, with the pattern of GPT-2's release, says what they must write. A folder
takes the place of the Hugging Face hub.

Run: python3 dev/test/test_prepare.py [part of a test's name]"""

import errno
import glob
import hashlib
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
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from harness import (
    BYTES,
    POINTER,
    ROOT,
    built,
    ended,
    header,
    main,
    new_folder,
    refused,
    tokenizer_file,
    unheard,
    whole_program_needs,
    written,
)

whole_program_needs("numpy", "tiktoken", "tqdm")
SEED = int(os.environ.get("SEED", 1))
END_OF_TEXT = 50256
PUBLISHED_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LETTERS = (
    "The ship's crew didn't see it: we'll say they've gone north, I'm sure. "
    "Twelve sailors sang in 1789, all of them!\n"
)
NASTY = [
    *("a", "Zoë", "it's", "we'LL", "12", "...", "'", "'s", "don't ", "日本語", "🙂", "e\u0301"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u3000", "\u00a0", "\x1c", "\u2028"),
    *("<", ">", "|>", "<|", "<|endof", "<p> ", "\n<", ">\n"),
]
QUESTIONS = [
    {
        "ind": i,
        "ctx": f"The sailors sang {'all day ' * i}and they",
        "label": i % 4,
        "endings": ["gone north.", "didn't see it.", "'ll say 12 🙂.", "sure"],
    }
    for i in range(7)
]

# Merges as vocab.bpe writes them. GPT-2's pattern would split three of them.
MERGES = (
    "H i,Ġ t,Ġt h,e r,Ġth er,Ġther e,' s,' t,r e,' re,v e,' ve,' m,l l,' ll,' d,1 x,! x,Ġ Ġ,"
    "Ġ s,Ġs a,i l,Ġsa il,o r,or s,Ġsail ors,n g,Ġ a,Ġa ll,Ġsa ng,T h,Th e,h e,he y,Ġs h,8 9,a y,Ã «"
).split(",")
MERGED = [merge.replace(" ", "").replace("Ġ", " ").replace("Ã«", "ë").encode() for merge in MERGES]
RANKS = {token: rank for rank, token in enumerate(BYTES + MERGED)}

# The scripts are copied to an empty folder, because they write to data/cache next to themselves.
new_folder()
for script in ROOT.glob("data/*.py"):
    written(f"data/{script.name}", script.read_bytes())
sys.path.append(os.path.abspath("data"))
import prepare  # noqa: E402  the copy

# This program ignores SIGINT if it runs in the background, and its child processes would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
FORMATS = ["txt", "jsonl"] + ["parquet"] * bool(importlib.util.find_spec("pyarrow"))

# No test may need the network.
os.environ.update(dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:1"))
SERVED = Path("served")  # the hub's repositories
asked = []  # names of the files that were downloaded from there


class Hub:
    """Takes the place of the module huggingface_hub."""

    def hf_hub_download(repo_id, filename, repo_type, revision):
        asked.append(filename)
        return str(SERVED / repo_id / filename)

    class HfApi:
        def dataset_info(self, repo_id):
            if not (SERVED / repo_id).exists():
                raise RuntimeError("404\nnot found")
            return SimpleNamespace(sha="c0ffee")

        def list_repo_tree(self, repo_id, path_in_repo, repo_type, revision):
            for path in sorted((SERVED / repo_id / path_in_repo).iterdir(), reverse=True):
                yield SimpleNamespace(path=str(path.relative_to(SERVED / repo_id)))


sys.modules["huggingface_hub"] = Hub


def ranks_options(merges=MERGES, name="vocab.bpe"):
    path = written(name, "\n".join(["#version: 0.2", *merges, ""]))
    return ["--ranks", str(path), "--ranks-sha256", hashlib.sha256(path.read_bytes()).hexdigest()]


def run(*command, code=0, says="", script="prepare", ranks=None):
    """Runs a script with the merges of this file, or with the options `ranks`. It must print `says`
    and, if `code` is 1, exactly one line on stderr. Returns its stdout, or its stderr if `code` is
    not 0."""
    found, out, err = ended(script, *command, *(ranks_options() if ranks is None else ranks))
    assert found == code, f"{command}: expected exit code {code}, found {found}:\n{out}{err}"
    assert code != 1 or len(err.splitlines()) == 1, f"expected one line, found:\n{err}"
    assert says in (err if code else out), f"expected {says!r} in: {out}{err}"
    return err if code else out


def oracle(ranks=RANKS):
    """tiktoken's encoder."""
    import tiktoken

    return tiktoken.Encoding(
        "oracle", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def expected_tokens(documents):
    """The stream of tokens that shards hold."""
    encode = oracle().encode_ordinary
    tokens = []
    for document in documents:
        if document.strip():
            tokens += [END_OF_TEXT, *encode(document)]
    return tokens


def content(name):
    """{name: bytes} of the files in a folder of data/cache."""
    assert not list(Path("data/cache").rglob("*.part")), "a part was left behind"
    return {path.name: path.read_bytes() for path in Path("data/cache", name).iterdir()}


def check_stream(sources, documents, *options, validation, most=None, per_shard=10**8):
    """Prepares the sources. The shards must hold the documents' tokens, at most `most` of them:
    the first `validation` in shards for validation, and at most `per_shard` in each shard."""
    run(*sources, *options)
    tokens = expected_tokens(documents)[:most]
    expected = {"gpt2_tokenizer.bin": tokenizer_file(RANKS)}
    shards = 0
    for split, part in ("val", tokens[:validation]), ("train", tokens[validation:]):
        for i in range(0, len(part), per_shard):
            piece = part[i : i + per_shard]
            raw = header(20240520, 1, len(piece)) + struct.pack(f"<{len(piece)}H", *piece)
            expected[f"{split}_{shards:06d}.bin"] = raw
            shards += 1
    found = content(Path(sources[0]).stem)
    wrong = [name for name in found if found[name] != expected.get(name)]
    assert found == expected, (sources, sorted(found), wrong)


def some_documents(count):
    chance = random.Random(SEED)
    words = LETTERS.split() + ["日本語", "🙂", "\n", "\n\n", "  ", "\r\n", "42"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 80))) + "." for _ in range(count)]


def json_lines(objects):
    return "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in objects)


def write_documents(path, documents):
    """Writes a file in the format that its suffix names, and returns its path."""
    path = Path(path)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.table({"text": documents})
        pyarrow.parquet.write_table(table, path, row_group_size=700)  # several batches per group
        return path
    if path.suffix == ".jsonl":
        lines = json_lines({"text": document} for document in documents)
        return written(path, f"\n\n{lines}\n")
    return written(path, "\n<|endoftext|>\n".join(documents))


# Among others, words at which the merges and GPT-2's pattern disagree.
DOCUMENTS = [
    "Hi there, Hi~\n\u00e9 x's x't x're x've x'm x'll x'd 1x!x  x",
    *some_documents(299),
]


def test_one_stream_of_tokens_in_shards():
    parts = [
        write_documents("1.txt", DOCUMENTS[:100]),
        write_documents("2.jsonl", DOCUMENTS[100:200]),
        write_documents("3.txt", DOCUMENTS[200:]),
    ]
    # About a tenth of the tokens, of four bytes each, is for validation.
    tenth = sum(path.stat().st_size for path in parts) // 40
    check_stream(parts, DOCUMENTS, validation=tenth)
    check_stream([written("small.txt", "a b")], ["a b"], validation=1)

    body = written("body.jsonl", json_lines({"body": document} for document in DOCUMENTS))
    options = "--field body --max-tokens 1.5e3 --shard-tokens 1e3 --val-tokens 100".split()
    check_stream([body], DOCUMENTS, *options, validation=100, most=1500, per_shard=1000)


def test_what_json_can_contain():
    """<|endoftext|> and a byte order mark are text. Half of a surrogate pair is encoded as tiktoken
    encodes it."""
    texts = ["\ufeffa<|endoftext|>\n", " ", "b\r\n", "日本語"]
    lines = json_lines([{"text": text} for text in [*texts, None]])
    path = written("json.jsonl", lines + '{"text": "A \\ud800"}')
    check_stream([path], [*texts, "A \ufffd"], "--val-tokens", 2, validation=2)


def test_documents_that_are_blank():
    """Each is longer than a batch, or empty."""
    blank = "  \n " * 1000
    documents = ["", *DOCUMENTS[:9], blank, blank, *DOCUMENTS[9:], ""]
    options = "--shard-tokens 5000 --val-tokens 7001".split()
    for suffix in FORMATS:
        path = write_documents(f"format_{suffix}.{suffix}", documents)
        with mock.patch("prepare.BATCH_BYTES", 3000):
            check_stream([path], documents, *options, validation=7001, per_shard=5000)


def split_documents(text):
    """The documents of a text file, by the rules of prepare.py."""
    documents = text.split("<|endoftext|>")
    for i in range(len(documents)):
        if i + 1 < len(documents):
            documents[i] = re.sub(r"\r?\n\Z", "", documents[i])
        if i > 0:
            documents[i] = re.sub(r"\A\r?\n", "", documents[i])
    return documents


def test_text_is_cut_where_no_token_changes():
    chance = random.Random(SEED)
    encoding = prepare.make_encoding(RANKS)
    separators = ["\n<|endoftext|>\n", "\r\n<|endoftext|>\r\n", "\r<|endoftext|>"]
    for trial in range(300):
        documents = [
            "".join(chance.choices(NASTY, k=chance.randint(0, 60)))
            for _ in range(chance.randint(1, 4))
        ]
        text = chance.choice(separators).join(documents)
        expected = expected_tokens(split_documents(text))
        path = written("nasty.txt", chance.choice(["", "\ufeff"]) + text)
        with mock.patch.object(prepare, "BATCH_BYTES", chance.choice([1, 2, 7, 40])):
            batches = list(prepare.read_text(path, SimpleNamespace(sources=[path])))
        found = [token for texts in batches for token in prepare.encode(encoding, texts).tolist()]
        assert found == expected, f"seed {SEED}, trial {trial}: {text!r}"


def test_long_runs_of_white_space():
    """400,000 white spaces in a row are refused, wherever they begin, and one fewer is not."""
    for begin in 0, 1, 199_999, 200_001, 399_999:
        longest = "a" * begin + 399_999 * " "
        assert prepare.encodable(longest + "b\n") == longest + "b\n"
        with refused(ValueError, "white-space characters"):
            prepare.encodable(longest + "\n")


def test_hellaswag_file():
    encode = oracle().encode_ordinary
    stream = []
    sizes = []
    for i, question in enumerate(QUESTIONS):
        texts = [question["ctx"], *(" " + ending for ending in question["endings"])]
        parts = []
        for tokens in map(encode, texts):
            parts += [len(tokens), *tokens]
        size = 2 * (5 + len(parts))
        stream += [65535, size, i, question["label"], len(question["endings"]), *parts]
        sizes.append(size)
    examples = struct.pack(f"<{len(stream)}H", *stream)

    run(written("hellaswag_val.jsonl", json_lines(QUESTIONS)), script="hellaswag")
    assert content("hellaswag") == {
        "hellaswag_val.bin": header(20240522, 1, len(QUESTIONS), max(sizes)) + examples,
        "gpt2_tokenizer.bin": tokenizer_file(RANKS),
    }


def test_stopped_runs_leave_no_dataset():
    """A run with two threads is stopped in several ways. When it runs again, it writes the same
    files as a run with one thread that was never stopped."""
    source = write_documents("long.jsonl", some_documents(50000))
    options = [source, "--val-tokens", 1000, "--shard-tokens", 50000]
    run(*options, "-o", "data/cache/whole", "--jobs", 1)

    stopped = [*options, "-o", "data/cache/stopped", "--jobs", 2]
    part = Path("data/cache/stopped.part")
    command = [sys.executable, "-u", "data/prepare.py", *stopped, *ranks_options()]
    for most_bytes, stop, code, says in (
        (90000, 0, 1, "too large"),  # 0 is no signal
        (10**9, signal.SIGINT, 1, "interrupted"),
        (10**9, signal.SIGKILL, -signal.SIGKILL, ""),
    ):
        with subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()  # says that the first shard has been written
            run(*stopped, code=1, says="another run is writing there")
            # A limit below a shard's size acts like a full disk.
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
            process.send_signal(stop)
            err = process.communicate()[1]
        lines = 1 if code == 1 else 0
        assert process.returncode == code and says in err and err.count("\n") == lines, (stop, err)
        was_killed = code < 0
        assert not os.path.exists("data/cache/stopped") and part.exists() == was_killed, stop

    written(part / "train_999999.bin", "left by another run")
    run(*stopped)
    assert content("stopped") == content("whole")


def test_stdout_that_cannot_be_written():
    """If stdout's reader has exited, the disk is full, or stdout is closed, the files are written
    nevertheless."""
    documents = write_documents("unheard.jsonl", some_documents(2000))
    questions = written("unheard_hellaswag.jsonl", json_lines(QUESTIONS))
    for script, options, output in (
        ("prepare", [documents, "--shard-tokens", 9000], ""),
        ("hellaswag", [questions], "/h.bin"),
    ):
        run(*options, "-o", f"data/cache/heard_{script}{output}", script=script)
        command = [sys.executable, "-u", f"data/{script}.py", *options, *ranks_options()]
        for _ in unheard(*command, "-o", f"data/cache/unheard_{script}{output}", cwd=None):
            assert content(f"unheard_{script}") == content(f"heard_{script}"), script
            shutil.rmtree(f"data/cache/unheard_{script}")


def test_few_batches_are_in_flight():
    begun = []
    done = []

    class Pool:
        def submit(self, function, encoding, batch):
            begun.append(batch)
            return SimpleNamespace(result=lambda: done.append(batch))

    for _ in prepare.in_order(Pool(), range(100), None, ahead=7):
        assert len(begun) - len(done) <= 7, (begun, done)
    assert done == list(range(100)), done


def test_names_appear_after_a_sync():
    """Every file is synced before it gets its name, and so is the folder with all of its files. At
    the end the folder's name is synced, too."""
    synced = {}  # content by inode
    replace = os.replace

    def content_of(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else Path(path).read_bytes()

    def fake_fsync(file):
        synced[os.fstat(file).st_ino] = content_of(f"/proc/self/fd/{file}")

    def checked_replace(part, path):
        for each in (Path(part), *Path(part).glob("*")):
            assert synced.get(each.stat().st_ino) == content_of(each), f"{each} is not synced"
        replace(part, path)

    with mock.patch("os.fsync", fake_fsync), mock.patch("os.replace", checked_replace):
        run(written("disk.txt", LETTERS), "-o", "synced/made")
    assert synced[os.stat("synced").st_ino] == ["made"], synced


def test_folders_that_cannot_be_synced():
    """For a folder, file systems such as CIFS answer with EINVAL, which is no error. Any other
    answer is one, and so is EINVAL for a file."""
    path = written("network.txt", LETTERS)
    run(path, "-o", "data/cache/local")
    sync = os.fsync
    for for_folders, error, says in (
        (True, errno.EINVAL, ""),
        (True, errno.EIO, "Input/output error"),
        (False, errno.EINVAL, "Invalid argument"),
    ):

        def fsync(file, for_folders=for_folders, error=error):
            if os.path.isdir(f"/proc/self/fd/{file}") == for_folders:
                raise OSError(error, os.strerror(error))
            sync(file)

        with mock.patch("os.fsync", fsync):
            run(path, "-o", "data/cache/network", code=1 if says else 0, says=says)
        if says:
            assert not os.path.exists("data/cache/network")
        else:
            assert content("network") == content("local")
            shutil.rmtree("data/cache/network")


def test_datasets_of_the_hub():
    documents = some_documents(400)
    names = "TinyStoriesV2-GPT4-valid.txt", "TinyStoriesV2-GPT4-train.txt"
    for name, part in zip(names, (documents[:200], documents[200:])):
        write_documents(f"served/roneneldan/TinyStories/{name}", part)
    check_stream(["tinystories"], documents, "--val-tokens", 2000, validation=2000)
    assert asked == list(names), asked
    run("fineweb10B", code=1, says="HuggingFaceFW/fineweb: ")
    for size in ("10B", "100B") if "parquet" in FORMATS else ():
        written(f"served/HuggingFaceFW/fineweb/sample/{size}T/README.md", size)
        parts = [[size, *documents[100 * i :][:100]] for i in range(3)]
        for i, part in enumerate(parts):
            write_documents(
                f"served/HuggingFaceFW/fineweb/sample/{size}T/00{i}_00000.parquet", part
            )
        check_stream([f"fineweb{size}"], sum(parts, []), "--val-tokens", 50, validation=50)


def test_downloads_by_address():
    """Another text takes the place of tinyshakespeare, which llm.c splits into speeches."""
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\n" * 20 + "First:\nSure.\n"
    speeches = re.findall(r"(?s).+?(?:\n\n|\Z)", text)
    path = written("at/input.txt", text).absolute()
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    run("tinyshakespeare", code=1, says="input.txt: cannot be downloaded")
    with mock.patch("prepare.SHAKESPEARE", (f"file://{path}", sha256)):
        check_stream(["tinyshakespeare"], speeches, "--val-tokens", 50, validation=50)
        path.unlink()  # it is not downloaded again
        run("tinyshakespeare", "-o", "again", "--val-tokens", 50)
        written("data/cache/download/input.txt", text[:-1])
        run("tinyshakespeare", "-o", "cut", code=1, says="input.txt: wrong SHA-256")

    says = "hellaswag_val.jsonl: cannot be downloaded"
    run("val", "-o", "away/h.bin", script="hellaswag", code=1, says=says)
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR="no_cache"):
        run(written("a.txt", LETTERS), ranks=[], code=1, says="--ranks")


def wrong_files():
    """Of each, its name, its content, and what the error says after the name."""
    good = '{"text": "good"}\n'
    long = b"good \n" * 300000
    yield from (
        ("a.txt", b"good \xff bad", "invalid UTF-8 at offset 5"),
        ("a.txt", b"good \xe2\x82", "UTF-8 at offset 5"),
        ("a.txt", long + b"\xe2\x28", "UTF-8 at offset 1800000"),
        ("a.txt", long + b"\0", "zero byte at offset 1800000"),
        ("a.txt", "a" + " " * 3000000, "white-space characters"),
        ("a.jsonl", "[1]\n", "object at offset 0"),
        ("a.jsonl", good.encode() + b'{"text": "\xff"}\n', "not JSON in UTF-8 at offset 17"),
        ("a.jsonl", good + '{"text": \n', "at offset 17"),
        ("a.jsonl", good + "[" * 100000, "at offset 17"),
        ("a.jsonl", good + '{"body": 1}\n', "object at offset 17"),
        ("a.jsonl", good + '{"text": 1}\n', "object at offset 17"),
    )
    if "parquet" in FORMATS:
        raw = write_documents("a.parquet", some_documents(9)).read_bytes()
        numbers = write_documents("a.parquet", [1, 2]).read_bytes()
        yield from (
            ("a.parquet", "PAR1 no", "damaged"),
            ("a.parquet", raw[:4] + bytes(300) + raw[304:], "damaged"),
            ("a.parquet", numbers, "no text in the field 'text'"),
        )


def test_wrong_files():
    for name, raw, says in wrong_files():
        path = written(name, raw)
        err = run(path, "-o", "errors", "--val-tokens", 2, code=1, says=f"{name}: ")
        assert says in err, (name, says)
        assert not glob.glob("errors*"), name


def test_wrong_questions():
    where = "h.jsonl: example at offset 0: "
    cases = [
        ("", "h.jsonl: no examples"),
        ("[1]\n", where),
        ('{"ctx": "a", "endings": [""], "label": 0}\n' * 65537, "65536 examples"),
    ]
    good = QUESTIONS[0]
    second = len(json_lines([good]).encode())
    for change in (
        {"label": 4},
        {"label": ""},
        {"label": None},
        {"endings": None},
        {"endings": "abcd"},
        {"endings": [None] * 4},
        {"endings": ["a"] * 65},
        {"ctx": ""},
        {"ctx": None},
        {"ctx": " " * 10**6},
        {"ctx": "! " * 40000},
    ):
        lines = json_lines([good, good | change])
        cases.append((lines, f"h.jsonl: example at offset {second}: "))
    for raw, says in cases:
        run(written("h.jsonl", raw), "-o", "errors/h.bin", script="hellaswag", code=1, says=says)
        assert not glob.glob("errors*"), says


def test_wrong_merges():
    text = written("a.txt", LETTERS)
    characters = [chr(33 + i) for i in range(94)]
    many = [f"{a} {b}{c}" for a in characters for b in characters for c in characters][:50001]
    for name, merges, says in (
        ("many", many, "expected at most 50256 different tokens"),
        ("twice", ["a b", "a b"], "expected at most 50256 different tokens"),
        ("long", ["a" * 256], "expected at most 50256 different tokens"),
        ("foreign", ["🙂 a"], "damaged"),
    ):
        ranks = ranks_options(merges, f"{name}.bpe")
        run(text, code=1, says=f"{name}.bpe: {says}", ranks=ranks)
    without_sha256 = ranks_options()[:2]
    run(text, code=1, says="vocab.bpe: wrong SHA-256", ranks=without_sha256)


def test_nothing_to_train_on():
    for raw in "a", "":
        path = written("short.txt", raw)
        says = "errors: no tokens are left to train on"
        run(path, "-o", "errors", "--val-tokens", 2, code=1, says=says)
        assert not glob.glob("errors*"), raw
    options = "--val-tokens 9 --max-tokens 5".split()
    says = "there are 5, and the first 9 are for validation"
    run(written("a.txt", LETTERS), *options, code=1, says=says)


def test_pointers_of_git_lfs():
    """The error names the file, whichever it is. A long text that begins like a pointer is text."""
    good = written("good.txt", LETTERS)
    for name in "p.txt", "p.jsonl", "p.parquet":
        run(good, written(name, POINTER), "-o", "lfs", code=1, says=f"{name}: is a Git LFS")
        assert not glob.glob("lfs*"), name
    run("p.jsonl", "-o", "lfs/h.bin", script="hellaswag", code=1, says="p.jsonl: is a Git LFS")
    run(good, "-o", "lfs", ranks=["--ranks", "p.txt"], code=1, says="p.txt: is a Git LFS")
    run(written("long.txt", POINTER + LETTERS.encode() * 20), "-o", "lfs")


def test_wrong_commands():
    os.symlink("nothing", "link")
    for there in "data", "link":
        run("none.txt", "-o", there, code=1, says=f"{there}: exists already")
    for command, code, says in (
        ("", 2, "SOURCE"),
        ("book.pdf", 2, "book.pdf"),
        ("tinystories a.txt", 2, "tinystories"),
        ("none.txt", 1, "none.txt"),
        ("a.txt --shard-tokens 0", 2, "--shard-tokens"),
        ("a.txt --shard-tokens 3e9", 2, "--shard-tokens"),
        ("a.txt --max-tokens inf", 2, "--max-tokens"),
        ("a.txt --val-tokens some", 2, "--val-tokens"),
        ("a.txt --jobs 0", 2, "--jobs"),
    ):
        run(*command.split(), code=code, says=says)
    run("a.csv", script="hellaswag", code=2, says="a.csv")


def test_printed_command():
    """A shell splits it into words that name the files, whatever the folder's name."""
    folder = "it's [1] $x *"
    out = run(written("printed.txt", LETTERS), "-o", folder)
    command = out.split("next: ")[1]
    split = subprocess.check_output(["sh", "-c", f"printf '%s\\0' {command}"], text=True)
    words = split.split("\0")
    options = dict(zip(words[1::2], words[2::2]))
    assert glob.glob(options["-i"]) == [f"{folder}/train_000001.bin"], words
    assert glob.glob(options["-j"]) == [f"{folder}/val_000000.bin"], words
    assert Path(options["--tokenizer"]).exists(), words


def test_trainer_encodes_as_tiktoken():
    """Every character with others around it, then nasty text. The merges are random and as many as
    GPT-2's, so that most of them would cross a boundary between words."""
    chance = random.Random(SEED)
    pairs = chance.sample([a + b for a in BYTES for b in BYTES], 30000)
    fours = set()
    while len(fours) < 20000:
        fours.add(chance.choice(pairs) + chance.choice(pairs))
    ranks = {token: rank for rank, token in enumerate(BYTES + pairs + sorted(fours))}
    with mock.patch("tiktoken.get_encoding", lambda name: oracle(ranks)):  # instead of GPT-2's
        assert prepare.load_ranks(SimpleNamespace(ranks=None)) == ranks
    prepare.write_tokenizer(Path("pairs.bin"), ranks)

    # All but surrogates and large areas without characters.
    areas = (*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200), 0x10FFFF)
    characters = [chr(c) for c in areas]
    text = "".join(f"{c}a {c}1{c}! {c}{c}\n" for c in characters)
    text += "".join(
        chance.choice(NASTY if chance.random() < 0.7 else characters) for _ in range(100000)
    )
    command = [built("dev/encode"), "pairs.bin", written("nasty.txt", text)]
    found = [int(id) for id in subprocess.check_output(command).split()]
    expected = oracle(ranks).encode_ordinary(text)
    for i, (ours, tiktokens) in enumerate(zip(found, expected, strict=True)):
        assert ours == tiktokens, f"seed {SEED}, token {i}: {ours}, tiktoken has {tiktokens}"


if __name__ == "__main__":
    main()
