#!/usr/bin/env python3
"""Converts GPT-2 from Hugging Face's format to ours and back, without loss.

    # From a name on the hub, or from a folder with config.json and safetensors files:
    python3 scripts/hf.py import openai-community/gpt2 gpt2.bin
    ./train_gpt2cu -e gpt2.bin -i 'data/train_*.bin'

    # The newest model_….bin of a run, for transformers (after --bytes leave out tokenizer=):
    python3 scripts/hf.py export run1 my-gpt2
    pipeline("text-generation", "my-gpt2", tokenizer="gpt2")("Once")

Needs: pip install -r scripts/requirements.txt. Only one tensor at a time is held in memory.

The formats differ: Hugging Face's Conv1D stores matrices as (in, out), ours are (out, in) and
stacked over the layers, and our wte is padded with rows of zeros to a multiple of 128. A model that
./train_gpt2cu would compute differently is refused.
"""

import argparse
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "data"))
from prepare_common import (
    BYTES,
    DAMAGED,
    END_OF_TEXT,
    SHOWN,
    Fail,
    asking_hub,
    check_fetched,
    check_stdout,
    need,
    progress,
    reading,
    write_file,
)

# Our file begins with 256 int32: magic, version, SIZES by transformers' names, and padded V.
MAGIC = 20240326
HEADER_INTS = 256
SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
BYTE_VOCABULARY = 257  # tokens of a model without merges: 256 bytes and <|endoftext|>

# Types have the names that safetensors gives them.
TYPE_OF_VERSION = {3: "F32", 5: "BF16"}
VERSION_OF_TYPE = {dtype: version for version, dtype in TYPE_OF_VERSION.items()}
TYPE_OF_PRECISION = {"fp32": "F32", "bf16": "BF16"}
NUMPY_TYPE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # numpy has no bf16: its bits
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

# Names that transformers has for the activation that our program computes. Exports use the first.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")


def tensors(c):
    """Every tensor in the order of our file: Hugging Face's name, and our shape without padding.
    `c` is a configuration."""
    L, C = c["n_layer"], c["n_embd"]
    block = {
        "ln_1.weight": (C,),
        "ln_1.bias": (C,),
        "attn.c_attn.weight": (3 * C, C),
        "attn.c_attn.bias": (3 * C,),
        "attn.c_proj.weight": (C, C),
        "attn.c_proj.bias": (C,),
        "ln_2.weight": (C,),
        "ln_2.bias": (C,),
        "mlp.c_fc.weight": (4 * C, C),
        "mlp.c_fc.bias": (4 * C,),
        "mlp.c_proj.weight": (C, 4 * C),
        "mlp.c_proj.bias": (C,),
    }
    return (
        [("wte.weight", (c["vocab_size"], C)), ("wpe.weight", (c["n_positions"], C))]
        + [(f"h.{l}.{name}", shape) for name, shape in block.items() for l in range(L)]
        + [("ln_f.weight", (C,)), ("ln_f.bias", (C,))]
    )


def is_conv1d(name):
    return ".c_" in name and name.endswith(".weight")


def convert(name, x, have, want):
    """A tensor's bytes for the other format: converted to another storage type, and transposed if
    it is a Conv1D's matrix. Conversion to bf16 rounds to nearest, ties to even."""
    if have != want:
        x = to_fp32(x, have)
        if want == "BF16":
            x = to_bf16(x)
    return np.ascontiguousarray(x.T if is_conv1d(name) else x).data


def to_fp32(x, dtype):
    if dtype == "BF16":
        return (x.astype("<u4") << 16).view("<f4")
    return x.astype("<f4")


def to_bf16(x):
    bits = x.view("<u4")
    is_odd = (bits >> 16) & 1
    rounded = (bits + 0x7FFF + is_odd) >> 16
    # For a NaN the sum could carry into the exponent. 0x40 keeps the mantissa from becoming zero,
    # which would be infinity.
    nan = (bits >> 16) | 0x40
    return np.where(np.isnan(x), nan, rounded).astype("<u2")


def read_safetensors(path):
    """name → (type, shape, bytes). The library only checks the file; it does not load the tensors,
    because numpy has no bf16."""
    with reading(path), need("safetensors").safe_open(path, "numpy"), open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        data = np.memmap(path, np.uint8, "r", 8 + length)
        found = {}
        for name, entry in header.items():
            name = name.removeprefix("transformer.")
            if name in found:
                raise Fail(
                    f"{path}: tensor {name} is stored twice, with and without the prefix "
                    "transformer.; get the file again"
                )
            begin, end = entry["data_offsets"]
            found[name] = entry["dtype"], tuple(entry["shape"]), data[begin:end]
        return found


