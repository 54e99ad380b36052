"""What prepare.py and hellaswag.py share: errors of one line, files that are whole or not there, downloads that are
checked and go on where they broke off, and GPT-2's byte pair encoding from whichever form of its ranks is at hand."""
import base64
import concurrent.futures
import contextlib
import errno
import hashlib
import http.client
import importlib
import json
import os
import struct
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

END_OF_TEXT, VOCABULARY = 50256, 50257
TOKENIZER_MAGIC = 20240328
# GPT-2's order of the bytes, whose first tokens they are. Its files show each as a visible character, Latin-1's visible
# ones as themselves and the others from U+0100 on.
VISIBLE = [byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")]
BYTES = VISIBLE + [byte for byte in range(256) if byte not in VISIBLE]
SHOWN = {byte: chr(byte) if byte in VISIBLE else chr(256 + i - len(VISIBLE)) for i, byte in enumerate(BYTES)}
# GPT-2's, as tiktoken writes it.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

RANKS_HOST = "https://openaipublic.blob.core.windows.net/"
RANKS_FILES = "GPT-2's merges.txt, vocab.bpe, vocab.json, encoder.json or r50k_base.tiktoken"
RANKS_SHA256 = {  # three forms of the same list; the first two have other names on the Hugging Face hub
    "gpt-2/encodings/main/vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "gpt-2/encodings/main/encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "encodings/r50k_base.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
}


class Fail(Exception):
    """One line for the user: what, where, expected, found, what to do."""
    def __str__(self):
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in super().__str__())


def need(module):
    try:
        return importlib.import_module(module)
    except ImportError:
        name = module.split(".")[0]
        more = {"pyarrow": "-c scripts/requirements-more.txt pyarrow",
                "huggingface_hub": "-c scripts/requirements-more.txt huggingface_hub"}
        raise Fail(f"needs {name}: pip install {more.get(name, '-r scripts/requirements.txt')}") from None


def progress(**options):
    return need("tqdm").tqdm(unit_scale=True, disable=None, **options)  # None: only on a terminal


# -------------------------------------------------------------------------------------------------- files and downloads


def regular(path):
    """This path, unless no file is there: a pipe would let a reader wait, and some devices have no end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise Fail(f"{path}: expected a file, found a directory, a pipe or a device; give a file")
    return path


@contextlib.contextmanager
def reading(path, advice="get the file again"):
    """Whatever its content makes a reader raise is one line about this file."""
    try:
        yield regular(path)
    except Exception as error:
        if isinstance(error, Fail) or getattr(error, "filename", None):
            raise
        reason = str(error).strip().split("\n")[0]
        raise Fail(f"{path}: damaged ({advice}): {type(error).__name__}: {reason}") from None


def sha256_of(path):
    with open(regular(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(file, path):
    """Gives a complete file its final name: on disk first, so that a final name never holds a partial file."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def write_file(path, chunks):
    file = open(regular(f"{path}.part"), "wb")
    file.writelines(chunks)
    commit(file, path)


