"""keep.py COMMAND...: runs nvcc with the additional option `-Xptxas=-v`, and writes the output of ptxas for each kernel to
OBJECT.ptxas, next to the object. All other output is unchanged."""
import pathlib
import re
import subprocess
import sys

FIGURES = re.compile(r"^ptxas info\s|^\s+\d+ bytes stack frame")


def main() -> int:
    command = sys.argv[1:]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    lines = run.stderr.splitlines(keepends=True)
    kept = [line for line in lines if FIGURES.match(line)]
    sys.stderr.write("".join(line for line in lines if not FIGURES.match(line)))
    if kept and "-o" in command:
        pathlib.Path(command[command.index("-o") + 1] + ".ptxas").write_text("".join(kept))
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
