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
without_numpy = stand_in("numpy")
sys.path.append(str(HF.parent))  # last, because a script there is named as a library is


def hf(*command, **replaced):
    """Runs hf.py in this process and gives its line of error, or None. `replaced` are functions that it calls."""
    need("numpy")
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


def program(*arguments, **environment):
    return subprocess.run([sys.executable, HF, *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


def converts(*command):
    assert (error := hf(*command)) is None, f"{command}: {error}"


def refuses(message, *command, **replaced):
    """One line with `message`, and nothing new in the folder."""
    before = sorted(os.listdir())
    error = str(hf(*command, **replaced))
    assert error.startswith("hf.py: ") and message in error and "\n" not in error, f"{command}: {error}"
    assert sorted(os.listdir()) == before, f"left behind: {set(os.listdir()) - set(before)}"


def refuses_each(file, command, cases):
    """Each case is a message and the content with which `file` causes it. Afterwards the file is as before."""
    good = read(file)
    for message, content in cases:
        written(file, content)
        refuses(message, *command)
    written(file, good)


IMPORT, EXPORT = ("import", "hf", "b.bin"), ("export", "a.bin", "hf")


def read(path):
    return Path(path).read_bytes()


def unpack(code, raw):
    """The numbers that all of `raw` holds."""
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))


def unpack_safetensors(raw):
    """{name without "transformer.": (bytes, type, shape)}"""
    begin = 8 + int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:begin]), raw[begin:]
    return {name.removeprefix("transformer."): (data[slice(*entry["data_offsets"])], entry["dtype"], entry["shape"])
            for name, entry in header.items() if name != "__metadata__"}


def pack_safetensors(tensors):
    header, data = {}, b""
    for name, (raw, dtype, shape) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header = json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


P, V, L, C = 40, 257, 2, 32  # of the checkpoints


def padded(V):
    return (V + 127) // 128 * 128


def new_checkpoint(path="a.bin", version=3, P=P, V=V):
    """A checkpoint of random bits with NaNs, because what is only moved must come back as it was. Padding is zero."""
    size, rest = 4 if version == 3 else 2, P * C + L * (12 * C * C + 13 * C) + 2 * C
    chance, header = random.Random(1), struct.pack("<256i", 20240326, version, P, V, L, 2, C, padded(V), *[0] * 248)
    written(path, header + chance.randbytes(V * C * size) + bytes((padded(V) - V) * C * size) +
          chance.randbytes(rest * size))


def new_export(**checkpoint):
    """In a new folder a.bin and its export, the folder hf."""
    new_folder()
    new_checkpoint(**checkpoint)
    converts(*EXPORT)


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
        new_export(version=version, P=P, V=V)
        assert sorted(os.listdir("hf")) == ["config.json", "generation_config.json", "model.safetensors"]
        config, generation = (json.loads(read(f"hf/{name}")) for name in ("config.json", "generation_config.json"))
        for ends in config, generation:
            assert ends["bos_token_id"] == ends["eos_token_id"] == end_of_text, (ends, V)
        assert config["torch_dtype"] == dtype, config
        assert [config[f"{part}_pdrop"] for part in ("embd", "attn", "resid")] == [0, 0, 0], config
        assert int.from_bytes(read("hf/model.safetensors")[:8], "little") % 8 == 0  # P and V change its header's length
        converts(*IMPORT)
        assert read("a.bin") == read("b.bin"), (version, V)


def test_each_tensor_is_where_hugging_face_has_it():
    """Hugging Face's c_… weights are (in, out). A round trip sees neither the order of tensors nor their names."""
    new_export()
    tensors = unpack_safetensors(read("hf/model.safetensors"))
    words = memoryview(read("a.bin")[1024:]).cast("I")
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
    a, b = (unpack("H", read(f)[1024:]) for f in ("a.bin", "back.bin"))
    quiet = [x | 0x40 if x & 0x7FFF > 0x7F80 else x for x in a]  # a signalling NaN comes back so
    assert quiet != a and quiet == b

    # To the nearer of the two neighbours, a tie to the even one.
    new_checkpoint("r.bin")
    bits = [0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0xFFFFFFFF, 0x7F800001, 0x80000001]
    want = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0xFFFF, 0x7FC0, 0x8000]
    raw = read("r.bin")
    written("r.bin", raw[:1024] + struct.pack(f"<{len(bits)}I", *bits) + raw[1024 + 4 * len(bits):])
    converts("export", "r.bin", "rounded", "--precision", "bf16")
    converts("import", "rounded", "rounded.bin")
    found = unpack("H", read("rounded.bin")[1024:1024 + 2 * len(bits)])
    assert found == want, [hex(x) for x in found]


