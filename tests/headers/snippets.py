"""snippets.py ROOT: every line of C++ and C in README and in the documents of examples/ stands in a file that is compiled.

These are the tests' and the examples' sources. A block that shows a compiler's message or another language is left out.
"""
import pathlib
import re
import sys

SOURCES = {".cpp", ".cu", ".hpp", ".c", ".h"}


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    have = set()
    for folder in ("tests/unit", "tests/mpi", "tests/cuda", "examples"):
        for file in (root / folder).glob("**/*"):
            if file.suffix in SOURCES:
                have |= {' '.join(line.split()) for line in file.read_text(encoding="utf-8").splitlines()}
    missing, seen = [], 0
    for document in [root / "README.md", *sorted((root / "examples").glob("**/*.md"))]:
        for block in re.findall(r"```c(?:pp)?\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            for line in filter(str.strip, block.splitlines()):
                seen += 1
                if ' '.join(line.split()) not in have:
                    missing.append(f"{document.relative_to(root)}: {line.strip()}")
    for line in missing:
        print(f"in no source: {line}")
    print(f"{seen} lines, {len(missing)} missing")
    return 1 if missing or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
