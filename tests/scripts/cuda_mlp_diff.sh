#!/bin/sh
# The README of examples/cuda_mlp shows the current difference between its two programs.
# timeout: 20
set -eu
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM

cd "$SOURCE/examples/cuda_mlp"
diff -u --label plain.cu --label parallel.cu plain.cu parallel.cu >"$work/made" && code=0 || code=$?
[ "$code" = 1 ] || { echo "FAILED: diff ends with $code" >&2; exit 1; }
sed -n '/^```diff$/,/^```$/p' README.md | sed '1d;$d' >"$work/shown"
if ! diff -u --label README.md --label "diff -u plain.cu parallel.cu" "$work/shown" "$work/made"; then
  echo "FAILED: the README shows another difference than there is" >&2
  exit 1
fi