def test_import_of_fp16():
    new_folder()
    new_checkpoint()
    n, chance = os.path.getsize("a.bin") // 4 - 256, random.Random(2)
    halves = unpack("e", struct.pack(f"<{n}e", *(chance.gauss(0, 1) for _ in range(n))))
    halves[V * C:padded(V) * C] = (padded(V) - V) * C * [0]
    written("a.bin", read("a.bin")[:1024] + struct.pack(f"<{n}f", *halves))
    converts(*EXPORT)
    tensors = unpack_safetensors(read("hf/model.safetensors"))
    for name, (raw, _, shape) in tensors.items():
        tensors[name] = struct.pack(f"<{len(raw) // 4}e", *unpack("f", raw)), "F16", shape
    written("hf/model.safetensors", pack_safetensors(tensors))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")


def test_sharded_safetensors_and_old_names():
    """Large models come in several files. Early ones have names without "transformer." and keep the causal masks."""
    new_export()
    tensors = unpack_safetensors(read("hf/model.safetensors"))
    tensors["h.0.attn.bias"] = bytes(16), "BOOL", [1, 1, 4, 4]
    tensors["h.1.attn.masked_bias"] = bytes(4), "F32", []
    tensors["lm_head.weight"] = tensors["wte.weight"]
    names = list(tensors)
    for part in range(2):
        written(f"hf/model-{part}.safetensors", pack_safetensors({name: tensors[name] for name in names[part::2]}))
    os.unlink("hf/model.safetensors")
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    written("hf/model.safetensors.index.json", json.dumps({"weight_map": weight_map}))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")
    os.unlink("hf/model-1.safetensors")
    refuses("model-1.safetensors: cannot read: No such file", "import", "hf", "c.bin")
    written("hf/model.safetensors.index.json", '{"weight_map": ["x"]}')
    refuses("index.json: damaged", "import", "hf", "c.bin")


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
        refuses("needs huggingface_hub (import of", "import", "someone/gpt2", "c.bin")
    refuses("./gpt2: not a folder", "import", "./gpt2", "c.bin")


def test_no_numpy_and_usage():
    new_folder()
    written("none/numpy.py", "raise ImportError('none here')")
    done = program("import", "hf", "a.bin", PYTHONPATH="none")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
    assert done.stderr.startswith("hf.py: needs numpy (none here)"), done
    done = program("--help", PYTHONPATH="none")
    assert done.returncode == 0 and "from_pretrained" in done.stdout, done
    for arguments in ((), ("import",), ("move", "a", "b"), ("import", "a", "b", "--precision", "fp8")):
        assert hf(*arguments) == 2, arguments


def test_config_that_is_not_gpt2():
    new_export()
    config = json.loads(read("hf/config.json"))
    others = {"model_type": "llama", "activation_function": "gelu", "layer_norm_epsilon": 1e-6,
              "tie_word_embeddings": False, "scale_attn_weights": False, "add_cross_attention": True,
              "scale_attn_by_inverse_layer_idx": True, "n_inner": 64, "n_embd": 33, "n_layer": 0, "n_head": "2",
              "vocab_size": None, "rotary_dim": 16, "rope_theta": 1e4, "position_embedding_type": "relative_key",
              "rotary_pct": 0.25, "rope_scaling": {"factor": 2}, "rope_parameters": {"rope_theta": 1e4},
              "quantization_config": {"bits": 4}}
    cases = [(f"config.json: {key}", json.dumps({**config, key: value})) for key, value in others.items()]
    cases += [(message, json.dumps({**config, key: value})) for message, key, value in (
        ("tensor wte.weight: expected shape (258, 32)", "vocab_size", 258),
        ("GPT-2 as config.json describes it has none", "n_layer", 1),
        ("tensor h.999999999.ln_1.weight is missing", "n_layer", 10**9))]
    cases += [("config.json: damaged (get the file again): ", raw) for raw in ('{"model_type": ', 100000 * "[")]
    refuses_each("hf/config.json", IMPORT, cases)
    same = {"n_inner": 4 * C, "activation_function": "gelu_pytorch_tanh"}  # by other names
    written("hf/config.json", json.dumps({**config, **same}))
    converts(*IMPORT)
    assert read("a.bin") == read("b.bin")
    os.unlink("hf/config.json")
    refuses("config.json: cannot read: No such file", "import", "hf", "c.bin")


