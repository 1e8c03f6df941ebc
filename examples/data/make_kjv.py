"""make_kjv.py > kjv.txt: makes the sample text from Debian's packages bible-kjv and bible-kjv-text.

One line per verse, without its number; a heading per chapter between blank lines.
"""
import re
import subprocess

BOOKS = ["Genesis", "1 Samuel", "2 Samuel", "Psalms", "Ecclesiastes", "Song of Solomon", "Luke"]

text = subprocess.run(["bible", "-l100000", "gen1:1-rev22:21"], stdout=subprocess.PIPE, check=True, encoding="ascii").stdout
keep = False
pieces = []
for line in text.splitlines():
    heading = re.fullmatch(r"(\d? ?[A-Z][A-Za-z ]*) (\d+)", line)
    verse = re.fullmatch(r"  (\d+) (\S.*\S)\s*", line)
    if heading:
        keep = heading[1] in BOOKS
        if keep:
            pieces.append(("\n" if pieces else "") + line + "\n")
    elif verse and keep:
        pieces.append(re.sub(" +", " ", verse[2]))
    elif line and keep:
        raise SystemExit(f"a line that is neither heading nor verse: {line!r}")
print("\n".join(pieces))