def end_of_text(config):
    """The id of <|endoftext|>, which both begins and ends a text. It is known for GPT-2's
    vocabulary and for that of single bytes; None for others."""
    if config["vocab_size"] == BYTE_VOCABULARY:
        return BYTE_VOCABULARY - 1
    return END_OF_TEXT if config["vocab_size"] > END_OF_TEXT else None


def find_folder(source):
    """The folder `source`, or else one with the hub's model of this name."""
    if os.path.exists(source):
        return Path(source)
    patterns = ["config.json", "model*.safetensors"]
    with asking_hub(f"{source}: no such folder") as hub:
        return Path(hub.snapshot_download(source, allow_patterns=patterns))


def check_architecture(path, config):
    """Fails if any setting would make it another model than plain GPT-2."""
    # A missing key means transformers' default, which is among the values of each.
    allowed = {
        "model_type": ("gpt2",),
        "activation_function": ACTIVATIONS,
        "layer_norm_epsilon": (1e-5,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    for key, values in allowed.items():
        if key in config and config[key] not in values:
            raise Fail(
                f"{path}: {key}: expected {values[0]}, found {config[key]}; "
                "only plain GPT-2 can be converted"
            )


def check_sizes(path, config):
    for key in SIZES:
        if type(config.get(key)) is not int or not 1 <= config[key] < 2**31:
            raise Fail(
                f"{path}: {key}: expected a positive integer, found {config.get(key)!r}; "
                "get the file again"
            )
    n_embd = config["n_embd"]
    if n_embd % config["n_head"]:
        raise Fail(
            f"{path}: n_embd: expected a multiple of n_head = {config['n_head']}, "
            f"found {n_embd}; get the file again"
        )
    n_inner = config.get("n_inner")
    if n_inner not in (None, 4 * n_embd):
        raise Fail(
            f"{path}: n_inner: expected {4 * n_embd}, found {n_inner}; "
            "only plain GPT-2 can be converted"
        )


def check_end_of_text(path, config):
    """Our file does not say which token begins and ends a text: the program infers it from the
    vocabulary's size. Many configurations name GPT-2's token whatever the size, so it is allowed,
    too."""
    known = (END_OF_TEXT, end_of_text(config))
    for key in "bos_token_id", "eos_token_id":
        found = config.get(key)
        if found is None or (type(found) is int and found in known):
            continue
        expected = end_of_text(config) or END_OF_TEXT
        raise Fail(
            f"{path}: {key}: expected {expected}, found {found!r}; ./train_gpt2cu would begin and "
            "end texts with another token, so give a model that has GPT-2's tokens"
        )


def read_config(path):
    check_fetched(path)
    with reading(path):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    check_architecture(path, config)
    check_sizes(path, config)
    check_end_of_text(path, config)
    return config


def read_tensors(folder, config):
    """name → (type, shape, bytes). Fails unless these are exactly GPT-2's tensors."""
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        files = sorted(folder.glob("model-*.safetensors"))  # a large model, in several files
    if not files:
        raise Fail(
            f"{folder}: no model.safetensors; write it with save_pretrained() of transformers"
        )
    found = {}
    for file in files:
        check_fetched(file)
        more = read_safetensors(file)
        twice = more.keys() & found.keys()
        if twice:
            raise Fail(f"{file}: tensor {min(twice)} is stored twice; get the folder again")
        found.update(more)

    check_tensors(folder, config, found)
    return found


def check_tensors(folder, config, found):
    # Before tensors() makes a list of as many layers as a damaged config.json claims.
    if config["n_layer"] > len(found):
        raise Fail(f"{folder}: fewer tensors than the n_layer of config.json; get the folder again")

    wanted = dict(tensors(config))
    for name, shape in wanted.items():
        expected = shape[::-1] if is_conv1d(name) else shape
        dtype, found_shape, _ = found.get(name, ("none", "none", None))
        if dtype not in NUMPY_TYPE or found_shape != expected:
            raise Fail(
                f"{folder}: tensor {name}: expected F32, F16 or BF16 of shape {expected}, "
                f"found {dtype} of {found_shape}; get the folder again"
            )

    for name, (dtype, shape, data) in found.items():
        is_causal_mask = re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name)
        if name == "lm_head.weight":  # old versions of transformers store it; tied, it equals wte
            wte_type, wte_shape, wte = found["wte.weight"]
            is_same_type = dtype == wte_type and shape == wte_shape
            if not is_same_type or not np.array_equal(data, wte):
                raise Fail(
                    f"{folder}: lm_head.weight differs from wte.weight; "
                    "only tied embeddings can be converted"
                )
        elif name not in wanted and not is_causal_mask:
            raise Fail(
                f"{folder}: tensor {name} is not part of the GPT-2 that config.json describes; "
                "only plain GPT-2 can be converted"
            )


def import_model(source, out, want):
    """Writes the checkpoint `out` with the type `want`, or with the source's type if it is None.
    Returns configuration and type."""
    folder = find_folder(source)
    config = read_config(folder / "config.json")
    found = read_tensors(folder, config)
    if want is None:
        is_bf16 = all(found[name][0] == "BF16" for name, _ in tensors(config))
        want = "BF16" if is_bf16 else "F32"
    padding = -config["vocab_size"] % 128

    def chunks():
        sizes = [config[key] for key in SIZES]
        header = np.zeros(HEADER_INTS, "<i4")
        header[:8] = [MAGIC, VERSION_OF_TYPE[want], *sizes, config["vocab_size"] + padding]
        yield header.data
        for name, _ in progress(iterable=tensors(config), unit=" tensors"):
            have, shape, data = found[name]
            yield convert(name, data.view(NUMPY_TYPE[have]).reshape(shape), have, want)
            if name == "wte.weight":
                yield bytes(padding * config["n_embd"] * ITEM_BYTES[want])

    write_file(out, chunks())
    return config, want


def newest_model(folder):
    """Like the trainer, chooses the largest step among the files that are named as checkpoints are,
    whether or not its state is there."""
    is_model = re.compile(r"model_([0-9]{8}|[1-9][0-9]{8,9})\.bin").fullmatch
    by_step = {int(found[1]): found[0] for found in map(is_model, os.listdir(folder)) if found}
    if not by_step:
        raise Fail(
            f"{folder}: has no checkpoint, such as model_00001000.bin; give a model file or the "
            "folder of a run"
        )
    return Path(folder, by_step[max(by_step)])


def read_model(path):
    """Reads our checkpoint, or a run's newest: sizes, rows of padding, type, and the parameters as
    one flat array."""
    if os.path.isdir(path):
        path = newest_model(path)
    check_fetched(path)
    header = np.fromfile(path, "<i4", HEADER_INTS)
    if header.size < HEADER_INTS or header[0] != MAGIC or header[1] not in TYPE_OF_VERSION:
        raise Fail(
            f"{path}: expected magic {MAGIC} and version 3 (fp32) or 5 (bf16), "
            f"found {header[:2].tolist()}; give a model file of ./train_gpt2cu or of llm.c "
            "(a model_….bin, not a state_….bin)"
        )
    dtype = TYPE_OF_VERSION[int(header[1])]
    config = dict(zip(SIZES, header[2:7].tolist()))
    padding = int(header[7]) - config["vocab_size"]
    size = os.path.getsize(path)
    if (
        min(config.values()) < 1
        or not 0 <= padding < 128
        or config["n_embd"] % config["n_head"] != 0
        or config["n_layer"] > size  # before tensors() makes a list of so many layers
    ):
        raise Fail(f"{path}: {DAMAGED} (sizes {config}, padded vocabulary {header[7]})")

    count = sum(math.prod(shape) for _, shape in tensors(config)) + padding * config["n_embd"]
    expected = header.nbytes + count * ITEM_BYTES[dtype]
    if size != expected:
        raise Fail(f"{path}: {DAMAGED} (expected {expected} bytes, found {size})")
    return config, padding, dtype, np.memmap(path, NUMPY_TYPE[dtype], "r", header.nbytes)


def byte_tokenizer(config, end_id):
    """The files {name: text} of a tokenizer whose tokens are single bytes, in GPT-2's order."""
    vocabulary = {SHOWN[byte]: id for id, byte in enumerate(BYTES)}
    vocabulary["<|endoftext|>"] = end_id
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["n_positions"],
    }
    return {
        "vocab.json": json.dumps(vocabulary),
        "merges.txt": "#version: 0.2\n",
        "tokenizer_config.json": json.dumps(settings),
    }


