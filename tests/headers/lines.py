"""lines.py ROOT: every source file below ROOT has at most 400 lines; build trees are left out.

Longer ones are named, with how many lines they have.
"""
import os
import pathlib
import sys

MOST_LINES = 400
SUFFIXES = {".hpp", ".ipp", ".h", ".cuh", ".cpp", ".cu", ".c", ".py", ".sh", ".cmake"}
FOLDERS = ["include", "examples", "tests", "benchmarks", "cmake"]
MACROS = '#include "plait/core/macros_off.hpp"'  # a header that includes it has three lines more: see floors.py


def sources(root: pathlib.Path):
    """The source files of the tree; build trees are left out."""
    for folder in FOLDERS:
        for path, folders, names in os.walk(root / folder):
            folders[:] = sorted(f for f in folders if not f.startswith("build"))
            for name in sorted(names):
                file = pathlib.Path(path) / name
                if file.suffix in SUFFIXES or name == "CMakeLists.txt":
                    yield file
    yield from sorted(root.glob("CMakeLists.txt"))


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    seen = longer = 0
    for file in sources(root):
        text = file.read_text(encoding="utf-8")
        lines = text.count("\n") - (3 if MACROS in text else 0)
        seen += 1
        if lines > MOST_LINES:
            longer += 1
            print(f"{file.relative_to(root).as_posix()}: {lines} lines; at most {MOST_LINES} are legal: split it by idea")
    print(f"{seen} files, {longer} over {MOST_LINES} lines")
    return 1 if longer or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
