#!/bin/sh
# Every program of the guide prints the output that its page shows, and tables list all examples. headers.snippets
# compares the code of pages with the programs.
. "$(dirname "$0")/lib/base.sh"
cd "$work"
pages=0
for source in "$SOURCE"/examples/guide/[0-9]*.cpp; do
  name=$(basename "$source" .cpp)
  "$BIN/guide_$name" >"$work/printed" 2>&1 || fail "guide_$name: $(cat "$work/printed")"
  sed -n '/^```text$/,/^```$/p' "${source%.cpp}.md" | grep -v '^```' >"$work/shown"
  cmp -s "$work/printed" "$work/shown" || fail "$name.md does not show what its program prints: $(cat "$work/printed")"
  [ "$(wc -l <"$source")" -le 100 ] || fail "$name.cpp has more than 100 lines"
  pages=$((pages + 1))
done
[ $pages -ge 12 ] || fail "there are $pages programs"

for page in README.md guide/12_own_parts.md; do
  folder=$SOURCE/examples/$(dirname "$page")
  sed -n 's/^| \[`[^`]*`\](\([^)]*\)) | \([0-9]*\) |.*/\1 \2/p' "$SOURCE/examples/$page" >"$work/rows"
  [ "$(wc -l <"$work/rows")" -ge 5 ] || fail "examples/$page has no rows"
  while read -r file lines; do  # to a tenth
    have=$(wc -l <"$folder/$file")
    [ $((10 * (have - lines))) -le "$have" ] && [ $((10 * (lines - have))) -le "$have" ] ||
      fail "examples/$page: $file has $have lines, and not $lines"
  done <"$work/rows"
done
