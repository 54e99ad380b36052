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
    "a",
    "Zoë",
    "it's",
    "we'LL",
    "12",
    "...",
    "<",
    ">",
    "|>",
    "<|",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u3000",
    "\u00a0",
    "\x1c",
    "\u2028",
    "日本語",
    "🙂",
    "e\u0301",
    "<|endof",
    "'",
    "'s",
    "don't ",
    "<p> ",
    "\n<",
    ">\n",
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

# Merges as vocab.bpe writes them. GPT-2's pattern cuts inside three of them.
MERGES = (
    "H i,Ġ t,Ġt h,e r,Ġth er,Ġther e,' s,' t,r e,' re,v e,' ve,' m,l l,' ll,' d,1 x,! x,Ġ Ġ,"
    "Ġ s,Ġs a,i l,Ġsa il,o r,or s,Ġsail ors,n g,Ġ a,Ġa ll,Ġsa ng,T h,Th e,h e,he y,Ġs h,8 9,a y,Ã «"
).split(",")
MERGED = [merge.replace(" ", "").replace("Ġ", " ").replace("Ã«", "ë").encode() for merge in MERGES]
RANKS = {token: rank for rank, token in enumerate(BYTES + MERGED)}

# The scripts are copied to an empty folder, so that what they write by default goes there as well.
new_folder()
for script in ROOT.glob("data/*.py"):
    written(f"data/{script.name}", script.read_bytes())
sys.path.append(os.path.abspath("data"))
import prepare  # noqa: E402  the copy, which has to be there first

# A background job ignores SIGINT, and its child processes would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
FORMATS = ["txt", "jsonl"] + ["parquet"] * bool(importlib.util.find_spec("pyarrow"))

