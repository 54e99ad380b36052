#!/usr/bin/env python3
"""Writes HellaSwag (questions of a context and four endings, one of which is right) in llm.c's
format for multiple-choice evaluation.

  header:   256 int32: magic 20240522, version 1, number of examples, bytes of the longest example
  example:  uint16 each, little endian:
            65535, bytes of the whole example, its index, index of the right ending,
            number of endings, number of tokens of the context, those tokens,
            and for each ending: number of tokens, the tokens

Endings are tokenised with a space before them, as GPT-2 expects; there is no <|endoftext|>. The
ending whose tokens have the lowest mean loss counts as the model's answer."""

import argparse
import array
import shlex
import struct
from pathlib import Path

from prepare_common import (
    CACHE,
    Fail,
    add_ranks_options,
    check_fetched,
    check_stdout,
    download,
    encodable,
    json_lines,
    load_ranks,
    make_encoding,
    progress,
    run,
    write_file,
    write_tokenizer,
)

MAGIC = 20240522
START_EXAMPLE = 65535
URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{}.jsonl"
# The splits whose right endings are public.
SHA256 = {
    "train": "dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d",
    "val": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
}


def encode_example(encoding, where, index, example):
    """The example in the file's format. `where` says in an error which one it is."""
    try:
        context = example["ctx"]
        endings = example["endings"]
        label = int(str(example["label"]))
        if not context or not isinstance(endings, list) or not 0 <= label < len(endings) <= 64:
            raise ValueError
        texts = [context] + [" " + ending for ending in endings]
        parts = [encoding.encode_ordinary(encodable(text)) for text in texts]
    except (KeyError, TypeError, ValueError):
        raise Fail(
            f"{where}: expected text in ctx, 1 to 64 texts in endings, and the index of one of "
            "them in label, which the test split does not have; give val or train"
        ) from None

    stream = [START_EXAMPLE, 0, index, label, len(endings)]  # 0 stands for the size
    for tokens in parts:
        stream += [len(tokens), *tokens]
    size = 2 * len(stream)
    if size > 65535 or index > 65535:
        raise Fail(
            f"{where}: expected at most 65535 bytes per example and 65536 examples, "
            f"found {size} bytes in example {index}; give a smaller file"
        )
    stream[1] = size
    return array.array("H", stream)


def convert(args):
    check_fetched(args.source)
    ranks = load_ranks(args)
    encoding = make_encoding(ranks)
    path = args.source
    if path in SHA256:
        path = download(URL.format(path), SHA256[path])

    examples = []
    for offset, example in progress(iterable=json_lines(path), unit=" examples"):
        where = f"{path}: example at offset {offset}"
        examples.append(encode_example(encoding, where, len(examples), example))
    if not examples:
        raise Fail(f"{path}: no examples: expected one object per line; get the file again")
    longest = max(2 * len(example) for example in examples)

    header = struct.pack("<256i", MAGIC, 1, len(examples), longest, *[0] * 252)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_file(args.output, [header, *examples])
    write_tokenizer(args.output.parent / "gpt2_tokenizer.bin", ranks)
    print(f"{args.output}: {len(examples):,} examples, the longest of {longest:,} bytes")
    print(f"./train_gpt2cu ... --hellaswag {shlex.quote(str(args.output))}")


@check_stdout()
def main():
    parser = argparse.ArgumentParser(
        description="Writes the multiple-choice questions of HellaSwag in llm.c's format, for "
        "./train_gpt2cu --hellaswag. "
        "Needs: pip install -r scripts/requirements.txt"
    )
    parser.add_argument(
        "source",
        nargs="?",
        default="val",
        help="val or train, to download that split, or a .jsonl file (default: val)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: data/cache/hellaswag/hellaswag_NAME.bin)",
    )
    add_ranks_options(parser)
    args = parser.parse_args()
    if args.source not in SHA256 and not args.source.endswith(".jsonl"):
        parser.error(f"{args.source}: expected val, train or a .jsonl file")
    name = "hellaswag_" + Path(args.source).stem.replace("hellaswag_", "")
    args.output = args.output or CACHE / "hellaswag" / f"{name}.bin"
    run(convert, args)


if __name__ == "__main__":
    main()
