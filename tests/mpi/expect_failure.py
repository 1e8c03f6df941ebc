"""expect_failure.py REGEX COMMAND...: succeeds if COMMAND exits non-zero and its output matches REGEX."""
import re
import subprocess
import sys

regex, command = sys.argv[1], sys.argv[2:]
run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
print(run.stdout)
if run.returncode == 0:
    sys.exit("the program was to fail, and exited with 0")
if not re.search(regex, run.stdout):
    sys.exit(f"the output does not hold the expected text: {regex}")