def test_tensors_that_are_not_gpt2s():
    new_export()
    file, name, other = "hf/model.safetensors", "h.1.mlp.c_fc.weight", "h.2.mlp.c_fc.weight"
    good = unpack_safetensors(read(file))
    raw, _, shape = good[name]
    refuses_each(file, IMPORT, [(message, pack_safetensors(tensors)) for message, tensors in (
        (f"tensor {name} is missing", {key.replace(name, other): tensor for key, tensor in good.items()}),
        ("expected F32, F16 or BF16, found I32", {**good, name: (raw, "I32", shape)}),
        ("expected shape (32, 128) by config.json, found (128, 32)", {**good, name: (raw, "F32", shape[::-1])}),
        ("tensor score.weight: GPT-2 as config", {**good, "score.weight": (bytes(64), "F32", [16])}),
        ("only tied embeddings", {**good, "lm_head.weight": (bytes(4 * V * C), "F32", [V, C])}))])
    os.rename(file, "hf/pytorch_model.bin")
    refuses("hf: no model.safetensors", *IMPORT)


def test_damaged_safetensors():
    new_export()
    file = "hf/model.safetensors"
    good = read(file)
    end = 8 + int.from_bytes(good[:8], "little")
    cases = [("the header claims", raw) for raw in (b"", b"1234567", b"\xff" * 8 + good[8:], good[:end - 1])]
    cases += [("header: JSONDecodeError", good[:8] + b"?" + good[9:]),
              ("header: UnicodeDecodeError", good[:10] + b"\xff" + good[11:]),
              ("header: ", (100000).to_bytes(8, "little") + 100000 * b"[" + good),
              ("header: ", (2).to_bytes(8, "little") + b"[]" + good),
              ("expected", good[:-1]), ("expected", good + b"1")]
    for message, old, new in (("header: ValueError", b"[257, 32]", b"[257,-32]"),
                              ("header: ValueError", b"[257, 32]", b"[257,3.2]"),
                              ("header: KeyError", b'"dtype"', b'"dtypo"'),
                              ("transformer.wte.weight: F32", b"[257, 32]", b"[257, 31]"),
                              ("transformer.wte.weight: expected its data from offset 0, found 4", b"[0, ", b"[4, ")):
        assert old in good
        cases.append((message, good.replace(old, new, 1)))
    refuses_each(file, IMPORT, [(f"{file}: damaged (get the file again): {message}", raw) for message, raw in cases])


def test_bad_checkpoints():
    new_folder()
    new_checkpoint()
    good = read("a.bin")
    damaged = "damaged (get the file again): expected"
    cases = [("expected magic", b""), ("expected magic", good[:1000]), (damaged, good[:-1]), (damaged, good + b"1")]
    for index, value, message in ((0, 20240520, "expected magic"), (1, 4, "expected magic"), (4, 3, damaged),
                                  (3, -1, "damaged header"), (4, 2**31 - 1, "damaged header"),
                                  (5, 3, "damaged header"), (7, 128, "damaged header")):
        cases.append((message, good[:4 * index] + struct.pack("<i", value) + good[4 * index + 4:]))
    refuses_each("a.bin", EXPORT, [(f"a.bin: {message}", raw) for message, raw in cases])
    refuses("none.bin: cannot read: No such file", "export", "none.bin", "hf")


def test_output_that_cannot_be():
    new_export()
    refuses("a.bin: exists already", "import", "hf", "a.bin")
    refuses("hf: exists already", *EXPORT)
    refuses("none: no such folder", "import", "hf", "none/b.bin")
    refuses("none: no such folder", "export", "a.bin", "none/hf")
    done = program(*EXPORT)
    assert done.returncode == 1 and done.stderr.startswith("hf.py: hf: exists already"), done


