#!/bin/sh
# The example of ring attention and of a user-defined policy: both have the results of one rank, and the ring sends
# less.
# timeout: 60
. "$(dirname "$0")/lib/base.sh"
out=$("$BIN/ring_attention") || fail "ring_attention: $out"
for line in '^ring: 1180 kB on the wire' '^broadcasts: 6291 kB on the wire' '^largest difference to one rank'; do
  echo "$out" | grep -q "$line" || fail "the output lacks '$line': $out"
done
