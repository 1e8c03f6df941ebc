"""budget.py TABLE NVCC [--write] FILE.ptxas...: holds what ptxas gave each kernel against a table.

A line of the table is a kernel and, for each architecture, its registers a thread, its static shared memory in bytes and
the share of a multiprocessor's warps that both allow (of attention's dynamic shared memory the launch has the say:
`require_attention`); where a kernel spills to local memory, the bytes. More of any than
in the table fails under the compiler whose version the table names; another version's are not comparable, and the test
says so. --write makes the table anew.
"""
import collections
import pathlib
import re
import subprocess
import sys

ENTRY = re.compile(r"Compiling entry function '(\w+)' for 'sm_(\d+)a?'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
WARPS = {"80": 64, "86": 48, "89": 48, "90": 64, "100": 64, "103": 64, "120": 48}  # of a multiprocessor
SHARED_MEMORY = {"80": 164, "86": 100, "89": 100, "90": 228, "100": 228, "103": 228, "120": 100}  # KiB of one
NAMESPACES = re.compile(r"plait::kernels::detail::|plait::kernels::|plait::|\(anonymous namespace\)::")


def figures_of(files: list[str]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Kernel, architecture: registers, static shared memory, bytes that are spilled."""
    found: dict[str, dict[str, tuple[int, int, int]]] = collections.defaultdict(dict)
    for file in files:
        name, architecture, spilled = "", "", 0
        for line in pathlib.Path(file).read_text().splitlines():
            if entry := ENTRY.search(line):
                name, architecture, spilled = entry[1], entry[2], 0
            elif spills := SPILLS.search(line):
                spilled = int(spills[2]) + int(spills[3])
            elif (used := USED.search(line)) and name:
                shared = SHARED.search(line)
                found[name][architecture] = (int(used[1]), int(shared[1]) if shared else 0, spilled)
                name = ""
    mangled = list(found)
    plain = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True).stdout
    names = [NAMESPACES.sub("", re.sub(r"^void ", "", p)) for p in plain.splitlines()]
    names = [re.sub(r"\s+", " ", n[:end_of_name(n)]) for n in names]
    result: dict[str, dict[str, tuple[int, int, int]]] = {}
    for m, n in sorted(zip(mangled, names)):
        while n in result:
            n += "'"  # overloads
        result[n] = found[m]
    return result


def end_of_name(signature: str) -> int:
    """Where the parameters begin: the first parenthesis outside the template arguments."""
    depth = 0
    for i, c in enumerate(signature):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and i > 0:
            return i
    return len(signature)


def occupancy(architecture: str, registers: int, shared: int) -> int:
    """Percent of the warps, for blocks of 8 warps; registers are given out to a warp by 256."""
    most = WARPS.get(architecture, 64)
    blocks = 65536 // (-(-registers * 32 // 256) * 256) // 8
    if shared:
        blocks = min(blocks, SHARED_MEMORY.get(architecture, 100) * 1024 // (shared + 1024))
    return round(100 * min(most, blocks * 8) / most)


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    table, nvcc, files = pathlib.Path(arguments[0]), arguments[1], arguments[2:]
    version = re.search(r"release ([\d.]+), V([\d.]+)",
                        subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout)[2]
    found = figures_of(files)
    architectures = sorted({a for by in found.values() for a in by}, key=int)
    if not found:
        print("no kernel in", *files)
        return 1
    def column(a: str, registers: int, shared: int, spilled: int) -> str:
        return f"{a}: {registers} {shared} {occupancy(a, registers, shared)}%" + (f" {spilled} spilled" if spilled else "")

    lines = [" | ".join([kernel, *(column(a, *by[a]) for a in architectures if a in by)]) for kernel, by in found.items()]
    if "--write" in sys.argv:
        table.write_text(f"# nvcc {version}; registers, bytes of static shared memory, occupancy in blocks of 8 warps\n" +
                         "\n".join(sorted(lines)) + "\n")
    head, *rows = table.read_text().splitlines()
    expected = {}
    for row in rows:
        kernel, *columns = row.split(" | ")
        expected[kernel] = {}
        for words in map(str.split, columns):
            expected[kernel][words[0].rstrip(":")] = (int(words[1]), int(words[2]), int(words[4]) if len(words) > 4 else 0)
    complaints = []
    if f"nvcc {version};" not in head:
        print(f"the table is nvcc {head.split()[2].rstrip(';')}'s, and this is {version}: nothing to compare with")
        return 77
    for kernel, by in found.items():
        if kernel not in expected:
            complaints.append(f"{kernel}: not in the table")
            continue
        for a, figures in by.items():
            most = expected[kernel].get(a)
            if most is None:
                complaints.append(f"{kernel} for sm_{a}: not in the table")
            elif any(figure > limit for figure, limit in zip(figures, most)):
                complaints.append(f"{kernel} for sm_{a}: {figures[0]} registers, {figures[1]} bytes of shared memory and "
                                  f"{figures[2]} spilled; the table has {most[0]}, {most[1]} and {most[2]}")
    complaints += [f"{kernel}: in the table, but nowhere else" for kernel in expected if kernel not in found]
    for complaint in complaints:
        print(complaint)
    print(f"{len(found)} kernels for {', '.join('sm_' + a for a in architectures)}: {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
