"""self_test.py --compiler C: the runners of fail/, codegen/ and headers/ accept what is right and refuse what is wrong."""
import argparse
import pathlib
import subprocess
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parent.parent

MISTAKE = """#ifndef PLAIT_FAIL_FIX
static_assert(sizeof(int) == 1, "an int of one byte");
#endif
"""
PAIR = 'extern "C" int typed_f(int* p) { return %s; }\nextern "C" int raw_f(int* p) { return p[1] + p[2]; }\n'

FAIL_CASES = {  # name: (text of the case, whether the runner must accept it)
    "right": ("// expect: an int of one byte\n// errors-at-most: 1\n" + MISTAKE, True),
    "other text": ("// expect: an int of two bytes\n" + MISTAKE, False),
    "one of two texts": ("// expect: an int of one byte\n// expect: nowhere\n" + MISTAKE, False),
    "text only in the source": ("// expect: PLAIT_FAIL_FIX\n" + MISTAKE, False),
    "too many errors": ("// expect: an int of one byte\n// errors-at-most: 0\n" + MISTAKE, False),
    "no text": (MISTAKE, False),
    "compiles": ("// expect: an int of one byte\nint main() {}\n", False),
    "two cases": ("// errors-at-most: 1\n// case: a\n// expect: an int of one byte\n" + MISTAKE +
                  "// case: b\n// expect: an int of one byte\n" + MISTAKE, True),
    "a second case compiles": ("// expect: an int of one byte\n// case: a\n" + MISTAKE + "// case: b\nint x;\n", False),
    "a second case has another text": ("// case: a\n// expect: an int of one byte\n" + MISTAKE +
                                       "// case: b\n// expect: an int of two bytes\n" + MISTAKE, False),
    "the fix is broken": ("// expect: an int of one byte\n#define OURS\n" + MISTAKE + "no_such_thing x;\n", False),
}
FIXED_CASES = {  # name: (text of a case compiled together with another, whether the two must be accepted)
    "right": ("#include <vector>\nstd::vector<int> mine;\n" + MISTAKE, True),
    "the fix is broken": ("// expect: an int of one byte\n" + MISTAKE + "no_such_thing x;\n", False),
    "another's names": ("void use() {}\nstruct policy {};\n" + MISTAKE, True),
    "a warning": ("#include <vector>\nbool f(std::vector<int> x) { return x.size() == -1; }\n", False),
}
HEADER_CASES = {  # name: (texts of plait/lower.hpp and plait/upper.hpp, whether each compiles alone)
    "right": ("#pragma once\n#include <vector>\nstd::vector<int> f();\n",
              '#pragma once\n#include "plait/lower.hpp"\ninline auto g() { return f(); }\n', True),
    "an include that only another has": ("#pragma once\nstd::vector<int> f();\n",
                                         '#pragma once\n#include <vector>\n#include "plait/lower.hpp"\n', False),
    "an include under a condition": ("#pragma once\nusing number = int;\n",
                                     '#pragma once\n#ifdef OURS\n#include "plait/lower.hpp"\n#endif\nnumber x();\n', False),
    "no guard": ("struct a {};\n", '#pragma once\n#include "plait/lower.hpp"\n', False),
}
MAP = "| `core` | errors |\n"
GLOSSARY = "| word | meaning | in the code |\n|---|---|---|\n| rank | a process | `%s` |\n"
DOCUMENT_CASES = {  # name: (text of README.md, a name of the glossary, whether they are accepted)
    "right": (MAP + "[a](tests/unit/a/b.cpp), `tests/unit/a/b.cpp`, `unit.a_b`, `unit.a_*`, `unit.long`", "world::rank",
              True),
    "a link into nowhere": (MAP + "[a](tests/unit/a/c.cpp)", "rank", False),
    "a path into nowhere": (MAP + "`tests/unit/a/c.cpp`", "rank", False),
    "no such test": (MAP + "`unit.a_c`", "rank", False),
    "no such tests": (MAP + "`unit.b_*`", "rank", False),
    "nothing": (MAP, "rank", False),
    "a folder without a row": ("`unit.a_b`", "rank", False),
    "a program": (MAP + "`unit.a_b`\n```sh\ncmake --preset release && build/bin/one\n```\n", "rank", True),
    "no such program": (MAP + "`unit.a_b`\n```sh\nbuild/bin/two\n```\n", "rank", False),
    "no such preset": (MAP + "`unit.a_b`\n```sh\ncmake --preset fast\n```\n", "rank", False),
    "a word that no code has": (MAP + "`unit.a_b`", "world::process", False),
}
CODEGEN_CASES = {
    "equal": (PAIR % "*(1 + p) + *(2 + p)", True),
    "different": (PAIR % "p[1] * p[2]", False),
    "no twin": ('extern "C" int typed_f(int* p) { return *p; }\n', False),
    "nothing": ("int f() { return 1; }\n", False),
}


