#!/bin/sh
# A program with its own autograd on ranks that shard weights, gradients and moments (ZeRO 3). It has the losses and
# gradient norms of the plain program on 1, 2 and 4 threads and MPI processes, and the memory that its page gives. It
# adds few lines. unit/nn/callers_zero.cpp tests the errors.
# timeout: 300
. "$(dirname "$0")/lib/made_parallel.sh"
numbers own_autograd_plain own_autograd_zero
cd "$SOURCE/examples/own_autograd"
lines zero.cpp 125
for ranks in 1 2 4; do
  bytes=$(sed -n 's/^\([0-9]*\) bytes of weights, gradients and moments$/\1/p' "$work/errors-$ranks")
  [ -n "$bytes" ] && grep -q "| $ranks | $bytes |" README.md || fail "the README does not say '| $ranks | $bytes |'"
done
if "$BIN/own_autograd_zero" 1 "$text" 33 >/dev/null 2>"$work/errors"; then fail "32 samples on 33 ranks are not refused"; fi
grep -q "^own_autograd_zero: .*batch is 32, sharded over dp=33" "$work/errors" || fail "33 ranks: $(cat "$work/errors")"
[ -z "$mpi" ] || echo "$mpi"
