#!/bin/sh
# Every benchmark runs one small round; the test ignores the times. (benchmarks/cuda has its own tests.)
# timeout: 600
# runs: with --all
. "$(dirname "$0")/lib/base.sh"
[ -x "$BIN/bench_typed_vs_raw" ] || { echo "SKIPPED: the benchmarks are not built"; exit 77; }
# round MOST PATTERN COMMAND...: the exit code is at most MOST (1: a target may be missed), and PATTERN is printed.
round() {
  most=$1 pattern=$2
  shift 2
  echo "$*"
  out=$("$@" 2>&1) && code=0 || code=$?
  [ "$code" -le "$most" ] || fail "$* ends with $code: $out"
  echo "$out" | grep -Eq "$pattern" || fail "$* lacks '$pattern': $out"
}

round 0 'loss in 32 chunks' "$BIN/bench_step_vs_gemm" --hidden 128 --seq 32 --sequences 1 --vocab 4096 --rounds 1
round 0 'tp=2.* are equal in every bit' "$BIN/bench_typed_vs_raw" --hidden 128 --seq 32 --sequences 1 --rounds 2
round 0 '^[0-9.]+$' "$BIN/bench_all_reduce_threads" 2 65536
if [ -x "$BIN/bench_all_reduce_mpi" ]; then
  mpi="mpirun --allow-run-as-root --oversubscribe -n 2"
  # shellcheck disable=SC2086  # a command and its options
  round 0 '^[0-9.]+$' $mpi "$BIN/bench_all_reduce_mpi" 65536 plait
fi
round 1 'documents of a quarter, zigzag .* %' "$BIN/bench_ring_overlap" --tokens 64 --rounds 1
round 1 '% forward, of 75 % that chunks allow' "$BIN/bench_tensor_overlap" --chunks 4 --product-ms 8 --rounds 1
round 0 'zb_h1' "$BIN/bench_pipeline_bubble" --rounds 1 --unit 200
round 1 'zero3, 3 uses ahead' "$BIN/bench_data_parallel" --rounds 1 --block-ms 1 --layers 2
round 0 'one rank gets all rows' "$BIN/bench_mixture_step" --hidden 128 --seq 16 --rounds 1
round 0 'zero3 +0[.]979 +0[.]824 ' "$BIN/bench_step_limit"
round 0 'zero1 +0[.][0-9]+$' "$BIN/bench_step_limit" --computing-us 500000 --bytes-per-second 120000000
round 2 'given together' "$BIN/bench_step_limit" --computing-us 500000
round 0 'pp=2 cp=2 tp=2 zb_h1' "$BIN/bench_four_axes" --hidden 256 --layers 4 --seq 64 --microbatches 4 --rounds 1
round 0 'one hash: yes; bytes as predicted: yes' "$BIN/bench_deterministic" --hidden 256 --layers 2 --seq 64 --rounds 1
touch "$work/other"
round 1 'of the disk|disk' "$BIN/bench_checkpoint_save" --megabytes 8 --rounds 1 --directory "$work"
[ "$(ls "$work")" = other ] || fail "bench_checkpoint_save: other files than before are in its folder: $(ls "$work")"
round 0 'zero3 +rank 16383: .* boxes' "$BIN/bench_checkpoint_plan" --rounds 1 --writers 100
round 0 '[0-9]' "$BIN/bench_schedule" --ranks 4 --microbatches 8 --chunks 2 --rounds 1
if [ -x "$BIN/bench_planner" ]; then
  round 0 'search_405b/16384' "$BIN/bench_planner" --benchmark_min_time=0.001 --benchmark_filter=-100096
fi
# Other work on the machine may slow down only one of the two, so the bound is loose.
out=$(HIDDEN=64 SEQ=32 RUNS="threads:dp=2:2:1f1b threads:pp=2,tp=2:2:zb_h1" \
  sh "$SOURCE/benchmarks/planner_own.sh" "$BIN/train_llama" "$BIN/plan_llama" 5) || fail "planner_own.sh: $out"
echo "$out" | awk '/^threads / { if ($5 <= 0 || $6 <= 0 || $5 > 50 * $6 || $6 > 50 * $5) wrong = 1; ++rows }
  /^worst error: [0-9.]+ %$/ { ++ends } END { exit wrong || rows != 2 || ends != 1 }' || fail "planner_own.sh: $out"
if [ -x "$BIN/bench_kernels_cpu" ]; then
  round 0 'items_per_second|FLOP|Time' "$BIN/bench_kernels_cpu" --benchmark_min_time=0.001
fi
# A compiler that only preprocesses, so that each file must find its headers, and links nothing.
cat >"$work/preprocess" <<'SH'
#!/bin/sh
previous= out=
for argument; do
  [ "$previous" != -o ] || out=$argument
  previous=$argument
done
case " $* " in *" -c "*) exec g++ -E "$@" ;; *) cp /bin/true "$out" ;; esac
SH
chmod +x "$work/preprocess"
export CXX="$work/preprocess"
round 1 'examples/train_llama/train[.]cpp +[0-9.]+' env 'TRAINER=*' sh "$SOURCE/benchmarks/compile_time.sh" -O0