def safetensors_header(config, dtype):
    """The beginning of the file, up to the tensors."""
    entries = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, shape in tensors(config):
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries["transformer." + name] = {
            "dtype": dtype,
            "shape": shape[::-1] if is_conv1d(name) else shape,
            "data_offsets": [begin, end],
        }
        begin = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the data is aligned
    return len(header).to_bytes(8, "little") + header


def transformers_config(config, dtype, ends):
    """What config.json says."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **config,
        "n_inner": None,
        "activation_function": ACTIVATIONS[0],
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[dtype],
        **ends,
    }


def export_model(path, out, want, with_bytes):
    """Writes the folder `out` with the type `want`, or with the checkpoint's type if it is None.
    Returns configuration and type."""
    config, padding, have, parameters = read_model(path)
    want = want or have
    end_id = end_of_text(config)
    if with_bytes and end_id is None:
        raise Fail(
            f"{path}: no tokenizer for a vocabulary of {config['vocab_size']}; leave out --bytes"
        )
    with_bytes = with_bytes or config["vocab_size"] == BYTE_VOCABULARY

    def chunks():
        yield safetensors_header(config, want)
        begin = 0
        for name, shape in progress(iterable=tensors(config), unit=" tensors"):
            end = begin + math.prod(shape)
            yield convert(name, parameters[begin:end].reshape(shape), have, want)
            begin = end
            if name == "wte.weight":
                begin += padding * config["n_embd"]

    ends = {"bos_token_id": end_id, "eos_token_id": end_id}
    files = byte_tokenizer(config, end_id) if with_bytes else {}
    files["config.json"] = json.dumps(transformers_config(config, want, ends), indent=2)
    files["generation_config.json"] = json.dumps(ends)
    out.mkdir()
    for name, content in files.items():
        write_file(out / name, [content.encode()])
    write_file(out / "model.safetensors", chunks())
    if end_id is not None and not with_bytes:
        print(
            f"{out.name}: no tokenizer, and transformers would silently load an empty one; "
            'pass tokenizer="gpt2" to it, '
            "or export with --bytes if the model was trained without --tokenizer"
        )
    return config, want


def convert_model(a):
    """Writes the output whole or not at all, and returns its configuration and type."""
    if os.path.lexists(a.out):
        raise Fail(f"{a.out}: exists already; remove it or choose another name")
    want = TYPE_OF_PRECISION.get(a.precision)
    with tempfile.TemporaryDirectory(prefix=f"{a.out.name}.tmp.", dir=a.out.parent) as folder:
        made = Path(folder, a.out.name)
        if a.command == "import":
            config, dtype = import_model(a.source, made, want)
        else:
            config, dtype = export_model(a.source, made, want, a.bytes)
        os.rename(made, a.out)
    return config, dtype


@check_stdout()
def main():
    global np  # imported below, because --help works without numpy
    arg = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg.add_argument("command", choices=["import", "export"])
    arg.add_argument(
        "source",
        help="import: a folder, or the name of a model on the Hugging Face hub; "
        "export: a model file, or the folder of a run, whose newest checkpoint is taken",
    )
    arg.add_argument("out", type=Path, help="import: model file to write; export: folder to write")
    arg.add_argument(
        "--precision",
        choices=TYPE_OF_PRECISION,
        help="precision of the output (default: bf16 if the whole source is bf16, else fp32)",
    )
    arg.add_argument(
        "--bytes",
        action="store_true",
        help="export: add a tokenizer of single bytes, for a model that was trained without "
        "--tokenizer (default if the vocabulary has 257 tokens)",
    )
    a = arg.parse_args()
    if a.bytes and a.command == "import":
        arg.error("--bytes is for export only; an import reads no tokenizer")
    try:
        np = need("numpy")
        config, dtype = convert_model(a)
    except Fail as e:
        sys.exit(f"hf.py: {e}")
    except OSError as e:
        sys.exit(f"hf.py: {e.filename or a.out}: {e.strerror}")
    except KeyboardInterrupt:
        sys.exit(f"hf.py: interrupted; {a.out} was not written")
    print(f"{a.out}: {dtype}, " + ", ".join(f"{key} {config[key]}" for key in SIZES))


if __name__ == "__main__":
    main()
