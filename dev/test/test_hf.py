#!/usr/bin/env python3
"""Tests scripts/hf.py: round trips keep every bit, Hugging Face's GPT-2 and ours agree in the loss
and in every gradient, and bad input is refused with one line.

The comparison needs PyTorch: pip install -c scripts/requirements-more.txt transformers torch
"""

import functools
import json
import os
import random
import shutil
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from harness import (
    POINTER,
    ROOT,
    Skip,
    built,
    ended,
    header,
    main,
    need,
    new_folder,
    run,
    succeeds,
    unheard,
    whole_program_needs,
    written,
)

whole_program_needs("numpy", "safetensors", "tqdm")
import numpy as np  # noqa: E402

os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")  # before libraries read them
sys.dont_write_bytecode = True
sys.path.append(str(ROOT / "scripts"))  # last, because a script there has the name of a library
import results  # noqa: E402

converts = functools.partial(succeeds, "hf")


def refuses(message, *command):
    """hf.py prints one line with `message`, and leaves the folder as it was."""
    before = sorted(os.listdir())
    code, _, error = ended("hf", *command)
    is_line = error.count("\n") == 1
    assert code == 1 and is_line and message in error, f"{command}: {message}: {error}"
    assert sorted(os.listdir()) == before, f"left behind: {set(os.listdir()) - set(before)}"


IMPORT = ("import", "hf", "b.bin")
EXPORT = ("export", "a.bin", "hf2")
TENSORS = "hf/model.safetensors"
CONFIG = "hf/config.json"
TOKENIZER = ("vocab.json", "merges.txt", "tokenizer_config.json")


def read(path):
    return Path(path).read_bytes()


def read_config():
    return json.loads(read(CONFIG))


def write_config(config):
    written(CONFIG, json.dumps(config))


def unpack(code, raw):
    """The numbers that `raw` holds, of the type `code` of the module struct."""
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def read_tensors(path=TENSORS):
    """{name without "transformer.": (bytes, type, shape)}"""
    raw = read(path)
    data_begin = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:data_begin])
    data = raw[data_begin:]
    del entries["__metadata__"]
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        tensor = data[begin:end], entry["dtype"], entry["shape"]
        found[name.removeprefix("transformer.")] = tensor
    return found


def pack_tensors(tensors):
    """The content of a safetensors file."""
    entries = {}
    data = b""
    for name, (raw, dtype, shape) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


# Of the checkpoints: positions, vocabulary, layers, heads, channels.
P, V, L, NH, C = 40, 257, 2, 4, 32


def padded(V):
    return (V + 127) // 128 * 128


def new_export(version=3, P=P, V=V, values=b""):
    """Creates a.bin and its export, the folder hf, in a new folder. wte begins with these values.
    The others are random bits, including NaNs, because a conversion that only moves them must keep
    every bit. Padding is zero."""
    new_folder()
    item_bytes = {3: 4, 5: 2}[version]
    chance = random.Random(1)
    wte = values + chance.randbytes(V * C * item_bytes - len(values))
    padding = bytes((padded(V) - V) * C * item_bytes)
    others = chance.randbytes((P * C + L * (12 * C * C + 13 * C) + 2 * C) * item_bytes)
    sizes = header(20240326, version, P, V, L, NH, C, padded(V))
    written("a.bin", sizes + wte + padding + others)
    converts("export", "a.bin", "hf")


def llmc_order(P, V, C):
    """(name, rows, columns) of GPT-2's tensors in the order in which llm.c stores them. A vector
    has one column."""
    blocks = [
        ("ln_1", C, 1),
        ("attn.c_attn", 3 * C, C),
        ("attn.c_proj", C, C),
        ("ln_2", C, 1),
        ("mlp.c_fc", 4 * C, C),
        ("mlp.c_proj", C, 4 * C),
    ]
    parts = []
    for name, rows, columns in blocks:
        parts += [(f"{name}.weight", rows, columns), (f"{name}.bias", rows, 1)]
    layers = [(f"h.{l}.{name}", rows, columns) for name, rows, columns in parts for l in range(L)]
    return [
        ("wte.weight", padded(V), C),
        ("wpe.weight", P, C),
        *layers,
        ("ln_f.weight", C, 1),
        ("ln_f.bias", C, 1),
    ]


def test_checkpoint_to_hf_and_back_is_the_same_file():
    for version, P, V in (3, 10, 257), (5, 19, 257), (3, 109, 256), (5, 1009, 50257):
        new_export(version, P, V)
        converts(*IMPORT)
        assert read("a.bin") == read("b.bin"), (version, V)


