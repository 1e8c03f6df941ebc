"""budget.py TABLE NVCC LAUNCHES KERNELS [--write] FILE.ptxas...: compares the resources of each kernel with a table.

A line of the table has a kernel and, for each architecture, its registers a thread, its static shared memory in bytes and
the share of a multiprocessor's warps that these allow, or `refused` if a block has too little shared memory. Kernels with
dynamic shared memory have an additional first column: the warps of a block, the bytes, and all architectures, including
those without a column, that refuse the launch. LAUNCHES is the program that prints both, and KERNELS the folder of the
sources, in which no other kernel may have such memory.

Larger numbers than in the table, or a smaller share, are a failure with the compiler version named in the table. Numbers
of other versions are not comparable, and the test prints this. --write writes a new table. A kernel that spills to local
memory is always a failure.
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
SHARED_MEMORY = {"80": 164, "86": 100, "89": 100, "90": 228, "100": 228, "103": 228, "120": 100}  # KiB of a multiprocessor
SHARED_MEMORY_OF_BLOCK = {"80": 163, "86": 99, "89": 99, "90": 227, "100": 227, "103": 227, "120": 99}  # KiB, the limit of a block
KERNEL = re.compile(r"(\w+)\([^(){};]*\) \{\n")
NAMESPACES = re.compile(r"plait::kernels::detail::|plait::kernels::|plait::|\(anonymous namespace\)::")


def figures_of(files: list[str]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """By kernel and architecture: registers, static shared memory, spilled bytes."""
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
            n += "'"  # marks overloads
        result[n] = found[m]
    return result


def end_of_name(signature: str) -> int:
    """The position of the parameters: the first parenthesis outside the template arguments."""
    depth = 0
    for i, c in enumerate(signature):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0 and i > 0:
            return i
    return len(signature)


def launches_of(program: str, kernels: str) -> dict[str, tuple[int, int]]:
    """By kernel that declares dynamic shared memory: warps of a block, and bytes of that memory."""
    found = {}
    for line in subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines():
        name, threads, shared = line.rsplit(" ", 2)
        found[name] = (int(threads) // 32, int(shared))
    declared = set()
    for source in pathlib.Path(kernels).rglob("*.?pp"):
        text = source.read_text()
        declared |= {KERNEL.findall(text[:use.start()])[-1] for use in re.finditer(r"PLAIT_DYNAMIC_SHARED\(", text)}
    missing = declared ^ {name.partition("<")[0] for name in found}
    if missing or not declared:
        raise SystemExit(f"{program} prints the launches of other kernels than declare dynamic shared memory: "
                         f"{', '.join(sorted(missing))}")
    return found


def refuses(architecture: str, shared: int) -> bool:
    return shared > SHARED_MEMORY_OF_BLOCK.get(architecture, 99) * 1024


def occupancy(architecture: str, registers: int, shared: int, warps: int) -> int:
    """Percent of the warps, for blocks of `warps`; a warp gets registers in units of 256. 0 if the launch is refused."""
    if refuses(architecture, shared):
        return 0
    most = WARPS.get(architecture, 64)
    blocks = 65536 // (-(-registers * 32 // 256) * 256) // warps
    if shared:
        blocks = min(blocks, SHARED_MEMORY.get(architecture, 100) * 1024 // (shared + 1024))
    return round(100 * min(most, blocks * warps) / most)


def main() -> int:
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    table, nvcc, launches, files = pathlib.Path(arguments[0]), arguments[1], launches_of(*arguments[2:4]), arguments[4:]
    version = re.search(r"release ([\d.]+), V([\d.]+)",
                        subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout)[2]
    found = figures_of(files)
    architectures = sorted({a for by in found.values() for a in by}, key=int)
    if not found:
        print("no kernel in", *files)
        return 1
    if absent := sorted(set(launches) - set(found)):
        print(f"{arguments[2]} prints launches of kernels that nvcc did not compile: {', '.join(absent)}")
        return 1

    def share_of(kernel: str, a: str) -> int:
        warps, dynamic = launches.get(kernel, (8, 0))
        return occupancy(a, found[kernel][a][0], found[kernel][a][1] + dynamic, warps)

    def column(kernel: str, a: str) -> str:
        (registers, shared, _), share = found[kernel][a], share_of(kernel, a)
        return f"{a}: {registers} {shared} {f'{share}%' if share else 'refused'}"

    def launch(kernel: str) -> list[str]:
        if kernel not in launches:
            return []
        warps, dynamic = launches[kernel]
        static = max(shared for _, shared, _ in found[kernel].values())
        refusing = [a for a in SHARED_MEMORY_OF_BLOCK if refuses(a, static + dynamic)]
        return [f"launch: {warps} warps {dynamic} dynamic" + (f", refused by {' '.join(refusing)}" if refusing else "")]

    lines = [" | ".join([kernel, *launch(kernel), *(column(kernel, a) for a in architectures if a in by)])
             for kernel, by in found.items()]
    if "--write" in sys.argv:
        table.write_text(f"# nvcc {version}; registers, bytes of static shared memory, occupancy in blocks of 8 warps "
                         "or, with dynamic shared memory, as launched\n" +
                         "\n".join(sorted(lines)) + "\n")
    head, *rows = table.read_text().splitlines()
    expected, expected_launches = {}, {}
    for row in rows:
        kernel, *columns = row.split(" | ")
        expected[kernel] = {}
        for column_ in columns:
            words = column_.split()
            if words[0] == "launch:":
                expected_launches[kernel] = (int(words[1]), int(words[3]))
                continue
            share = 0 if words[3] == "refused" else int(words[3].rstrip("%"))
            expected[kernel][words[0].rstrip(":")] = (int(words[1]), int(words[2]), share)
    complaints = []
    if f"nvcc {version};" not in head:
        print(f"the table is nvcc {head.split()[2].rstrip(';')}'s, and this is {version}: nothing to compare with")
        return 77
    for kernel, by in found.items():
        if kernel not in expected:
            complaints.append(f"{kernel}: not in the table")
            continue
        (warps, dynamic), (_, most_dynamic) = launches.get(kernel, (8, 0)), expected_launches.get(kernel, (8, 0))
        if dynamic > most_dynamic:
            complaints.append(f"{kernel}: {dynamic} bytes of dynamic shared memory; the table has {most_dynamic}")
        for a, figures in by.items():
            if a not in expected[kernel]:
                complaints.append(f"{kernel} for sm_{a}: not in the table")
                continue
            *most, least = expected[kernel][a]
            share = share_of(kernel, a)
            if figures[2]:
                complaints.append(f"{kernel} for sm_{a}: {figures[2]} bytes spilled; no kernel may spill")
            if any(figure > limit for figure, limit in zip(figures, most)):
                complaints.append(f"{kernel} for sm_{a}: {figures[0]} registers and {figures[1]} bytes of shared memory; "
                                  f"the table has {most[0]} and {most[1]}")
            elif share < least:
                complaints.append(f"{kernel} for sm_{a}: blocks of {warps} warps "
                                  + (f"occupy {share} %" if share else "are refused") + f"; the table has {least} %")
    complaints += [f"{kernel}: in the table, but nowhere else" for kernel in expected if kernel not in found]
    for complaint in complaints:
        print(complaint)
    print(f"{len(found)} kernels for {', '.join('sm_' + a for a in architectures)}: {len(complaints)} complaints")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
