#!/usr/bin/env python3
"""GPT-2 from Hugging Face to this program and back, without loss.

    # A name on the hub, or a folder with config.json and safetensors files.
    python3 scripts/hf.py import openai-community/gpt2 gpt2.bin
    ./train_gpt2cu -e gpt2.bin -i 'data/train_*.bin'

    # The newest model_….bin of a run, for transformers; after --bytes without tokenizer=.
    python3 scripts/hf.py export run1 my-gpt2
    pipeline("text-generation", "my-gpt2", tokenizer="gpt2")("Once")

Needs: pip install -r scripts/requirements.txt. Only one tensor at a time is in memory.

The two formats differ: Hugging Face's Conv1D stores matrices as (in, out), ours are (out, in) and
stacked over the layers, and our wte is padded with rows of zeros to a multiple of 128. A model that
our program would compute differently is refused.
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

MAGIC, HEADER_INTS = 20240326, 256
BYTE_VOCABULARY = 257  # tokens of a model without merges: 256 bytes and <|endoftext|>
VERSIONS = {3: "F32", 5: "BF16"}  # of our file, and what safetensors calls the type
PRECISIONS = {"fp32": "F32", "bf16": "BF16"}
# In our header from index 2, then padded V.
SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
# What the program computes, by transformers' names. Exports have the first.
ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh")
STORAGE = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # bf16: its bits
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def tensors(c):
    """Every tensor in the order of our file: Hugging Face's name, and our shape without padding."""
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
        x = (x.astype("<u4") << 16).view("<f4") if have == "BF16" else x.astype("<f4")
        if want == "BF16":
            bits = x.view("<u4")
            # This sum could carry a NaN into infinity.
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            x = np.where(np.isnan(x), bits >> 16 | 0x40, rounded).astype("<u2")
    return np.ascontiguousarray(x.T if is_conv1d(name) else x).data


def read_safetensors(path):
    """name → (type, shape, bytes). The library only checks the file; it does not load the tensors,
    because numpy has no bf16."""
    with reading(path), need("safetensors").safe_open(path, "numpy"), open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        data = np.memmap(path, np.uint8, "r", 8 + length)
        found = {}
        for name, e in header.items():
            name = name.removeprefix("transformer.")
            if name in found:
                raise Fail(
                    f"{path}: tensor {name} is here twice, with and without the prefix "
                    "transformer.; get the file again"
                )
            found[name] = e["dtype"], tuple(e["shape"]), data[slice(*e["data_offsets"])]
        return found


def end_of_text(config):
    """The id of <|endoftext|>, which both begins and ends a text: known in GPT-2's vocabulary and
    in the one of single bytes."""
    if config["vocab_size"] == BYTE_VOCABULARY:
        return BYTE_VOCABULARY - 1
    return END_OF_TEXT if config["vocab_size"] > END_OF_TEXT else None


def find_folder(source):
    if os.path.exists(source):
        return Path(source)
    with asking_hub(f"{source}: no such folder") as hub:
        return Path(
            hub.snapshot_download(source, allow_patterns=["config.json", "model*.safetensors"])
        )


def read_config(path):
    check_fetched(path)
    with reading(path):
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    # A missing key means the library's default. Of the activation that is this one, whatever the
    # program computes.
    config.setdefault("activation_function", "gelu_new")
    # What would make it another model. The library's default of the other keys is the first here.
    allowed = {
        "model_type": ("gpt2",),
        "activation_function": ACTIVATIONS,
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * (config.get("n_embd") or 0)),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
    }
    for key, values in allowed.items():
        if config.get(key, values[0]) not in values:
            raise Fail(
                f"{path}: {key}: expected {values[0]}, found {config[key]}; "
                "only plain GPT-2 can be read"
            )
    for key in SIZES:
        if type(config.get(key)) is not int or not 1 <= config[key] < 2**31:
            raise Fail(
                f"{path}: {key}: expected a positive integer, found {config.get(key)!r}; "
                "get the file again"
            )
    if config["n_embd"] % config["n_head"]:
        raise Fail(
            f"{path}: n_embd: expected a multiple of n_head = {config['n_head']}, "
            f"found {config['n_embd']}"
        )
    # Our file does not say which token begins and ends a text: the program goes by the vocabulary's
    # size. A library's default is GPT-2's token, whatever the size.
    for key in "bos_token_id", "eos_token_id":
        found = config.get(key)
        if found is None or type(found) is int and found in (END_OF_TEXT, end_of_text(config)):
            continue
        expected = end_of_text(config) or END_OF_TEXT
        raise Fail(
            f"{path}: {key}: expected {expected}, found {found!r}; texts would begin and "
            "end with another token here, so give a model that has GPT-2's tokens"
        )
    return config


