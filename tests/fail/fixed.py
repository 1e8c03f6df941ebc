"""fixed.py --compiler C --include DIR --out FILE.cpp CASE.cpp...

Compiles all cases with -DPLAIT_FAIL_FIX as one file, each in its own namespace. This shows that a case is refused for its
mistake only, and that no other mistake in its file makes its test pass. run_case.py compiles the cases of macros.
"""
import argparse
import pathlib
import sys

from run_case import base_command, cases_of, run, shared_file, shares_a_file


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("cases", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    shared = [(source, name, text) for source in sorted(arguments.cases) for name, text, _ in cases_of(source)
              if shares_a_file(text)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(shared_file(shared))
    folder = str(arguments.cases[0].parent)
    command = [*base_command(arguments.compiler, [*arguments.include, folder]), "-fsyntax-only", "-DPLAIT_FAIL_FIX",
               "-Werror", "-Wno-unused"]
    code, output = run([*command, str(arguments.out)])
    print(output)
    return code


if __name__ == "__main__":
    sys.exit(main())
