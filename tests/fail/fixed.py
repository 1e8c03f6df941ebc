"""fixed.py --compiler C --include DIR --out FILE.cpp CASE.cpp...

Compiles all cases with -DPLAIT_FAIL_FIX as one file, each in its own namespace. This shows that a case is refused for its
mistake only, and that no other mistake in its file makes its test pass. run_case.py compiles the cases of macros.
"""
import argparse
import pathlib
import re
import sys

from run_case import INCLUDE, base_command, cases_of, run, shares_a_file


DECLARED = re.compile(r"^(?:struct|class|using) (\w+)", re.MULTILINE)
INSTANTIATED = re.compile(r"^template (?:class|struct) plait::[^;]*;", re.MULTILINE)


def in_namespace(name: str, body: str) -> str:
    """The body in a namespace, except explicit instantiations of plait's templates, which C++ allows in no other namespace."""
    own = re.compile(r"\b(" + "|".join(DECLARED.findall(body) or ["$^"]) + r")\b")
    outside = INSTANTIATED.sub(lambda found: f"}} {own.sub(name + '::' + chr(92) + '1', found[0])} namespace {name} {{", body)
    return f"namespace {name} {{\n{outside}\n}}\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("cases", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    included: dict[str, None] = {}  # in order, each once
    bodies = []
    for source in sorted(arguments.cases):
        for name, text, _ in cases_of(source):
            if not shares_a_file(text):
                continue
            included |= dict.fromkeys(INCLUDE.findall(text))
            body = f'#line 1 "{source}"\n{INCLUDE.sub("", text)}'
            bodies.append(in_namespace("fixed_" + re.sub(r"\W", "_", name), body))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    head = "".join(f"#include {name}\n" for name in included) + "namespace plait {}\nusing namespace plait;\n"
    arguments.out.write_text(head + "".join(bodies))
    folder = str(arguments.cases[0].parent)
    command = [*base_command(arguments.compiler, [*arguments.include, folder]), "-fsyntax-only", "-DPLAIT_FAIL_FIX",
               "-Werror", "-Wno-unused"]
    code, output = run([*command, str(arguments.out)])
    print(output)
    return code


if __name__ == "__main__":
    sys.exit(main())
