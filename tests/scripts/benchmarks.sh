#!/bin/sh
# Every benchmark still runs: one small round each, whose times nobody looks at. (benchmarks/cuda has tests of its own.)
# timeout: 240
set -eu
SOURCE=${SOURCE:-$(cd "$(dirname "$0")/../.." && pwd)}
BIN=${BIN:-$SOURCE/build/bin}
[ -x "$BIN/bench_typed_vs_raw" ] || { echo "SKIPPED: the benchmarks are not built"; exit 77; }
# Runs a benchmark and looks for a pattern in what it prints.
round() {
  pattern=$1
  shift
  echo "$*"
  out=$("$@" 2>&1) && code=0 || code=$?
  [ "$code" -le "${most:-0}" ] || { echo "FAILED: $* ends with $code: $out" >&2; exit 1; }
  echo "$out" | grep -Eq "$pattern" || { echo "FAILED: $* lacks '$pattern': $out" >&2; exit 1; }
}

round 'best|median' "$BIN/bench_step_vs_gemm" --hidden 512 --seq 32 --sequences 1 --rounds 1
round 'tp=2.* are equal in every bit' "$BIN/bench_typed_vs_raw" --hidden 128 --seq 32 --sequences 1 --rounds 2
round '^[0-9.]+$' "$BIN/bench_all_reduce_threads" 2 65536
if [ -x "$BIN/bench_all_reduce_mpi" ]; then
  mpi="mpirun --allow-run-as-root --oversubscribe -n 2"
  # shellcheck disable=SC2086  # a command and its options
  round '^[0-9.]+$' $mpi "$BIN/bench_all_reduce_mpi" 65536 plait
fi
most=1 round '%' "$BIN/bench_ring_overlap" --tokens 64 --rounds 1  # 1 is a target that was missed
round 'zb_h1' "$BIN/bench_pipeline_bubble" --rounds 1 --unit 200
round 'pp=2 cp=2 tp=2 zb_h1' "$BIN/bench_four_axes" --hidden 256 --layers 4 --seq 64 --microbatches 4 --rounds 1
round '[0-9]' "$BIN/bench_schedule" --ranks 4 --microbatches 8 --chunks 2 --rounds 1
if [ -x "$BIN/bench_kernels_cpu" ]; then
  round 'items_per_second|FLOP|Time' "$BIN/bench_kernels_cpu" --benchmark_min_time=0.001
fi
