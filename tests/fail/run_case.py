"""run_case.py --compiler C [--compiler C...] --include DIR [--precompiled DIR] CASE.cpp

A case is ill-formed code. Every compiler must refuse it with all the texts in its leading comments. It must compile with
-DPLAIT_FAIL_FIX, so another mistake in the file cannot make the test pass; fixed.py checks this for most cases, in one
file. Leading comments:

    // expect: TEXT            in the messages of every compiler
    // expect-gcc: TEXT        ... of g++ only
    // expect-clang: TEXT      ... of clang++ only
    // with-nvcc: yes          if nvcc is found, it must refuse the case too, with the texts of `expect`
    // errors-at-most: N       the maximum of errors: one for each mistake in the case
    // lines-at-most: N        the maximum of printed lines, including lines of source; by default 30 for each mistake

A file may have several cases. Each starts with this line, followed by the case's comments:

    // case: NAME

The lines before the first case are part of each case, and each case is compiled separately. Limits of a case override
those before the first case.

The first of the texts (with several mistakes, any of them) must be in the first 12 lines, and no message may mention
macros.

--precompiled names a folder with the precompiled layers.hpp, written by precompile.py.

g++ and clang first compile all cases of a file together, each in its own namespace, and a case's messages are those that
point into it. A case that fails so is compiled separately, which decides.

Before messages are compared, runs of white space become one blank and quotes become plain. Lines of source that compilers
print are not part of messages.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

LINES_AT_MOST, TEXT_WITHIN = 30, 12
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+([<"][^>"]+[>"])', re.MULTILINE)
ABOUT_LAYERS = re.compile(r'^#include "plait/(nn|train|models|tensor|pipeline)/', re.MULTILINE)
GCC_ECHO = re.compile(r"^\s*\d*\s*\|")
CLANG_MESSAGE = re.compile(r"^(\S+:\d+:\d+: |In file included from |\d+ (error|warning)s? )")
DIRECTIVE = re.compile(r"^//\s*(expect|expect-gcc|expect-clang|with-nvcc|errors-at-most|lines-at-most):\s*(.*?)\s*$")
CASE = re.compile(r"^// case: (\w+)\n", re.MULTILINE)
DECLARED = re.compile(r"^(?:struct|class|using) (\w+)", re.MULTILINE)
INSTANTIATED = re.compile(r"^template (?:class|struct) plait::[^;]*;", re.MULTILINE)
CLANG_COUNT = re.compile(r"^\d+ (?:error|warning)s?\b.* generated[.]$")
ERROR = re.compile(r"(?:^|\s)(?:fatal )?error: ")
BEGINS_MESSAGE = re.compile(r"^In file included from |^\S+: In |^\S+:\d+:\d+: (?:fatal )?(?:error|warning): ")


def cases_of(path: pathlib.Path) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """The name, the text and the directives of each case of a file. In a text, the lines of other cases are empty."""
    text = path.read_text()
    begins = [match.start() for match in CASE.finditer(text)]
    if not begins:
        return [(path.stem, text, directives(text))]
    head = text[:begins[0]]
    cases = []
    for begin, end in zip(begins, [*begins[1:], len(text)]):
        name = CASE.match(text, begin)[1]
        case = text[begin:end]
        empty = "\n" * text.count("\n", len(head), begin)
        cases.append((f"{path.stem}_{name}", head + empty + case, directives(case) + directives(head)))
    return cases


def directives(text: str) -> list[tuple[str, str]]:
    found = []
    for line in text.splitlines():
        if not line.startswith("//"):
            break
        match = DIRECTIVE.match(line)
        if match:
            found.append(match.groups())
    return found


def shares_a_file(text: str) -> bool:
    """Whether fixed.py compiles the corrected case in a namespace together with others: it must neither depend on macros
    before includes nor specialise plait's templates."""
    if re.search(r"^\s*#\s*(define|undef)\b|plait::(error_text|c::array)<", text, re.MULTILINE):
        return False
    condition = re.search(r"^\s*#\s*if", text, re.MULTILINE)
    includes = [match.start() for match in INCLUDE.finditer(text)]
    return not condition or all(at < condition.start() for at in includes)


