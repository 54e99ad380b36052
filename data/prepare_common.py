"""What prepare.py, hellaswag.py and scripts/hf.py share: one-line errors, files that are either
complete or absent, checked downloads, and GPT-2's tokens. scripts/results.py imports from here what
every Python tool needs."""

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

END_OF_TEXT, VOCABULARY, TOKENIZER_MAGIC = 50256, 50257, 20240328
# GPT-2's order of the bytes, which are its first tokens. Its files show each byte as a visible
# character: Latin-1's visible ones as themselves, the others from U+0100 on.
VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {
    byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE))
    for i, byte in enumerate(BYTES)
}
# GPT-2's, as tiktoken writes it.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Of GPT-2's vocab.bpe or merges.txt.
MERGES_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
DAMAGED = "damaged, get the file again"
CACHE = Path(__file__).parent / "cache"


class Fail(Exception):
    """One line for the user: what, where, expected, found, what to do."""


def tool_name():
    return os.path.basename(sys.argv[0])


class Output:
    """stdout or stderr of a tool whose files matter more than its messages. If a write fails,
    because the reader has ended or the disk is full, `error` says so and the rest is dropped."""

    def __init__(self, stream):
        self.stream, self.error = stream, None
        if stream is None:  # as Python has it if the tool was started without
            self.stream = open(os.devnull, "w")
            self.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
        elif getattr(stream, "errors", "") == "strict":  # else "…" would be an error in ASCII
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
            # The stream still has what it could not write, and Python flushes it at the end.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def check_stdout():
    """Decorates a tool's main(), which does all its work even if nobody can read what it prints.
    The exit code is then 1, as ./train_gpt2cu's is."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = outputs = [Output(stream) for stream in before]
    try:
        yield
    except SystemExit as end:
        if end.code:
            raise
    finally:
        for output in outputs:
            output.flush()
        sys.stdout, sys.stderr = before
    if error := outputs[0].error:
        sys.exit(
            f"{tool_name()}: stdout: a line could not be written: {error.strerror}; free some "
            "space or send it elsewhere"
        )


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        what = (
            "-c scripts/requirements-more.txt pyarrow"
            if name == "pyarrow"
            else "-r scripts/requirements.txt"
        )
        raise Fail(f"needs {name}: pip install {what}") from None


def progress(**options):
    return need("tqdm").tqdm(unit_scale=True, disable=None, **options)  # None: only on a terminal


@contextlib.contextmanager
def reading(what, advice=DAMAGED):
    """Whatever a reader or a library raises is one line about what it reads."""
    try:
        yield
    except Exception as error:
        if isinstance(error, Fail) or getattr(error, "filename", None):
            raise
        raise Fail(
            f"{what}: {advice}: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from None


def check_fetched(path):
    """Fails if Git LFS has left its pointer, a few lines of text, in the place of the file."""
    if not os.path.isfile(path):  # of a pipe nothing may be taken
        return
    with open(path, "rb") as file:
        head = file.read(1024)  # a pointer is shorter
    if len(head) < 1024 and head.startswith(b"version https://git-lfs.github.com/spec/v1\n"):
        raise Fail(f"{path}: a Git LFS pointer, not the file itself; get that with git lfs pull")


def rename(part, path):
    """Gives a file or folder that is on disk its final name. A crash after this cannot undo it."""
    os.replace(part, path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has nothing to sync
            raise
    finally:
        os.close(parent)


def write_file(path, chunks):
    """The file is on disk before it has its name, so a file of this name is never a part."""
    with open(f"{path}.part", "wb") as file:
        file.writelines(chunks)
        file.flush()
        os.fsync(file.fileno())
    rename(file.name, path)


@contextlib.contextmanager
def asking_hub(name):
    """Gives huggingface_hub, whose errors are its own, its libraries' and the network's."""
    with reading(name, "the Hugging Face hub does not give it; check HF_ENDPOINT and the network"):
        yield need("huggingface_hub")


def download(url, sha256):
    """The path of what this address has. A file that is there is not asked for again."""
    path = CACHE / "download" / Path(url).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        advice = "cannot download; check the network, or give a local file"
        with reading(url, advice), urllib.request.urlopen(url, timeout=60) as response:
            write_file(path, [response.read()])
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != sha256:
        raise Fail(
            f"{path}: wrong SHA-256: expected {sha256}, found {found}; delete it to get it again"
        )
    return path


def json_lines(path):
    """(offset, object) of each line that is not blank."""
    with open(path, "rb") as file:
        for line in file:
            position = file.tell() - len(line)
            try:
                if line.strip():
                    yield position, json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise Fail(
                    f"{path}: no JSON in UTF-8 at offset {position}: {error}; "
                    "give one object a line"
                ) from None


def load_ranks(args):
    """{bytes of a token: its id}, from the file of merges that --ranks names, or else from
    tiktoken, which downloads GPT-2's and caches them."""
    path, advice = args.ranks, "give GPT-2's vocab.bpe or merges.txt with --ranks"
    if not path:
        with reading("GPT-2's ranks", f"cannot download; check the network, or {advice}"):
            gpt2 = need("tiktoken").get_encoding("gpt2")
            return {gpt2.decode_single_token_bytes(rank): rank for rank in range(END_OF_TEXT)}
    check_fetched(path)
    content = Path(path).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 not in (MERGES_SHA256, args.ranks_sha256):
        raise Fail(
            f"{path}: wrong SHA-256: found {sha256}; {advice}, "
            "or accept this file with --ranks-sha256"
        )
    byte_of = {character: byte for byte, character in SHOWN.items()}
    with reading(path, f"damaged, {advice}"):
        merges = content.decode().splitlines()[1:]  # behind a line with the version
        tokens = [bytes([byte]) for byte in BYTES]
        tokens += [bytes(byte_of[c] for c in merge if c != " ") for merge in merges if merge]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or len(tokens) > END_OF_TEXT or max(map(len, tokens)) > 255:
        raise Fail(
            f"{path}: expected at most {END_OF_TEXT} different tokens of at most 255 bytes; "
            f"{advice}"
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
    # So long a run fills at least one whole block of half its length, wherever it begins. Few texts
    # have such a block, and only in these do we measure every run, which is slow.
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
        raise ValueError(f"expected text with at most {max_spaces:,} white spaces in a row")
    return text


def write_tokenizer(path, ranks):
    """Writes llm.c's tokenizer file: 256 uint32 (magic, version 2, number of tokens, id of
    <|endoftext|>), then for each token a length byte and that many bytes."""
    header = struct.pack("<256I", TOKENIZER_MAGIC, 2, VOCABULARY, END_OF_TEXT, *[0] * 252)
    pieces = [*ranks, *[b""] * (END_OF_TEXT - len(ranks)), b"<|endoftext|>"]
    write_file(path, [header, *(bytes([len(piece)]) + piece for piece in pieces)])


def add_ranks_options(parser):
    parser.add_argument(
        "--ranks", metavar="FILE", help="GPT-2's vocab.bpe or merges.txt (default: tiktoken's)"
    )
    parser.add_argument(
        "--ranks-sha256",
        metavar="HASH",
        help="accept a file that is not GPT-2's, with this SHA-256",
    )


def run(main, args):
    """Runs main(args); what goes wrong is one line on stderr and exit code 1."""
    try:
        return main(args)
    except Fail as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename or args.output}: {error.strerror or error}"
    except KeyboardInterrupt:
        message = f"interrupted; {args.output} is not written"
    sys.stdout.flush()
    print(f"{tool_name()}: {message}", file=sys.stderr, flush=True)
    os._exit(1)  # sys.exit would wait for what threads have begun
