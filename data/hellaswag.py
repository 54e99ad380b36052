#!/usr/bin/env python3
"""Writes HellaSwag (a context and four endings, one of them right) as llm.c's file for
multiple-choice evaluation.

  header:   256 int32: magic 20240522, version 1, number of examples, bytes of the longest example
  example:  uint16 each, little endian:
            65535, bytes of the whole example, its index, the right ending, number of endings,
            number of tokens of the context, the context,
            and for each ending: number of tokens, the tokens

Endings are tokenised with the space before them, as GPT-2 expects; there is no <|endoftext|>. A
model's answer is the ending whose tokens have the lowest mean loss."""

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

MAGIC, START_EXAMPLE = 20240522, 65535
URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{}.jsonl"
SHA256 = {  # of the splits whose right endings are public
    "train": "dae5e69249868cb9fe4e23ff925c60b66169564cfb7072d793cd7356a2b69f8d",
    "val": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588",
}


def encode_example(encoding, where, index, example):
    try:
        context, endings, label = example["ctx"], example["endings"], int(str(example["label"]))
        texts = [context] + [" " + ending for ending in endings]
        if not context or not isinstance(endings, list) or not 0 <= label < len(endings) <= 64:
            raise ValueError
        parts = [encoding.encode_ordinary(encodable(text)) for text in texts]
    except (KeyError, TypeError, ValueError):
        raise Fail(
            f"{where}: expected text in ctx, 1 to 64 endings of text, "
            "and the index of one as label (the test split has none); give val or train"
        ) from None
    stream = [START_EXAMPLE, 0, index, label, len(endings)]
    for tokens in parts:
        stream += [len(tokens), *tokens]
    stream[1] = 2 * len(stream)
    if stream[1] > 65535 or index > 65535:
        raise Fail(
            f"{where}: expected at most 65535 bytes an example and 65536 examples, "
            f"found {stream[1]} bytes in example {index}; give a smaller file"
        )
    return array.array("H", stream)


def convert(args):
    check_fetched(args.source)
    ranks = load_ranks(args)
    encoding = make_encoding(ranks)
    folder, path = args.output.parent, args.source
    if path in SHA256:
        path = download(URL.format(path), SHA256[path])
    examples = [
        encode_example(encoding, f"{path}: example at offset {at}", index, example)
        for index, (at, example) in enumerate(progress(iterable=json_lines(path), unit=" examples"))
    ]
    if not examples:
        raise Fail(f"{path}: no examples: expected an object a line; get the file again")
    longest = max(2 * len(example) for example in examples)
    header = struct.pack("<256i", MAGIC, 1, len(examples), longest, *[0] * 252)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(args.output, [header, *examples])
    write_tokenizer(folder / "gpt2_tokenizer.bin", ranks)
    print(
        f"{args.output}: {len(examples):,} examples, the longest of {longest:,} bytes\n"
        f"./train_gpt2cu ... --hellaswag {shlex.quote(str(args.output))}"
    )


@check_stdout()
def main():
    parser = argparse.ArgumentParser(
        description="Writes HellaSwag as llm.c's file for multiple-choice evaluation. "
        "Needs: pip install -r scripts/requirements.txt"
    )
    parser.add_argument(
        "source", nargs="?", default="val", help="val, train, or a .jsonl file (default: val)"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="default: data/cache/hellaswag/hellaswag_<name>.bin",
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