def read_tensors(folder, config):
    """Checked to be GPT-2's, all of them and no others: name → (storage type, shape, bytes)."""
    files = [folder / "model.safetensors"]
    if not files[0].exists():
        files = sorted(folder.glob("model-*.safetensors"))  # a large model, in several files
    if not files:
        raise Fail(
            f"{folder}: no model.safetensors; save_pretrained of the transformers library writes it"
        )
    found = {}
    for file in files:
        check_fetched(file)
        of_file = read_safetensors(file)
        if twice := of_file.keys() & found.keys():
            raise Fail(f"{file}: tensor {min(twice)} is here a second time; get the folder again")
        found.update(of_file)
    # Checked before tensors() makes a list of as many layers as a damaged config.json claims.
    if config["n_layer"] > len(found):
        raise Fail(f"{folder}: fewer tensors than the n_layer of config.json")
    wanted = dict(tensors(config))
    for name, shape in wanted.items():
        dtype, have, _ = found.get(name, ("none", "none", None))
        shape = shape[::-1] if is_conv1d(name) else shape
        if dtype not in STORAGE or have != shape:
            raise Fail(
                f"{folder}: tensor {name}: expected F32, F16 or BF16 of shape {shape}, "
                f"found {dtype} of {have}"
            )
    for name, tensor in found.items():
        is_causal_mask = re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name)
        if name == "lm_head.weight":  # of an older library; tied, it is wte
            wte = found["wte.weight"]
            if tensor[:2] != wte[:2] or not np.array_equal(tensor[2], wte[2]):
                raise Fail(
                    f"{folder}: lm_head.weight is not wte.weight; only tied embeddings can be read"
                )
        elif name not in wanted and not is_causal_mask:
            raise Fail(
                f"{folder}: tensor {name}: GPT-2 as config.json describes it has none of this name"
            )
    return found


def import_model(source, out, want, _):
    folder = find_folder(source)
    config = read_config(folder / "config.json")
    found = read_tensors(folder, config)
    want = want or (
        "BF16" if all(found[name][0] == "BF16" for name, _ in tensors(config)) else "F32"
    )
    version = next(v for v, dtype in VERSIONS.items() if dtype == want)
    padding = -config["vocab_size"] % 128

    def chunks():
        header = np.zeros(HEADER_INTS, "<i4")
        header[:8] = [
            MAGIC,
            version,
            *(config[key] for key in SIZES),
            config["vocab_size"] + padding,
        ]
        yield header.data
        for name, _ in progress(iterable=tensors(config), unit=" tensors"):
            have, shape, data = found[name]
            yield convert(name, data.view(STORAGE[have]).reshape(shape), have, want)
            if name == "wte.weight":
                yield bytes(padding * config["n_embd"] * ITEM_BYTES[want])

    write_file(out, chunks())
    return config, want


def newest_model(folder):
    """Follows the trainer's rule: of the files with a checkpoint's name, the one with the largest
    step, whether its state is there or not."""
    found = [
        re.fullmatch(r"model_([0-9]{8}|[1-9][0-9]{8,9})\.bin", name) for name in os.listdir(folder)
    ]
    if not any(found):
        raise Fail(
            f"{folder}: expected a file, or a folder with one such as model_00001000.bin; "
            "give a run's folder"
        )
    return Path(folder, max(filter(None, found), key=lambda name: int(name[1]))[0])


def read_model(path):
    """Reads our checkpoint, or a run's newest: sizes, rows of padding, storage type, and the
    parameters as one flat array."""
    path = newest_model(path) if os.path.isdir(path) else path
    check_fetched(path)
    header = np.fromfile(path, "<i4", HEADER_INTS)
    if header.size < HEADER_INTS or header[0] != MAGIC or header[1] not in VERSIONS:
        raise Fail(
            f"{path}: expected magic {MAGIC} and version 3 (fp32) or 5 (bf16), "
            f"found {header[:2].tolist()}; give a model checkpoint of this program or of llm.c "
            "(a model_….bin, not a state_….bin)"
        )
    config, dtype = dict(zip(SIZES, header[2:7].tolist())), VERSIONS[int(header[1])]
    padding = int(header[7]) - config["vocab_size"]
    size = os.path.getsize(path)
    if (
        min(config.values()) < 1
        or not 0 <= padding < 128
        or config["n_embd"] % config["n_head"]
        or config["n_layer"] > size
    ):
        raise Fail(f"{path}: {DAMAGED}: {config}, padded vocabulary {header[7]}")
    count = sum(math.prod(shape) for _, shape in tensors(config)) + padding * config["n_embd"]
    if size != (expected := header.nbytes + count * ITEM_BYTES[dtype]):
        raise Fail(f"{path}: {DAMAGED}: expected {expected} bytes, found {size}")
    return config, padding, dtype, np.memmap(path, STORAGE[dtype], "r", header.nbytes)


