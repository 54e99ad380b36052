"""Small stand-ins for numpy, tiktoken and tqdm, for tests on a machine that lacks these. They do what our scripts use,
slowly. A copy of this file takes the name of the library."""
import atexit
import functools
import importlib.util
import math
import operator
import os
import re
import shutil
import struct
import sys
import tempfile


def stand_in(*libraries):
    """This process and those that it starts import a stand-in for each library that is missing. Gives these names."""
    missing = [library for library in libraries if not importlib.util.find_spec(library)]
    folder = tempfile.mkdtemp(prefix="stand_ins.")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for library in missing:
        print(f"without {library}: a stand-in")
        shutil.copy(__file__, f"{folder}/{library}.py")
    sys.path.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))
    return missing


# --------------------------------------------------------------------------------------------------------------- numpy


class dtype(str):
    itemsize = property(lambda self: int(self[2:]))
    code = property(lambda self: {"u1": "B", "u2": "H", "u4": "I", "i4": "i", "f2": "e", "f4": "f"}[self[1:]])


uint8 = dtype("|u1")


class ndarray:
    """Bytes, a type and a shape. What is only moved keeps its bits."""
    def __init__(self, data, kind, shape=None):
        self.data, self.dtype, self.nbytes = memoryview(data), dtype(kind), len(data)
        self.size, rest = divmod(self.nbytes, self.dtype.itemsize)
        self.shape = (self.size,) if shape is None else tuple(shape)
        assert rest == 0 and math.prod(self.shape) == self.size, f"{self.nbytes} bytes as {kind} {self.shape}"

    def flat(self): return struct.unpack(f"<{self.size}{self.dtype.code}", self.data)
    def tobytes(self): return bytes(self.data)
    def reshape(self, shape): return ndarray(self.data, self.dtype, shape)
    def astype(self, kind): return self if kind == self.dtype else packed(self.flat(), kind, self.shape)

    def view(self, kind):
        same = dtype(kind).itemsize == self.dtype.itemsize
        assert same or len(self.shape) == 1, "view of another size"
        return ndarray(self.data, kind, self.shape if same else None)

    def tolist(self):
        assert len(self.shape) == 1
        return list(self.flat())

    @property
    def T(self):
        (rows, columns), size = self.shape, self.dtype.itemsize
        at = (size * (i * columns + j) for j in range(columns) for i in range(rows))
        return ndarray(b"".join(self.data[a:a + size] for a in at), self.dtype, (columns, rows))

    def part(self, of):
        assert len(self.shape) == 1 and of.step is None
        return slice(*(i * self.dtype.itemsize for i in of.indices(self.size)[:2]))

    def __getitem__(self, of):
        return ndarray(self.data[self.part(of)], self.dtype) if isinstance(of, slice) else self.tolist()[of]

    def __setitem__(self, of, values): self.data[self.part(of)] = packed(values, self.dtype).data


def packed(values, kind, shape=None):
    kind, values = dtype(kind), list(values)
    if kind[1] == "u":  # it wraps around
        values = [value & (1 << 8 * kind.itemsize) - 1 for value in values]
    return ndarray(struct.pack(f"<{len(values)}{kind.code}", *values), kind, shape)


def elementwise(operation):
    def of(a, b):
        b = b if isinstance(b, ndarray) else packed([b] * a.size, a.dtype, a.shape)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{a.shape} {a.dtype} with {b.shape} {b.dtype}"
        return packed(map(operation, a.flat(), b.flat()), a.dtype, a.shape)
    return of


for name in ("add", "and", "or", "lshift", "rshift"):
    setattr(ndarray, f"__{name}__", elementwise(getattr(operator, f"__{name}__")))


def fromfile(path, kind, count=-1, offset=0):
    size = dtype(kind).itemsize
    with open(path, "rb") as f:
        f.seek(offset)
        data = f.read(count * size if count >= 0 else -1)
    return ndarray(data[:len(data) // size * size], kind)


def where(which, a, b):
    of = zip(which.flat(), a.flat(), b.flat(), strict=True)
    return packed((x if w else y for w, x, y in of), a.dtype, a.shape)


def zeros(count, kind): return ndarray(bytearray(count * dtype(kind).itemsize), kind)
def memmap(path, kind, mode, offset=0): return fromfile(path, kind, offset=offset)
def isnan(a): return packed(map(math.isnan, a.flat()), uint8, a.shape)
def array_equal(a, b): return a.shape == b.shape and a.flat() == b.flat()
def ascontiguousarray(a): return a
empty = zeros


# ---------------------------------------------------------------------------------------------------- tiktoken and tqdm


class Encoding:
    r"""Byte pair encoding as tiktoken does it. Its pattern's \p{L} and \p{N} are near enough for the tests' texts."""
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
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return [token for word in self.pattern.findall(text) for token in self.encode_word(word)]


class tqdm:
    def __init__(self, iterable=(), **options): self.iterable, self.n = iterable, options.get("initial", 0)
    def __iter__(self): return iter(self.iterable)
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def update(self, n): self.n += n
    def write(text, file): print(text, file=file)