def test_tensors_of_an_export():
    """A round trip would not notice tensors in a wrong order or with wrong names, nor c_… weights
    that are not (in, out) in the export. P and V change the length of the header."""
    for version, P, V in (3, 10, 257), (5, 19, 257), (3, 109, 256), (5, 1009, 50257):
        new_export(version, P, V)
        data_begin = 8 + int.from_bytes(read(TENSORS)[:8], "little")
        assert data_begin % 8 == 0, (P, V)
        exported = read_tensors()
        numbers = np.fromfile("a.bin", {3: "<u4", 5: "<u2"}[version], offset=1024)
        for name, rows, columns in llmc_order(P, V, C):
            tensor, numbers = np.split(numbers, [rows * columns])
            tensor = tensor.reshape(rows, columns)
            if name == "wte.weight":
                tensor = tensor[:V]
            if ".c_" in name:
                tensor = tensor.T
            assert exported[name][0] == tensor.tobytes(), name
        assert numbers.size == 0


def test_settings_of_an_export():
    """An export says what transformers needs to know."""
    for version, dtype, V, end_of_text in (
        (3, "float32", 257, 256),
        (5, "bfloat16", 257, 256),
        (3, "float32", 256, None),
        (5, "bfloat16", 50257, 50256),
    ):
        new_export(version, P, V)
        files = {"config.json", "generation_config.json", "model.safetensors"}
        if V == 257:
            files.update(TOKENIZER)
        assert set(os.listdir("hf")) == files, V
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        assert json.loads(read("hf/generation_config.json")) == ends
        assert read_config() == {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_positions": P,
            "vocab_size": V,
            "n_layer": L,
            "n_head": NH,
            "n_embd": C,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "embd_pdrop": 0,
            "attn_pdrop": 0,
            "resid_pdrop": 0,
            "torch_dtype": dtype,
            **ends,
        }


def test_newest_of_a_run():
    """Only the right file contains a model, so that any other choice is refused."""
    new_export()
    for name in (
        "model_99999999.bin",
        "state_100000001.bin",
        "model_100000002.bin.tmp.7",
        "model_0200000000.bin",
        "model_best.bin",
    ):
        written(f"run/{name}", b"another")
    newest = written("run/model_100000000.bin", read("a.bin"))
    converts("export", "run", "hf2")
    assert read_tensors("hf2/model.safetensors") == read_tensors()
    written(newest, b"cut")  # is not silently replaced by an older one
    refuses(newest.name, "export", "run", "hf3")
    refuses("hf: ", "export", "hf", "hf3")  # has none


def test_rounding_to_bf16():
    """To the nearer of the two neighbours, a tie to the even one. A NaN stays one."""
    expected = {
        0x3F800000: 0x3F80,  # 1, which bf16 has
        0x3F808000: 0x3F80,  # a tie, the lower neighbour is even
        0x3F818000: 0x3F82,  # a tie, the upper one is
        0x3F808001: 0x3F81,  # just above a tie
        0x3F807FFF: 0x3F80,  # just below it
        0x7F7FFFFF: 0x7F80,  # the largest fp32: infinity
        0xFFFFFFFF: 0xFFFF,  # a NaN with all bits set
        0x7F800001: 0x7FC0,  # a NaN whose upper half is infinity's
        0x80000001: 0x8000,  # a negative denormal: -0
    }
    new_export(values=struct.pack(f"<{len(expected)}I", *expected))
    converts(*EXPORT, "--precision", "bf16")
    raw, _, _ = read_tensors("hf2/model.safetensors")["wte.weight"]
    found = unpack("H", raw)[: len(expected)]
    assert found == list(expected.values()), [hex(x) for x in found]


def test_import_of_mixed_types():
    """If one tensor has another type than bf16, here the file's last, all become fp32, and no bit
    is lost."""
    new_export(version=5)
    tensors = read_tensors()
    wide = [x << 16 for x in unpack("H", read("a.bin")[1024:])]
    all_but_last = struct.pack(f"<{len(wide)}I", *wide)[: -4 * C]
    for code, dtype in ("f", "F32"), ("e", "F16"):
        last = struct.pack(f"<{C}{code}", *(random.Random(2).gauss(0, 1) for _ in range(C)))
        written(TENSORS, pack_tensors({**tensors, "ln_f.bias": (last, dtype, [C])}))
        converts("import", "hf", f"{dtype}.bin")
        found = read(f"{dtype}.bin")
        assert found[:8] == struct.pack("<2i", 20240326, 3), dtype
        assert found[1024:] == all_but_last + struct.pack(f"<{C}f", *unpack(code, last)), dtype


