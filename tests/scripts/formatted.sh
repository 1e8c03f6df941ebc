#!/bin/sh
# The tree is formatted as .clang-format says.
# timeout: 120
set -eu
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
command -v clang-format-16 >/dev/null || { echo "SKIPPED: there is no clang-format-16"; exit 77; }
cd "$SOURCE"
find include examples tests benchmarks -name '*.?pp' -o -name '*.cu' -o -name '*.h' | sort >"${TMPDIR:-/tmp}/plait_files.$$"
trap 'rm -f "${TMPDIR:-/tmp}/plait_files.$$"' EXIT
[ "$(wc -l <"${TMPDIR:-/tmp}/plait_files.$$")" -gt 300 ] || { echo "FAILED: where are the files?" >&2; exit 1; }
xargs clang-format-16 --dry-run -Werror <"${TMPDIR:-/tmp}/plait_files.$$"
