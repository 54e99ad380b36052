#!/usr/bin/env python3
"""What sources and objects must look like.

A name has one meaning in a program, so what no header declares is static or in an unnamed namespace. If two files
define a type or function of the same name, it is undefined which of them runs, and no linker reports it. And includes
form a tree of rooms, so that a reader can stop at any of them.

    make train_gpt2cu && python3 dev/test_symbols.py
"""
import graphlib
import os
import re
import subprocess

from harness import ROOT, Skip, main

# Every room of the program, and the rooms that its files may include besides it. The order makes a tree, because a room
# stands behind all that it includes.
ROOMS = {
    "layers/gpu": (),
    "data": ("layers/gpu",),
    "layers/sm90": ("layers/gpu",),
    "layers": ("layers/gpu", "layers/sm90", "data"),
    "attention": ("layers/gpu",),
    "attention/ring": ("layers/gpu", "attention"),
    "layers/cpu": ("layers/gpu", "attention", "attention/ring"),
    "layers/comm": ("layers/gpu", "layers/cpu"),
    "run": ("layers/gpu", "data", "attention", "attention/ring", "layers", "layers/comm"),
    ".": ("layers/comm", "layers", "attention", "attention/ring", "run"),
}


def files(*suffixes, rooms=tuple(ROOMS)[:-1]):
    """The texts of the rooms' files by name, except those of the program itself."""
    paths = [path for room in rooms for path in sorted((ROOT / room).iterdir()) if path.suffix in suffixes]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def included(text):
    return re.findall(r'^#include "(.*)"', text, re.M)


def declared():
    """Every word of the headers, without comments."""
    headers = files(".h", ".cuh")
    assert len(headers) > 20, headers
    return set(re.findall(r"\w+", re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(headers.values()), flags=re.S)))


def name_of(symbol):
    """What a demangled symbol is of, with its class: "void A::f<int>(B const&)" → "A::f"."""
    symbol = re.sub("operator.*", "operator", symbol.replace("(anonymous namespace)", "unnamed"))
    while re.search(r"<[^<>]*>|\[[^\[\]]*\]", symbol):
        symbol = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", "", symbol)
    return symbol.split("(")[0].split()[-1]


def test_symbols_of_objects_are_declared_in_headers():
    known, undeclared, found = declared(), [], 0
    objects = [ROOT / "build" / f"{os.path.splitext(name)[0]}.o" for name in files(".cu", ".cpp")]
    objects = [path for path in objects if path.exists()]
    if not objects:
        raise Skip("nothing is built")
    for path in objects:
        command = ["nm", "-C", "--defined-only", "--extern-only", path]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
            name = name_of(line.split(maxsplit=2)[2])
            if re.search(r"\bunnamed::|^std::|^(_|DW|vtable|typeinfo)|nvtx", name, re.I):  # the compiler's, the toolkit's
                continue
            found += 1
            if name.split("::")[0] not in known:  # of a member, its class
                undeclared.append(f"{path.relative_to(ROOT)}: {name}")
    assert found > 10 * len(objects), (found, len(objects))
    assert not undeclared, "neither in a header, static nor in an unnamed namespace:\n" + "\n".join(undeclared)


def test_types_and_kernels_are_in_unnamed_namespaces():
    """What no object shows: a type whose functions were inlined, a kernel that is a template."""
    known, wrong, found = declared(), [], 0
    for name, text in files(".cu", ".cpp").items():
        inside = False
        for number, line in enumerate(text.splitlines(), 1):
            if line in ("namespace {", "}  // namespace"):
                inside = line == "namespace {"
            thing = re.match(r"(?:struct|class|union|enum class|enum) (?:alignas\(.*\) )?(\w+)|(__global__ void)", line)
            if thing and ("{" in line or not line.endswith(";")):
                found += 1
                if not inside and thing[1] not in known:
                    wrong.append(f"{name}:{number}: {line}")
    assert found > 50, found
    assert not wrong, "neither in a header nor in an unnamed namespace:\n" + "\n".join(wrong)


def test_includes_form_a_tree():
    wrong, found, before = [], 0, set()
    for room, others in ROOMS.items():
        assert set(others) <= before, room
        before.add(room)
        for name, text in files(".h", ".cuh", ".cu", ".cpp", rooms=[room]).items():
            for header in included(text):
                found += 1
                if (os.path.dirname(header) or ".") not in (room, *others):
                    wrong.append(f"{name} includes {header}")
    assert found > 100, found
    assert not wrong, "\n".join(wrong)
    with_kernels = {str(path.relative_to(ROOT).parent) for path in ROOT.glob("[adlr]*/**/*.cu")} - {"dev"}
    assert with_kernels <= set(ROOMS), with_kernels


def test_headers_do_not_include_one_another_in_a_circle():
    graphlib.TopologicalSorter({name: included(text) for name, text in files(".h", ".cuh").items()}).prepare()


def test_program_has_nothing_of_dev():
    plan = subprocess.run(["make", "-n", "-B", "train_gpt2cu", "MAKEFLAGS="], cwd=ROOT, capture_output=True, text=True)
    built = re.findall(r"build/(\S+)\.o", plan.stdout)
    assert "train_gpt2" in built and len(built) > 40, plan.stdout[-500:] + plan.stderr
    assert not [name for name in built if name.startswith("dev/")], built


if __name__ == "__main__":
    main()