def test_other_forms_of_a_model():
    """Large models are split into several files. Old ones have names without "transformer.", and
    include the causal masks and lm_head."""
    new_export()
    tensors = read_tensors()
    tensors["h.0.attn.bias"] = bytes(16), "BOOL", [1, 1, 4, 4]
    tensors["h.1.attn.masked_bias"] = bytes(4), "F32", []
    tensors["lm_head.weight"] = tensors["wte.weight"]
    names = list(tensors)

    def write_part(number, part_names):
        part = {name: tensors[name] for name in part_names}
        written(f"hf/model-{number}.safetensors", pack_tensors(part))

    write_part(0, names[0::2])
    write_part(1, names[1::2])
    os.unlink(TENSORS)
    other_names = {"n_inner": 4 * C, "activation_function": "gelu_pytorch_tanh"}
    write_config(read_config() | other_names)
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")

    write_part(1, [names[0], *names[1::2]])
    refuses(f"model-1.safetensors: tensor {names[0]} ", "import", "hf", "d.bin")
    os.unlink("hf/model-1.safetensors")
    refuses(names[1], "import", "hf", "d.bin")


def test_import_from_the_hub():
    new_export()

    def snapshot_download(name, allow_patterns):
        if name != "someone/gpt2":
            raise OSError("404\nnot found")
        for path in Path("hf").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                written(f"cache/{path.name}", read(path))
        return "cache"

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    with mock.patch.dict(sys.modules, huggingface_hub=hub):
        converts("import", "someone/gpt2", "b.bin")
        assert read("a.bin") == read("b.bin")
        refuses("someone/else: no such folder", "import", "someone/else", "c.bin")


def test_end_of_text():
    """An import accepts models without an end of text, or with the one that an export names: 256
    only in the vocabulary of single bytes."""
    for V, end, accepted in (
        (50257, 50256, True),
        (50300, 50256, True),
        (50300, None, True),
        (50300, 256, False),
        (257, 256, True),
        (257, 50256, True),
        (258, 50256, True),
        (258, 256, False),
    ):
        new_export(V=V)
        exported = read_config()
        assert exported["eos_token_id"] == {257: 256, 258: None}.get(V, 50256), V
        write_config({**exported, "bos_token_id": end, "eos_token_id": end})
        if accepted:
            converts(*IMPORT)
            assert read("a.bin") == read("b.bin"), (V, end)
        else:
            refuses("config.json: bos_token_id", *IMPORT)

    new_export()
    config = read_config()
    del config["bos_token_id"], config["eos_token_id"]
    write_config(config)
    converts(*IMPORT)


def test_tokenizer_of_an_export():
    """The trainer uses the same ids for single bytes."""
    for V, options, end_of_text in (257, [], 256), (50257, ["--bytes"], 50256):
        new_export(V=V)
        converts(*EXPORT, *options)
        assert read("hf2/merges.txt") == b"#version: 0.2\n"
        config = json.loads(read("hf2/tokenizer_config.json"))
        assert config["model_max_length"] == P, config
        vocabulary = json.loads(read("hf2/vocab.json"))
        shown = "!", "~", "\u00ff", "\u0100", "Ġ", "<|endoftext|>"
        found = [vocabulary[token] for token in shown]
        assert found == [0, 93, 187, 188, 220, end_of_text], found
        assert list(vocabulary.values()) == [*range(256), end_of_text], vocabulary

    new_export(V=50257)
    converts(*EXPORT)
    assert not set(os.listdir("hf2")) & set(TOKENIZER)
    new_export(V=258)
    refuses("a.bin: no tokenizer for a vocabulary of 258", *EXPORT, "--bytes")
    assert "tokenizer" not in converts(*EXPORT)  # no advice that does not help


def check_refused(command, path, content, message):
    """With this content, or without the file if it is None, the command must say `message`."""
    before = read(path)
    os.unlink(path)
    if content is not None:
        written(path, content)
        assert read(path) != before, message
    refuses(message, *command)
    written(path, before)


