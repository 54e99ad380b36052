#!/usr/bin/env python3
"""What sources and objects must look like.

A name has one meaning in a program, so what no header declares is static or in an unnamed namespace. If two files
define a type or function of the same name, no linker reports which of them runs. And includes form a tree of rooms, so
that a reader can stop at any of them.

    make train_gpt2cu && python3 dev/test_symbols.py
"""
import graphlib
import re
from pathlib import Path

from harness import ROOT, Skip, main, run

# Every room of the program, and the rooms that its files may include besides it. A room stands behind all of these.
ROOMS = {"layers/gpu": "", "data": "layers/gpu", "layers/sm90": "layers/gpu", "layers": "layers/gpu layers/sm90 data",
         "attention": "layers/gpu", "attention/ring": "layers/gpu attention",
         "layers/cpu": "layers/gpu attention attention/ring", "layers/comm": "layers/gpu layers/cpu",
         "run": "layers/gpu data attention layers layers/comm",
         ".": "layers/comm layers/cpu layers attention attention/ring run"}
FILES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for room in ROOMS for path in sorted((ROOT / room).iterdir()) if path.suffix in (".h", ".cuh", ".cu", ".cpp")}
HEADERS = {name: text for name, text in FILES.items() if name.endswith("h")}
SOURCES = {name: text for name, text in FILES.items() if name not in HEADERS and "/" in name}  # not the program's own
DECLARED = set(re.findall(r"\w+", re.sub(r"//[^\n]*", "", "\n".join(HEADERS.values()))))


def included(text):
    return re.findall(r'^#include "(.*)"', text, re.M)


def name_of(symbol):
    """What a demangled symbol is of, with its class: "void A::f<int>(B const&)" → "A::f"."""
    symbol = re.sub("operator.*", "operator", symbol.replace("(anonymous namespace)", "unnamed"))
    while re.search(r"<[^<>]*>|\[[^\[\]]*\]", symbol):
        symbol = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", "", symbol)
    return symbol.split("(")[0].split()[-1]


def test_symbols_of_objects_are_declared_in_headers():
    objects = [path for path in (ROOT / "build" / Path(name).with_suffix(".o") for name in SOURCES) if path.exists()]
    if not objects:
        raise Skip("nothing is built")
    lines = run("nm", "-C", "--defined-only", "--extern-only", *objects).stdout.splitlines()
    names = {name_of(line.split(maxsplit=2)[2]) for line in lines if re.match("[0-9a-f]+ ", line)}
    ours = {name for name in names  # not the compiler's nor the toolkit's
            if not re.search(r"\bunnamed::|^std::|^(_|DW|vtable|typeinfo)", name)}
    assert len(ours) > 100, ours
    undeclared = {name for name in ours if name.split("::")[0] not in DECLARED}  # of a member, its class
    assert not undeclared, f"neither in a header, static nor in an unnamed namespace: {undeclared}"


def test_types_and_kernels_are_in_unnamed_namespaces():
    """What no object shows: a type whose functions were inlined, a kernel that is a template."""
    thing = r"^(?:struct|class|union|enum class|enum) (?:alignas.* )?(\w+)(?:.*\{.*|.*[^;])$|^__global__ void\W*(\w*)"
    found = 0
    for name, text in SOURCES.items():
        found += len(re.findall(thing, text, re.M))
        outside = re.sub(r"^namespace \{$.*?^\}  // namespace$", "", text, flags=re.S | re.M)
        wrong = [a or b for a, b in re.findall(thing, outside, re.M) if b or a not in DECLARED]
        assert not wrong, f"{name}: neither in a header nor in an unnamed namespace: {wrong}"
    assert found > 50, found


def test_includes_form_a_tree():
    """Nothing of dev/ is in it, neither by a header nor in what make links."""
    before = set()
    for room, others in ROOMS.items():
        assert set(others.split()) <= before, room
        before.add(room)
    for name, text in FILES.items():
        room = str(Path(name).parent)
        for header in included(text):
            assert str(Path(header).parent) in (room, *ROOMS[room].split()), f"{name} includes {header}"
    graphlib.TopologicalSorter({name: included(text) for name, text in HEADERS.items()}).prepare()  # no circle
    linked = re.findall(r"build/(\S+)\.o", run("make", "-n", "-B", "train_gpt2cu", "MAKEFLAGS=").stdout)
    rooms = {str(Path(name).parent) for name in linked}
    assert rooms == {str(Path(name).parent) for name in [*SOURCES, "train_gpt2.cu"]} and len(linked) > 40, rooms


if __name__ == "__main__":
    main()
