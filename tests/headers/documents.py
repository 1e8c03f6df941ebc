"""documents.py ROOT: checks that the names in Markdown files exist: files of links, paths in backticks, tests, and
in commands programs, their options, files, presets and options of CMake.

The glossary has at most MOST_WORDS words, and include/ has each of its names; README's map has each folder of
include/plait. Names of tests are those of ctest, KIND.NAME, where KIND is a folder of tests/ and NAME one of its files or
variants; NAME may end in *.
"""
import pathlib
import re
import sys

KINDS = {"unit": "unit", "parity": "parity", "cuda": "cuda", "cuda_on_cpu": "cuda", "mpi": "mpi", "fail": "fail",
         "fuzz": "fuzz", "codegen": "codegen", "ports": "ports", "script": "scripts"}
BESIDE = {"include", "include/plait", "tests", "examples", "benchmarks"}  # paths start here, at the root, or at the file
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PATH = re.compile(r"`((?:[\w.]+/)+\w+\.(?:hpp|cpp|cu|h|py|sh|md|json|csv))`")
TEST = re.compile(r"`(%s)\.(\w+\*?)`" % "|".join(KINDS))
VARIANT = re.compile(r"^// variant: (\w+)", re.MULTILINE)
ADDED = re.compile(r"add_test\(NAME (\w+\.\w+)\s")  # tests added by name in a CMake file
SUFFIXES = {".cpp", ".cu", ".sh"}
CMAKE = re.compile(r"```cmake\n(.*?)```", re.DOTALL)
COMMANDS = re.compile(r"```sh\n(.*?)```|`(build/bin/[^`\n]+)`", re.DOTALL)
TARGET = re.compile(r"add_executable\((\w+)[\s)]")
FOLDERS = ("examples/", "tests/", "benchmarks/", "cmake/", "include/")
GLOSSARY = "examples/guide/README.md"
MOST_WORDS = 60
ROW = re.compile(r"^\| (?!word \|)([^|]+)\|([^|]+)\|([^|]+)\|$", re.MULTILINE)


def tests_of(folder: pathlib.Path) -> set[str]:
    """The names of the tests made from the files of a folder of tests/."""
    names = set()
    for file in folder.glob("**/*"):
        if file.suffix in SUFFIXES:
            # Names of tests for GPUs do not contain a folder.
            name = file.stem if folder.name == "cuda" else "_".join(file.relative_to(folder).with_suffix("").parts)
            names |= {name, *VARIANT.findall(file.read_text(encoding="utf-8"))}
    return names


def glossary_and_map(root: pathlib.Path) -> set[str]:
    """The errors in the glossary and in README's map of folders."""
    wrong = set()
    rows = ROW.findall((root / GLOSSARY).read_text(encoding="utf-8"))
    if not 1 <= len(rows) <= MOST_WORDS:
        wrong.add(f"{GLOSSARY}: has {len(rows)} words; 1 to {MOST_WORDS} are legal")
    code = " ".join(f.read_text(encoding="utf-8") for f in sorted((root / "include").glob("**/*.[hi]pp")))
    known = set(re.findall(r"\w+", code))
    for word, _, names in rows:
        for name in re.findall(r"`([\w:]+)`", names):
            if not set(name.split("::")) <= known:
                wrong.add(f"{GLOSSARY}: {word.strip()} is {name}, which include/ does not have")
    folders = {f.relative_to(root / "include/plait").parts[0] for f in (root / "include/plait").glob("*/**/*.hpp")}
    readme = (root / "README.md").read_text(encoding="utf-8")
    listed = {f for row in re.findall(r"^\| ((?:`\w+` )+)\|", readme, re.MULTILINE) for f in re.findall(r"\w+", row)}
    wrong |= {f"README.md: the map has no folder {f}" for f in folders - listed}
    return wrong


def anchors_of(document: pathlib.Path) -> set[str]:
    """The anchors that GitHub generates for the headings of a document."""
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


