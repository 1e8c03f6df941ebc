# Sourced by tests of programs: folders, $work for scratch files, which is removed at the end, and a function that reports
# failures. BIN is the folder of the programs, SOURCE that of the project; both have defaults for a manual run.

set -eu
here=$(cd "$(dirname "$0")" && pwd)
SOURCE=${SOURCE:-$(cd "$here/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
# Processes of Open MPI may be more than the cores.
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none

fail() {
  echo "FAILED: $*" >&2
  exit 1
}