def run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def judge(runner: str, name: str, code: int, good: bool, output: str) -> int:
    """1 and a printed line if the runner's result for a case is wrong."""
    if (code == 0) == good:
        return 0
    print(f"{runner}: '{name}' was to be {'accepted' if good else 'refused'}:\n{output}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    compiler = parser.parse_args().compiler
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for runner, cases in (("fail/run_case.py", FAIL_CASES), ("codegen/compare.py", CODEGEN_CASES)):
            for name, (text, good) in cases.items():
                case = pathlib.Path(folder) / "case.cpp"
                case.write_text(text)
                code, output = run([sys.executable, str(TESTS / runner), "--compiler", compiler, str(case)])
                wrong += judge(runner, name, code, good, output)
        for name, (text, good) in FIXED_CASES.items():
            one, other = pathlib.Path(folder) / "one.cpp", pathlib.Path(folder) / "other.cpp"
            one.write_text(text)
            other.write_text("struct policy { int x; };\nvoid use() {}\n")
            code, output = run([sys.executable, str(TESTS / "fail/fixed.py"), "--compiler", compiler, "--out",
                                str(pathlib.Path(folder) / "fixed/all.cpp"), str(one), str(other)])
            wrong += judge("fail/fixed.py", name, code, good, output)
        for name, (lower, upper, good) in HEADER_CASES.items():
            root = pathlib.Path(folder) / "include"
            (root / "plait").mkdir(parents=True, exist_ok=True)
            (root / "plait/lower.hpp").write_text(lower)
            (root / "plait/upper.hpp").write_text(upper)
            (root / "headers.txt").write_text("plait/lower.hpp\nplait/upper.hpp\n")
            made = [str(TESTS / "headers/chains.py"), str(root), str(root / "chains"), str(root / "headers.txt")]
            code, sources = run([sys.executable, *made])
            output = sources
            for source in sources.split(";") if code == 0 else []:
                compiled, said = run([compiler, "-std=c++20", "-fsyntax-only", f"-I{root}", source])
                code, output = code or compiled, output + said
            wrong += judge("headers/chains.py", name, code, good, output)
            wrong += judge("headers/chains.py --check", name, run([sys.executable, *made, "--check"])[0], True, "")
        for name, (text, word, good) in DOCUMENT_CASES.items():
            root = pathlib.Path(folder) / "documents"
            for made in ("tests/unit/a", "examples/guide", "include/plait/core"):
                (root / made).mkdir(parents=True, exist_ok=True)
            (root / "include/plait/core/world.hpp").write_text("struct world { int rank; };\n")
            (root / "examples/guide/README.md").write_text(GLOSSARY % word)
            (root / "tests/unit/a/b.cpp").write_text("// variant: long SIZE=8\n")
            (root / "CMakeLists.txt").write_text("add_executable(one one.cpp)\n")
            (root / "CMakePresets.json").write_text('{"configurePresets": [{"name": "release"}]}\n')
            (root / "README.md").write_text(text)
            code, output = run([sys.executable, str(TESTS / "headers/documents.py"), str(root)])
            wrong += judge("headers/documents.py", name, code, good, output)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
