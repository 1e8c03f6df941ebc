# Sourced by tests of programs: where they are, and how to say what failed. BIN is the folder of the programs, SOURCE that of
# the project; both have defaults for a run by hand.

set -eu
here=$(cd "$(dirname "$0")" && pwd)
SOURCE=${SOURCE:-$(cd "$here/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