class Commands:
    """The names that commands in documents may use."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        examples = root / "examples"
        cmake = [root / "CMakeLists.txt", *root.glob("cmake/*.cmake"), *examples.glob("**/CMakeLists.txt")]
        self.cmake = "\n".join(file.read_text(encoding="utf-8") for file in cmake)
        self.presets = (root / "CMakePresets.json").read_text(encoding="utf-8")
        sources = [*examples.glob("**/*.[ch]pp"), *(root / "benchmarks").glob("**/*.[ch]pp")]
        self.sources = "\n".join(file.read_text(encoding="utf-8") for file in sources)
        self.programs = {*TARGET.findall(self.cmake), *(file.stem for file in examples.glob("*.cpp")),
                         *("guide_" + file.stem for file in (examples / "guide").glob("*.cpp")),
                         *("bench_" + file.stem for file in (root / "benchmarks").glob("*.cpp")),
                         *("cuda_mlp_" + file.stem for file in (examples / "cuda_mlp").glob("*.cu"))}

    def missing(self, command: str) -> list[str]:
        """The names in a command that do not exist."""
        wrong, words, program, targets = [], command.split(), "", False
        for before, word in zip(["", *words], words):
            if word.startswith("build/bin/"):
                program = word[len("build/bin/"):]
                if program not in self.programs:
                    wrong.append(word)
            elif program and word.startswith("--"):
                if not re.search(re.escape(word.split("=")[0]) + r"\b", self.sources):
                    wrong.append(f"{program} {word}")
            elif word.startswith("-DPLAIT_") and word[2:].split("=")[0] not in self.cmake:
                wrong.append(word)
            elif before == "--preset" and f'"name": "{word}"' not in self.presets:
                wrong.append(f"--preset {word}")
            elif targets and word not in self.programs:
                wrong.append(f"--target {word}")
            elif word.startswith(FOLDERS) and not (self.root / word).exists():
                wrong.append(word)
            targets = word == "--target" or targets and not program
        return wrong


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    known = {kind: tests_of(root / "tests" / folder) for kind, folder in KINDS.items()}
    cmake = [*root.glob("*/**/CMakeLists.txt"), *(root / "tests").glob("**/*.cmake")]
    added = {name for file in cmake for name in ADDED.findall(file.read_text(encoding="utf-8"))}
    documents = [root / "README.md", *(f for d in sorted(BESIDE) for f in sorted((root / d).glob("**/*.md")))]
    commands = Commands(root)
    seen, missing = 0, glossary_and_map(root)
    for document in documents:
        where = document.relative_to(root).as_posix()
        for name in re.findall(r"plait::\w+|PLAIT_\w+", "".join(CMAKE.findall(document.read_text(encoding="utf-8")))):
            seen += 1
            if name not in commands.cmake:
                missing.add(f"{where}: names {name}, which no CMake file has")
        for block, inline in COMMANDS.findall(document.read_text(encoding="utf-8")):
            for line in (block or inline).replace("\\\n", " ").splitlines():
                for command in re.sub(r"\s#.*", "", line).split(" && "):
                    seen += 1
                    missing |= {f"{where}: a command names {name}, which does not exist" for name in commands.missing(command)}
        text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link, anchor in LINK.findall(text):
            if "://" not in link:
                seen += 1
                there = document.parent / link if link else document
                if not there.exists():
                    missing.add(f"{where}: links to {link}, which does not exist")
                elif anchor and anchor not in anchors_of(there):
                    missing.add(f"{where}: links to {link}#{anchor}, a heading that does not exist")
        for path in PATH.findall(text):
            seen += 1
            if not any((folder / path).exists() for folder in (root, document.parent, *(root / b for b in BESIDE))):
                missing.add(f"{where}: names {path}, which does not exist")
        for kind, name in TEST.findall(text):
            seen += 1
            found = any(n.startswith(name[:-1]) for n in known[kind]) if name.endswith("*") else name in known[kind]
            if not found and f"{kind}.{name}" not in added and name != "hpp":
                missing.add(f"{where}: names the test {kind}.{name}, and tests/{KINDS[kind]} has none of this name")
    for line in sorted(missing):
        print(line)
    print(f"{seen} names in {len(documents)} documents, {len(missing)} missing")
    return 1 if missing or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
