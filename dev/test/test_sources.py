#!/usr/bin/env python3
"""Checks two rules of the sources.

What no header declares is static or in an unnamed namespace: if two files define a type, template
or inline function of the same name, no linker reports it, and only one of them is used.

Includes between rooms (folders) go one way, so that a reader can stop at any room.
"""

import graphlib
import re
from pathlib import Path

from harness import ROOT, main, run

# Every room of the program, and the other rooms that its files may include. A room comes after all
# the rooms that it includes.
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
HEADERS = {name: text for name, text in FILES.items() if name.endswith((".h", ".cuh"))}
PROGRAM = "train_gpt2.cu"
SOURCES = {name: text for name, text in FILES.items() if name not in HEADERS and name != PROGRAM}


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


# What stands for a kernel's name. It is never among the declared names, because headers declare
# only the functions that launch kernels.
KERNEL = "__global__"
# All words of all headers: a superset of the names that they declare.
DECLARED = set(re.findall(r"\w+", without_comments("\n".join(HEADERS.values())))) - {KERNEL}


def included(text):
    return re.findall(r'^#include "(.*)"', text, re.M)


def test_what_no_header_declares_is_static_or_in_an_unnamed_namespace():
    # Each pattern has one group, the name. A definition's first line has a { or does not end with ;
    a_type = r"(?:struct|class|union|enum class|enum) (?:alignas.* )?(\w+)(?:.*\{.*|.*[^;])$"
    kernel = rf"({KERNEL}) void\W*\w*"
    # A function's definition has a { after its parameters, and no ; before it.
    function = (
        r"(?!static |namespace |using |template )(?:\w[\w:<>*&, ]*[ *&])?"
        r"([\w:~]+)\([^;{}]*\)[^;{}]*\{"
    )
    defined = re.compile(f"^(?:{a_type}|{kernel}|{function})", re.M)
    found = 0
    for name, text in SOURCES.items():
        outside = re.sub(r"^namespace \{$.*?^\}  // namespace$", "", text, flags=re.S | re.M)
        found += len(defined.findall(without_comments(text)))
        matches = defined.findall(without_comments(outside))
        # Of a match's three groups one is not empty. A member function counts as its class.
        names = {"".join(match).split("::")[0] for match in matches}
        undeclared = names - DECLARED
        assert not undeclared, f"{name}: neither static nor declared: {undeclared}"
    assert found > 300, found


def room_of(name):
    return str(Path(name).parent)


def test_includes_go_one_way():
    """The program includes nothing of dev/, and make links nothing of it."""
    before = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= before, room
        before.add(room)
    for name, text in FILES.items():
        room = room_of(name)
        for header in included(text):
            assert room_of(header) in (room, *ROOMS[room].split()), f"{name} includes {header}"
    # Raises an error if headers include each other in a cycle.
    graphlib.TopologicalSorter({name: included(text) for name, text in HEADERS.items()}).prepare()

    commands = run("make", "-n", "-B", "train_gpt2cu", "MAKEFLAGS=").stdout
    linked = re.findall(r"build/(\S+)\.o", commands)
    assert len(linked) > 40, linked
    assert set(map(room_of, linked)) == set(map(room_of, [*SOURCES, PROGRAM])), linked


if __name__ == "__main__":
    main()
