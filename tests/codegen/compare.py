"""compare.py --compiler C --include DIR FILE.cpp: the assembly of typed_X equals that of raw_X, for every pair.

Both are extern "C" functions of FILE.cpp, compiled with -O2. Labels are renamed in their order, and directives and
comments dropped. A function that the compiler merged with its twin (an alias, or only a jump to it) counts as equal. A line
`// include: DIR...` in FILE.cpp names further include folders, relative to FILE.cpp's folder.
"""
import argparse
import difflib
import pathlib
import re
import subprocess
import sys

FLAGS = ["-std=c++20", "-O2", "-DNDEBUG", "-S", "-o", "-", "-fno-asynchronous-unwind-tables", "-fcf-protection=none",
         "-fno-stack-protector", "-g0"]


def functions(assembly: str) -> dict[str, list[str]]:
    """Instructions of each function whose symbol begins with typed_ or raw_, by name."""
    found: dict[str, list[str]] = {}
    current = None
    for line in assembly.splitlines():
        line = re.sub(r"\s+#.*$", "", line).strip()
        label = re.match(r"^((?:typed|raw)_\w+):$", line)
        alias = re.match(r"^\.set\s+((?:typed|raw)_\w+),\s*(\S+)$", line)
        if label:
            current = label.group(1)
            found[current] = []
        elif alias:
            found[alias.group(1)] = [f"jmp {alias.group(2)}"]
        elif re.match(r"^\.size\s", line):
            current = None
        elif current and line and (not line.startswith(".") or line.endswith(":")):
            found[current].append(re.sub(r"\s+", " ", line))
    return found


def normalise(body: list[str]) -> list[str]:
    names: dict[str, str] = {}
    rename = lambda match: names.setdefault(match.group(0), f"L{len(names)}")
    # Labels that no jump names are removed: they do not describe the code.
    text = "\n".join(body)
    used = set(re.findall(r"\.L\w+(?!\w|:)", text))
    kept = [line for line in body if not (line.endswith(":") and line[:-1] not in used)]
    lines = [re.sub(r"\.L\w+", rename, line) for line in kept]
    # The operands of a test for equality may have either order.
    for at, line in enumerate(lines[:-1]):
        compare = re.match(r"(cmp\w?) (%\w+), (%\w+)$", line)
        if compare and re.match(r"jn?e ", lines[at + 1]):
            lines[at] = f"{compare.group(1)} {', '.join(sorted(compare.group(2, 3)))}"
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("source")
    arguments = parser.parse_args()
    source = pathlib.Path(arguments.source)
    line = re.search(r"^// include: (.+)$", source.read_text(), re.MULTILINE)
    folders = arguments.include + [str(source.parent / path) for path in (line.group(1).split() if line else [])]
    command = [arguments.compiler, *FLAGS, *[f"-I{path}" for path in folders], arguments.source]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    found = functions(run.stdout)
    names = sorted({name.split("_", 1)[1] for name in found})
    if not names:
        sys.exit(f"{arguments.source}: no functions named typed_X and raw_X")
    bad = 0
    for name in names:
        if f"typed_{name}" not in found or f"raw_{name}" not in found:
            print(f"{name}: typed_{name} and raw_{name} are not both there")
            bad += 1
            continue
        typed, raw = normalise(found[f"typed_{name}"]), normalise(found[f"raw_{name}"])
        merged = typed in ([f"jmp raw_{name}"], [f"jmp raw_{name}@PLT"]) or raw in (
            [f"jmp typed_{name}"], [f"jmp typed_{name}@PLT"])
        if typed == raw or merged:
            print(f"{name}: equal, {len(raw if typed != raw and len(raw) > 1 else typed)} lines")
            continue
        bad += 1
        print(f"{name}: different ({len(typed)} against {len(raw)} lines)")
        print("\n".join(difflib.unified_diff(raw, typed, f"raw_{name}", f"typed_{name}", lineterm="")))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
