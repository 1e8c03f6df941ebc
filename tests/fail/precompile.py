"""precompile.py --compiler C --include DIR --out DIR [--depfile FILE]: precompiles layers.hpp for the cases."""
import argparse
import pathlib
import shutil
import subprocess
import sys

from run_case import base_command, precompiled_at


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compiler", required=True)
    parser.add_argument("--include", action="append", default=[])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--depfile")
    arguments = parser.parse_args()
    file, _ = precompiled_at(arguments.compiler, arguments.out)
    file.parent.mkdir(parents=True, exist_ok=True)
    header = file.parent / "layers.hpp"  # g++ looks for the compiled header in the same folder
    shutil.copyfile(pathlib.Path(__file__).parent / "layers.hpp", header)
    depends = ["-MD", "-MF", arguments.depfile, "-MT", str(file)] if arguments.depfile else []
    return subprocess.run([*base_command(arguments.compiler, arguments.include), *depends, "-x", "c++-header",
                           str(header), "-o", str(file)]).returncode


if __name__ == "__main__":
    sys.exit(main())
