"""accesses.py SOURCE NVCC OPTION...: compiles SOURCE to PTX and counts the global accesses of its kernels.

SOURCE has lines `// accesses KERNEL: WIDE wide, NARROW narrow`. KERNEL must have at least WIDE accesses of 16 bytes and at
most NARROW smaller ones. KERNEL is compared with the demangled name without namespaces.
"""
import collections
import pathlib
import re
import subprocess
import sys

PROMISE = re.compile(r"^// accesses (.+): (\d+) wide, (\d+) narrow$", re.MULTILINE)
ENTRY = re.compile(r"\.entry (\w+)\(")
ACCESS = re.compile(r"\b(?:ld|st)\.(?!param|shared|local|const)[\w.]*?(?:\.v(\d))?\.[busf](\d+)\s")
NAMESPACES = re.compile(r"plait::kernels::detail::|plait::kernels::|plait::")


def main() -> int:
    source, nvcc, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    run = subprocess.run([nvcc, *options, "-std=c++20", "-arch=compute_80", "-ptx", source, "-o", "-"],
                         capture_output=True, text=True)
    if run.returncode != 0:
        print(run.stderr)
        return 1
    wide, narrow = collections.Counter(), collections.Counter()
    kernel = ""
    for line in run.stdout.splitlines():
        if entry := ENTRY.search(line):
            kernel = entry[1]
        elif access := ACCESS.search(line):
            counter = wide if int(access[1] or 1) * int(access[2]) >= 128 else narrow
            counter[kernel] += 1
    mangled = sorted({*wide, *narrow})
    plain = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = [NAMESPACES.sub("", p) for p in plain.splitlines()]
    failed = 0
    for kernel, least, most in PROMISE.findall(pathlib.Path(source).read_text()):
        found = [m for m, n in zip(mangled, names) if kernel in n]
        if len(found) != 1:
            print(f"{kernel}: {len(found)} kernels of that name")
            failed += 1
            continue
        print(f"{kernel}: {wide[found[0]]} wide, {narrow[found[0]]} narrow")
        if wide[found[0]] < int(least) or narrow[found[0]] > int(most):
            print(f"  promised are at least {least} wide and at most {most} narrow")
            failed += 1
    if failed:
        print("there are")
        for m, n in zip(mangled, names):
            print(f"  {n}: {wide[m]} wide, {narrow[m]} narrow")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