def fetch(url, start=0):
    """The server's answer with the bytes from `start` on, or None if there are no more."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        return urllib.request.urlopen(request, timeout=60)
    except (OSError, ValueError, http.client.HTTPException) as error:  # URLError is an OSError
        if isinstance(error, urllib.error.HTTPError) and error.code == 416:
            return None
        raise Fail(f"{url}: cannot download: {getattr(error, 'reason', error)}; check the network, or give a local "
                   "file (GPT-2's vocab.bpe with --ranks)") from None


def blocks(response):
    with contextlib.suppress(OSError, http.client.HTTPException):  # the length will tell
        yield from iter(lambda: response.read(1 << 20), b"")


def download(url, path, sha256, check=lambda path: ""):
    """`path`, downloaded or already there, with this hash (None: unknown) and nothing wrong; a partial one goes on."""
    def wrong(path):
        found = sha256 and sha256_of(path)
        return f"wrong SHA-256: expected {sha256}, found {found}" if found != sha256 else check(path)

    if path.exists():
        if why := wrong(path):
            raise Fail(f"{path}: {why}; delete it to get it again")
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = regular(Path(f"{path}.part"))
    response = fetch(url, part.stat().st_size if part.exists() else 0)
    with open(part, "ab" if response is None or response.status == 206 else "wb") as file:
        if response:
            total = file.tell() + response.length if response.length else None
            with response, progress(total=total, initial=file.tell(), unit="B", desc=path.name) as bar:
                for block in blocks(response):
                    bar.update(file.write(block))
            if total and file.tell() < total:
                raise Fail(f"{url}: download broke off: expected {total} bytes, found {file.tell()}; run again"
                           " to go on")
        file.flush()
        if why := wrong(part):
            part.unlink()
            raise Fail(f"{url}: {why}; deleted, run again")
        commit(file, path)
    return path


def invalid_utf8(path, offset, error):
    byte = error.object[error.start]
    return Fail(f"{path}: invalid UTF-8 at offset {offset + error.start}: found byte 0x{byte:02x} ({error.reason}); "
                "convert the file to UTF-8")


def json_lines(path, position=0):
    """(offset, object) of each line from a position on, without blank ones."""
    with open(path, "rb") as file:
        file.seek(position)
        for line in file:
            try:
                found = json.loads(line.decode()) if line.strip() else None
            except UnicodeDecodeError as error:
                raise invalid_utf8(path, position, error) from None
            except (ValueError, RecursionError) as error:  # too long a number and too deep a list have no position
                at, reason = position + getattr(error, "pos", 0), getattr(error, "msg", error)
                raise Fail(f"{path}: not JSON at offset {at}: {reason}; give one object a line") from None
            if line.strip():
                yield position, found
            position += len(line)


# -------------------------------------------------------------------------------------------------------- the tokenizer


def parse_ranks(content):
    """{bytes of a token: its id} from vocab.bpe, encoder.json or a .tiktoken file."""
    byte_of = {character: byte for byte, character in SHOWN.items()}
    if content.startswith(b"{"):
        return {bytes(byte_of[c] for c in token): int(rank) for token, rank in json.loads(content).items()
                if rank != END_OF_TEXT or token != "<|endoftext|>"}
    if content.startswith(b"#version"):
        merges = content.decode().splitlines()[1:]
        tokens = [bytes([byte]) for byte in BYTES]
        tokens += [bytes(byte_of[c] for c in merge.replace(" ", "")) for merge in merges if merge]
        return {token: rank for rank, token in enumerate(tokens)}
    pairs = (line.split() for line in content.splitlines() if line)
    return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}


def load_ranks(paths, extra_sha256):
    """GPT-2's ranks from the given files, else from tiktoken's cache, else from the network into that cache."""
    if not paths:
        cache = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
        cache = Path(cache or os.path.join(tempfile.gettempdir(), "data-gym-cache"))
        urls = {cache / hashlib.sha1((RANKS_HOST + name).encode()).hexdigest(): name for name in RANKS_SHA256}
        paths = [path for path in urls if path.exists()][:1]
    if not paths:
        path, name = next(iter(urls.items()))
        paths = [download(RANKS_HOST + name, path, RANKS_SHA256[name])]
    accepted = [*extra_sha256, *RANKS_SHA256.values()]
    found = []
    for path in paths:
        content = Path(regular(path)).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 not in accepted:
            raise Fail(f"{path}: wrong SHA-256: expected one of {', '.join(accepted)}, found {sha256}; give "
                       f"{RANKS_FILES}, or accept another list with --ranks-sha256")
        with reading(path, f"give {RANKS_FILES}"):
            found.append(parse_ranks(content))
        if found[0] != found[-1]:
            raise Fail(f"{path}: other ranks than in {paths[0]}; give files of the same tokenizer")
    ranks, ids = found[0], set(found[0].values())
    if not ids <= set(range(END_OF_TEXT)) or len(ids) < len(ranks):
        raise Fail(f"{paths[0]}: expected different ids below {END_OF_TEXT} (<|endoftext|>), found {len(ids)} from "
                   f"{min(ids)} to {max(ids)} for {len(ranks)} tokens; use GPT-2's ranks")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise Fail(f"{paths[0]}: a single byte has no token: expected all 256; use GPT-2's ranks")
    return ranks


def make_encoding(ranks):
    return need("tiktoken").Encoding("gpt2", pat_str=PATTERN, mergeable_ranks=ranks,
                                     special_tokens={"<|endoftext|>": END_OF_TEXT})


def encodable(where, text, spaces=400_000):
    """This text, unless tiktoken could panic, as it does at a million of white spaces in a row."""
    if any(text[i:i + spaces].isspace() for i in range(0, len(text) - spaces + 1, spaces)):
        raise Fail(f"{where}: {spaces:,} white spaces in a row, too many for tiktoken; remove some")
    return text


def write_tokenizer(path, ranks):
    """llm.c's tokenizer file: 256 uint32 (magic, version 2, tokens, id of <|endoftext|>), then for each a length byte
    and as many bytes."""
    pieces = [b""] * VOCABULARY
    for token, rank in [*ranks.items(), (b"<|endoftext|>", END_OF_TEXT)]:
        if len(token) > 255:
            raise Fail(f"{path}: token {rank} has {len(token)} bytes: expected at most 255; use GPT-2's ranks")
        pieces[rank] = token
    header = struct.pack("<256I", TOKENIZER_MAGIC, 2, VOCABULARY, END_OF_TEXT, *[0] * 252)
    write_file(path, [header, *(bytes([len(piece)]) + piece for piece in pieces)])


# ----------------------------------------------------------------------------------------------------- the command line


def add_ranks_options(parser):
    parser.add_argument("--ranks", action="append", metavar="FILE", default=[],
                        help=f"{RANKS_FILES}; several are compared (default: from TIKTOKEN_CACHE_DIR, else downloaded "
                        "into it)")
    parser.add_argument("--ranks-sha256", action="append", metavar="HASH", default=[],
                        help="accept a ranks file with this SHA-256 although it is not GPT-2's")


def run(main, args):
    """Runs main(args); what goes wrong is one line on stderr and exit code 1."""
    try:
        return main(args)
    except SystemExit:  # stdout has said why
        os._exit(1)
    except Fail as error:
        message = str(error)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        message = (f"{error.filename or args.output or 'output'}: {error.strerror or error}" +
                   ("; make room and run again, what is finished is kept" if full else ""))
    except concurrent.futures.BrokenExecutor:
        message = "a worker was killed, for lack of memory perhaps; try fewer --jobs, what is finished is kept"
    except KeyboardInterrupt:
        message = "interrupted; run again to go on, what is finished is kept"
    print(f"{os.path.basename(sys.argv[0])}: {message}", file=sys.stderr, flush=True)
    with contextlib.suppress(SystemExit):
        sys.stdout.flush()
    os._exit(1)  # sys.exit would wait for what is left of a pool of workers; they leave with this process
