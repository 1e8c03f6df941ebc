"""self_test.py --compiler C: the runners of fail/ and codegen/ accept what is right and refuse what is wrong."""
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
    "the fix is broken": ("// expect: an int of one byte\n" + MISTAKE + "no_such_thing x;\n", False),
}
CODEGEN_CASES = {
    "equal": (PAIR % "*(1 + p) + *(2 + p)", True),
    "different": (PAIR % "p[1] * p[2]", False),
    "no twin": ('extern "C" int typed_f(int* p) { return *p; }\n', False),
    "nothing": ("int f() { return 1; }\n", False),
}


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
                run = subprocess.run([sys.executable, str(TESTS / runner), "--compiler", compiler, str(case)],
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                if (run.returncode == 0) != good:
                    wrong += 1
                    print(f"{runner}: '{name}' was to be {'accepted' if good else 'refused'}:\n{run.stdout}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
