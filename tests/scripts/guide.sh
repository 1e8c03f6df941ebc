#!/bin/sh
# Every numbered page of the guide: its program prints what the page shows, and the lines of code on the page are the
# program's.
. "$(dirname "$0")/lib/base.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
pages=0
for page in "$SOURCE"/examples/guide/[0-9]*.md; do
  name=$(basename "$page" .md)
  "$BIN/guide_$name" >"$work/printed" 2>&1 || fail "guide_$name: $(cat "$work/printed")"
  sed -n '/^```text$/,/^```$/p' "$page" | grep -v '^```' >"$work/shown"
  cmp -s "$work/printed" "$work/shown" || fail "$name.md does not show what its program prints: $(cat "$work/printed")"
  python3 "$SOURCE/tests/headers/snippets.py" "$page" "${page%.md}.cpp" || fail "$name.md shows code that is not its program's"
  [ "$(wc -l <"${page%.md}.cpp")" -le 100 ] || fail "$name.cpp has more than 100 lines"
  pages=$((pages + 1))
done
[ $pages -ge 2 ] || fail "there are $pages pages"
