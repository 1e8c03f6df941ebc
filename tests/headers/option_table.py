#!/usr/bin/env python3
"""Writes the table of options in the trainer's page from its --help, or compares them.

    python3 tests/headers/option_table.py build/bin/train_llama examples/train_llama/README.md [--write]

The exit status is 1 if the page differs and --write is not given.
"""
import re
import subprocess
import sys

BEGIN, END = "<!-- options -->\n", "<!-- end of options -->\n"


def table(help_text):
    """The groups of options with their defaults, as tables."""
    lines = []
    for group, options in re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", help_text, re.M):
        rows = re.findall(r"^  (?:-\w,)?(--[\w-]+)(?: [A-Z]+(?:=(\S*))?(?: \.\.\.)?)?\s+(\S.*)$", options, re.M)
        if not rows:
            continue
        lines += [f"\n**{group}**\n", "| option | default | what it is |", "|---|---|---|"]
        for flag, default, text in rows:
            text = text.replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{flag}` | {f'`{default}`' if default else ''} | {text} |")
    return "\n".join(lines).lstrip("\n") + "\n"


def main():
    trainer, page = sys.argv[1:3]
    wanted = table(subprocess.run([trainer, "--help"], check=True, capture_output=True, text=True).stdout)
    with open(page, encoding="utf-8") as file:
        text = file.read()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    if text[begin:end] == wanted:
        return
    if "--write" not in sys.argv:
        sys.exit(f"{page}: the table of options is not that of --help; write it anew with --write")
    with open(page, "w", encoding="utf-8") as file:
        file.write(text[:begin] + wanted + text[end:])


main()
