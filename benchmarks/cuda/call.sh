# shellcheck shell=sh
# Sourced by call1.sh to call3.sh in a folder that pack.sh has filled. `call STEP,...` runs these steps of run.sh with
# the programs of the pack. The machine needs a driver, CUDA's libraries (a toolkit, or Python wheels) and python3. Logs
# are in $OUT/logs.tgz, or in this folder. PLAIT_NO_GPU=yes tests the call without a GPU.
here=$(cd "$(dirname "$0")" && pwd)

call() {
  programs=$here/programs
  out=${OUT:-$here}
  mkdir -p "$programs" "$out" || exit 1
  if [ ! -x "$programs/bench_cuda_step" ]; then
    python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$here/programs.tar.xz" "$programs" || exit 1
  fi
  # A machine may be available for ten minutes at a time, including unpacking.
  sh "$here/benchmarks/cuda/run.sh" --only "$1" --build "$programs" --out "$here/logs" --results "$here/logs" \
    --archive "$out/logs.tgz" --limit "${PLAIT_LIMIT:-570}" --quick --short ${PLAIT_NO_GPU:+--no-gpu}
}
