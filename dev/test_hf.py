#!/usr/bin/env python3
"""Tests of scripts/hf.py. Round trips keep every bit, Hugging Face's GPT-2 and ours agree (logits, every gradient,
answers to multiple-choice questions), and bad input is refused in one line. Where numpy is missing, a small one stands
in for it.

    python3 dev/test_hf.py [part of a test's name]
"""
import contextlib
import io
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

from harness import ROOT, Skip, main, need, new_folder, run_program, written
from stand_ins import stand_in

HF = ROOT / "scripts" / "hf.py"
os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")  # before the libraries read them
sys.dont_write_bytecode = True
without_numpy = stand_in("numpy", "tqdm")
sys.path.append(str(HF.parent))  # last, because a script there is named as a library is


def hf(*command, **replaced):
    """Runs hf.py in this process and gives its line of error, or None. `replaced` are functions that it calls."""
    import hf as module
    silent = io.StringIO()
    with (mock.patch.object(sys, "argv", ["hf.py", *command]), mock.patch.dict(vars(module), replaced),
          contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent)):
        try:
            module.main()
        except SystemExit as end:
            return end.code
        except KeyboardInterrupt:
            return "KeyboardInterrupt"


def converts(*command):
    assert (error := hf(*command)) is None, f"{command}: {error}"


def refuses(message, *command, **replaced):
    """One line with `message`, and nothing new in the folder."""
    before = sorted(os.listdir())
    error = str(hf(*command, **replaced))
    assert error.startswith("hf.py: ") and message in error and "\n" not in error, f"{command}: {error}"
    assert sorted(os.listdir()) == before, f"left behind: {set(os.listdir()) - set(before)}"


IMPORT, EXPORT = ("import", "hf", "b.bin"), ("export", "a.bin", "hf2")
TENSORS, CONFIG = "hf/model.safetensors", "hf/config.json"


TOKENIZER = ("vocab.json", "merges.txt", "tokenizer_config.json")
BYTES = sorted(range(256), key=lambda byte: (byte < 33 or 126 < byte < 161 or byte == 173, byte))  # GPT-2's order


def tokenizer(*longer, magic=20240328):
    """llm.c's file with the single bytes, then these tokens."""
    pieces = [bytes([byte]) for byte in BYTES] + list(longer)
    pieces += [b""] * (50256 - len(pieces)) + [b"<|endoftext|>"]
    header = struct.pack("<256I", magic, 2, 50257, 50256, *[0] * 252)
    return header + b"".join(bytes([len(piece)]) + piece for piece in pieces)


def read(path):
    return Path(path).read_bytes()


def unpack(code, raw):
    """The numbers that all of `raw` holds."""
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def read_tensors(path=TENSORS):
    """{name without "transformer.": (bytes, type, shape)}"""
    raw = read(path)
    begin = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:begin]), raw[begin:]
    return {name.removeprefix("transformer."): (data[slice(*entry["data_offsets"])], entry["dtype"], entry["shape"])
            for name, entry in header.items() if name != "__metadata__"}


