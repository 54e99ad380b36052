"""Shared by prepare.py, hellaswag.py and scripts/hf.py: one-line errors, files that are either
complete or absent, checked downloads, and GPT-2's tokens. scripts/results.py passes on what every
Python tool needs."""

import contextlib
import errno
import hashlib
import importlib
import json
import os
import re
import struct
import sys
import urllib.request
from pathlib import Path

END_OF_TEXT = 50256
VOCABULARY_SIZE = 50257
TOKENIZER_MAGIC = 20240328

# GPT-2's first tokens are the 256 bytes, in this order. Its files show each byte as a visible
# character: Latin-1's visible characters as themselves, the other bytes as U+0100 and up.
VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {
    byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE))
    for i, byte in enumerate(BYTES)
}

# The regular expression that splits a text into words, as tiktoken writes GPT-2's.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

# GPT-2's vocab.bpe, which other places call merges.txt.
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
RANKS_ADVICE = "give GPT-2's vocab.bpe or merges.txt with --ranks"
DAMAGED = "damaged; get the file again"
CACHE = Path(__file__).parent / "cache"


class Fail(Exception):
    """An error whose text is one line for the user: what is wrong, where, what was expected, what
    was found, and what to do."""


def tool_name():
    return os.path.basename(sys.argv[0])


class Output:
    """stdout or stderr of a tool whose files matter more than its messages. If a write fails,
    because the reader has exited or the disk is full, `error` holds the reason, and everything that
    follows is dropped."""

    def __init__(self, stream):
        self.stream = stream
        self.error = None
        if stream is None:  # the tool was started without this stream
            self.stream = open(os.devnull, "w")
            self.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
        elif getattr(stream, "errors", "") == "strict":
            # A character that the terminal's encoding lacks, such as "…" in ASCII, is no error.
            stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        self.attempt("write", text)
        return len(text)

    def flush(self):
        self.attempt("flush")

    def attempt(self, call, *arguments):
        if self.error:
            return
        try:
            getattr(self.stream, call)(*arguments)
        except OSError as error:
            self.error = error
            # The stream still buffers what it could not write, and Python flushes it at exit.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def check_stdout():
    """Decorates a tool's main(): it does all its work even if stdout cannot be written. The exit
    code is then 1, like that of ./train_gpt2cu."""
    before = sys.stdout, sys.stderr
    stdout, stderr = Output(sys.stdout), Output(sys.stderr)
    sys.stdout, sys.stderr = stdout, stderr
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
        # An exit with 0, as after --help, is a success only if stdout was written.
    finally:
        stdout.flush()
        stderr.flush()
        sys.stdout, sys.stderr = before

    if stdout.error:
        sys.exit(
            f"{tool_name()}: stdout could not be written: {stdout.error.strerror}; "
            "free some space or redirect it"
        )


def need(module):
    """Imports a library, and says how to install it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        what = "-r scripts/requirements.txt"
        if name == "pyarrow":
            what = "-c scripts/requirements-more.txt pyarrow"
        raise Fail(f"needs {name}: pip install {what}") from None


def progress(**options):
    """A progress bar; disable=None shows it only on a terminal."""
    return need("tqdm").tqdm(unit_scale=True, disable=None, **options)


@contextlib.contextmanager
def reading(what, advice=DAMAGED):
    """Turns whatever a reader or a library raises into one line about the file that it reads."""
    try:
        yield
    except Exception as error:
        # A Fail has such a line already, and run() makes one of an OSError that names its file.
        if isinstance(error, Fail) or getattr(error, "filename", None):
            raise
        reason = " ".join(str(error).split())  # on one line
        raise Fail(f"{what}: {advice} ({type(error).__name__}: {reason})") from None


def check_fetched(path):
    """Fails if the file is only a Git LFS pointer: a few lines of text in place of the content."""
    if not os.path.isfile(path):  # reading from a pipe would take bytes away from it
        return
    with open(path, "rb") as file:
        head = file.read(1024)
    is_short = len(head) < 1024  # as every pointer is
    if is_short and head.startswith(b"version https://git-lfs.github.com/spec/v1\n"):
        raise Fail(
            f"{path}: is a Git LFS pointer, not the file itself; get the file with git lfs pull"
        )


def rename(part, path):
    """Gives a file or folder that has been synced its final name, which survives a crash."""
    os.replace(part, path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: this file system cannot sync a folder
            raise
    finally:
        os.close(parent)


def write_file(path, chunks):
    """Syncs the file to disk before it gets its name, so that a file of this name is complete."""
    with open(f"{path}.part", "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    rename(file.name, path)


@contextlib.contextmanager
def asking_hub(name):
    """Yields huggingface_hub. It raises errors of many kinds, its libraries' among them."""
    advice = "cannot be downloaded from the Hugging Face hub; check HF_ENDPOINT and the network"
    with reading(name, advice):
        yield need("huggingface_hub")