def test_interrupt():
    """Ctrl-C in the middle of the tensors ends in one line, and nothing is left."""
    new_export()
    import hf as module
    for command in ("export", "a.bin", "hf2"), IMPORT:
        fifth = [module.convert] * 4 + [mock.Mock(side_effect=KeyboardInterrupt)]
        refuses(f"interrupted; {command[2]} is not written", *command, convert=lambda *how: fifth.pop(0)(*how))
        assert not fifth
        converts(*command)


def test_full_disk():
    """Where hf.py opens a file for writing, it gets /dev/full. What was begun is removed."""
    if not os.path.exists("/dev/full"):
        raise Skip("needs /dev/full")
    created = []

    def full(path, mode="r", **how):
        if mode != "wb":
            return open(path, mode, **how)
        created.append(path)
        open(path, mode).close()
        return open("/dev/full", mode)

    new_export()
    for command in ("export", "a.bin", "hf2"), IMPORT:
        refuses(f"{command[2]}: cannot write: No space left on device; free some space", *command, open=full)
    assert len(created) == 2 and all(".tmp." in path for path in created)


# ----------------------------------------------------------------------------------------------------------------------
# With PyTorch and transformers

def need_libraries(cuda=False):
    if without_numpy:  # these want a real one
        raise Skip("needs numpy (scripts/requirements.txt)")
    need("torch", "transformers")
    import torch
    if cuda and not torch.cuda.is_available():
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
    compare("cpu", "flash", V=257, C=128)
    compare("cpu", "flash", V=50257, C=16)
    compare("cpu", "flash", V=256, C=128, B=1, T=1)


def test_gradients_cuda():
    need_libraries(cuda=True)
    for attention in ("flash", "naive"):
        compare("cuda", attention, V=257, C=128)
        compare("cuda", attention, V=50257, C=128)


def check_hellaswag(*device, V=257, P=48):
    """--hellaswag gives each question the answer and each ending the loss that the exported model gives it."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM
    rng = np.random.default_rng(3)
    text = lambda tokens: rng.integers(0, V, tokens).tolist()
    questions = [(i % 4, text(rng.integers(1, 20)), [text(rng.integers(1, 28)) for _ in range(4)]) for i in range(13)]
    _, context, endings = questions[-1]
    endings[1] = text(P + 1 - len(context))  # together as long as the model has positions
    examples = []
    for i, (label, context, endings) in enumerate(questions):
        parts = [part for tokens in (context, *endings) for part in (len(tokens), *tokens)]
        examples.append([65535, 2 * (5 + len(parts)), i, label, len(endings), *parts])
    random_model(V, 128, P)
    header = [20240522, 1, len(questions), max(example[1] for example in examples)]
    written("questions.bin", np.array(header + 252 * [0], np.int32).tobytes() +
          np.array(sum(examples, []), np.uint16).tobytes())
    converts("export", "a.bin", "exported")
    model = AutoModelForCausalLM.from_pretrained("exported").double().eval()
    log = run_program("train_gpt2cu", "--precision", "fp32", "-e", "a.bin", "--eval-only", "-b", 3, "-t", P,
                      "--hellaswag", "questions.bin", *device)

    def loss(context, ending):
        tokens = torch.tensor([context + ending])
        logits = model(tokens[:, :-1]).logits[0, len(context) - 1:]
        return torch.nn.functional.cross_entropy(logits, tokens[0, len(context):]).item()

    with torch.no_grad():
        want = [[loss(context, ending) for ending in endings] for _, context, endings in questions]
    answers = [losses.index(min(losses)) for losses in want]
    labels = [label for label, _, _ in questions]
    found = re.findall(r"^question (\d+) \| answer (\d+) \| label (\d+) \| \w+ (.*)$", log, re.MULTILINE)
    numbers = [tuple(map(int, line[:3])) for line in found]
    assert numbers == list(zip(range(len(questions)), answers, labels)), (log, answers)
    np.testing.assert_allclose([list(map(float, line[3].split())) for line in found], want, 1e-4)
    correct = sum(answer == label for answer, label in zip(answers, labels))
    assert f"hellaswag {correct} of {len(questions)}," in log, log


def test_hellaswag_cpu():
    need_libraries()
    check_hellaswag("--device", "cpu")


def test_hellaswag_cuda():
    need_libraries(cuda=True)
    check_hellaswag("--device", "cuda", "--no-tf32")


if __name__ == "__main__":
    main()