def test_configurations_that_are_refused():
    new_export()
    good = {**read_config(), "bos_token_id": None, "eos_token_id": None}
    cases = [
        ("model_type", "llama"),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 64),
        ("tie_word_embeddings", False),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("scale_attn_by_inverse_layer_idx", True),
        ("n_embd", 33),
        ("n_embd", {"width": 32}),
        ("n_layer", 0),
        ("n_head", "2"),
        ("vocab_size", None),
        ("n_layer", 10**4299),
        ("n_layer", True),
        ("n_embd", float("inf")),
        ("n_positions", 40.0),
    ]
    for key, value in cases:
        content = json.dumps({**good, key: value})
        check_refused(IMPORT, CONFIG, content, f"config.json: {key}")
    for key in "bos_token_id", "eos_token_id":
        for value in 0, 2, 255, "256", [2], True, 256.0:
            content = json.dumps({**good, key: value})
            check_refused(IMPORT, CONFIG, content, f"config.json: {key}: expected 256")
    for content in '{"model": ', 100000 * "[", '"', "null", b"\xff":
        check_refused(IMPORT, CONFIG, content, "config.json: damaged")
    check_refused(IMPORT, CONFIG, None, "config.json")
    check_refused(IMPORT, CONFIG, POINTER, f"{CONFIG}: is a Git LFS")

    # Sizes that do not fit the tensors.
    for key, value, message in (
        ("vocab_size", 258, "wte.weight: expected F32, F16 or BF16 of shape (258, 32)"),
        ("n_layer", 1, "is not part of the GPT-2"),
        ("n_layer", 10**9, "n_layer"),
    ):
        check_refused(IMPORT, CONFIG, json.dumps({**good, key: value}), message)


def test_tensors_that_are_refused():
    new_export()
    good = read_tensors()
    name = "h.1.mlp.c_fc.weight"
    other = "h.2.mlp.c_fc.weight"
    data, _, shape = good[name]
    renamed = {key.replace(name, other): tensor for key, tensor in good.items()}
    for tensors, message in (
        (renamed, f"tensor {name}"),
        (good | {name: (data, "I32", shape)}, "I32"),
        (good | {name: (data * 2, "F64", shape)}, "F64"),
        (
            good | {name: (data, "F32", shape[::-1])},
            "of shape (32, 128), found F32 of (128, 32)",
        ),
        (good | {"other": (bytes(64), "F32", [16])}, "tensor other is not part of the GPT-2"),
        (good | {f"transformer.{name}": good[name]}, f"{TENSORS}: tensor {name} "),
        (
            good | {"lm_head.weight": (bytes(4 * V * C), "F32", [V, C])},
            "only tied embeddings",
        ),
    ):
        check_refused(IMPORT, TENSORS, pack_tensors(tensors), message)

    raw = read(TENSORS)
    for content in (
        b"",
        b"\xff" * 8 + raw[8:],
        raw[:8] + b"?" + raw[9:],
        raw[:-1],
        raw.replace(b"[0, ", b"[4, ", 1),
    ):
        check_refused(IMPORT, TENSORS, content, f"{TENSORS}: damaged")
    check_refused(IMPORT, TENSORS, None, "hf: no model.safetensors")
    check_refused(IMPORT, TENSORS, POINTER, f"{TENSORS}: is a Git LFS")


def test_checkpoints_that_are_refused():
    new_export()
    good = read("a.bin")
    for content in b"", good[:1000], good[:-1], good[:-4], good + b"1":
        check_refused(EXPORT, "a.bin", content, "a.bin: ")
    # Of the header's numbers: magic, version, P, V, L, NH, C, padded V.
    for index, value in (
        (0, 20240520),
        (1, 4),
        (3, -1),
        (3, 3),
        (4, 3),
        (4, 2**31 - 1),
        (5, 3),
        (7, 128),
        (7, 512),
    ):
        begin = 4 * index
        content = good[:begin] + struct.pack("<i", value) + good[begin + 4 :]
        check_refused(EXPORT, "a.bin", content, "a.bin: ")
    check_refused(EXPORT, "a.bin", b"state", "(a model_….bin, not a state_….bin)")
    check_refused(EXPORT, "a.bin", None, "a.bin")
    check_refused(EXPORT, "a.bin", POINTER, "a.bin: is a Git LFS")


def test_wrong_commands():
    for usage in "", "import", "move a b", "import a b --precision fp8", "import a b --bytes":
        assert ended("hf", *usage.split())[0] == 2, usage


def test_stdout_that_cannot_be_written():
    new_export(V=50257)  # whose export prints a line before the last one
    for _ in unheard(sys.executable, "-u", ROOT / "scripts" / "hf.py", *EXPORT, cwd=None):
        assert sorted(os.listdir("hf2")) == sorted(os.listdir("hf"))
        assert read_tensors("hf2/model.safetensors") == read_tensors()
        shutil.rmtree("hf2")


