#!/bin/sh
# The README of examples/cuda_mlp shows the current difference between its two programs.
# timeout: 20
. "$(dirname "$0")/lib/base.sh"

cd "$SOURCE/examples/cuda_mlp"
diff -u --label plain.cu --label parallel.cu plain.cu parallel.cu >"$work/made" && code=0 || code=$?
[ "$code" = 1 ] || fail "diff ends with $code"
sed -n '/^```diff$/,/^```$/p' README.md | sed '1d;$d' >"$work/shown"
diff -u --label README.md --label "diff -u plain.cu parallel.cu" "$work/shown" "$work/made" ||
  fail "the README shows another difference than there is"
