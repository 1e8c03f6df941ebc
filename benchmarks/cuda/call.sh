# shellcheck shell=sh
# Sourced by call1.sh to call3.sh in a folder that pack.sh has filled: `call STEP,...` runs these steps of run.sh with the
# programs of the pack, on a machine that has a driver, CUDA's libraries (a toolkit, or Python wheels) and python3.
# Logs are in $OUT/logs.tgz, or beside this file; PLAIT_NO_GPU=yes rehearses the call without a GPU.
here=$(cd "$(dirname "$0")" && pwd)

call() {
  programs=$here/programs
  out=${OUT:-$here}
  mkdir -p "$programs" "$out" || exit 1
  if [ ! -x "$programs/bench_cuda_step" ]; then
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$here/programs.tar.xz" "$programs" || exit 1
  fi
  # Ten minutes are what a machine may be lent for at a time; unpacking is among them.
  sh "$here/benchmarks/cuda/run.sh" --only "$1" --build "$programs" --out "$here/logs" --results "$here/logs" \
    --archive "$out/logs.tgz" --limit "${PLAIT_LIMIT:-570}" --quick --short ${PLAIT_NO_GPU:+--no-gpu}
}
