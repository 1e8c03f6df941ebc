"""snippets.py README.md TEST.cpp...: every line of the README's C++ and C stands in a test, so that what is shown is compiled.

Blocks that show a compiler's message or another language are left out.
"""
import re
import sys


def main() -> int:
    readme, *tests = (open(path, encoding="utf-8").read() for path in sys.argv[1:])
    have = {' '.join(line.split()) for test in tests for line in test.splitlines()}
    missing, seen = [], 0
    for block in re.findall(r"```c(?:pp)?\n(.*?)```", readme, re.DOTALL):
        for line in block.splitlines():
            if line.strip():
                seen += 1
                if ' '.join(line.split()) not in have:
                    missing.append(line.strip())
    for line in missing:
        print(f"in no test: {line}")
    print(f"{seen} lines, {len(missing)} missing")
    return 1 if missing or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
