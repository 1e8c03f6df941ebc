"""chains.py INCLUDE_ROOT FOLDER HEADERS.txt [BASE...] [--check]: writes to FOLDER sources that show that every header
compiles alone.

HEADERS.txt has a line for each header. Each source includes a chain of headers, and each header of a chain includes all
earlier ones of its chain, directly or through others. So the lines before a header in a source add nothing that the header
does not include itself: if it lacks an include, the source does not compile. A header that many others include is parsed
once for its chain. The number of chains is the smallest possible (Dilworth's theorem, by a maximum matching).

The sources are in parts. The part of each base has the headers that include it and no earlier base; the first part has the
rest. All headers of a part include its base, so the base can be precompiled for them. Prints the sources, a line for each
part. With --check writes nothing; the exit status is 0 if the files are up to date.
"""
import pathlib
import re
import sys

DIRECTIVE = re.compile(r'^\s*#\s*(if|ifdef|ifndef|endif|include)\b\s*(?:[<"]([^>"]+)[>"])?', re.MULTILINE)


def includes_of(text: str) -> set[str]:
    """The headers that a header includes unconditionally."""
    depth, found = 0, set()
    for directive, name in DIRECTIVE.findall(text):
        if directive == "include":
            if depth == 0 and name:
                found.add(name)
        else:
            depth += -1 if directive == "endif" else 1
    return found


def chains_of(headers: list[str], below: dict[str, set[str]]) -> list[list[str]]:
    """The fewest chains that contain every header, each starting with the lowest header."""
    above = {h: sorted((g for g in headers if h in below[g]), key=lambda g: (len(below[g]), g)) for h in headers}
    next_of, last_of = {}, {}

    def place(header: str, tried: set[str]) -> bool:
        for upper in above[header]:
            if upper not in tried:
                tried.add(upper)
                if upper not in last_of or place(last_of[upper], tried):
                    next_of[header], last_of[upper] = upper, header
                    return True
        return False

    for header in sorted(headers, key=lambda h: (-len(below[h]), h)):
        place(header, set())
    chains = []
    for header in headers:
        if header not in last_of:
            chain = [header]
            while chain[-1] in next_of:
                chain.append(next_of[chain[-1]])
            chains.append(chain)
    return chains


def main() -> int:
    root, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    headers = pathlib.Path(sys.argv[3]).read_text().split()
    direct = {file.relative_to(root).as_posix(): includes_of(file.read_text())
              for file in [*root.glob("plait/**/*.hpp"), *root.glob("plait/**/*.ipp")]}
    below: dict[str, set[str]] = {}

    def closure(name: str) -> set[str]:
        if name not in below:
            below[name] = set()  # another test reports circles
            below[name] = {n for d in direct.get(name, ()) if d in direct for n in closure(d) | {d}}
        return below[name]

    for header in headers:
        closure(header)
    bases = [a for a in sys.argv[4:] if a != "--check"]
    parts: list[list[str]] = [[] for _ in [None, *bases]]
    for header in headers:
        parts[next((i for i, base in enumerate(bases, 1) if base in below[header]), 0)].append(header)
    sources, names_of = {}, []
    for part in parts:
        names_of.append([])
        for chain in chains_of(part, below):
            lines = [f"#include <{header}>\n" for header in chain]  # twice: a header without a guard is an error
            names_of[-1].append(re.sub(r"\W", "_", chain[-1]) + ".cpp")
            sources[names_of[-1][-1]] = "".join([*lines, *(line.rstrip() + "  // NOLINT\n" for line in lines)])
    found = {file.name: file.read_text() for file in folder.glob("*.cpp")}
    if "--check" in sys.argv:
        if found != sources:
            print(f"{folder} is of other includes than the headers have now: run cmake again")
        return int(found != sources)
    folder.mkdir(parents=True, exist_ok=True)
    for name in found.keys() - sources.keys():
        (folder / name).unlink()
    for name, text in sources.items():
        if found.get(name) != text:
            (folder / name).write_text(text)
    print("\n".join(";".join(str(folder / name) for name in sorted(names)) for names in names_of), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