def test_output_that_cannot_be_written():
    new_export()
    for message, *command in (
        ("a.bin: exists already", "import", "hf", "a.bin"),
        ("hf: exists already", "export", "a.bin", "hf"),
        ("none", "import", "hf", "none/b.bin"),
        ("none", "export", "a.bin", "none/hf"),
    ):
        refuses(message, *command)

    # The disk is full, or the user presses Ctrl-C, after four tensors.
    for command in EXPORT, IMPORT:
        for error, message in (
            (OSError(28, "No space left"), "No space left"),
            (KeyboardInterrupt(), "was not written"),
        ):
            with mock.patch("hf.convert", side_effect=[b"1234"] * 4 + [error]):
                refuses(message, *command)
        converts(*command)


def hugging_face_model(V, C, P):
    """Creates the folder hf with a model whose parameters are all random, so that no bias or norm
    can be mistaken for another. Imports it, exports it as hf2, and returns what transformers loads
    from there."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    sizes = {"n_layer": L, "n_head": 2, "n_embd": C, "n_positions": P, "vocab_size": V}
    ends = {"bos_token_id": V - 1, "eos_token_id": V - 1}
    first = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    with torch.no_grad():
        for p in first.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    new_folder()
    first.save_pretrained("hf")
    converts("import", "hf", "a.bin")
    converts(*EXPORT, "--bytes")

    model, info = AutoModelForCausalLM.from_pretrained("hf2", output_loading_info=True)
    assert not any(info.values()) and model.dtype == first.dtype, info
    before = first.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name], tensor), name
    tokenizer = AutoTokenizer.from_pretrained("hf2")
    text = "in the Zo\u00eb 's  , don 't\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    return model


def train_one_step(device, attention, B, T):
    """Trains a.bin for a step on data.bin with ./train_gpt2cu. Returns the loss and all gradients
    as one array."""
    options = {
        "-e": "a.bin",
        "-i": "data.bin",
        "-b": B,
        "-t": T,
        "--device": device,
        "--precision": "fp32",
        "--no-tf32": None,
        "--attention": attention,
        "-x": 1,
        "--max-norm": 0,
        "-v": 0,
        "-s": 0,
        "--no-shuffle": None,
        "-o": "run",
    }
    run(built(), *results.option_words(options), cwd=None)
    (row,) = results.read_log(Path("run"))["train"]
    # The state ends with AdamW's m and v, each as large as the parameters. After the first step
    # m is a tenth of the gradient.
    size = len(read("a.bin")) - 1024
    m = np.frombuffer(read("run/state_00000001.bin")[-2 * size : -size], np.float32)
    return row["loss_nats"], 10 * m


def compare(device, attention, V, C, B=3, T=37, P=48):
    """Runs one batch through Hugging Face's model in fp64 and ours in fp32, from the same weights,
    and compares the loss and the gradients of all parameters."""
    need("torch", "transformers")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise Skip("no GPU")
    model = hugging_face_model(V, C, P)
    text = np.random.default_rng(2).integers(0, V, B * T + 1)
    text[::5] = 7  # a frequent token
    stored = np.where(text == V - 1, 50256, text)  # shards have GPT-2's end of text in any case
    written("data.bin", header(20240520, 1, text.size) + stored.astype(np.uint16).tobytes())
    our_loss, our_gradients = train_one_step(device, attention, B, T)

    tokens = torch.from_numpy(text[:-1]).reshape(B, T)
    targets = torch.from_numpy(text[1:])
    model = model.double().eval()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), targets)
    loss.backward()

    def check_near(name, found, expected):
        found = torch.from_numpy(found.astype(np.float64)).reshape(expected.shape)
        expected = expected.detach()
        error = ((found - expected).abs().max() / expected.abs().max()).item()
        where = f"{device} {attention} V={V} C={C}: {name}"
        assert error <= 1e-4, f"{where}: off by {error:.2g} of its largest element"

    check_near("loss", np.array(our_loss), loss)
    gradients = {name: p.grad for name, p in model.transformer.named_parameters()}
    for name, rows, columns in llmc_order(P, V, C):
        ours, our_gradients = np.split(our_gradients, [rows * columns])
        if name == "wte.weight":
            ours, padding = np.split(ours, [V * C])
            assert (padding == 0).all(), "gradient of the padding rows"
        gradient = gradients.pop(name)
        is_transposed = ".c_" in name and columns > 1
        check_near(name, ours, gradient.T if is_transposed else gradient)
    assert our_gradients.size == 0 and not gradients, gradients


def test_gradients_cpu():
    for shape in {"V": 257, "C": 128}, {"V": 50257, "C": 16}, {"V": 257, "C": 128, "B": 1, "T": 1}:
        compare("cpu", "flash", **shape)


def test_gradients_cuda():
    for attention in ("flash", "naive"):
        for V in (257, 50257):
            compare("cuda", attention, V, C=128)


if __name__ == "__main__":
    main()