def pack_tensors(tensors):
    header, data = {}, b""
    for name, (raw, dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


P, V, L, C = 40, 257, 2, 32  # of the checkpoints


def padded(V):
    return (V + 127) // 128 * 128


def new_export(version=3, P=P, V=V, values=b""):
    """In a new folder a.bin and its export, the folder hf. a.bin begins with these values. Random bits follow, NaNs
    among them, because what is only moved must come back as it was. Padding is zero."""
    new_folder()
    size, rest = 4 if version == 3 else 2, P * C + L * (12 * C * C + 13 * C) + 2 * C
    chance, header = random.Random(1), struct.pack("<256i", 20240326, version, P, V, L, 2, C, padded(V), *[0] * 248)
    written("a.bin", header + values + chance.randbytes(V * C * size - len(values)) +
            bytes((padded(V) - V) * C * size) + chance.randbytes(rest * size))
    converts("export", "a.bin", "hf")


def llmc_order(P, V, C):
    """Name, rows and columns of GPT-2's tensors as llm.c has them and in its order. A vector has one column."""
    blocks = [("ln_1", C, 1), ("attn.c_attn", 3 * C, C), ("attn.c_proj", C, C), ("ln_2", C, 1), ("mlp.c_fc", 4 * C, C),
              ("mlp.c_proj", C, 4 * C)]
    parts = [part for name, rows, columns in blocks
             for part in ((f"{name}.weight", rows, columns), (f"{name}.bias", rows, 1))]
    layers = [(f"h.{l}.{name}", rows, columns) for name, rows, columns in parts for l in range(L)]
    return [("wte.weight", padded(V), C), ("wpe.weight", P, C), *layers, ("ln_f.weight", C, 1), ("ln_f.bias", C, 1)]


# ----------------------------------------------------------------------------------------------------------------------
# With numpy alone, or its stand-in; what is expected comes without either

def test_checkpoint_to_hf_and_back_is_the_same_file():
    """An export also says what the transformers library asks: the type, no dropout, what ends a text, aligned data."""
    for version, dtype, P, V, end_of_text in ((3, "float32", 10, 257, 256), (5, "bfloat16", 19, 257, 256),
                                              (3, "float32", 109, 256, None), (5, "bfloat16", 1009, 50257, 50256)):
        new_export(version, P, V)
        files = {"config.json", "generation_config.json", "model.safetensors"} | (set(TOKENIZER) if V == 257 else set())
        assert set(os.listdir("hf")) == files, V
        config, generation = (json.loads(read(file)) for file in (CONFIG, "hf/generation_config.json"))
        for ends in config, generation:
            assert ends["bos_token_id"] == ends["eos_token_id"] == end_of_text, (ends, V)
        assert config["torch_dtype"] == dtype, config
        assert [config[f"{part}_pdrop"] for part in ("embd", "attn", "resid")] == [0, 0, 0], config
        assert int.from_bytes(read(TENSORS)[:8], "little") % 8 == 0  # P and V change its header's length
        converts(*IMPORT)
        assert read("a.bin") == read("b.bin"), (version, V)


def test_newest_of_a_run():
    """Only the file with the true name is a model, so that any other choice is refused."""
    new_export()
    for newest, *others in (
            ("model_00000010.bin", "model_00000009.bin", "state_00000011.bin", "model_00000012.bin.tmp.7"),
            ("model_100000000.bin", "model_99999999.bin"), ("model_1234567890.bin", "model_999999999.bin"),
            ("model_00000001.bin", "model_9.bin", "model_best.bin", "model_000000009.bin", "model_00000009_old.bin",
             "old_model_00000009.bin", "model_\u0661\u0661111111.bin")):
        shutil.rmtree("run", ignore_errors=True)
        for name in others:
            written(f"run/{name}", b"another")
        written(f"run/{newest}", read("a.bin"))
        converts("export", "run", "hf2")
        assert read_tensors("hf2/model.safetensors") == read_tensors(), newest
        shutil.rmtree("hf2")
        written(f"run/{newest}", read("a.bin")[:-1])  # an older one does not silently take the place of this one
        refuses(f"run/{newest}: damaged", "export", "run", "hf2")
        os.unlink(f"run/{newest}")
    refuses("run: expected a file, or a folder", "export", "run", "hf2")


def test_each_tensor_is_where_hugging_face_has_it():
    """Hugging Face's c_… weights are (in, out). A round trip sees neither the order of tensors nor their names."""
    new_export()
    tensors, words = read_tensors(), memoryview(read("a.bin")[1024:]).cast("I")
    for name, rows, columns in llmc_order(P, V, C):
        values, words = words[:rows * columns].tolist(), words[rows * columns:]
        if ".c_" in name:
            values = [values[i * columns + j] for j in range(columns) for i in range(rows)]
        if name == "wte.weight":
            values = values[:V * C]
        assert unpack("I", tensors[name][0]) == values, name
    assert len(words) == 0


def test_conversion_of_precision():
    new_export(version=5)
    converts(*IMPORT, "--precision", "fp32")
    converts("export", "b.bin", "back", "--precision", "bf16")
    converts("import", "back", "back.bin")
    a, b = (unpack("H", read(file)[1024:]) for file in ("a.bin", "back.bin"))
    quiet = [x | 0x40 if x & 0x7FFF > 0x7F80 else x for x in a]  # a signalling NaN comes back so
    assert quiet != a and quiet == b

    # To the nearer of the two neighbours, a tie to the even one.
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000001]
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFFFF, 0x7FC0, 0x8000]
    new_export(values=struct.pack(f"<{len(bits)}I", *bits))
    converts(*EXPORT, "--precision", "bf16")
    found = unpack("H", read_tensors("hf2/model.safetensors")["wte.weight"][0])[:len(bits)]
    assert found == want, [hex(x) for x in found]

    chance = random.Random(2)
    halves = {}
    for name, (raw, _, shape) in read_tensors().items():
        values = [chance.gauss(0, 1) for _ in range(len(raw) // 4)]
        halves[name] = struct.pack(f"<{len(values)}e", *values), "F16", shape
    written(TENSORS, pack_tensors(halves))
    converts(*IMPORT)
    converts("export", "b.bin", "floats")
    for name, (raw, dtype, shape) in read_tensors("floats/model.safetensors").items():
        assert (unpack("f", raw), dtype, shape) == (unpack("e", halves[name][0]), "F32", halves[name][2]), name

    # One tensor of another type, the file's last: no bit of it is lost, nor of the others.
    new_export(version=5)
    tensors, wide = read_tensors(), [x << 16 for x in unpack("H", read("a.bin")[1024:])]
    for code, dtype in ("f", "F32"), ("e", "F16"):
        raw = struct.pack(f"<{C}{code}", *(chance.gauss(0, 1) for _ in range(C)))
        written(TENSORS, pack_tensors({**tensors, "ln_f.bias": (raw, dtype, [C])}))
        converts("import", "hf", f"{dtype}.bin")
        header, values = read(f"{dtype}.bin")[:8], struct.pack(f"<{len(wide)}I", *wide)[:-4 * C]
        assert header == struct.pack("<2i", 20240326, 3), dtype
        assert read(f"{dtype}.bin")[1024:] == values + struct.pack(f"<{C}f", *unpack(code, raw)), dtype


def test_sharded_safetensors_and_old_names():
    """Large models come in several files. Early ones have names without "transformer." and keep the causal masks."""
    new_export()
    tensors, index = read_tensors(), "hf/model.safetensors.index.json"
    tensors["h.0.attn.bias"] = bytes(16), "BOOL", [1, 1, 4, 4]
    tensors["h.1.attn.masked_bias"] = bytes(4), "F32", []
    tensors["lm_head.weight"] = tensors["wte.weight"]
    names = list(tensors)
    for part in range(2):
        written(f"hf/model-{part}.safetensors", pack_tensors({name: tensors[name] for name in names[part::2]}))
    os.unlink(TENSORS)
    written(index, json.dumps({"weight_map": {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}}))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")
    written("hf/model-1.safetensors", pack_tensors({name: tensors[name] for name in [names[0], *names[1::2]]}))
    refuses(f"model-1.safetensors: tensor {names[0]} ", "import", "hf", "c.bin")
    os.unlink("hf/model-1.safetensors")
    refuses("index.json: names 'model-1.safetensors', but no such file is beside it", "import", "hf", "c.bin")
    for name in "../a.bin", os.path.abspath("a.bin"), "", "..", "a\0", "\ud800", 1, None, ["model-0.safetensors"]:
        written(index, json.dumps({"weight_map": {"wte.weight": name}}))
        says = f"hf/{name}: expected a file" if name in ("", "..") else "but no such file is beside it"
        refuses(says, "import", "hf", "c.bin")
    written(index, '{"weight_map": ["x"]}')
    refuses("index.json: damaged", "import", "hf", "c.bin")


def test_tokenizer_of_an_export():
    """The ids are those of the trainer. Its file has no merges, and a token of three parts has one way to be made."""
    for V, source, end_of_text, merges in ((257, None, 256, []), (50257, "bytes", 50256, []), (50257, None, 0, None),
                                           (50257, "t.bin", 50256, ["Ġ t", "h e", "Ġt he", "i n"])):
        new_export(V=V)
        written("t.bin", tokenizer(b" t", b"he", b" the", b"in"))
        converts(*EXPORT, *(["--tokenizer", source] if source else []))
        assert len(set(os.listdir("hf2")) & set(TOKENIZER)) == (0 if merges is None else 3), V
        if merges is not None:
            vocabulary, config = (json.loads(read(f"hf2/{name}")) for name in TOKENIZER[::2])
            assert read("hf2/merges.txt").decode().splitlines() == ["#version: 0.2", *merges]
            assert config["model_max_length"] == P
            found = [vocabulary[shown] for shown in ("!", "~", "\u00ff", "\u0100", "Ġ", "<|endoftext|>")]
            assert found == [0, 93, 187, 188, 220, end_of_text], found
            assert list(vocabulary.values())[:-1] == list(range(256 + len(merges))), vocabulary
    for raw, message in ((b"", "t.bin: expected 50257 tokens with all bytes, and magic 20240328, found 0 and 0"),
                         (tokenizer(magic=1), "found 50257 and 1"), (tokenizer() + b"1", "t.bin: expected"),
                         (tokenizer().replace(b"\1z", b"\1y"), "t.bin: expected"),
                         (tokenizer()[:-1], "t.bin: expected"), (tokenizer(b"the"), "token 256 is not made of two")):
        refuses(message, "export", "a.bin", "hf3", "--tokenizer", written("t.bin", raw).name)
    new_export()
    refuses("t.bin: no tokenizer for a vocabulary of 257", *EXPORT, "--tokenizer", "t.bin")


def test_names_on_the_hub():
    """A stand-in for huggingface_hub takes the place of the network."""
    def snapshot_download(name, allow_patterns):
        assert "config.json" in allow_patterns
        if name != "someone/gpt2":
            raise OSError("404\nnot found")
        return "hf"

    new_export()
    with mock.patch.dict(sys.modules, huggingface_hub=mock.Mock(snapshot_download=snapshot_download)):
        converts("import", "someone/gpt2", "b.bin")
        assert read("a.bin") == read("b.bin")
        refuses("the hub does not give it: 404 not found", "import", "someone/else", "c.bin")
    with mock.patch.dict(sys.modules, huggingface_hub=None):
        refuses("the hub does not give it: needs huggingface_hub: pip install -c", "import", "someone/gpt2", "c.bin")
    refuses("./gpt2: not a folder", "import", "./gpt2", "c.bin")


def test_as_a_program():
    new_export(V=256)
    written("none/numpy.py", "raise ImportError('none here')")
    for command, path, code, says in (("import hf b.bin", "none", 1, "hf.py: needs numpy: pip install -r"),
                                      ("--help", "none", 0, "text-generation"),
                                      ("export a.bin hf2", None, 0, "transformers loads an empty one without an error"),
                                      ("export a.bin hf", None, 1, "hf.py: hf: exists already")):
        environment = {**os.environ, "PYTHONPATH": path or os.environ["PYTHONPATH"]}
        done = subprocess.run([sys.executable, HF, *command.split()], capture_output=True, text=True, env=environment)
        assert done.returncode == code and says in done.stdout + done.stderr, done
        assert done.stderr.count("\n") == code, done
    for usage in "", "import", "move a b", "import a b --precision fp8", "import a b --tokenizer t":
        assert hf(*usage.split()) == 2, usage


def test_files_that_are_refused():
    """A case has a file, what stands in it (None: no such file), and what is said."""
    new_export()
    config, tensors, raw, good = json.loads(read(CONFIG)), read_tensors(), read(TENSORS), read("a.bin")
    cases = [(CONFIG, None, "hf: not a folder with config.json"), (TENSORS, None, "hf: no model.safetensors"),
             ("a.bin", None, "cannot read: No such file"), ("a.bin", b"state", "(a model_….bin, not a state_….bin)")]

    others = {"model_type": "llama", "activation_function": "gelu", "layer_norm_epsilon": 1e-6,
              "tie_word_embeddings": False, "scale_attn_weights": False, "add_cross_attention": True,
              "scale_attn_by_inverse_layer_idx": True, "n_inner": 64, "n_embd": 33, "n_layer": 0, "n_head": "2",
              "vocab_size": None, "rotary_dim": 16, "rope_theta": 1e4, "position_embedding_type": "relative_key",
              "rotary_pct": 0.25, "rope_scaling": {"factor": 2}, "rope_parameters": {"rope_theta": 1e4},
              "quantization_config": {"bits": 4}}
    changes = [(key, value, f"{CONFIG}: {key}") for key, value in others.items()]
    changes += [(key, value, f"{CONFIG}: {key}: expected a positive") for key in ("n_embd", "n_layer")
                for value in (10**4299, float("inf"), True, [])]
    changes += [("vocab_size", 258, "tensor wte.weight: expected shape (258, 32)"),
                ("n_layer", 1, "GPT-2 as config.json describes it has none"),
                ("n_layer", 10**9, "tensor h.999999999.ln_1.weight is missing")]
    cases += [(CONFIG, json.dumps({**config, key: value}), message) for key, value, message in changes]
    cases += [(CONFIG, text, f"{CONFIG}: damaged (get the file again): ") for text in (
        '{"model_type": ', 100000 * "[", f'{{"n_embd": {5000 * "9"}}}', '"', "null", "[1]", b"\xff")]

    name, other = "h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"
    data, _, shape = tensors[name]
    cases += [(TENSORS, pack_tensors(wrong), message) for wrong, message in (
        ({key.replace(name, other): tensor for key, tensor in tensors.items()}, f"tensor {name} is missing"),
        ({**tensors, name: (data, "I32", shape)}, "expected F32, F16 or BF16, found I32"),
        ({**tensors, name: (data * 2, "F64", shape)}, "found F64"),
        ({**tensors, name: (data, "F32", shape[::-1])}, "expected shape (32, 128) by config.json, found (128, 32)"),
        ({**tensors, "a\n\0\ud800": (bytes(64), "F32", [16])}, "tensor a\\n\\x00\\ud800: GPT-2 as config"),
        ({**tensors, "lm_head.weight": (bytes(4 * V * C), "F32", [V, C])}, "only tied embeddings"))]

    end, damaged = 8 + int.from_bytes(raw[:8], "little"), f"{TENSORS}: damaged (get the file again): "
    cases += [(TENSORS, wrong, f"{damaged}{message}") for wrong, message in (
        (b"", "the header claims"), (b"1234567", "the header claims"), (b"\xff" * 8 + raw[8:], "the header claims"),
        (raw[:end - 1], "the header claims"), (raw[:8] + b"?" + raw[9:], "header: JSONDecodeError"),
        (raw[:10] + b"\xff" + raw[11:], "header: UnicodeDecodeError"),
        ((100000).to_bytes(8, "little") + 100000 * b"[" + raw, "header: "),
        ((2).to_bytes(8, "little") + b"[]" + raw, "header: "), (raw[:-1], "expected"), (raw + b"1", "expected"),
        (raw.replace(b"[257, 32]", b"[257,-32]", 1), "header: ValueError"),
        (raw.replace(b"[257, 32]", b"[257,3.2]", 1), "header: ValueError"),
        (raw.replace(b'"dtype"', b'"dtypo"', 1), "header: KeyError"),
        (raw.replace(b"[257, 32]", b"Infinity ", 1), "header: TypeError"),
        (raw.replace(b"[257, 32]", b"[257, 31]", 1), "transformer.wte.weight: F32"),
        (raw.replace(b"[0, ", b"[4, ", 1), "transformer.wte.weight: expected its data from offset 0, found 4"))]

    damaged = "damaged (get the file again): expected"
    cases += [("a.bin", wrong, f"a.bin: {message}") for wrong, message in (
        (b"", "expected magic"), (good[:1000], "expected magic"), (good[:-1], damaged), (good + b"1", damaged))]
    for index, value, message in ((0, 20240520, "expected magic"), (1, 4, "expected magic"), (4, 3, damaged),
                                  (3, -1, "damaged header"), (4, 2**31 - 1, "damaged header"),
                                  (5, 3, "damaged header"), (7, 128, "damaged header"), (3, 3, "damaged header")):
        wrong = good[:4 * index] + struct.pack("<i", value) + good[4 * index + 4:]
        cases.append(("a.bin", wrong, f"a.bin: {message}"))

    for file, wrong, message in cases:
        before = read(file)
        os.unlink(file)
        if wrong is not None:
            assert written(file, wrong).read_bytes() != before, message
        refuses(message, *(EXPORT if file == "a.bin" else IMPORT))
        written(file, before)
    same = {"n_inner": 4 * C, "activation_function": "gelu_pytorch_tanh"}  # by other names
    written(CONFIG, json.dumps({**config, **same}))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")
    new_export(V=50257)
    kinds = (os.mkfifo, os.unlink), (os.mkdir, os.rmdir), (lambda to: os.symlink("/dev/zero", to), os.unlink)
    for file, *words in ((TENSORS, *IMPORT), (CONFIG, *IMPORT), ("t", *EXPORT, "--tokenizer", "t"), ("a.bin", *EXPORT)):
        Path(file).unlink(missing_ok=True)
        for make, remove in kinds:
            make(file)
            refuses(f"{file}: expected a file", *words)
            remove(file)


def test_output_that_cannot_be():
    """Ctrl-C comes in the middle of the tensors. Where hf.py opens a file for writing, it gets /dev/full."""
    new_export()
    for message, *command in (("a.bin: exists already", "import", "hf", "a.bin"),
                              ("hf: exists already", "export", "a.bin", "hf"),
                              ("none: no such folder", "import", "hf", "none/b.bin"),
                              ("none: no such folder", "export", "a.bin", "none/hf")):
        refuses(message, *command)
    import hf as module
    import prepare_common
    for command in EXPORT, IMPORT:
        opened = []

        def full(path, mode="r", **how):
            if mode == "wb":
                opened.append(path)
                open(path, mode).close()
                path = "/dev/full"
            return open(path, mode, **how)

        with mock.patch.object(prepare_common, "open", full, create=True):
            refuses(f"{command[2]}: cannot write: No space left on device; free some space", *command)
        assert len(opened) == 1 and ".tmp." in opened[0], opened
        fifth = [module.convert] * 4 + [mock.Mock(side_effect=KeyboardInterrupt)]
        refuses(f"interrupted; {command[2]} is not written", *command, convert=lambda *how: fifth.pop(0)(*how))
        assert not fifth
        for buffered in "1", "":  # stdout is full when the files are written, and they stay
            with open("/dev/full", "w") as stdout:
                done = subprocess.run([sys.executable, HF, *command], stdout=stdout, stderr=subprocess.PIPE, text=True,
                                      env={**os.environ, "PYTHONUNBUFFERED": buffered})
            assert done.returncode == 1 and done.stderr.startswith("hf.py: stdout: "), done
            assert done.stderr.count("\n") == 1, done
            os.rename(command[2], f"{command[2]}{buffered}.full")
        converts(*command)


# ----------------------------------------------------------------------------------------------------------------------
# With PyTorch and transformers

def need_libraries(device="cpu"):
    if without_numpy:  # these want a real one
        raise Skip("needs numpy (scripts/requirements.txt)")
    need("torch", "transformers")
    import torch
    if device == "cuda" and not torch.cuda.is_available():
        raise Skip("no GPU")


def random_model(V, C, P=48, dtype="float32"):
    """GPT-2 with 2 layers and 2 heads, every parameter random, so that no bias or norm can be mistaken for another.
    In a new folder it is saved as hf, and a.bin is what our program reads."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging
    logging.disable_progress_bar()
    torch.manual_seed(1)
    ends = {"bos_token_id": V - 1, "eos_token_id": V - 1}
    model = GPT2LMHeadModel(GPT2Config(n_layer=L, n_head=2, n_embd=C, n_positions=P, vocab_size=V, **ends)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    new_folder()
    model = model.to(getattr(torch, dtype))
    model.save_pretrained("hf")
    converts("import", "hf", "a.bin")
    return model


def test_transformers_round_trip():
    """The library's files become ours and then a folder that the library loads. Every bit is kept, and it generates."""
    need_libraries()
    import torch
    from transformers import AutoModelForCausalLM
    for V, C, dtype in ((257, 128, "float32"), (50257, 16, "float32"), (257, 128, "bfloat16")):
        model = random_model(V, C, dtype=dtype)
        converts("export", "a.bin", "back")
        back, info = AutoModelForCausalLM.from_pretrained("back", torch_dtype="auto", output_loading_info=True)
        assert not any(info.values()), info
        want, got = model.state_dict(), back.state_dict()
        assert want.keys() == got.keys() and back.dtype == model.dtype
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


def test_transformers_tokenizer():
    """An export's text goes in and out. The longest tokens are those that the trainer takes."""
    need_libraries()
    from transformers import AutoTokenizer, pipeline
    text, letters = "in the Zo\u00eb 's  , don 't\n", [BYTES.index(ord(letter)) for letter in "in the"]
    for V, option, ids in ((257, (), letters), (50257, ("--tokenizer", "t.bin"), [259, 258])):
        random_model(V, 16)
        written("t.bin", tokenizer(b" t", b"he", b" the", b"in"))
        converts(*EXPORT, *option)
        found = AutoTokenizer.from_pretrained("hf2")
        assert found("in the")["input_ids"] == ids and found.decode(found(text)["input_ids"]) == text
        assert found("<|endoftext|>")["input_ids"] == [found.eos_token_id] == [V - 1] and found.model_max_length == 48
        made = pipeline("text-generation", "hf2")(text, max_new_tokens=5)[0]["generated_text"]
        assert made.startswith(text), made


def compare(device, attention, V, C, B=3, T=37, P=48):
    """One batch through Hugging Face's model in fp64 and ours in fp32, from the same weights."""
    import numpy as np
    import torch
    model = random_model(V, C, P)
    batch = np.random.default_rng(2).integers(0, V, (2, B, T), np.int32)
    batch[0, :, ::5] = 7  # a token that comes again and again
    batch.tofile("batch.bin")
    run_program("dev/dump_gradients", "--model", "a.bin", "--batch", "batch.bin", "-b", B, "-t", T, "--out", "out.bin",
                "--device", device, "--attention", attention)
    out = np.fromfile("out.bin", np.float32)

    model = model.double()
    tokens, targets = torch.from_numpy(batch.astype(np.int64))
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), targets.reshape(-1))
    loss.backward()

    worst = []

    def near(name, got, want):
        got, want = torch.from_numpy(got.astype(np.float64)).reshape(want.shape), want.detach()
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error <= 1e-4, f"{device} {attention} V={V} C={C}: {name}: off by {error:.2g} of its largest element"
        worst.append((error, name))

    at = 1 + B * T * padded(V)
    near("loss", out[:1], loss)
    near("logits", out[1:at].reshape(B, T, padded(V))[..., :V], logits)
    wanted = {name: p.grad for name, p in model.transformer.named_parameters()}
    for name, rows, columns in llmc_order(P, V, C):
        got, at = out[at:at + rows * columns], at + rows * columns
        if name == "wte.weight":
            assert (got[V * C:] == 0).all(), "gradient of the padding rows"
            got = got[:V * C]
        want = wanted.pop(name)
        near(name, got, want.T if ".c_" in name and columns > 1 else want)
    assert at == out.size and not wanted, wanted
    print(f"  {device} {attention} V={V} C={C}: worst {max(worst)[1]}, {max(worst)[0]:.1e}")


