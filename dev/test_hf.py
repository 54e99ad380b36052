#!/usr/bin/env python3
"""scripts/hf.py: round trips bit for bit, Hugging Face's GPT-2 against ours (logits, every gradient, answers to
multiple-choice questions), bad input. Where numpy is missing, a small one stands in for it.

    python3 dev/test_hf.py [part of a test's name]
"""
import atexit
import contextlib
import importlib.util
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

from harness import Skip, main, need

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HF = os.path.join(ROOT, "scripts", "hf.py")
DUMP = os.path.join(ROOT, "dev", "dump_gradients")
TRAINER = os.path.join(ROOT, "train_gpt2cu")
os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")  # before the libraries read them

# What scripts/hf.py uses of numpy, slowly. An array is bytes, a type and a shape: what is only moved keeps its bits.
NUMPY = r"""
import math, operator, struct
class dtype:
    def __init__(self, name):
        self.name = name.name if isinstance(name, dtype) else name
        self.kind, self.itemsize = self.name[1], int(self.name[2:])
        self.code = {"u1": "B", "u2": "H", "u4": "I", "i4": "i", "f2": "e", "f4": "f"}[self.name[1:]]
uint8 = dtype("|u1")
class ndarray:
    def __init__(self, data, kind, shape=None):
        self.data, self.dtype, self.nbytes = memoryview(data), dtype(kind), len(data)
        if self.nbytes % self.dtype.itemsize:
            raise ValueError(f"{self.nbytes} bytes as {self.dtype.name}")
        self.size = self.nbytes // self.dtype.itemsize
        self.shape = (self.size,) if shape is None else tuple(shape)
        if math.prod(self.shape) != self.size:
            raise ValueError(f"{self.size} elements as {self.shape}")
    def flat(self): return struct.unpack(f"<{self.size}{self.dtype.code}", self.data)
    def tobytes(self): return bytes(self.data)
    def reshape(self, shape): return ndarray(self.data, self.dtype, shape)
    def view(self, kind):
        if dtype(kind).itemsize != self.dtype.itemsize and len(self.shape) > 1:
            raise ValueError("view of another size")
        return ndarray(self.data, kind, self.shape if dtype(kind).itemsize == self.dtype.itemsize else None)
    def astype(self, kind):
        return self if dtype(kind).name == self.dtype.name else packed(self.flat(), kind, self.shape)
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
    if kind.kind == "u":  # wraps around
        values = [value & (1 << 8 * kind.itemsize) - 1 for value in values]
    return ndarray(struct.pack(f"<{len(values)}{kind.code}", *values), kind, shape)
def elementwise(operation):
    def of(a, b):
        if isinstance(b, ndarray) and (a.shape, a.dtype.name) != (b.shape, b.dtype.name):
            raise ValueError(f"{a.shape} {a.dtype.name} with {b.shape} {b.dtype.name}")
        return packed(map(operation, a.flat(), b.flat() if isinstance(b, ndarray) else [b] * a.size), a.dtype, a.shape)
    return of
for name in ("add", "and", "or", "lshift", "rshift"):
    setattr(ndarray, f"__{name}__", elementwise(getattr(operator, f"__{name}__")))
def zeros(count, kind): return ndarray(bytearray(count * dtype(kind).itemsize), kind)
def fromfile(path, kind, count=-1, offset=0):
    size = dtype(kind).itemsize
    with open(path, "rb") as f:
        f.seek(offset)
        data = f.read(count * size if count >= 0 else -1)
    return ndarray(data[:len(data) // size * size], kind)
def memmap(path, kind, mode, offset=0): return fromfile(path, kind, offset=offset)
def isnan(a): return packed(map(math.isnan, a.flat()), uint8, a.shape)
def where(which, a, b):
    chosen = [x if w else y for w, x, y in zip(which.flat(), a.flat(), b.flat(), strict=True)]
    return packed(chosen, a.dtype, a.shape)
def array_equal(a, b): return a.shape == b.shape and a.flat() == b.flat()
def ascontiguousarray(a): return a
empty = zeros
"""
without_numpy = not importlib.util.find_spec("numpy")
if without_numpy:
    print("without numpy: a stand-in")
    stand_ins = tempfile.mkdtemp(prefix="test_hf.")
    atexit.register(shutil.rmtree, stand_ins, ignore_errors=True)
    with open(os.path.join(stand_ins, "numpy.py"), "w") as file:
        file.write(NUMPY)
    sys.path.append(stand_ins)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), stand_ins]))


