"""Bugs put into a program that was made parallel: each must be refused by the compiler or at run time, or named by the
comparison of two runs.

    ports.py write BUGS.txt --source DIR --out FILE.inc        writes the include file of the program for run-time bugs
    ports.py check BUGS.txt --source DIR --compiler CLANG --scratch FILE.cpp --program FILE [OPTION...]

BUGS.txt names the program, and has a section for each bug:

    program: FILE
    == NAME
    # what is wrong
    -TEXT                a text that occurs exactly once in the program, and
    +TEXT                its replacement; several lines are one text, and a bug may have several such pairs
    compile: TEXT        the error of the compiler, or
    run: TEXT            the error of the program on several ranks, or
    kit: TEXT            the result of compare_runs for the correct program on one rank and the bug on several

The section `recorded` has no such line: it adds the calls of testing/program_record.hpp to programs of `kit`.

All bugs for the compiler are compiled as one file, each in its own namespace, and so are all others: headers are read
once. An error belongs to the bug whose lines it names.
"""
import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys

KINDS = ("compile", "run", "kit")


@dataclasses.dataclass
class Bug:
    name: str
    changes: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    kind: str = ""
    text: str = ""


def read(path: pathlib.Path) -> tuple[str, list[Bug]]:
    program, bugs, before = "", [], ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        key, _, rest = line.partition(": ")
        if key == "program":
            program = rest
        elif line.startswith("== "):
            bugs.append(Bug(line[3:]))
        elif line.startswith(("-", "+")):
            if line[0] == "-" and before != "-":
                bugs[-1].changes.append(("", ""))
            old, new = bugs[-1].changes[-1]
            text = line[1:] + "\n"
            bugs[-1].changes[-1] = (old + text, new) if line[0] == "-" else (old, new + text)
        elif key in KINDS:
            bugs[-1].kind, bugs[-1].text = key, rest
        elif line and not line.startswith("#"):
            sys.exit(f"{path}:{number}: '{line}' is no line of a bug")
        before = line[:1]
    for bug in bugs:
        if not bug.changes or (bug.kind == "") != (bug.name == "recorded"):
            sys.exit(f"{path}: '{bug.name}' changes nothing, or lacks what must happen")
    return program, bugs


def changed(text: str, bug: Bug) -> str:
    for old, new in bug.changes:
        old, new = old.removesuffix("\n"), new.removesuffix("\n")
        if text.count(old) != 1:
            sys.exit(f"'{bug.name}': the program has this text {text.count(old)} times, and not once: {old}")
        text = text.replace(old, new)
    return text


def in_namespace(name: str, text: str) -> str:
    return f'namespace {name} {{\n#line 1 "{name}"\n{text}\n}}\n'


def programs(path: pathlib.Path, source: pathlib.Path, kinds: tuple[str, ...]) -> tuple[list[Bug], str]:
    """The bugs of these kinds, and their programs, after the program as it is."""
    program, bugs = read(path)
    right = (source / program).read_text()
    recorded = next((bug for bug in bugs if bug.name == "recorded"), None)
    chosen = [bug for bug in bugs if bug.kind in kinds]
    whole = in_namespace("right", changed(right, recorded) if "kit" in kinds else right)
    for bug in chosen:
        text = changed(right, bug)
        whole += in_namespace(bug.name, changed(text, recorded) if bug.kind == "kit" else text)
    return chosen, whole


def write(arguments: argparse.Namespace) -> int:
    bugs, text = programs(arguments.bugs, arguments.source, ("run", "kit"))
    calls = "".join(f'{{"{bug.name}", {bug.name}::train}}, ' for bug in bugs)
    arguments.out.write_text(f"{text}constexpr ports::port<decltype(right::train)> bugs[] = {{{calls}}};\n")
    return 0


def plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub("[\u2018\u2019`]", "'", text))


def blocks_of(output: str) -> list[str]:
    """Each error with the notes that follow it."""
    return re.split(r"^(?=.*?: (?:fatal )?error: )", output, flags=re.MULTILINE)[1:]


def check_compiled(arguments: argparse.Namespace) -> list[str]:
    bugs, text = programs(arguments.bugs, arguments.source, ("compile",))
    header = arguments.bugs.resolve().with_suffix(".hpp")
    arguments.scratch.write_text(f'#include "{header}"\n#define main program\n{text}')
    command = [arguments.compiler, "-std=c++20", "-fsyntax-only", "-fno-color-diagnostics", "-fno-caret-diagnostics",
               "-ferror-limit=0", "-ftemplate-backtrace-limit=0", *arguments.options, str(arguments.scratch)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    found: dict[str, list[str]] = {}
    for block in blocks_of(done.stderr):
        lines = re.findall(r"^(\w+):\d+:\d+: ", block, flags=re.MULTILINE)
        found.setdefault(lines[-1] if lines else "", []).append(block)
    complaints = [f"an error is of no bug: {block}" for name in ("", "right") for block in found.get(name, [])]
    for bug in bugs:
        said = found.get(bug.name, [])
        if not said:
            complaints.append(f"{bug.name}: compiles, and was to be refused: {bug.text}")
        elif not any(bug.text in plain(block) for block in said):
            complaints.append(f"{bug.name}: no error holds: {bug.text}\n{''.join(said)}")
    return complaints


def check_run(arguments: argparse.Namespace) -> list[str]:
    _, bugs = read(arguments.bugs)
    done = subprocess.run([str(arguments.program)], capture_output=True, text=True, errors="replace")
    complaints = [] if done.returncode == 0 else [f"{arguments.program} ends with {done.returncode}: {done.stderr}"]
    said = dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
    for bug in bugs:
        line = said.get(bug.name, "nothing")
        if bug.kind in ("run", "kit") and not (line.startswith(bug.kind) and bug.text in line):
            complaints.append(f"{bug.name}: expected '{bug.kind}: {bug.text}', and there is: {line}")
    return complaints


def check(arguments: argparse.Namespace) -> int:
    complaints = check_compiled(arguments) + check_run(arguments)
    print("\n".join(complaints))
    return 1 if complaints else 0


def main() -> int:
    parser = argparse.ArgumentParser()
    calls = parser.add_subparsers(required=True)
    for name, call in (("write", write), ("check", check)):
        sub = calls.add_parser(name)
        sub.set_defaults(call=call)
        sub.add_argument("bugs", type=pathlib.Path)
        sub.add_argument("--source", type=pathlib.Path, required=True)
        if name == "write":
            sub.add_argument("--out", type=pathlib.Path, required=True)
        else:
            sub.add_argument("--compiler", required=True)
            sub.add_argument("--scratch", type=pathlib.Path, required=True)
            sub.add_argument("--program", type=pathlib.Path, required=True)
    arguments, arguments.options = parser.parse_known_args()
    return arguments.call(arguments)


if __name__ == "__main__":
    sys.exit(main())