def in_namespace(name: str, body: str) -> str:
    """The body in a namespace, except explicit instantiations of plait's templates, which C++ allows in no other namespace."""
    own = re.compile(r"\b(" + "|".join(DECLARED.findall(body) or ["$^"]) + r")\b")
    outside = INSTANTIATED.sub(lambda found: f"}} {own.sub(name + '::' + chr(92) + '1', found[0])} namespace {name} {{", body)
    return f"namespace {name} {{\n{outside}\n}}\n"


def shared_file(cases: list[tuple[pathlib.Path, str, str]]) -> str:
    """The text of a file that has all these cases (source, name, text), each in its own namespace."""
    included: dict[str, None] = {}  # in order, each once
    bodies = []
    for source, name, text in cases:
        included |= dict.fromkeys(INCLUDE.findall(text))
        bodies.append(in_namespace("case_" + re.sub(r"\W", "_", name), f'#line 1 "{source}"\n{INCLUDE.sub("", text)}'))
    head = "".join(f"#include {name}\n" for name in included) + "namespace plait {}\nusing namespace plait;\n"
    return head + "".join(bodies)


def plain(text: str) -> str:
    text = re.sub("[\u2018\u2019`]", "'", text)
    return re.sub(r"\s+", " ", text)


def is_clang(compiler: str) -> bool:
    return "clang" in os.path.basename(compiler)


def is_nvcc(compiler: str) -> bool:
    return "nvcc" in os.path.basename(compiler)


def without_echo(compiler: str, line: str) -> str:
    """The line, or "" if it is a line of source that the compiler prints with its message."""
    if is_nvcc(compiler):
        return line  # nvcc's own lines are few, and source lines that it prints have no mark
    echoed = not CLANG_MESSAGE.match(line) if is_clang(compiler) else GCC_ECHO.match(line)
    return "" if echoed else line


def base_command(compiler: str, include: list[str]) -> list[str]:
    colorless = "-fno-color-diagnostics" if is_clang(compiler) else "-fdiagnostics-color=never"
    every = ["-ferror-limit=0"] if is_clang(compiler) else []
    return [compiler, "-std=c++20", "-Wall", "-Wextra", colorless, *every, *[f"-I{directory}" for directory in include]]


def precompiled_at(compiler: str, folder: pathlib.Path) -> tuple[pathlib.Path, list[str]]:
    """The path of a compiler's precompiled header, and the options that include it before a file."""
    if is_clang(compiler):
        file = folder / "clang" / "layers.pch"
        return file, ["-include-pch", str(file)]
    return folder / "gcc" / "layers.hpp.gch", ["-Winvalid-pch", "-include", str(folder / "gcc" / "layers.hpp")]


def run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                          env={**os.environ, "LC_ALL": "C"})
    return done.returncode, done.stdout


def compile_case(compiler: str, include: list[str], source: pathlib.Path, text: str, fixed: bool,
                 precompiled: pathlib.Path | None) -> tuple[int, str]:
    if is_nvcc(compiler):
        command = [compiler, "-std=c++20", "-x", "cu", "-arch=sm_90", "-c", "-o", os.devnull]
        command += [f"-I{directory}" for directory in include]
    else:
        command = [*base_command(compiler, include), "-fsyntax-only"]
        if precompiled and ABOUT_LAYERS.search(text):
            command += precompiled_at(compiler, precompiled)[1]
    if fixed:
        command += ["-DPLAIT_FAIL_FIX"] + ([] if is_nvcc(compiler) else ["-Werror", "-Wno-unused"])
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / source.name
        file.write_text(text)
        return run([*command, f"-I{source.parent}", str(file)])


def texts_for(compiler: str, wanted: list[tuple[str, str]]) -> list[str]:
    """The texts that a case expects of a compiler."""
    mine = {"expect"} if is_nvcc(compiler) else {"expect", "expect-clang" if is_clang(compiler) else "expect-gcc"}
    return [text for key, text in wanted if key in mine]


