#!/bin/sh
# The example of ring attention and of a user-defined policy: both have the results of one rank, and the ring sends
# less.
# timeout: 60
set -eu
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}
out=$("$BIN/ring_attention") || {
  echo "FAILED: ring_attention: $out" >&2
  exit 1
}
for line in '^ring: 1180 kB on the wire' '^broadcasts: 6291 kB on the wire' '^largest difference to one rank'; do
  echo "$out" | grep -q "$line" || {
    echo "FAILED: the output lacks '$line': $out" >&2
    exit 1
  }
done
