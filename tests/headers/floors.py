"""floors.py INCLUDE_ROOT: a header includes only from its own floor or below, is in no circle, and opens with a comment
of one to four lines that says what it is; files that the comment names exist. Comments begin with a subject, not with
"What" or "The same"; none has a word of WORDS, and a sentence has at most MOST_WORDS words. No text has an option
of a program, such as --mesh: an error names the field, and the program adds its option. The folders contain only headers
and sources. A header whose code has a word of core/macros_off.hpp includes that header itself: a program may include it
first, after macros of these names. A function has at most MOST_FUNCTION_LINES lines, from the line of its opening brace
to that of its closing one, and a folder at most MOST_FILES files.

The lowest floors include only the standard library.

Floors are the folders of include/plait, listed from the ground up.
"""
import pathlib
import re
import sys

FLOORS = ["core", "layout", "schedule", "io", "device", "kernels", "comm", "tensor", "deterministic", "nn", "parallel",
          "checkpoint", "plan", "models", "testing"]
STANDARD_ONLY = {"core", "layout", "schedule"}
MOST_OPENING_LINES = 4
MOST_WORDS = 25
MOST_FUNCTION_LINES = 60
MOST_FILES = 15
NAMED = re.compile(r"(?<![\w/.])((?:\w+/)+\w+\.(?:hpp|ipp|cpp|cu|py|sh|md))\b")  # paths of files
# Words in comments that leave the reader to guess who does what.
WORDS = re.compile(r"//.*\b(Next:|([Ll]ikewise|[Ww]hoever|goes on|is told|says so|so many|gives up|put off)\b)")
OPTION = re.compile(r'"[^"\n]*(?<![\w-])--[a-z][a-z-]+[^"\n]*"')  # an option of a program, in a text
COMMENT = re.compile(r"\s*///?<? ?(.*)")
SENTENCE_END = re.compile(r"(?<=[.:;!?]) ")
NO_SUBJECT = re.compile(r"///? (What|The same)\b")  # at the start of an opening comment or a docstring
PROTECTED = re.compile(r'^#pragma push_macro\("(\w+)"\)$', re.MULTILINE)
NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|^[ \t]*\#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])+'""", re.DOTALL | re.MULTILINE)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
NO_FUNCTION = re.compile(r"[^{]*\bPLAIT_\w+\(|(template\s*<.*?>\s*(requires.*?)?)?(namespace|class|struct|union|enum|extern)\b", re.DOTALL)


def longest_function(text: str) -> tuple[int, int]:
    """The number of lines of the longest function, and the line where its body starts. A body starts with a brace
    after a parameter list, outside of other bodies."""
    empty = lambda match: re.sub(r"[^\n]+", " ", match.group(0))
    line, head, open_braces, longest = 1, "", [], (0, 0)
    for letter in NO_CODE.sub(empty, DIRECTIVE.sub(empty, text)):
        line += letter == "\n"
        if letter == "{":
            body = ")" in head and not NO_FUNCTION.match(head.strip()) and not any(b for b, _ in open_braces)
            open_braces.append((body, line))
        elif letter == "}" and open_braces:
            body, begin = open_braces.pop()
            if body:
                longest = max(longest, (line - begin + 1, begin))
        head = "" if letter in "{};" else head + letter
    return longest


def long_sentences(text: str) -> list[str]:
    """The sentences of comments that have more than MOST_WORDS words. An indented line or an empty one ends a sentence;
    a word has at least one letter."""
    blocks = [""]
    for line in text.split("\n"):
        found = COMMENT.fullmatch(line)
        if found is None or found.group(1) == "" or found.group(1).startswith("  "):
            blocks.append("")
        else:
            blocks[-1] += f" {found.group(1)}"
    sentences = [s for block in blocks for s in SENTENCE_END.split(block)]
    return [s.strip() for s in sentences if sum(bool(re.search("[A-Za-z]", w)) for w in s.split()) > MOST_WORDS]


def sizes(root: pathlib.Path) -> list[str]:
    """Complaints about long functions and large folders."""
    complaints = []
    folders: dict[str, int] = {}
    for file in sorted(root.glob("plait/*/**/*.*")):
        name = file.relative_to(root / "plait").as_posix()
        folder = name.rpartition("/")[0]
        folders[folder] = folders.get(folder, 0) + 1
        lines, begin = longest_function(file.read_text())
        if lines > MOST_FUNCTION_LINES:
            complaints.append(f"plait/{name}: the function whose body begins in line {begin} has {lines} lines; at most "
                              f"{MOST_FUNCTION_LINES} are legal: give its parts names")
    for folder, files in sorted(folders.items()):
        if files > MOST_FILES:
            complaints.append(f"plait/{folder}: has {files} files; at most {MOST_FILES} are legal: let files that make "
                              "one idea be one, or give some a folder of their own")
    return complaints