def right_together(compiler: str, include: list[str], source: pathlib.Path,
                   cases: list[tuple[str, str, list[tuple[str, str]]]], precompiled: pathlib.Path | None) -> set[str]:
    """Compiles cases as one file. Returns the names of those whose messages are right; none if a message points into no
    case or into two."""
    together = shared_file([(source, name, text) for name, text, _ in cases])
    _, output = compile_case(compiler, include, source, together, False, precompiled)
    messages: list[list[str]] = [[]]
    for line in output.splitlines():
        if BEGINS_MESSAGE.match(line) and any(ERROR.search(other) for other in messages[-1]):
            messages.append([])
        if not CLANG_COUNT.match(line):
            messages[-1].append(line)
    case_at: dict[int, str] = {}  # by line; the cases share the lines before the first of them
    for name, text, _ in cases:
        for at, line in enumerate(text.splitlines(), 1):
            if line:
                case_at[at] = "" if at in case_at else name
    place = re.compile(re.escape(str(source)) + r":(\d+):")
    of_case: dict[str, list[str]] = {name: [] for name, _, _ in cases}
    for message in messages:
        owners = {case_at.get(int(at), "") for line in message for at in place.findall(line)} - {""}
        if len(owners) != 1:
            return set()
        of_case[owners.pop()] += [re.sub(r"\bcase_\w+::", "", line) for line in message]
    return {name for name, _, wanted in cases if of_case[name] and texts_for(compiler, wanted) and
            not judge(compiler, name, "\n".join(of_case[name]), texts_for(compiler, wanted), wanted)}


def check(compiler: str, include: list[str], source: pathlib.Path, case: tuple[str, str, list[tuple[str, str]]],
          precompiled: pathlib.Path | None) -> list[str]:
    name, text, wanted = case
    if is_nvcc(compiler) and ("with-nvcc", "yes") not in wanted:
        return []
    expected = texts_for(compiler, wanted)
    if not expected or not all(expected):
        return [f"{name}: the leading comments name no text to expect from {compiler}"]

    complaints = []
    alone = f'#line 1 "{source}"\n{text}'
    if is_nvcc(compiler) or not shares_a_file(text):
        code, output = compile_case(compiler, include, source, alone, True, precompiled)
        if code != 0:
            complaints.append(f"{compiler}: does not compile with -DPLAIT_FAIL_FIX:\n{output}")
    code, output = compile_case(compiler, include, source, alone, False, precompiled)
    if code == 0:
        return [*complaints, f"{compiler}: {name} compiles, and was to be refused"]
    return complaints + judge(compiler, name, output, expected, wanted)


def judge(compiler: str, name: str, output: str, expected: list[str], wanted: list[tuple[str, str]]) -> list[str]:
    """What is wrong with the messages of a case, given the texts that it expects and all its directives."""
    complaints = []
    printed = [without_echo(compiler, line) for line in output.splitlines()]
    messages = plain("\n".join(printed))
    complaints += [f"{compiler}: no message holds: {text}" for text in expected if plain(text) not in messages]
    limits = {key: int(value) for key, value in reversed(wanted) if key in {"errors-at-most", "lines-at-most"}}
    mistakes = limits.get("errors-at-most", 1)
    most_lines = limits.get("lines-at-most", LINES_AT_MOST * mistakes)
    errors = len(ERROR.findall(messages))
    if "errors-at-most" in limits and errors > mistakes:
        complaints.append(f"{compiler}: {errors} errors, and at most {mistakes} are wanted")
    if len(printed) > most_lines:
        complaints.append(f"{compiler}: {len(printed)} lines, and at most {most_lines} are wanted")
    head = plain("\n".join(printed[:TEXT_WITHIN]))
    if not any(plain(text) in head for text in (expected if mistakes > 1 else expected[:1])):
        complaints.append(f"{compiler}: the text is not within the first {TEXT_WITHIN} lines: {expected[0]}")
    if "in expansion of macro" in messages or "expanded from macro" in messages:
        complaints.append(f"{compiler}: the messages speak of macros")
    if complaints:
        complaints.append(f"what {compiler} said of {name}:\n{output}")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", action="append", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--precompiled", type=pathlib.Path)
    parser.add_argument("source", type=pathlib.Path)
    arguments = parser.parse_args()
    complaints = []
    for compiler in arguments.compiler:
        cases = cases_of(arguments.source)
        together = [] if is_nvcc(compiler) else [case for case in cases if shares_a_file(case[1])]
        right = set()
        if len(together) > 1:
            right = right_together(compiler, arguments.include, arguments.source, together, arguments.precompiled)
        for case in cases:
            if case[0] not in right:
                complaints += check(compiler, arguments.include, arguments.source, case, arguments.precompiled)
    print("\n".join(complaints))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