# No test may need the network.
os.environ.update(dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:1"))
SERVED, asked = Path("served"), []  # the hub's repositories, and what was downloaded from there


class Hub:
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
    """Runs a script with the merges of this file, or with the options `ranks`. It has to print
    `says` and, if `code` is 1, exactly one line on stderr. Returns what it printed: its stdout, or
    its stderr if `code` is not 0."""
    found, out, err = ended(script, *command, *(ranks_options() if ranks is None else ranks))
    assert found == code, f"{command}: expected exit code {code}, found {found}:\n{out}{err}"
    assert code != 1 or len(err.splitlines()) == 1, f"expected one line, found:\n{err}"
    assert says in (err if code else out), f"expected {says!r} in: {out}{err}"
    return err if code else out


def oracle(ranks=RANKS):
    import tiktoken

    return tiktoken.Encoding(
        "oracle", pat_str=PUBLISHED_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )


def expected_tokens(documents):
    encode = oracle().encode_ordinary
    return [
        token
        for document in documents
        if document.strip()
        for token in (END_OF_TEXT, *encode(document))
    ]


def content(name):
    assert not list(Path("data/cache").rglob("*.part")), "a part was left behind"
    return {path.name: path.read_bytes() for path in Path("data/cache", name).iterdir()}


def check_stream(sources, documents, *options, validation, most=None, of_shard=10**8):
    """Prepares the sources. The shards must hold the documents' tokens, `most` of them at most, the
    first `validation` of these for validation and `of_shard` in each shard."""
    run(*sources, *options)
    tokens = expected_tokens(documents)[:most]
    expected = {"gpt2_tokenizer.bin": tokenizer_file(RANKS)}
    for split, part in ("val", tokens[:validation]), ("train", tokens[validation:]):
        for i in range(0, len(part), of_shard):
            piece = part[i : i + of_shard]
            raw = header(20240520, 1, len(piece)) + struct.pack(f"<{len(piece)}H", *piece)
            expected[f"{split}_{len(expected) - 1:06d}.bin"] = raw
    found = content(Path(sources[0]).stem)
    assert found == expected, (
        sources,
        sorted(found),
        [name for name in found if found[name] != expected.get(name)],
    )


def some_documents(count=300, seed=SEED):
    chance = random.Random(seed)
    words = LETTERS.split() + ["日本語", "🙂", "\n", "\n\n", "  ", "\r\n", "42"]
    return [" ".join(chance.choices(words, k=chance.randint(1, 80))) + "." for _ in range(count)]


def json_lines(objects):
    return "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in objects)


def write_documents(path, documents):
    """A file of the format that the end of its name says."""
    if path.endswith(".parquet"):
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": documents}), path, row_group_size=700)
        return path  # several batches a group
    if path.endswith(".jsonl"):
        return written(
            path, "\n\n" + json_lines({"text": document} for document in documents) + "\n"
        )
    return written(path, "\n<|endoftext|>\n".join(documents))


def test_one_stream_of_tokens_in_shards():
    documents = [
        "Hi there, Hi~\n\u00e9 x's x't x're x've x'm x'll x'd 1x!x  x",
        *some_documents(299),
    ]
    parts = [
        write_documents(name, documents[100 * i :][:100])
        for i, name in enumerate(("1.txt", "2.jsonl", "3.txt"))
    ]
    # About a tenth of the tokens, at four bytes each, is for validation.
    tenth = sum(path.stat().st_size for path in parts) // 40
    check_stream(parts, documents, validation=tenth)
    body = written("body.jsonl", json_lines({"body": document} for document in documents))
    check_stream(
        [body],
        documents,
        "--field",
        "body",
        "--max-tokens",
        "1.5e3",
        "--shard-tokens",
        "1e3",
        "--val-tokens",
        100,
        validation=100,
        most=1500,
        of_shard=1000,
    )
    check_stream([written("small.txt", "a b")], ["a b"], validation=1)
    # In JSON <|endoftext|> and a byte order mark are text. Half of a surrogate pair is encoded as
    # tiktoken does it.
    texts = ["\ufeffa<|endoftext|>\n", " ", "b\r\n", "日本語"]
    path = written(
        "json.jsonl",
        json_lines([{"text": text} for text in [*texts, None]]) + '{"text": "A \\ud800"}',
    )
    check_stream([path], [*texts, "A \ufffd"], "--val-tokens", 2, validation=2)
    empty = ["", *documents[:9], *["  \n " * 1000] * 2, *documents[9:], ""]  # more than a batch
    for suffix in FORMATS:
        path = write_documents(f"format_{suffix}.{suffix}", empty)
        with mock.patch("prepare.BATCH_BYTES", 3000):
            check_stream(
                [path],
                empty,
                "--shard-tokens",
                5000,
                "--val-tokens",
                7001,
                validation=7001,
                of_shard=5000,
            )


def test_text_is_cut_where_no_token_changes():
    chance, encoding = random.Random(SEED), prepare.make_encoding(RANKS)
    for trial in range(300):
        documents = [
            "".join(chance.choices(NASTY, k=chance.randint(0, 60)))
            for _ in range(chance.randint(1, 4))
        ]
        text = chance.choice(
            ["\n<|endoftext|>\n", "\r\n<|endoftext|>\r\n", "\r<|endoftext|>"]
        ).join(documents)
        path = written("nasty.txt", chance.choice(["", "\ufeff"]) + text)
        documents = text.split("<|endoftext|>")
        documents = [
            re.sub(r"\r?\n\Z", "", d) if i + 1 < len(documents) else d
            for i, d in enumerate(documents)
        ]
        expected = expected_tokens(
            [re.sub(r"\A\r?\n", "", d) if i else d for i, d in enumerate(documents)]
        )
        with mock.patch.object(prepare, "BATCH_BYTES", chance.choice([1, 2, 7, 40])):
            batches = list(prepare.read_text(path, SimpleNamespace(sources=[path])))
        found = [token for texts in batches for token in prepare.encode(encoding, texts).tolist()]
        assert found == expected, f"seed {SEED}, trial {trial}: {text!r}"


def test_long_runs_of_white_space():
    """400,000 white spaces in a row are refused, wherever they begin, and one fewer is not."""
    for begin in 0, 1, 199_999, 200_001, 399_999:
        longest = "a" * begin + 399_999 * " "
        assert prepare.encodable(longest + "b\n") == longest + "b\n"
        with refused(ValueError, "white spaces"):
            prepare.encodable(longest + "\n")


def test_hellaswag_file():
    encode, stream, sizes = oracle().encode_ordinary, [], []
    for i, question in enumerate(QUESTIONS):
        texts = [
            encode(text)
            for text in [question["ctx"]] + [" " + ending for ending in question["endings"]]
        ]
        parts = [part for tokens in texts for part in (len(tokens), *tokens)]
        sizes.append(2 * (5 + len(parts)))
        stream += [65535, sizes[-1], i, int(question["label"]), len(question["endings"]), *parts]
    run(written("hellaswag_val.jsonl", json_lines(QUESTIONS)), script="hellaswag")
    questions = header(20240522, 1, len(QUESTIONS), max(sizes)) + struct.pack(
        f"<{len(stream)}H", *stream
    )
    assert content("hellaswag") == {
        "hellaswag_val.bin": questions,
        "gpt2_tokenizer.bin": tokenizer_file(RANKS),
    }


def test_stopped_runs_leave_no_dataset():
    """One thread writes the whole. Two write what is stopped, and then the same again."""
    options = [
        write_documents("long.jsonl", some_documents(50000)),
        "--val-tokens",
        1000,
        "--shard-tokens",
        50000,
    ]
    run(*options, "-o", "data/cache/whole", "--jobs", 1)
    again, part = [*options, "-o", "data/cache/again", "--jobs", 2], Path("data/cache/again.part")
    command = list(map(str, [sys.executable, "-u", "data/prepare.py", *again, *ranks_options()]))
    for most, stop, code, says in (
        (90000, 0, 1, "too large"),
        (10**9, signal.SIGINT, 1, "interrupted"),
        (10**9, signal.SIGKILL, -signal.SIGKILL, ""),
    ):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            process.stdout.readline()  # a shard is there
            run(*again, code=1, says="another run writes there")
            # A limit below a shard's size acts as a full disk.
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
            process.send_signal(stop)
            err = process.communicate()[1]
        assert process.returncode == code and says in err and err.count("\n") == (code == 1), (
            stop,
            err,
        )
        assert not os.path.exists("data/cache/again") and part.exists() == (code < 0), stop
    written(part / "train_999999.bin", "of other sources")
    run(*again)
    assert content("again") == content("whole")


def test_stdout_that_cannot_be_written():
    """Its reader has ended, or the disk is full, or there is none: the work goes on to its end."""
    documents = write_documents("unheard.jsonl", some_documents(2000))
    shards = ["prepare", documents, "--shard-tokens", 9000]
    questions = ["hellaswag", written("unheard_hellaswag.jsonl", json_lines(QUESTIONS))]
    for i, (script, *options) in enumerate((shards, questions)):
        run(*options, "-o", f"data/cache/heard{i}" + "/h.bin" * i, script=script)
        command = [sys.executable, "-u", f"data/{script}.py", *options, *ranks_options()]
        for _ in unheard(*command, "-o", f"data/cache/unheard{i}" + "/h.bin" * i, cwd=None):
            assert content(f"unheard{i}") == content(f"heard{i}"), script
            shutil.rmtree(f"data/cache/unheard{i}")


def test_few_batches_are_in_flight():
    begun, done = [], []
    pool = mock.Mock(
        submit=lambda _, encoding, i: begun.append(i) or mock.Mock(result=lambda: done.append(i))
    )
    for _ in prepare.in_order(pool, range(100), None, 7):
        assert len(begun) - len(done) <= 7, (begun, done)
    assert done == list(range(100)), done


def test_what_is_on_disk_before_it_has_its_name():
    """Each file, and then the folder with all that is in it. Its name is on disk at the end."""
    on_disk, replace = {}, os.replace

    def now(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else Path(path).read_bytes()

    def fsync(file):
        on_disk[os.fstat(file).st_ino] = now(f"/proc/self/fd/{file}")

    def replaced(part, path):
        for one in (Path(part), *Path(part).glob("*")):
            assert on_disk.get(one.stat().st_ino) == now(one), f"{one} is not on disk"
        replace(part, path)

    with mock.patch("os.fsync", fsync), mock.patch("os.replace", replaced):
        run(written("disk.txt", LETTERS), "-o", "synced/made")
    assert on_disk[os.stat("synced").st_ino] == ["made"], on_disk


def test_folders_that_cannot_be_synced():
    """A file system such as CIFS answers with EINVAL. Other errors count, and so do a file's."""
    path, sync = written("network.txt", LETTERS), os.fsync
    cases = (
        (True, errno.EINVAL, ""),
        (True, errno.EIO, "Input/output error"),
        (False, errno.EINVAL, "Invalid argument"),
    )
    for i, (of_folder, number, says) in enumerate(cases):

        def fsync(file, of_folder=of_folder, number=number):
            if os.path.isdir(f"/proc/self/fd/{file}") == of_folder:
                raise OSError(number, os.strerror(number))
            sync(file)

        with mock.patch("os.fsync", fsync):
            run(path, "-o", f"data/cache/network{i}", code=1 if says else 0, says=says)
        assert not says or not os.path.exists(f"data/cache/network{i}")
    run(path, "-o", "data/cache/local")
    assert content("network0") == content("local")


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
    """Another text stands in the place of tinyshakespeare, which llm.c cuts into speeches."""
    text = "First:\nHe sang.\n\nSecond:\nNo, I sang\nall day.\n\n" * 20 + "First:\nSure.\n"
    path = written("at/input.txt", text).absolute()
    run("tinyshakespeare", code=1, says="input.txt: cannot download")
    with mock.patch(
        "prepare.SHAKESPEARE", (f"file://{path}", hashlib.sha256(text.encode()).hexdigest())
    ):
        check_stream(
            ["tinyshakespeare"],
            re.findall(r"(?s).+?(?:\n\n|\Z)", text),
            "--val-tokens",
            50,
            validation=50,
        )
        path.unlink()  # it is not asked for again
        run("tinyshakespeare", "-o", "again", "--val-tokens", 50)
        written("data/cache/download/input.txt", text[:-1])
        run("tinyshakespeare", "-o", "cut", code=1, says="input.txt: wrong SHA-256")
    run(
        "val",
        "-o",
        "away/h.bin",
        script="hellaswag",
        code=1,
        says="hellaswag_val.jsonl: cannot download",
    )
    with mock.patch.dict(os.environ, TIKTOKEN_CACHE_DIR="no_cache"):
        run(written("a.txt", LETTERS), ranks=[], code=1, says="--ranks")


def test_wrong_input():
    """A case has a file, its content, and what the one-line error says after the file's name."""
    good, many = '{"text": "good"}\n', b"good \n" * 300000
    cases = [
        ("a.txt", b"good \xff bad", "invalid UTF-8 at offset 5"),
        ("a.txt", b"good \xe2\x82", "UTF-8 at offset 5"),
        ("a.txt", many + b"\xe2\x28", "UTF-8 at offset 1800000"),
        ("a.txt", many + b"\0", "NUL byte at offset 1800000"),
        ("a.txt", "a" + " " * 3000000, "white spaces"),
        ("errors", "a", "no tokens left to train on"),
        ("errors", "", "no tokens left to train on"),
        ("a.jsonl", "[1]\n", "object at offset 0"),
        ("a.jsonl", good.encode() + b'{"text": "\xff"}\n', "not JSON in UTF-8 at offset 17"),
        ("a.jsonl", good + '{"text": \n', "at offset 17"),
        ("a.jsonl", good + "[" * 100000, "at offset 17"),
        ("a.jsonl", good + '{"body": 1}\n', "object at offset 17"),
        ("a.jsonl", good + '{"text": 1}\n', "object at offset 17"),
        ("hella.jsonl", "", "no examples"),
        ("hella.jsonl", "[1]\n", "example at offset 0"),
        ("hella.jsonl", '{"ctx": "a", "endings": [""], "label": 0}\n' * 65537, "65536 examples"),
    ]
    for change in (
        {"label": 4},
        {"label": ""},
        {"label": None},
        {"endings": None},
        {"endings": "abcd"},
        {"ctx": ""},
        {"endings": [None] * 4},
        {"endings": ["a"] * 65},
        {"ctx": None},
        {"ctx": " " * 10**6},
        {"ctx": "! " * 40000},
    ):
        second = len(json_lines(QUESTIONS[:1]).encode())
        cases.append(
            (
                "hella.jsonl",
                json_lines([QUESTIONS[0], QUESTIONS[0] | change]),
                f"example at offset {second}",
            )
        )
    if "parquet" in FORMATS:
        raw = Path(write_documents("a.parquet", some_documents(9))).read_bytes()
        cases += [
            ("a.parquet", "PAR1 no", "damaged"),
            ("a.parquet", raw[:4] + bytes(300) + raw[304:], "damaged"),
            (
                "a.parquet",
                Path(write_documents("a.parquet", [1, 2])).read_bytes(),
                "no text in the field 'text'",
            ),
        ]
    for name, raw, says in cases:
        script, to = (
            ("hellaswag", ["errors/h.bin"])
            if "hella" in name
            else ("prepare", ["errors", "--val-tokens", 2])
        )
        path = written("a.txt" if name == "errors" else name, raw)
        assert says in run(path, "-o", *to, script=script, code=1, says=f"{name}: "), (name, says)
        assert not glob.glob("errors*"), name
    many = [
        chr(33 + i // 8836) + " " + chr(33 + i // 94 % 94) + chr(33 + i % 94) for i in range(50001)
    ]
    for name, merges in (
        ("many", many),
        ("twice", ["a b", "a b"]),
        ("long", ["a" * 256]),
        ("foreign", ["🙂 a"]),
    ):
        advice = "damaged" if name == "foreign" else "expected at most 50256 different tokens"
        run(
            "a.txt",
            code=1,
            says=f"{name}.bpe: {advice}",
            ranks=ranks_options(merges, f"{name}.bpe"),
        )
    run("a.txt", code=1, says="vocab.bpe: wrong SHA-256", ranks=ranks_options()[:2])
    run(
        written("a.txt", LETTERS),
        "--val-tokens",
        9,
        "--max-tokens",
        5,
        code=1,
        says="found 5, and 9 go to validation",
    )


def test_pointers_of_git_lfs():
    """Every file that is read is named. A long text that begins like one is a text."""
    good = written("good.txt", LETTERS)
    for name in "p.txt", "p.jsonl", "p.parquet":
        run(good, written(name, POINTER), "-o", "lfs", code=1, says=f"{name}: a Git LFS")
        assert not glob.glob("lfs*"), name
    run("p.jsonl", "-o", "lfs/h.bin", script="hellaswag", code=1, says="p.jsonl: a Git LFS")
    run(good, "-o", "lfs", ranks=["--ranks", "p.txt"], code=1, says="p.txt: a Git LFS")
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
    command = run(written("printed.txt", LETTERS), "-o", folder := "it's [1] $x *").split("next: ")[
        1
    ]
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True
    ).stdout.split("\0")
    for option, name in ("-i", "train_000001.bin"), ("-j", "val_000000.bin"):
        assert glob.glob(words[words.index(option) + 1]) == [f"{folder}/{name}"], words
    assert Path(words[words.index("--tokenizer") + 1]).exists(), words


def test_trainer_encodes_as_tiktoken():
    """Every character among others, then nasty text, with random merges that would cross word
    boundaries. There are as many of them as in GPT-2, and they replace those that tiktoken would
    download."""
    chance = random.Random(SEED)
    pairs = chance.sample([a + b for a in BYTES for b in BYTES], 30000)
    fours = set()
    while len(fours) < 20000:
        fours.add(chance.choice(pairs) + chance.choice(pairs))
    ranks = {token: rank for rank, token in enumerate(BYTES + pairs + sorted(fours))}
    with mock.patch("tiktoken.get_encoding", lambda name: oracle(ranks)):
        assert prepare.load_ranks(SimpleNamespace(ranks=None)) == ranks
    prepare.write_tokenizer(Path("pairs.bin"), ranks)
    characters = [
        chr(c)
        for c in (*range(0xD800), *range(0xE000, 0x33500), *range(0xE0000, 0xE0200), 0x10FFFF)
    ]
    text = "".join(f"{c}a {c}1{c}! {c}{c}\n" for c in characters)
    text += "".join(
        chance.choice(NASTY if chance.random() < 0.7 else characters) for _ in range(100000)
    )
    found = subprocess.check_output(
        [built("dev/encode"), "pairs.bin", written("nasty.txt", text)]
    ).split()
    for i, (id, expected) in enumerate(
        zip(map(int, found), oracle(ranks).encode_ordinary(text), strict=True)
    ):
        assert id == expected, f"seed {SEED}, token {i}: {id}, tiktoken has {expected}"


if __name__ == "__main__":
    main()