def download(url, sha256):
    """Downloads a file into the cache, unless it is there already, and returns its path."""
    path = CACHE / "download" / Path(url).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        advice = "cannot be downloaded; check the network, or give a local file"
        with reading(url, advice), urllib.request.urlopen(url, timeout=60) as response:
            write_file(path, [response.read()])
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise Fail(
            f"{path}: wrong SHA-256: expected {sha256}, found {found}; "
            "delete it to download it again"
        )
    return path


def json_lines(path):
    """(offset, object) of each line that is not blank."""
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            offset = file.tell() - len(line)
            try:
                found = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise Fail(
                    f"{path}: not JSON in UTF-8 at offset {offset}: {error}; "
                    "give one object per line"
                ) from None
            yield offset, found


def load_ranks(args):
    """{bytes of a token: its id}, from the merges file that --ranks names, or else from tiktoken,
    which downloads and caches GPT-2's."""
    if args.ranks:
        return read_merges(args.ranks, args.ranks_sha256)
    with reading("GPT-2's ranks", f"cannot be downloaded; check the network, or {RANKS_ADVICE}"):
        gpt2 = need("tiktoken").get_encoding("gpt2")
        return {gpt2.decode_single_token_bytes(rank): rank for rank in range(END_OF_TEXT)}


def read_merges(path, other_sha256):
    """The ranks in GPT-2's merges file, or in another file with the SHA-256 `other_sha256`."""
    check_fetched(path)
    content = Path(path).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 not in (MERGES_SHA256, other_sha256):
        raise Fail(
            f"{path}: wrong SHA-256: found {sha256}; {RANKS_ADVICE}, "
            "or accept this file with --ranks-sha256"
        )

    byte_of = {character: byte for byte, character in SHOWN.items()}
    tokens = [bytes([byte]) for byte in BYTES]
    with reading(path, f"damaged; {RANKS_ADVICE}"):
        merges = content.decode().splitlines()[1:]  # after the line with the version
        tokens += [bytes(byte_of[c] for c in merge if c != " ") for merge in merges if merge]

    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or len(tokens) > END_OF_TEXT or max(map(len, tokens)) > 255:
        raise Fail(
            f"{path}: expected at most {END_OF_TEXT} different tokens of at most 255 bytes; "
            f"{RANKS_ADVICE}"
        )
    return ranks


def make_encoding(ranks):
    return need("tiktoken").Encoding(
        "gpt2",
        pat_str=PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
    )


def has_white_spaces(text, count):
    """Whether the text has `count` white spaces in a row."""
    # A run of this length covers at least one whole block of half the length, wherever it begins.
    # Few texts have such a block. Only in these do we measure every run, which is slow.
    half = count // 2
    blocks = (text[begin : begin + half] for begin in range(0, len(text) - half + 1, half))
    if not any(block.isspace() for block in blocks):
        return False
    return any(len(run) >= count for run in re.findall(r"\s+", text))


def encodable(text, max_spaces=399_999):
    """The text, or "" for None. Raises ValueError for anything else, and for a text at which
    tiktoken could panic, as it does at a million white spaces in a row."""
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ValueError(f"expected text, found {type(text).__name__}")
    if has_white_spaces(text, max_spaces + 1):
        raise ValueError(
            f"expected text with at most {max_spaces:,} white-space characters in a row"
        )
    return text


def write_tokenizer(path, ranks):
    """Writes llm.c's tokenizer file: 256 uint32 (magic, version 2, number of tokens, id of
    <|endoftext|>), then for each token a length byte and that many bytes."""
    header = struct.pack("<256I", TOKENIZER_MAGIC, 2, VOCABULARY_SIZE, END_OF_TEXT, *[0] * 252)
    missing = [b""] * (END_OF_TEXT - len(ranks))
    tokens = [*ranks, *missing, b"<|endoftext|>"]
    write_file(path, [header, *(bytes([len(token)]) + token for token in tokens)])


def add_ranks_options(parser):
    parser.add_argument(
        "--ranks",
        metavar="FILE",
        help="GPT-2's BPE merges, vocab.bpe or merges.txt (default: tiktoken downloads them)",
    )
    parser.add_argument(
        "--ranks-sha256",
        metavar="HASH",
        help="use a --ranks file that is not GPT-2's, but has this SHA-256",
    )


def run(main, args):
    """Runs main(args). An error becomes one line on stderr and exit code 1."""
    try:
        return main(args)
    except Fail as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or args.output}: {error.strerror or error}"
    except KeyboardInterrupt:
        message = f"interrupted; {args.output} was not written"
    sys.stdout.flush()
    print(f"{tool_name()}: {message}", file=sys.stderr, flush=True)
    os._exit(1)  # sys.exit would wait until the pool's threads have finished
