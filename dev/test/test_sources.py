#!/usr/bin/env python3
"""What sources must look like.

A name has one meaning in a program, so what no header declares is static or in an unnamed
namespace: if two files define a type, template or inline function of the same name, no linker
reports it, and only one of them runs. And includes form a tree of rooms, so that a reader can stop
at any of them.
"""

import graphlib
import re
from pathlib import Path

from harness import ROOT, main, run

# Every room of the program, and the rooms besides itself that its files may include. A room is
# listed after all of these.
ROOMS = {
    "common": "",
    "cuda": "common",
    "data": "common",
    "layers/sm90": "common cuda",
    "attention": "common cuda data",
    "attention/ring": "common cuda attention",
    "layers": "common cuda layers/sm90 data attention",
    "layers/cpu": "common data attention attention/ring",
    "parallel": "common cuda data layers layers/cpu",
    "run": "common cuda data attention layers parallel",
    ".": "common parallel layers/cpu layers attention attention/ring run",
}
FILES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for room in ROOMS
    for path in sorted((ROOT / room).iterdir())
    if path.suffix in (".h", ".cuh", ".cu", ".cpp")
}
HEADERS = {name: text for name, text in FILES.items() if name.endswith("h")}
SOURCES = {
    name: text for name, text in FILES.items() if name not in HEADERS and "/" in name
}  # not the program's own
DECLARED = set(re.findall(r"\w+", re.sub(r"//[^\n]*", "", "\n".join(HEADERS.values()))))


def included(text):
    return re.findall(r'^#include "(.*)"', text, re.M)


def test_what_no_header_declares_is_static_or_in_an_unnamed_namespace():
    a_type = r"(?:struct|class|union|enum class|enum) (?:alignas.* )?(\w+)(?:.*\{.*|.*[^;])$"
    kernel = r"(__global__) void\W*\w*"  # never declared: its launcher is
    function = (
        r"(?!static |namespace |using |template )(?:\w[\w:<>*&, ]*[ *&])?"
        r"([\w:~]+)\([^;{}]*\)[^;{}]*\{"
    )
    defined = re.compile(f"^(?:{a_type}|{kernel}|{function})", re.M)
    found = 0
    for name, text in SOURCES.items():
        outside = re.sub(r"^namespace \{$.*?^\}  // namespace$", "", text, flags=re.S | re.M)
        everywhere, outside = (re.sub("//.*", "", part) for part in (text, outside))
        found += len(defined.findall(everywhere))
        # A member counts as its class.
        names = {"".join(match).split("::")[0] for match in defined.findall(outside)}
        assert names <= DECLARED - {"__global__"}, (
            f"{name}: neither static nor declared: {names - DECLARED}"
        )
    assert found > 300, found


def test_includes_form_a_tree():
    """Nothing of dev/ is in it, neither by a header nor in what make links."""
    before = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= before, room
        before.add(room)
    for name, text in FILES.items():
        room = str(Path(name).parent)
        for header in included(text):
            assert str(Path(header).parent) in (room, *ROOMS[room].split()), (
                f"{name} includes {header}"
            )
    # Raises an error if there is a cycle.
    graphlib.TopologicalSorter({name: included(text) for name, text in HEADERS.items()}).prepare()
    linked = re.findall(
        r"build/(\S+)\.o", run("make", "-n", "-B", "train_gpt2cu", "MAKEFLAGS=").stdout
    )
    rooms = {str(Path(name).parent) for name in linked}
    assert (
        rooms == {str(Path(name).parent) for name in [*SOURCES, "train_gpt2.cu"]}
        and len(linked) > 40
    ), rooms


if __name__ == "__main__":
    main()
