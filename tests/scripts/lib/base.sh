# Sourced by tests of programs: folders and a function that reports failures. BIN is the folder of the programs, SOURCE
# that of the project; both have defaults for a manual run.

set -eu
here=$(cd "$(dirname "$0")" && pwd)
SOURCE=${SOURCE:-$(cd "$here/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