@contextlib.contextmanager
def folder():
    """Works in an empty one."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as path:
        os.chdir(path)
        try:
            yield path
        finally:
            os.chdir(before)


def hf(*args, **env):
    if "PYTHONPATH" in env:  # before what is there
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [env["PYTHONPATH"], os.environ.get("PYTHONPATH")]))
    return subprocess.run([sys.executable, HF, *args], capture_output=True, text=True, env={**os.environ, **env})


def converts(*args):
    done = hf(*args)
    assert done.returncode == 0, f"hf.py {args}: {done.stderr}"


def refuses(message, *args, **env):
    """One line with `message`, exit code 1, and nothing new in the folder."""
    before = sorted(os.listdir())
    done = hf(*args, **env)
    assert done.returncode == 1 and message in done.stderr, f"{args}: exit {done.returncode}: {done.stderr}"
    assert done.stderr.startswith("hf.py: ") and done.stderr.count("\n") == 1, f"not one line: {done.stderr}"
    assert sorted(os.listdir()) == before, f"left behind: {set(os.listdir()) - set(before)}"


def write_checkpoint(path, version=3, P=40, V=257, L=2, NH=2, C=32):
    """A checkpoint of random bits, NaNs included: what is only moved must come back as it was. Padding is zero."""
    Vp, size = (V + 127) // 128 * 128, 4 if version == 3 else 2
    chance, rest = random.Random(1), P * C + L * (12 * C * C + 13 * C) + 2 * C
    with open(path, "wb") as f:
        f.write(struct.pack("<256i", 20240326, version, P, V, L, NH, C, Vp, *[0] * 248))
        f.write(chance.randbytes(V * C * size) + bytes((Vp - V) * C * size) + chance.randbytes(rest * size))


def read(path):
    with open(path, "rb") as f:
        return f.read()


def edit_json(path, **changes):
    with open(path) as f:
        content = json.load(f)
    content.update(changes)
    with open(path, "w") as f:
        json.dump(content, f)


def edit_safetensors(path, change):
    """change(header, data) → (header, data)"""
    raw = read(path)
    n = int.from_bytes(raw[:8], "little")
    header, data = change(json.loads(raw[8:8 + n]), raw[8 + n:])
    header = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(header).to_bytes(8, "little") + header + data)


def unpack(code, raw):
    """The numbers that all of `raw` holds."""
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def append(path, name, data, dtype, shape):
    def change(header, old):
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [len(old), len(old) + len(data)]}
        return {**header, name: entry}, old + data
    edit_safetensors(path, change)


# ----------------------------------------------------------------------------------------------------------------------
# With numpy alone, or its stand-in; what is expected comes without either

def test_checkpoint_to_hf_and_back_is_the_same_file():
    for version, V in ((3, 257), (5, 257), (3, 256), (5, 50257)):
        with folder():
            write_checkpoint("a.bin", version, V=V)
            converts("export", "a.bin", "hf")
            assert sorted(os.listdir("hf")) == ["config.json", "generation_config.json", "model.safetensors"]
            for name in ("config.json", "generation_config.json"):  # <|endoftext|>, of a vocabulary that has it
                ends = json.loads(read(f"hf/{name}"))
                assert ends["bos_token_id"] == ends["eos_token_id"] == {257: 256, 256: None, 50257: 50256}[V], (name, V)
            converts("import", "hf", "b.bin")
            assert read("a.bin") == read("b.bin"), (version, V)


def test_each_tensor_is_where_hugging_face_has_it():
    """By llm.c's order of tensors and GPT-2's names, in which c_… are weights (in, out): a round trip sees neither."""
    P, V, Vp, L, C = 40, 257, 384, 2, 32
    order = [("wte.weight", Vp, C, 1), ("wpe.weight", P, C, 1), ("ln_1.weight", 1, C, L), ("ln_1.bias", 1, C, L),
             ("attn.c_attn.weight", 3 * C, C, L), ("attn.c_attn.bias", 1, 3 * C, L), ("attn.c_proj.weight", C, C, L),
             ("attn.c_proj.bias", 1, C, L), ("ln_2.weight", 1, C, L), ("ln_2.bias", 1, C, L),
             ("mlp.c_fc.weight", 4 * C, C, L), ("mlp.c_fc.bias", 1, 4 * C, L), ("mlp.c_proj.weight", C, 4 * C, L),
             ("mlp.c_proj.bias", 1, C, L), ("ln_f.weight", 1, C, 1), ("ln_f.bias", 1, C, 1)]
    with folder():
        write_checkpoint("a.bin", P=P, V=V, L=L, C=C)
        converts("export", "a.bin", "hf")
        raw = read("hf/model.safetensors")
        n = int.from_bytes(raw[:8], "little")
        header, data = json.loads(raw[8:8 + n]), raw[8 + n:]
        words, seen = memoryview(read("a.bin")[1024:]).cast("I"), 0
        for name, rows, columns, layers in order:
            for layer in range(layers):
                values, words = words[:rows * columns].tolist(), words[rows * columns:]
                key = name if layers == 1 else f"h.{layer}.{name}"
                entry = header.get("transformer." + key) or header[key]
                begin, end = entry["data_offsets"]
                if ".c_" in name and rows > 1:
                    values = [values[i * columns + j] for j in range(columns) for i in range(rows)]
                if name == "wte.weight":
                    values = values[:V * C]
                assert memoryview(data[begin:end]).cast("I").tolist() == values, key
                seen += 1
        assert len(words) == 0 and seen == 4 + 12 * L


def test_conversion_of_precision():
    with folder():
        write_checkpoint("bf16.bin", 5)
        converts("export", "bf16.bin", "hf")
        converts("import", "hf", "fp32.bin", "--precision", "fp32")
        converts("export", "fp32.bin", "back", "--precision", "bf16")
        converts("import", "back", "back.bin")
        a, b = (unpack("H", read(f)[1024:]) for f in ("bf16.bin", "back.bin"))
        quiet = [x | 0x40 if x & 0x7FFF > 0x7F80 else x for x in a]  # a signalling NaN comes back so
        assert quiet != a and quiet == b

        # To the nearer of the two neighbours, a tie to the even one.
        write_checkpoint("r.bin", 3)
        raw = bytearray(read("r.bin"))
        bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF,
                0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000001]
        want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFFFF, 0x7FC0, 0x8000]
        raw[1024:1024 + 4 * len(bits)] = struct.pack(f"<{len(bits)}I", *bits)
        with open("r.bin", "wb") as f:
            f.write(raw)
        converts("export", "r.bin", "rounded", "--precision", "bf16")
        converts("import", "rounded", "rounded.bin")
        found = unpack("H", read("rounded.bin")[1024:1024 + 2 * len(bits)])
        assert found == want, [hex(x) for x in found]


def test_import_of_fp16():
    with folder():
        write_checkpoint("a.bin")
        n, chance = os.path.getsize("a.bin") // 4 - 256, random.Random(2)
        halves = unpack("e", struct.pack(f"<{n}e", *(chance.gauss(0, 1) for _ in range(n))))
        halves[257 * 32:384 * 32] = 127 * 32 * [0]
        with open("b.bin", "wb") as f:
            f.write(read("a.bin")[:1024] + struct.pack(f"<{n}f", *halves))
        converts("export", "b.bin", "hf")

        def to_fp16(header, data):
            for name, entry in header.items():
                if name != "__metadata__":
                    entry.update(dtype="F16", data_offsets=[n // 2 for n in entry["data_offsets"]])
            return header, struct.pack(f"<{len(data) // 4}e", *unpack("f", data))
        edit_safetensors("hf/model.safetensors", to_fp16)
        converts("import", "hf", "c.bin")
        assert read("b.bin") == read("c.bin")


def test_what_an_export_says_of_itself():
    """What the transformers library goes by: a type to load it as, no dropout; data that begins at a multiple of 8."""
    with folder():
        for version, dtype in (3, "float32"), (5, "bfloat16"):
            for P in range(40, 44):  # its digits and sizes change the header's length
                write_checkpoint("a.bin", version, P=10 ** (P - 40) + 9)
                converts("export", "a.bin", f"hf{version}_{P}")
                config = json.loads(read(f"hf{version}_{P}/config.json"))
                assert config["torch_dtype"] == dtype, config
                assert [config[f"{part}_pdrop"] for part in ("embd", "attn", "resid")] == [0, 0, 0], config
                assert int.from_bytes(read(f"hf{version}_{P}/model.safetensors")[:8], "little") % 8 == 0


def test_sharded_safetensors_and_old_names():
    """Large models come in several files; early ones have names without "transformer." and keep the causal masks."""
    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        raw = read("hf/model.safetensors")
        n = int.from_bytes(raw[:8], "little")
        header, data, weight_map = json.loads(raw[8:8 + n]), raw[8 + n:], {}
        names = [name for name in header if name != "__metadata__"]
        for part in range(2):
            file, blob, entries = f"model-{part}.safetensors", b"", {}
            for name in names[part::2]:
                begin, end = header[name]["data_offsets"]
                old = name.removeprefix("transformer.")
                entries[old] = {**header[name], "data_offsets": [len(blob), len(blob) + end - begin]}
                blob += data[begin:end]
                weight_map[old] = file
            text = json.dumps(entries).encode()
            with open(f"hf/{file}", "wb") as f:
                f.write(len(text).to_bytes(8, "little") + text + blob)
        os.unlink("hf/model.safetensors")
        append("hf/model-0.safetensors", "h.0.attn.bias", bytes(16), "BOOL", [1, 1, 4, 4])
        append("hf/model-0.safetensors", "h.1.attn.masked_bias", bytes(4), "F32", [])
        begin, end = header["transformer.wte.weight"]["data_offsets"]
        append("hf/model-0.safetensors", "lm_head.weight", data[begin:end], "F32", [257, 32])
        with open("hf/model.safetensors.index.json", "w") as f:
            json.dump({"weight_map": weight_map}, f)
        converts("import", "hf", "b.bin")
        assert read("a.bin") == read("b.bin")
        os.unlink("hf/model-1.safetensors")
        refuses("model-1.safetensors: cannot read: No such file", "import", "hf", "c.bin")
        edit_json("hf/model.safetensors.index.json", weight_map=["x"])
        refuses("index.json: damaged", "import", "hf", "c.bin")


def test_hub_name():
    """Through a stand-in for huggingface_hub, for there may be no network."""
    with folder() as here:
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        os.mkdir("stub")
        with open("stub/huggingface_hub.py", "w") as f:
            f.write("def snapshot_download(name, allow_patterns):\n"
                    "    assert 'config.json' in allow_patterns\n"
                    "    if name != 'someone/gpt2': raise OSError('404\\nnot found')\n"
                    f"    return {here + '/hf'!r}\n")
        assert hf("import", "someone/gpt2", "b.bin", PYTHONPATH="stub").returncode == 0
        assert read("a.bin") == read("b.bin")
        refuses("the hub does not give it: 404 not found", "import", "someone/else", "c.bin", PYTHONPATH="stub")
        with open("stub/huggingface_hub.py", "w") as f:
            f.write("raise ImportError('none here')\n")
        refuses("needs huggingface_hub (none here)", "import", "someone/gpt2", "c.bin", PYTHONPATH="stub")
        refuses("./gpt2: not a folder", "import", "./gpt2", "c.bin")


def test_numpy_missing():
    with folder():
        with open("numpy.py", "w") as f:
            f.write("raise ImportError('none here')\n")
        refuses("needs numpy (none here)", "import", "hf", "a.bin", PYTHONPATH=".", PYTHONDONTWRITEBYTECODE="1")


def test_usage():
    assert hf("--help").returncode == 0 and "from_pretrained" in hf("--help").stdout
    for args in ((), ("import",), ("move", "a", "b"), ("import", "a", "b", "--precision", "fp8")):
        assert hf(*args).returncode == 2, args


def test_config_that_is_not_gpt2():
    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        shutil.copy("hf/config.json", "good.json")
        for key, value in {"model_type": "llama", "activation_function": "gelu", "layer_norm_epsilon": 1e-6,
                           "tie_word_embeddings": False, "scale_attn_weights": False, "add_cross_attention": True,
                           "scale_attn_by_inverse_layer_idx": True, "n_inner": 64, "n_embd": 33, "n_layer": 0,
                           "n_head": "2", "vocab_size": None, "rotary_dim": 16, "rope_theta": 1e4,
                           "position_embedding_type": "relative_key", "rotary_pct": 0.25, "rope_scaling": {"factor": 2},
                           "rope_parameters": {"rope_theta": 1e4},
                           "quantization_config": {"bits": 4}}.items():
            edit_json("hf/config.json", **{key: value})
            refuses(f"config.json: {key}", "import", "hf", "b.bin")
            shutil.copy("good.json", "hf/config.json")
        edit_json("hf/config.json", n_inner=4 * 32, activation_function="gelu_pytorch_tanh")  # the same by other names
        converts("import", "hf", "same.bin")
        assert read("a.bin") == read("same.bin")
        with open("hf/config.json", "w") as f:
            f.write('{"model_type": ')
        refuses("config.json: damaged (get the file again)", "import", "hf", "b.bin")
        with open("hf/config.json", "w") as f:
            f.write(100000 * "[")
        refuses("config.json: damaged (get the file again): ", "import", "hf", "b.bin")
        os.unlink("hf/config.json")
        refuses("config.json: cannot read: No such file", "import", "hf", "b.bin")


def test_tensors_that_are_not_gpt2s():
    file, w = "hf/model.safetensors", "transformer.h.1.mlp.c_fc.weight"

    def rename(header, data):
        return {name.replace("h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"): e for name, e in header.items()}, data

    def transpose(header, data):
        header[w]["shape"].reverse()
        return header, data

    def integers(header, data):
        header[w]["dtype"] = "I32"
        return header, data

    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        good = read(file)
        for change, message in ((rename, "tensor h.1.mlp.c_fc.weight is missing"),
                                (integers, "expected F32, F16 or BF16, found I32"),
                                (transpose, "expected shape (32, 128) by config.json, found (128, 32)")):
            edit_safetensors(file, change)
            refuses(message, "import", "hf", "b.bin")
            with open(file, "wb") as f:
                f.write(good)
        edit_json("hf/config.json", vocab_size=258)
        refuses("tensor wte.weight: expected shape (258, 32)", "import", "hf", "b.bin")
        edit_json("hf/config.json", vocab_size=257, n_layer=1)
        refuses("GPT-2 as config.json describes it has none", "import", "hf", "b.bin")
        edit_json("hf/config.json", n_layer=10**9)
        refuses("tensor h.999999999.ln_1.weight is missing", "import", "hf", "b.bin")
        edit_json("hf/config.json", n_layer=2)
        append(file, "score.weight", bytes(64), "F32", [16])
        refuses("tensor score.weight: GPT-2 as config", "import", "hf", "b.bin")
        with open(file, "wb") as f:
            f.write(good)
        append(file, "lm_head.weight", bytes(4 * 257 * 32), "F32", [257, 32])
        refuses("only tied embeddings", "import", "hf", "b.bin")
        os.rename(file, "hf/pytorch_model.bin")
        refuses("hf: no model.safetensors", "import", "hf", "b.bin")


def test_damaged_safetensors():
    file = "hf/model.safetensors"
    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        good = read(file)
        n = int.from_bytes(good[:8], "little")

        def bad(message, raw):
            with open(file, "wb") as f:
                f.write(raw)
            refuses(f"{file}: damaged (get the file again): {message}", "import", "hf", "b.bin")

        def bad_header(message, old, new):
            assert old in good
            bad(message, good.replace(old, new.ljust(len(old)), 1))

        for raw in (b"", b"1234567", b"\xff" * 8 + good[8:], good[:8 + n - 1]):
            bad("the header claims", raw)
        bad("header: JSONDecodeError", good[:8] + b"?" + good[9:])
        bad("header: UnicodeDecodeError", good[:10] + b"\xff" + good[11:])
        bad("header: ", (100000).to_bytes(8, "little") + 100000 * b"[" + good)
        bad("header: ", (2).to_bytes(8, "little") + b"[]" + good)
        bad("expected", good[:-1])
        bad("expected", good + b"1")
        bad_header("header: ValueError", b"[257, 32]", b"[257,-32]")
        bad_header("header: ValueError", b"[257, 32]", b"[257,3.2]")
        bad_header("header: KeyError", b'"dtype"', b'"dtypo"')
        bad_header("transformer.wte.weight: F32", b"[257, 32]", b"[257, 31]")
        bad_header("transformer.wte.weight: expected its data from offset 0, found 4", b"[0, ", b"[4, ")


def test_bad_checkpoints():
    with folder():
        write_checkpoint("good.bin")
        good = read("good.bin")

        def bad(message, raw):
            with open("bad.bin", "wb") as f:
                f.write(raw)
            refuses(f"bad.bin: {message}", "export", "bad.bin", "hf")

        shutil.copy("good.bin", "bad.bin")
        for index, value, message in ((0, 20240520, "expected magic"), (1, 4, "expected magic"),
                                      (3, -1, "damaged header"), (7, 128, "damaged header"),
                                      (5, 3, "damaged header"), (4, 2**31 - 1, "damaged header"),
                                      (4, 3, "damaged (get the file again): expected")):
            header = unpack("i", good[:1024])
            header[index] = value
            bad(message, struct.pack("<256i", *header) + good[1024:])
        bad("expected magic", b"")
        bad("expected magic", good[:1000])
        for raw in (good[:-1], good + b"1"):
            bad("damaged (get the file again): expected", raw)
        refuses("none.bin: cannot read: No such file", "export", "none.bin", "hf")


def test_output_that_cannot_be():
    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        refuses("a.bin: exists already", "import", "hf", "a.bin")
        refuses("hf: exists already", "export", "a.bin", "hf")
        refuses("none: no such folder", "import", "hf", "none/b.bin")
        refuses("none: no such folder", "export", "a.bin", "none/hf")


def test_interrupt():
    """Ctrl-C in the middle of the tensors: one line, and nothing is left."""
    with folder():
        write_checkpoint("a.bin")
        for command, source, out in ("export", "a.bin", "hf"), ("import", "hf", "b.bin"):
            code = (f"import sys; sys.path.insert(0, {os.path.dirname(HF)!r}); sys.argv = ['hf.py', {command!r}, {source!r}, "
                    f"{out!r}]; import hf; real = hf.convert; seen = []\ndef convert(x, *how):\n    seen.append(0)\n    if len(seen) "
                    "== 5: raise KeyboardInterrupt\n    return real(x, *how)\nhf.convert = convert; hf.main()")
            done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True)
            assert done.returncode == 1 and done.stderr == f"hf.py: interrupted; {out} is not written\n", done
            assert not os.path.exists(out) and not [name for name in os.listdir() if ".tmp." in name]
            converts(command, source, out)


def test_full_disk():
    """hf.py itself, with its files for writing being /dev/full; what was begun is removed."""
    if not os.path.exists("/dev/full"):
        raise Skip("needs /dev/full")
    spec = importlib.util.spec_from_file_location("hf", HF)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    spec.loader.exec_module(module)
    created = []

    def full(path, mode="r", **how):
        if mode != "wb":
            return open(path, mode, **how)
        with open(path, mode):
            created.append(path)
        return open("/dev/full", mode)

    module.open = full
    with folder():
        write_checkpoint("a.bin")
        converts("export", "a.bin", "hf")
        before = sorted(os.listdir())
        for argv in (["import", "hf", "b.bin"], ["export", "a.bin", "hf2"]):
            sys.argv = ["hf.py", *argv]
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    module.main()
                raise AssertionError(f"{argv} went well")
            except SystemExit as e:
                assert f"{argv[2]}: cannot write: No space left on device; free some space" in e.code, e.code
            assert sorted(os.listdir()) == before
        assert len(created) == 2 and all(".tmp." in path for path in created)


# ----------------------------------------------------------------------------------------------------------------------
# With PyTorch and transformers

def need_libraries():
    if without_numpy:  # these want a real one
        raise Skip("needs numpy (scripts/requirements.txt)")
    need("torch", "transformers")


def random_model(V, C, P=48, seed=1):
    """GPT-2 with 2 layers and 2 heads, every parameter random, so that no bias or norm can be mistaken for another."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    ends = {"bos_token_id": V - 1, "eos_token_id": V - 1}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=C, n_positions=P, vocab_size=V, **ends)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def test_transformers_round_trip():
    """The library's files → ours → a folder that the library loads: every tensor the same bits; and it generates."""
    need_libraries()
    import torch
    from transformers import AutoModelForCausalLM
    for V, C, dtype in ((257, 128, torch.float32), (50257, 16, torch.float32), (257, 128, torch.bfloat16)):
        with folder():
            model = random_model(V, C).to(dtype)
            model.save_pretrained("hf")
            converts("import", "hf", "a.bin")
            converts("export", "a.bin", "back")
            back, info = AutoModelForCausalLM.from_pretrained("back", torch_dtype="auto", output_loading_info=True)
            assert not any(info.values()), info
            want, got = model.state_dict(), back.state_dict()
            assert want.keys() == got.keys() and back.dtype == dtype
            for name in want:
                assert torch.equal(want[name], got[name]), name
            for key in ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size", "activation_function",
                        "layer_norm_epsilon", "tie_word_embeddings"):
                assert getattr(back.config, key) == getattr(model.config, key), key
            assert back.lm_head.weight.data_ptr() == back.transformer.wte.weight.data_ptr()
            back.generation_config.pad_token_id = 0
            prompt = {"input_ids": torch.tensor([[1, 2, 3]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
            made = back.eval().generate(**prompt, max_new_tokens=8, do_sample=False)
            assert 3 < made.shape[1] <= 11 and int(made.max()) < V


def dump_gradients():
    """The program's path; built if that can be."""
    if shutil.which("make") and shutil.which(os.environ.get("NVCC", "nvcc")):
        command = ["make", "-C", ROOT, f"-j{os.cpu_count()}", "dev/dump_gradients"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    if not os.path.exists(DUMP):
        raise Skip("needs dev/dump_gradients, and there is no make or no nvcc to build it")
    return DUMP


def compare(device, attention, V, C, B=3, T=37):
    """One batch through Hugging Face's model in fp64 and ours in fp32, from the same weights."""
    need_libraries()
    import numpy as np
    import torch
    program = dump_gradients()
    with folder():
        model = random_model(V, C)
        model.save_pretrained("hf")
        converts("import", "hf", "model.bin")
        batch = np.random.default_rng(2).integers(0, V, (2, B, T), np.int32)
        batch[0, :, ::5] = 7  # a token that comes again and again
        batch.tofile("batch.bin")
        command = [program, "--model", "model.bin", "--batch", "batch.bin", "-b", str(B), "-t", str(T),
                   "--out", "out.bin", "--device", device, "--attention", attention]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        out = np.fromfile("out.bin", np.float32)

    model = model.double()
    tokens, targets = torch.from_numpy(batch.astype(np.int64))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), targets.reshape(-1))
    loss.backward()

    worst = []

    def near(name, got, want):
        got, want = torch.from_numpy(got.astype(np.float64)), want.detach()
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error <= 1e-4, f"{device} {attention} V={V} C={C}: {name}: off by {error:.2g} of its largest element"
        worst.append((error, name))

    Vp = (V + 127) // 128 * 128
    at = 1 + B * T * Vp
    near("loss", out[:1], loss.reshape(1))
    near("logits", out[1:at].reshape(B, T, Vp)[..., :V], logits)
    wanted = dict(model.transformer.named_parameters())
    block = [f"{name}.{part}" for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
             for part in ("weight", "bias")]
    layers = [f"h.{l}.{name}" for name in block for l in range(2)]
    for name in ["wte.weight", "wpe.weight", *layers, "ln_f.weight", "ln_f.bias"]:
        want = wanted.pop(name).grad
        size = Vp * C if name == "wte.weight" else want.numel()
        got, at = out[at:at + size], at + size
        if ".c_" in name and name.endswith("weight"):
            want = want.T
        if name == "wte.weight":
            assert (got[V * C:] == 0).all(), "gradient of the padding rows"
            got = got[:V * C]
        near(name, got.reshape(want.shape), want)
    assert at == out.size and not wanted, wanted
    print(f"  {device} {attention} V={V} C={C}: worst {max(worst)[1]}, {max(worst)[0]:.1e}")


def test_gradients_cpu():
    compare("cpu", "flash", V=257, C=128)
    compare("cpu", "flash", V=50257, C=16)
    compare("cpu", "flash", V=256, C=128, B=1, T=1)


def need_cuda():
    need_libraries()
    import torch
    if not torch.cuda.is_available():
        raise Skip("no GPU")


def test_gradients_cuda():
    need_cuda()
    for attention in ("flash", "naive"):
        compare("cuda", attention, V=257, C=128)
        compare("cuda", attention, V=50257, C=128)


def check_hellaswag(*device, V=257, P=48):
    """--hellaswag question by question: the loss of each ending and the answer are those of the exported model."""
    need_libraries()
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    if not os.path.exists(TRAINER):
        raise Skip("needs ./train_gpt2cu (make train_gpt2cu)")
    rng = np.random.default_rng(3)
    questions = []  # label, context, endings; the last is as long as the model has positions
    for i in range(13):
        context, longest = rng.integers(0, V, rng.integers(1, 20)).tolist(), 28
        endings = [rng.integers(0, V, rng.integers(1, longest)).tolist() for _ in range(4)]
        questions.append((i % 4, context, endings))
    questions[-1][2][1] = rng.integers(0, V, P + 1 - len(questions[-1][1])).tolist()
    stream, longest = [], 0
    for i, (label, context, endings) in enumerate(questions):
        parts = [part for tokens in (context, *endings) for part in (len(tokens), *tokens)]
        example = [65535, 0, i, label, len(endings), *parts]
        example[1] = 2 * len(example)
        longest = max(longest, example[1])
        stream += example
    with folder():
        header = np.zeros(256, np.int32)
        header[:4] = [20240522, 1, len(questions), longest]
        with open("questions.bin", "wb") as f:
            f.write(header.tobytes() + np.array(stream, np.uint16).tobytes())
        random_model(V, 128, P).save_pretrained("hf")
        converts("import", "hf", "model.bin")
        converts("export", "model.bin", "exported")
        model = AutoModelForCausalLM.from_pretrained("exported").double().eval()
        command = [TRAINER, "--precision", "fp32", "-e", "model.bin", "--eval-only", "--hellaswag", "questions.bin", "-b",
                   "3", "-t", str(P), *device]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("question ")]
    assert len(lines) == len(questions), done.stdout
    correct = 0
    for i, (line, (label, context, endings)) in enumerate(zip(lines, questions)):
        want = []
        for ending in endings:
            tokens = torch.tensor([context + ending])
            with torch.no_grad():
                logits = model(tokens[:, :-1]).logits[0, len(context) - 1:]
            want.append(torch.nn.functional.cross_entropy(logits, tokens[0, len(context):]).item())
        first, second, third, losses = line.split(" | ")
        got = [float(x) for x in losses.split()[1:]]
        best = min(range(4), key=want.__getitem__)
        assert (first, second, third) == (f"question {i}", f"answer {best}", f"label {label}"), (line, want)
        assert all(abs(g - w) <= 1e-4 * w for g, w in zip(got, want, strict=True)), (line, want)
        correct += best == label
    assert f"hellaswag {correct} of {len(questions)}," in done.stdout, done.stdout


def test_hellaswag_cpu():
    check_hellaswag("--device", "cpu")


def test_hellaswag_cuda():
    need_cuda()
    check_hellaswag("--device", "cuda", "--no-tf32")


if __name__ == "__main__":
    main()
