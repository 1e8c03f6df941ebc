#!/bin/sh
# The example of a model of one's own: a pipeline of tensor-parallel stages has the losses of one rank, and learns.
# timeout: 60
. "$(dirname "$0")/lib/base.sh"
out=$("$BIN/gpt2" "$SOURCE/examples/data/kjv.txt") || fail "gpt2: $out"
for line in '^step  4  loss 4\.44[0-9]* on one rank, 4\.44[0-9]* with pp=2, tp=2$' \
  '^the losses differ by [0-9.]*e-1[0-9] at most$'; do
  echo "$out" | grep -q "$line" || fail "the output lacks '$line': $out"
done