def floor_of(path: str) -> str | None:
    """The floor of a path such as plait/core/error.hpp; None for headers above all floors or below (version.hpp)."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else None


def circles(includes: dict[str, list[str]]) -> list[str]:
    """The first circle of includes, if there is one."""
    done, path = set(), []

    def walk(name: str) -> list[str]:
        if name in path:
            return [" -> ".join([*path[path.index(name):], name]) + ": a circle"]
        if name in done:
            return []
        path.append(name)
        found = next((c for c in map(walk, includes.get(name, [])) if c), [])
        path.pop()
        done.add(name)
        return found

    return next((c for c in map(walk, includes) if c), [])


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    complaints, seen, includes = [], 0, {}
    words = PROTECTED.findall((root / "plait/core/macros_off.hpp").read_text())
    word = re.compile(rf"\b({'|'.join(words)})\b") if words else re.compile(r"(?!)")
    for file in sorted(root.glob("**/*")):  # all of the folder is installed
        if file.is_file() and file.suffix not in {".hpp", ".h", ".ipp", ".cpp", ".cu"}:
            complaints.append(f"{file.relative_to(root).as_posix()}: no source")
    for file in sorted(f for ending in ("hpp", "h", "ipp") for f in root.glob(f"plait/**/*.{ending}")):
        name = file.relative_to(root).as_posix()
        floor = floor_of(name)
        seen += 1
        if floor is not None and floor not in FLOORS:
            complaints.append(f"{name}: the folder is no floor")
            continue
        text = file.read_text()
        macros = [text.count(f'#include "plait/core/macros_{which}.hpp"') for which in ("off", "on")]
        if macros[0] != macros[1]:
            complaints.append(f"{name}: includes core/macros_off.hpp and core/macros_on.hpp not as a pair")
        used = sorted(set(word.findall(NO_CODE.sub(" ", text))))
        if used and not macros[0]:
            complaints.append(f"{name}: has the words {', '.join(used)}, and does not include core/macros_off.hpp")
        opening = next((i for i, line in enumerate(text.split("\n")) if not line.startswith("// ")), 0)
        if not 1 <= opening <= MOST_OPENING_LINES:
            complaints.append(f"{name}: opens with {opening} lines of comment; 1 to {MOST_OPENING_LINES} are legal")
        for named in NAMED.findall("\n".join(text.split("\n")[:opening])):  # from plait/, or from the folder of include/
            if not any((folder / named).exists() for folder in (root / "plait", root, root.resolve().parent)):
                complaints.append(f"{name}: its comment names {named}, which does not exist")
        for line in text.split("\n"):
            if WORDS.search(line) or OPTION.search(line):
                complaints.append(f"{name}: has a word of WORDS or the option of a program: {line.strip()}")
        complaints += [f"{name}: a sentence with more than {MOST_WORDS} words: {s}" for s in long_sentences(text)]
        lines = [line.strip() for line in text.split("\n")]
        for before, line in zip(["", *lines], lines):
            if (line is lines[0] or line.startswith("///") and not before.startswith("///")) and NO_SUBJECT.match(line):
                complaints.append(f"{name}: a comment begins without a subject: {line}")
        for bracket, included in INCLUDE.findall(text):
            if bracket == '"' and (file.parent / included).exists():
                included = (file.parent / included).resolve().relative_to(root.resolve()).as_posix()
            if included.startswith("plait/"):
                includes.setdefault(name, []).append(included)
                if not (root / included).exists():
                    complaints.append(f"{name}: includes {included}, which does not exist")
                if floor is None or included == "plait/version.hpp":
                    continue
                target = floor_of(included)
                if target is None:
                    complaints.append(f"{name}: includes {included}, which stands above the floors")
                elif target in FLOORS and FLOORS.index(target) > FLOORS.index(floor):
                    complaints.append(f"{name} ({floor}): includes {included}, from the higher floor {target}")
            elif floor in STANDARD_ONLY and ("/" in included or included.endswith((".h", ".hpp"))):
                complaints.append(f"{name} ({floor}): includes {included}; this floor needs only the standard library")
        if name not in includes and name != "plait/version.hpp":
            complaints.append(f"{name}: includes no header of plait, so not version.hpp, which says what compilers it needs")
    complaints += circles(includes)
    complaints += sizes(root)
    for complaint in complaints:
        print(complaint)
    print(f"{seen} headers, {len(complaints)} complaints")
    return 1 if complaints or seen == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
