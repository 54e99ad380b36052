#!/usr/bin/env python3
"""Tests of scripts/hf.py: round trips keep every bit, Hugging Face's GPT-2 and ours agree in the
loss and in every gradient, and bad input is refused in one line.

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

os.environ.update(OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")  # before the libraries read them
sys.dont_write_bytecode = True
sys.path.append(str(ROOT / "scripts"))  # last, because a script there is named as a library is
converts = functools.partial(succeeds, "hf")


def refuses(message, *command):
    """One line with `message`, and nothing new in the folder."""
    before = sorted(os.listdir())
    code, _, error = ended("hf", *command)
    assert code == 1 and message in error and error.count("\n") == 1, (
        f"{command}: {message}: {error}"
    )
    assert sorted(os.listdir()) == before, f"left behind: {set(os.listdir()) - set(before)}"


IMPORT, EXPORT = ("import", "hf", "b.bin"), ("export", "a.bin", "hf2")
TENSORS, CONFIG = "hf/model.safetensors", "hf/config.json"
TOKENIZER = ("vocab.json", "merges.txt", "tokenizer_config.json")


def read(path):
    return Path(path).read_bytes()


def unpack(code, raw):
    """The numbers that all of `raw` holds."""
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def read_tensors(path=TENSORS):
    """{name without "transformer.": (bytes, type, shape)}"""
    raw = read(path)
    begin = 8 + int.from_bytes(raw[:8], "little")
    entries, data = json.loads(raw[8:begin]), raw[begin:]
    return {
        name.removeprefix("transformer."): (
            data[slice(*entry["data_offsets"])],
            entry["dtype"],
            entry["shape"],
        )
        for name, entry in entries.items()
        if name != "__metadata__"
    }


def pack_tensors(tensors):
    entries, data = {}, b""
    for name, (raw, dtype, shape) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


P, V, L, NH, C = 40, 257, 2, 4, 32  # of the checkpoints


def padded(V):
    return (V + 127) // 128 * 128


def new_export(version=3, P=P, V=V, values=b""):
    """Creates a.bin and its export, the folder hf, in a new folder. a.bin begins with these values.
    Random bits follow, including NaNs, because what is only moved must come back as it was. Padding
    is zero."""
    new_folder()
    size, rest = 4 if version == 3 else 2, P * C + L * (12 * C * C + 13 * C) + 2 * C
    chance, sizes = random.Random(1), header(20240326, version, P, V, L, NH, C, padded(V))
    written(
        "a.bin",
        sizes
        + values
        + chance.randbytes(V * C * size - len(values))
        + bytes((padded(V) - V) * C * size)
        + chance.randbytes(rest * size),
    )
    converts("export", "a.bin", "hf")


def llmc_order(P, V, C):
    """Name, rows and columns of GPT-2's tensors, as llm.c stores them and in its order. A vector
    has one column."""
    blocks = [
        ("ln_1", C, 1),
        ("attn.c_attn", 3 * C, C),
        ("attn.c_proj", C, C),
        ("ln_2", C, 1),
        ("mlp.c_fc", 4 * C, C),
        ("mlp.c_proj", C, 4 * C),
    ]
    parts = [
        part
        for name, rows, columns in blocks
        for part in ((f"{name}.weight", rows, columns), (f"{name}.bias", rows, 1))
    ]
    layers = [(f"h.{l}.{name}", rows, columns) for name, rows, columns in parts for l in range(L)]
    return [
        ("wte.weight", padded(V), C),
        ("wpe.weight", P, C),
        *layers,
        ("ln_f.weight", C, 1),
        ("ln_f.bias", C, 1),
    ]


def test_checkpoint_to_hf_and_back_is_the_same_file():
    """An export also says what the transformers library asks, and its data is aligned."""
    for version, dtype, P, V, end_of_text in (
        (3, "float32", 10, 257, 256),
        (5, "bfloat16", 19, 257, 256),
        (3, "float32", 109, 256, None),
        (5, "bfloat16", 1009, 50257, 50256),
    ):
        new_export(version, P, V)
        files = {"config.json", "generation_config.json", "model.safetensors"} | (
            set(TOKENIZER) if V == 257 else set()
        )
        assert set(os.listdir("hf")) == files, V
        ends = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
        assert json.loads(read("hf/generation_config.json")) == ends
        assert json.loads(read(CONFIG)) == {
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
        # P and V change the length of this header.
        assert int.from_bytes(read(TENSORS)[:8], "little") % 8 == 0
        converts(*IMPORT)
        assert read("a.bin") == read("b.bin"), (version, V)

        # A round trip would not notice tensors in a wrong order or with wrong names, nor c_…
        # weights that are not (in, out) in the export.
        exported = read_tensors()
        numbers = np.fromfile("a.bin", "<u4" if version == 3 else "<u2", offset=1024)
        for name, rows, columns in llmc_order(P, V, C):
            tensor, numbers = np.split(numbers, [rows * columns])
            tensor = tensor.reshape(rows, columns)[: V if name == "wte.weight" else rows]
            assert exported[name][0] == (tensor.T if ".c_" in name else tensor).tobytes(), name
        assert numbers.size == 0


def test_newest_of_a_run():
    """Only the file with the true name is a model, so that any other choice is refused."""
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
    written(newest, b"cut")  # an older one does not silently take the place of this one
    refuses(newest.name, "export", "run", "hf3")
    refuses("hf: ", "export", "hf", "hf3")  # has none


def test_conversion_of_precision():
    # Export: to the nearer of the two neighbours, a tie to the even one.
    bits = [
        0x3F800000,
        0x3F808000,
        0x3F818000,
        0x3F808001,
        0x3F807FFF,
        0x7F7FFFFF,
        0xFFFFFFFF,
        0x7F800001,
        0x80000001,
    ]
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFFFF, 0x7FC0, 0x8000]
    new_export(values=struct.pack(f"<{len(bits)}I", *bits))
    converts(*EXPORT, "--precision", "bf16")
    found = unpack("H", read_tensors("hf2/model.safetensors")["wte.weight"][0])[: len(bits)]
    assert found == want, [hex(x) for x in found]

    # Import with one tensor of another type, the file's last: no bit is lost, in it or the others.
    new_export(version=5)
    tensors, wide = read_tensors(), [x << 16 for x in unpack("H", read("a.bin")[1024:])]
    for code, dtype in ("f", "F32"), ("e", "F16"):
        raw = struct.pack(f"<{C}{code}", *(random.Random(2).gauss(0, 1) for _ in range(C)))
        written(TENSORS, pack_tensors({**tensors, "ln_f.bias": (raw, dtype, [C])}))
        converts("import", "hf", f"{dtype}.bin")
        found, values = read(f"{dtype}.bin"), struct.pack(f"<{len(wide)}I", *wide)[: -4 * C]
        assert found[:8] == struct.pack("<2i", 20240326, 3), dtype
        assert found[1024:] == values + struct.pack(f"<{C}f", *unpack(code, raw)), dtype


def test_other_forms_of_a_model():
    """Large models come in several files. Early ones have names without "transformer.", and include
    the causal masks and lm_head. A name on the hub stands for a folder."""
    new_export()
    tensors = read_tensors()
    tensors["h.0.attn.bias"] = bytes(16), "BOOL", [1, 1, 4, 4]
    tensors["h.1.attn.masked_bias"] = bytes(4), "F32", []
    tensors["lm_head.weight"] = tensors["wte.weight"]
    names = list(tensors)
    for part in range(2):
        written(
            f"hf/model-{part}.safetensors",
            pack_tensors({name: tensors[name] for name in names[part::2]}),
        )
    os.unlink(TENSORS)
    same = {"n_inner": 4 * C, "activation_function": "gelu_pytorch_tanh"}  # by other names
    written(CONFIG, json.dumps({**json.loads(read(CONFIG)), **same}))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")

    def snapshot_download(name, allow_patterns):
        if name != "someone/gpt2":
            raise OSError("404\nnot found")
        for path in Path("hf").iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                written(f"cache/{path.name}", read(path))
        return "cache"

    with mock.patch.dict(
        sys.modules, huggingface_hub=SimpleNamespace(snapshot_download=snapshot_download)
    ):
        converts("import", "someone/gpt2", "c.bin")
        assert read("a.bin") == read("c.bin")
        refuses("someone/else: no such folder", "import", "someone/else", "d.bin")
    written(
        "hf/model-1.safetensors",
        pack_tensors({name: tensors[name] for name in [names[0], *names[1::2]]}),
    )
    refuses(f"model-1.safetensors: tensor {names[0]} ", "import", "hf", "d.bin")
    os.unlink("hf/model-1.safetensors")
    refuses(names[1], "import", "hf", "d.bin")


def test_ends_of_texts():
    """An import takes a model with no end of text, or with the one that exports name. 256 is the
    one of single bytes alone."""
    for V, end, taken in (
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
        config = json.loads(read(CONFIG))
        assert config["eos_token_id"] == (256 if V == 257 else 50256 if V > 50256 else None), V
        written(CONFIG, json.dumps({**config, "bos_token_id": end, "eos_token_id": end}))
        if taken:
            converts(*IMPORT)
            assert read("a.bin") == read("b.bin"), (V, end)
        else:
            refuses("config.json: bos_token_id", *IMPORT)
    new_export()
    config = json.loads(read(CONFIG))
    del config["bos_token_id"], config["eos_token_id"]
    written(CONFIG, json.dumps(config))
    converts(*IMPORT)


def test_tokenizer_of_an_export():
    """The ids of single bytes are those of the trainer."""
    for V, option, end_of_text in (257, [], 256), (50257, ["--bytes"], 50256), (50257, [], None):
        new_export(V=V)
        converts(*EXPORT, *option)
        assert len(set(os.listdir("hf2")) & set(TOKENIZER)) == (3 if end_of_text else 0), V
        if end_of_text:
            vocabulary, config = (json.loads(read(f"hf2/{name}")) for name in TOKENIZER[::2])
            assert read("hf2/merges.txt") == b"#version: 0.2\n" and config["model_max_length"] == P
            found = [
                vocabulary[shown] for shown in ("!", "~", "\u00ff", "\u0100", "Ġ", "<|endoftext|>")
            ]
            assert found == [0, 93, 187, 188, 220, end_of_text], found
            assert list(vocabulary.values()) == [*range(256), end_of_text], vocabulary
    new_export(V=258)
    refuses("a.bin: no tokenizer for a vocabulary of 258", *EXPORT, "--bytes")
    assert "tokenizer" not in converts(*EXPORT)  # no advice that does not help


def test_files_that_are_refused():
    """A case has a file, its content (None: no such file), and what the error says."""
    new_export()
    config = {**json.loads(read(CONFIG)), "bos_token_id": None, "eos_token_id": None}
    tensors, raw, good = read_tensors(), read(TENSORS), read("a.bin")
    cases = [
        (CONFIG, None, "config.json"),
        (TENSORS, None, "hf: no model.safetensors"),
        ("a.bin", None, "a.bin"),
        ("a.bin", b"state", "(a model_….bin, not a state_….bin)"),
    ]
    others = [
        ("model_type", "llama"),
        ("activation_function", "gelu"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 64),
        ("tie_word_embeddings", False),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("scale_attn_by_inverse_layer_idx", True),
        ("n_embd", 33),
        ("n_layer", 0),
        ("n_head", "2"),
        ("vocab_size", None),
        ("n_layer", 10**4299),
        ("n_layer", True),
        ("n_embd", float("inf")),
        ("vocab_size", 258, "wte.weight: expected F32, F16 or BF16 of shape (258, 32)"),
        ("n_layer", 1, "has none of this name"),
        ("n_layer", 10**9, "n_layer"),
        ("n_positions", 40.0),
    ]
    others += [
        (key, value, f"config.json: {key}: expected 256")
        for key in ("bos_token_id", "eos_token_id")
        for value in (0, 2, 255, "256", [2], True, 256.0)
    ]
    cases += [
        (CONFIG, json.dumps({**config, key: value}), *(says or [f"config.json: {key}"]))
        for key, value, *says in others
    ]
    cases += [
        (CONFIG, text, "config.json: damaged")
        for text in ('{"model": ', 100000 * "[", '"', "null", b"\xff")
    ]

    name, other = "h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"
    data, _, shape = tensors[name]
    cases += [
        (TENSORS, pack_tensors(wrong), message)
        for wrong, message in (
            (
                {key.replace(name, other): tensor for key, tensor in tensors.items()},
                f"tensor {name}",
            ),
            ({**tensors, name: (data, "I32", shape)}, "I32"),
            ({**tensors, name: (data * 2, "F64", shape)}, "F64"),
            (
                {**tensors, name: (data, "F32", shape[::-1])},
                "of shape (32, 128), found F32 of (128, 32)",
            ),
            ({**tensors, "other": (bytes(64), "F32", [16])}, "tensor other: GPT-2 as config"),
            ({**tensors, f"transformer.{name}": tensors[name]}, f"{TENSORS}: tensor {name} "),
            (
                {**tensors, "lm_head.weight": (bytes(4 * V * C), "F32", [V, C])},
                "only tied embeddings",
            ),
        )
    ]
    cases += [(path, POINTER, f"{path}: a Git LFS") for path in (CONFIG, TENSORS, "a.bin")]
    cases += [
        (TENSORS, wrong, f"{TENSORS}: damaged")
        for wrong in (
            b"",
            b"\xff" * 8 + raw[8:],
            raw[:8] + b"?" + raw[9:],
            raw[:-1],
            raw.replace(b"[0, ", b"[4, ", 1),
        )
    ]

    cases += [
        ("a.bin", wrong, "a.bin: ")
        for wrong in (b"", good[:1000], good[:-1], good[:-4], good + b"1")
    ]
    for index, value in (
        (0, 20240520),
        (1, 4),
        (4, 3),
        (3, -1),
        (4, 2**31 - 1),
        (5, 3),
        (7, 128),
        (7, 512),
        (3, 3),
    ):
        cases.append(
            (
                "a.bin",
                good[: 4 * index] + struct.pack("<i", value) + good[4 * index + 4 :],
                "a.bin: ",
            )
        )

    for file, wrong, message in cases:
        before = read(file)
        os.unlink(file)
        if wrong is not None:
            assert written(file, wrong).read_bytes() != before, message
        refuses(message, *(EXPORT if file == "a.bin" else IMPORT))
        written(file, before)
    for usage in "", "import", "move a b", "import a b --precision fp8", "import a b --bytes":
        assert ended("hf", *usage.split())[0] == 2, usage


def test_stdout_that_cannot_be_written():
    new_export(V=50257)  # whose export says something in the middle
    for _ in unheard(sys.executable, "-u", ROOT / "scripts" / "hf.py", *EXPORT, cwd=None):
        assert sorted(os.listdir("hf2")) == sorted(os.listdir("hf"))
        assert read_tensors("hf2/model.safetensors") == read_tensors()
        shutil.rmtree("hf2")


def test_output_that_cannot_be():
    """The disk is full, or Ctrl-C comes, in the middle of the tensors."""
    new_export()
    for message, *command in (
        ("a.bin: exists already", "import", "hf", "a.bin"),
        ("hf: exists already", "export", "a.bin", "hf"),
        ("none", "import", "hf", "none/b.bin"),
        ("none", "export", "a.bin", "none/hf"),
    ):
        refuses(message, *command)
    import hf as module

    for command in EXPORT, IMPORT:
        for error, message in (
            (OSError(28, "No space left"), "No space left"),
            (KeyboardInterrupt(), "is not written"),
        ):
            with mock.patch.object(
                module, "convert", mock.Mock(side_effect=[b"1234"] * 4 + [error])
            ):
                refuses(message, *command)
        converts(*command)


def compare(device, attention, V, C, B=3, T=37, P=48):
    """Runs one batch through Hugging Face's model in fp64 and ours in fp32, from the same weights.
    Every parameter is random, so that no bias or norm can be mistaken for another. The model is
    imported from theirs and exported back."""
    need("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

    if device == "cuda" and not torch.cuda.is_available():
        raise Skip("no GPU")
    torch.manual_seed(1)
    ends = {"bos_token_id": V - 1, "eos_token_id": V - 1}
    first = GPT2LMHeadModel(
        GPT2Config(n_layer=L, n_head=2, n_embd=C, n_positions=P, vocab_size=V, **ends)
    )
    with torch.no_grad():
        for p in first.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    new_folder()
    first.save_pretrained("hf")
    converts("import", "hf", "a.bin")
    converts(*EXPORT, "--bytes")
    model, info = AutoModelForCausalLM.from_pretrained("hf2", output_loading_info=True)
    assert not any(info.values()) and model.dtype == first.dtype, info
    assert all(
        torch.equal(first.state_dict()[name], tensor) for name, tensor in model.state_dict().items()
    )
    words = AutoTokenizer.from_pretrained("hf2")
    assert words.decode(words(text := "in the Zo\u00eb 's  , don 't\n")["input_ids"]) == text

    text = np.random.default_rng(2).integers(0, V, B * T + 1)
    text[::5] = 7  # a token that comes again and again
    stored = np.where(text == V - 1, 50256, text)
    written("data.bin", header(20240520, 1, text.size) + stored.astype(np.uint16).tobytes())
    run(
        built(),
        "-e",
        "a.bin",
        "-i",
        "data.bin",
        "-b",
        B,
        "-t",
        T,
        "--device",
        device,
        "--precision",
        "fp32",
        "--no-tf32",
        "--attention",
        attention,
        "-x",
        1,
        "--max-norm",
        0,
        "-v",
        0,
        "-s",
        0,
        "--no-shuffle",
        "-o",
        "run",
        cwd=None,
    )
    (row,) = (row for line in open("run/log.jsonl") if (row := json.loads(line))["kind"] == "train")
    # The state ends with AdamW's m and v, each as large as the parameters. After the first step
    # m is a tenth of the gradient.
    size = len(read("a.bin")) - 1024
    out = 10 * np.frombuffer(read("run/state_00000001.bin")[-2 * size : -size], np.float32)
    tokens, targets = (torch.from_numpy(text[i : B * T + i]).reshape(B, T) for i in (0, 1))
    model = model.double().eval()
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.view(-1, V), targets.reshape(-1))
    loss.backward()

    def near(name, got, want):
        got, want = torch.from_numpy(got.astype(np.float64)).reshape(want.shape), want.detach()
        error = ((got - want).abs().max() / want.abs().max()).item()
        assert error <= 1e-4, (
            f"{device} {attention} V={V} C={C}: {name}: off by {error:.2g} of its largest element"
        )

    near("loss", np.array(row["loss_nats"]), loss)
    at = 0
    wanted = {name: p.grad for name, p in model.transformer.named_parameters()}
    for name, rows, columns in llmc_order(P, V, C):
        got, at = out[at : at + rows * columns], at + rows * columns
        if name == "wte.weight":
            assert (got[V * C :] == 0).all(), "gradient of the padding rows"
            got = got[: V * C]
        want = wanted.pop(name)
        near(name, got, want.T if ".c_" in name and columns > 1 else want)
    assert at == out.size and not wanted, wanted


def test_gradients_cpu():
    for shape in {"V": 257, "C": 128}, {"V": 50257, "C": 16}, {"V": 257, "C": 128, "B": 1, "T": 1}:
        compare("cpu", "flash", **shape)


def test_gradients_cuda():
    for attention in ("flash", "naive"):
        for V in (257, 50257):
            compare("cuda", attention, V, C=128)


if __name__ == "__main__":
    main()
