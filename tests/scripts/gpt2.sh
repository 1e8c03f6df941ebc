#!/bin/sh
# The example of a model of one's own: a pipeline of tensor-parallel stages has the losses of one rank, and learns.
# timeout: 60
set -eu
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}
fail() {
  echo "FAILED: $*" >&2
  exit 1
}
out=$("$BIN/gpt2" "$SOURCE/examples/data/kjv.txt") || fail "gpt2: $out"
for line in '^step  4  loss 4\.44[0-9]* on one rank, 4\.44[0-9]* with pp=2, tp=2$' \
  '^the losses differ by [0-9.]*e-1[0-9] at most$'; do
  echo "$out" | grep -q "$line" || fail "the output lacks '$line': $out"
done
