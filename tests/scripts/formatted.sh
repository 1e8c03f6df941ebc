#!/bin/sh
# The tree is formatted according to .clang-format.
# timeout: 120
. "$(dirname "$0")/lib/base.sh"
command -v clang-format-16 >/dev/null || { echo "SKIPPED: there is no clang-format-16"; exit 77; }
cd "$SOURCE"
files=$(find include examples tests benchmarks -name '*.?pp' -o -name '*.cu' -o -name '*.h')
[ "$(echo "$files" | wc -l)" -gt 300 ] || fail "where are the files?"
echo "$files" | xargs clang-format-16 --dry-run -Werror
