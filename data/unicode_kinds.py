#!/usr/bin/env python3
"""Prints data/unicode_kinds.txt: the kinds of all code points in order, run-length encoded, so that
L26 is 26 letters. L is a letter, N a number, S white space, O anything else. tiktoken uses Unicode
16.0, as does Python 3.14, so run this with Python 3.14."""

import itertools
import sys
import textwrap
import unicodedata

from prepare_common import check_stdout


def kind_of(code_point):
    character = chr(code_point)
    # Python counts U+001C to U+001F as white space, too; Unicode does not.
    if character.isspace() and not 0x1C <= code_point <= 0x1F:
        return "S"
    category = unicodedata.category(character)[0]
    return category if category in ("L", "N") else "O"


@check_stdout()
def main():
    kinds = map(kind_of, range(sys.maxunicode + 1))
    runs = [f"{kind}{len(list(run))}" for kind, run in itertools.groupby(kinds)]
    print("\n".join(textwrap.wrap(" ".join(runs), 120)))


if __name__ == "__main__":
    main()