def byte_tokenizer(config, end):
    """{name: text} of a tokenizer whose tokens are single bytes, in GPT-2's order."""
    vocabulary = {**{SHOWN[byte]: id for id, byte in enumerate(BYTES)}, "<|endoftext|>": end}
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


def export_model(path, out, want, of_bytes):
    config, padding, have, parameters = read_model(path)
    want = want or have
    end = end_of_text(config)
    ends = {"bos_token_id": end, "eos_token_id": end}
    if of_bytes and not end:
        raise Fail(
            f"{path}: no tokenizer for a vocabulary of {config['vocab_size']}; leave out --bytes"
        )
    is_of_bytes = of_bytes or config["vocab_size"] == BYTE_VOCABULARY
    files = byte_tokenizer(config, end) if is_of_bytes else {}
    header, position = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in tensors(config):
        behind = position + math.prod(shape) * ITEM_BYTES[want]
        shape = shape[::-1] if is_conv1d(name) else shape
        header["transformer." + name] = {
            "dtype": want,
            "shape": shape,
            "data_offsets": [position, behind],
        }
        position = behind
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)  # the data begins aligned

    def chunks():
        yield len(header).to_bytes(8, "little") + header
        at = 0
        for name, shape in progress(iterable=tensors(config), unit=" tensors"):
            yield convert(name, parameters[at : at + math.prod(shape)].reshape(shape), have, want)
            at += math.prod(shape) + (padding * config["n_embd"] if name == "wte.weight" else 0)

    model = {
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
        "torch_dtype": {"F32": "float32", "BF16": "bfloat16"}[want],
        **ends,
    }
    files.update(
        {"config.json": json.dumps(model, indent=2), "generation_config.json": json.dumps(ends)}
    )
    out.mkdir()
    for name, content in files.items():
        write_file(out / name, [content.encode()])
    write_file(out / "model.safetensors", chunks())
    if end and not is_of_bytes:
        print(
            f"{out.name}: no tokenizer, and transformers loads an empty one without an error; "
            'give it tokenizer="gpt2", '
            "or export with --bytes if the model was trained without --tokenizer"
        )
    return config, want


@check_stdout()
def main():
    global np  # --help needs none
    arg = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arg.add_argument("command", choices=["import", "export"])
    arg.add_argument(
        "source", help="import: folder or name on the hub; export: a checkpoint, or a run's folder"
    )
    arg.add_argument("out", type=Path, help="import: checkpoint to write; export: folder to write")
    arg.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="of the output; default: bf16 if all of the source is, else fp32",
    )
    arg.add_argument(
        "--bytes",
        action="store_true",
        help="export: with a tokenizer of single bytes, for a model that "
        "was trained without --tokenizer; default: if the vocabulary has 257 tokens",
    )
    a = arg.parse_args()
    if a.bytes and a.command == "import":
        arg.error("--bytes belongs to export; an import has the weights alone")
    try:
        np = need("numpy")
        if os.path.lexists(a.out):
            raise Fail(f"{a.out}: exists already; remove it or choose another name")
        convert_model = import_model if a.command == "import" else export_model
        with tempfile.TemporaryDirectory(prefix=f"{a.out.name}.tmp.", dir=a.out.parent) as folder:
            made = Path(folder, a.out.name)
            config, dtype = convert_model(a.source, made, PRECISIONS.get(a.precision), a.bytes)
            os.rename(made, a.out)
    except Fail as e:
        sys.exit(f"hf.py: {e}")
    except OSError as e:
        sys.exit(f"hf.py: {e.filename or a.out}: {e.strerror}")
    except KeyboardInterrupt:
        sys.exit(f"hf.py: interrupted; {a.out} is not written")
    print(f"{a.out}: {dtype}, " + ", ".join(f"{key} {config[key]}" for key in SIZES))


if __name__ == "__main__":
    main()