def test_gradients_cpu():
    need_libraries()
    for shape in {"V": 257, "C": 128}, {"V": 50257, "C": 16}, {"V": 256, "C": 128, "B": 1, "T": 1}:
        compare("cpu", "flash", **shape)


def test_gradients_cuda():
    need_libraries("cuda")
    for attention in ("flash", "naive"):
        for V in (257, 50257):
            compare("cuda", attention, V, C=128)


def check_hellaswag(device, V=257, P=48):
    """--hellaswag gives each question the answer and each ending the loss that the exported model gives it."""
    need_libraries(device)
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    rng = np.random.default_rng(3)
    text = lambda tokens: rng.integers(0, V, tokens).tolist()
    questions = [(i % 4, text(rng.integers(1, 20)), [text(rng.integers(1, 28)) for _ in range(4)]) for i in range(13)]
    _, context, endings = questions[-1]
    endings[1] = text(P + 1 - len(context))  # together as long as the model has positions
    stream, sizes = [], []
    for i, (label, context, endings) in enumerate(questions):
        parts = [part for tokens in (context, *endings) for part in (len(tokens), *tokens)]
        sizes.append(2 * (5 + len(parts)))
        stream += [65535, sizes[-1], i, label, len(endings), *parts]
    random_model(V, 128, P)
    header = struct.pack("<256i", 20240522, 1, len(questions), max(sizes), *[0] * 252)
    written("questions.bin", header + struct.pack(f"<{len(stream)}H", *stream))
    converts("export", "a.bin", "exported")
    model = AutoModelForCausalLM.from_pretrained("exported").double().eval()
    log = run_program("train_gpt2cu", "--precision", "fp32", "-e", "a.bin", "--eval-only", "-b", 3, "-t", P,
                      "--hellaswag", "questions.bin", "--device", device, "--no-tf32")

    def loss(context, ending):
        tokens = torch.tensor([context + ending])
        logits = model(tokens[:, :-1]).logits[0, len(context) - 1:]
        return torch.nn.functional.cross_entropy(logits, tokens[0, len(context):]).item()

    with torch.no_grad():
        want = [[loss(context, ending) for ending in endings] for _, context, endings in questions]
    answers, labels = [np.argmin(losses) for losses in want], [label for label, _, _ in questions]
    found = re.findall(r"^question (\d+) \| answer (\d+) \| label (\d+) \| \w+ (.*)$", log, re.MULTILINE)
    numbers = [tuple(map(int, line[:3])) for line in found]
    assert numbers == list(zip(range(len(questions)), answers, labels)), (log, answers)
    np.testing.assert_allclose([list(map(float, line[3].split())) for line in found], want, 1e-4)
    correct = sum(answer == label for answer, label in zip(answers, labels))
    assert f"hellaswag {correct} of {len(questions)}," in log, log


def test_hellaswag_cpu():
    check_hellaswag("cpu")


def test_hellaswag_cuda():
    check_hellaswag("cuda")


if __name__ == "__main__":
    main()
