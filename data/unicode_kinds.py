#!/usr/bin/env python3
"""Writes data/unicode_kinds.txt: the kinds of all code points, in order, as runs of a kind and a
length. L is a letter, N a number, S white space, O anything else. tiktoken uses Unicode 16.0, as
does Python 3.14."""

import itertools
import textwrap
import unicodedata

from prepare_common import check_stdout


def kind(c):
    # Those four are white space to Python, but not to Unicode.
    space = chr(c).isspace() and not 0x1C <= c <= 0x1F
    return "S" if space else {"L": "L", "N": "N"}.get(unicodedata.category(chr(c))[0], "O")


@check_stdout()
def main():
    runs = ((kind, len(list(run))) for kind, run in itertools.groupby(map(kind, range(0x110000))))
    print(*textwrap.wrap(" ".join(f"{kind}{length}" for kind, length in runs), 120), sep="\n")


if __name__ == "__main__":
    main()
