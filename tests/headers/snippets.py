"""snippets.py ROOT: checks that every line of C++ and C in README and in the documents of examples/ is in a compiled file.

These files are the sources of tests and examples. Blocks with a compiler's message or another language are skipped.
Where the last cell of a row on the page of errors is a test, the test's file has the row's code: the text of the error,
and for a case of tests/fail also the wrong line and the right one. A case expects each error of a compiler that is shown.
"""
import pathlib
import re
import sys

SOURCES = {".cpp", ".cu", ".hpp", ".c", ".h"}
ERRORS = "examples/guide/14_checks.md"
ROW = re.compile(r"^\| (.*) \| `(fail|unit)\.(\w+)` \|$", re.MULTILINE)
SHOWN = re.compile(r"^error: static assertion failed: (.*)$", re.MULTILINE)
CODE = re.compile(r"`` (.*?) ``|`(.*?)`")


def plain(text: str) -> str:
    """The text with split literals joined, and with each run of white space as one blank."""
    return " ".join(re.sub(r'"\s*\n\s*"', "", text).split())


def chosen(text: str, which: int) -> str:
    """The text with the right (0) or the wrong (1) form of all types and values that tests/fail/if_fixed.hpp chooses."""
    while (start := text.find("if_fixed<")) >= 0:
        begin, depth, forms = start + len("if_fixed<"), 0, []
        for at in range(begin, len(text)):
            if depth == 0 and text[at] in ",>":
                forms.append(text[begin:at].strip())
                begin = at + 1
                if text[at] == ">":
                    break
            depth += {"<": 1, "(": 1, ">": -1, ")": -1}.get(text[at], 0)
        text = text[:start] + forms[which] + text[begin:]
    return re.sub(r"\bfixed \? (\w+) : (\w+)", lambda match: match.group(1 + which), text)


def errors(root: pathlib.Path) -> tuple[int, list[str]]:
    """The number of rows of the page of errors, and the parts of them that their tests do not have."""
    files = {}
    for kind in ("fail", "unit"):
        folder = root / "tests" / kind
        for file in folder.glob("**/*.cpp"):
            files[kind, "_".join(file.relative_to(folder).with_suffix("").parts)] = file
    rows, missing = ROW.findall((root / ERRORS).read_text(encoding="utf-8")), []
    for cells, kind, name in rows:
        file = files.get((kind, name))
        text = plain(file.read_text(encoding="utf-8")) if file else ""
        text = " ".join([text, chosen(text, 0), chosen(text, 1)])
        codes = [a or b for a, b in CODE.findall(cells)]
        for code in codes if kind == "fail" else codes[:1]:
            if plain(code) not in text:
                missing.append(f"{ERRORS}: {kind}.{name} has no '{code}'")
    return len(rows), missing


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    have = set()
    for folder in ("tests/unit", "tests/mpi", "tests/cuda", "examples"):
        for file in (root / folder).glob("**/*"):
            if file.suffix in SOURCES:
                have |= {' '.join(line.split()) for line in file.read_text(encoding="utf-8").splitlines()}
    missing, seen = [], 0
    documents = [root / "README.md", *sorted((root / "examples").glob("**/*.md"))]
    for document in documents:
        for block in re.findall(r"```c(?:pp)?\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
            for line in filter(str.strip, block.splitlines()):
                seen += 1
                if ' '.join(line.split()) not in have:
                    missing.append(f"{document.relative_to(root)}: {line.strip()}")
    rows, unlike = errors(root)
    cases = "\n".join(file.read_text(encoding="utf-8") for file in (root / "tests/fail").glob("*.cpp"))
    for document in documents:
        for text in SHOWN.findall(document.read_text(encoding="utf-8")):
            rows += 1
            if f"// expect: {text}" not in cases:
                unlike.append(f"{document.relative_to(root)}: no case of tests/fail expects '{text}'")
    for line in missing:
        print(f"in no source: {line}")
    for line in unlike:
        print(line)
    print(f"{seen} lines, {len(missing)} missing; {rows} errors, {len(unlike)} wrong")
    return 1 if missing or unlike or seen == 0 or rows == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
