#!/usr/bin/env python3
"""What sources and objects must look like.

One name, one meaning in a program: what no header declares is static or in an unnamed namespace. If two files define a
type or function of the same name, it is undefined which of them runs, and no linker reports it. And includes form a tree
of rooms: a reader can stop at any of them.

    make train_gpt2cu && python3 dev/test_symbols.py
"""
import pathlib
import re
import subprocess

from harness import Skip, main

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Every room of the program, and the rooms that its files may include besides it. The order makes a tree: a room stands
# behind all that it includes.
ROOMS = {
    "layers/gpu": (),
    "data": ("layers/gpu",),
    "layers/cpu": ("layers/gpu",),
    "layers/comm": ("layers/gpu", "layers/cpu"),
    "layers/sm90": ("layers/gpu",),
    "layers": ("layers/gpu", "layers/sm90", "data"),
    "attention": ("layers/gpu",),
    "attention/ring": ("layers/gpu", "attention"),
    "run": ("layers/gpu", "data", "attention", "layers", "layers/comm"),
    ".": ("layers/comm", "layers", "attention", "attention/ring", "run"),
}
FOLDERS = [room for room in ROOMS if room != "."]


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def headers():
    """Every word of the headers, without comments."""
    files = [f for folder in FOLDERS for f in (ROOT / folder).iterdir() if f.suffix in (".h", ".cuh")]
    assert len(files) > 20, files
    return set(re.findall(r"\w+", "".join(without_comments(f.read_text(encoding="utf-8")) for f in files)))


def name_of(symbol):
    """What a demangled symbol is of, with its class: "void A::f<int>(B const&)" → "A::f"."""
    symbol = re.sub("operator.*", "operator", symbol.replace("(anonymous namespace)", "unnamed"))
    while re.search(r"<[^<>]*>|\[[^\[\]]*\]", symbol):
        symbol = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", "", symbol)
    return symbol.split("(")[0].split()[-1]


def sources():
    return [f for folder in FOLDERS for f in sorted((ROOT / folder).iterdir()) if f.suffix in (".cu", ".cpp")]


def test_symbols_of_objects_are_declared_in_headers():
    declared, undeclared, found = headers(), [], 0
    objects = [o for o in (ROOT / "build" / f.relative_to(ROOT).with_suffix(".o") for f in sources()) if o.exists()]
    if not objects:
        raise Skip("nothing is built")
    for path in objects:
        listing = subprocess.run(["nm", "-C", "--defined-only", "--extern-only", path], capture_output=True, text=True,
                                 check=True).stdout
        for line in listing.splitlines():
            name = name_of(line.split(maxsplit=2)[2])
            if re.search(r"\bunnamed::|^std::|^(_|DW|vtable|typeinfo)", name):  # the last ones are the compiler's
                continue
            found += 1
            if name.split("::")[0] not in declared:  # of a member, its class
                undeclared.append(f"{path.relative_to(ROOT)}: {name}")
    assert found > 10 * len(objects), (found, len(objects))
    assert not undeclared, "neither in a header, static nor in an unnamed namespace:\n" + "\n".join(undeclared)


def test_types_and_kernels_are_in_unnamed_namespaces():
    """What no object shows: a type whose functions were inlined, a kernel that is a template."""
    declared, wrong, found = headers(), [], 0
    for path in sources():
        inside = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line == "namespace {" or line == "}  // namespace":
                inside = line == "namespace {"
            thing = re.match(r"(?:struct|class|union|enum class|enum) (?:alignas\(.*\) )?(\w+)|(__global__ void)", line)
            if thing and ("{" in line or not line.endswith(";")):
                found += 1
                if not inside and thing[1] not in declared:
                    wrong.append(f"{path.relative_to(ROOT)}:{number}: {line}")
    assert found > 50, found
    assert not wrong, "neither in a header nor in an unnamed namespace:\n" + "\n".join(wrong)


def test_includes_form_a_tree():
    wrong, found = [], 0
    for number, room in enumerate(ROOMS):
        assert set(ROOMS[room]) <= set(list(ROOMS)[:number]), room
        for path in sorted((ROOT / room).iterdir()):
            if path.suffix not in (".h", ".cuh", ".cu", ".cpp"):
                continue
            for included in re.findall(r'^#include "(.*)"', path.read_text(encoding="utf-8"), re.M):
                found += 1
                if str(pathlib.PurePath(included).parent) not in (room, *ROOMS[room]):
                    wrong.append(f"{path.relative_to(ROOT)} includes {included}")
    assert found > 100, found
    assert not wrong, "\n".join(wrong)
    rooms = {str(f.relative_to(ROOT).parent) for f in ROOT.glob("[adlr]*/**/*.cu")} - {"dev"}
    assert rooms <= set(ROOMS), rooms


def test_headers_do_not_include_one_another_in_a_circle():
    files = {str(f.relative_to(ROOT)): f for room in FOLDERS for f in (ROOT / room).iterdir() if f.suffix in (".h", ".cuh")}
    includes = {name: [i for i in re.findall(r'^#include "(.*)"', f.read_text(encoding="utf-8"), re.M) if i in files]
                for name, f in files.items()}
    while free := [name for name in includes if not any(i in includes for i in includes[name])]:
        for name in free:
            del includes[name]
    assert not includes, includes


def test_program_has_nothing_of_dev():
    plan = subprocess.run(["make", "-n", "-B", "train_gpt2cu", "MAKEFLAGS="], cwd=ROOT, capture_output=True, text=True)
    built = re.findall(r"build/(\S+)\.o", plan.stdout)
    assert "train_gpt2" in built and len(built) > 40, plan.stdout[-500:] + plan.stderr
    assert not [name for name in built if name.startswith("dev/")], built


if __name__ == "__main__":
    main()
