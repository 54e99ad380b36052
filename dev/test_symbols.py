#!/usr/bin/env python3
"""One name, one meaning in a program: what no header declares is static or in an unnamed namespace. If two files define
a type or function of the same name, it is undefined which of them runs, and no linker reports it.

    make train_gpt2cu && python3 dev/test_symbols.py
"""
import pathlib
import re
import subprocess

from harness import Skip, main

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("attention", "layers", "data")


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


if __name__ == "__main__":
    main()
