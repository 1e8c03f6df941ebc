#!/bin/sh
# Builds the benchmarks, runs them one after the other, and prints one table. Give it a quiet machine.
#
#   sh benchmarks/run.sh [--python PYTHON] [--quick]
#
# PYTHON is an interpreter that has torch and transformers; without it the comparison with PyTorch is left out. --quick
# leaves out the compile times and runs fewer rounds. The table is also written to benchmarks/results/, under the
# processor's name and the date.
set -eu

cd "$(dirname "$0")/.."
python=
quick=no
while [ $# -gt 0 ]; do
  case "$1" in
    --python) python=${2:?--python needs an interpreter}; shift ;;
    --quick) quick=yes ;;
    *) echo "unknown argument '$1'; legal are --python PYTHON and --quick" >&2; exit 2 ;;
  esac
  shift
done

# shellcheck source=cmake/packages.sh
. cmake/packages.sh
# shellcheck disable=SC2086  # lists of names
install_packages $plait_build_packages $plait_mpi_packages
cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DPLAIT_BUILD_BENCHMARKS=ON >/dev/null
programs="bench_step_vs_gemm bench_typed_vs_raw bench_all_reduce_threads bench_all_reduce_mpi bench_ring_overlap bench_tensor_overlap bench_pipeline_bubble bench_four_axes bench_deterministic bench_data_parallel bench_value_checks bench_step_limit bench_mixture_step bench_checkpoint_save bench_checkpoint_plan train_llama plan_llama"
# shellcheck disable=SC2086  # a list of names
cmake --build build -j "$(plait_jobs)" --target $programs

processor=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | sort -u | head -n 1)
day=$(date +%Y-%m-%d)
out=benchmarks/results/$(echo "$processor" | tr -cs 'A-Za-z0-9\n' '-' | tr '[:upper:]' '[:lower:]' | sed 's/-*$//')-$day.md
mkdir -p benchmarks/results
rm -f build/benchmarks.done

rounds=8
all_reduce_rounds=3
if [ "$quick" = yes ]; then rounds=3 all_reduce_rounds=1; fi

# section TITLE COMMAND...: prints a heading, and the output of a command as it is.
section() {
  printf '\n## %s\n\n```\n' "$1"
  shift
  "$@"
  echo '```'
}
# or_say TEXT COMMAND...: runs the command, and prints TEXT if it fails.
or_say() {
  failure=$1
  shift
  "$@" || echo "$failure"
}
deterministic() {
  build/bin/bench_deterministic --rounds "$rounds"
  build/bin/bench_deterministic --rounds 2 --hidden 1024 --layers 4
}
two_hosts() {
  if [ "$quick" = yes ]; then set -- 5 1gbit 2; else set -- 8 '10gbit 1gbit 300mbit' '2 8'; fi
  benchmarks/two_hosts.sh build/bin/train_llama "$@" "$python" || echo "ended with status $?"
}
saving() {
  set -- build/bin/bench_checkpoint_save 768 "$rounds" "$python"
  or_say 'a target was missed' benchmarks/checkpoint_vs_pytorch.sh "$@"
  echo
  or_say 'a target was missed' benchmarks/checkpoint_vs_pytorch.sh "$@" 64
}
compile_times() { sh benchmarks/compile_time.sh || echo "ended with status $?: 1 is a missed limit, 2 what does not compile"; }

{
  echo "# $processor, $(nproc) cores, $day"
  echo
  echo "Load of the machine at the start: $(cut -d' ' -f1 /proc/loadavg)."
  section 'A training step against its matrix products (target: 0.75 or more; in bf16 1.6 times as fast or more)' \
    build/bin/bench_step_vs_gemm --rounds "$rounds"
  section 'A typed block against the same block by hand (target: 1.01 or less at hidden 512)' build/bin/bench_typed_vs_raw
  section 'A step with experts against a dense one with the same products for each token (target: 1.15 or less)' \
    or_say 'the memory is above its bound' build/bin/bench_mixture_step --rounds "$rounds"
  section "The planner's time of a step beside the measured one (target: within 10 %)" \
    sh benchmarks/planner_own.sh build/bin/train_llama build/bin/plan_llama
  section 'All-reduce: ranks in one process against Open MPI (target: 3 or more from 1 MB on)' \
    sh benchmarks/all_reduce.sh build/bin/bench_all_reduce_threads build/bin/bench_all_reduce_mpi "$all_reduce_rounds"
  section 'What a ring hides of a slow link (target: 90 % or more)' \
    or_say 'the target was missed' build/bin/bench_ring_overlap --rounds "$((4 * rounds))"
  section 'What linears hide of a slow link between tensor-parallel ranks (target: 90 % of what chunks allow)' \
    or_say 'the target was missed' build/bin/bench_tensor_overlap
  section 'The same bits on every layout (target: 1.2 or less at hidden 512, 1.1 at hidden 1024)' deterministic
  section 'The bubble of pipeline schedules (target: within 3 % of the simulation, 1 us per action)' \
    build/bin/bench_pipeline_bubble
  section 'What data parallelism hides of a slow link (targets: 0.95 of what the program allows, 16 ranks 0.97 of 2)' \
    or_say 'a target was missed' build/bin/bench_data_parallel
  section 'Comparing values over ranks (target: a checked step below 1.10 of one that is not)' \
    or_say 'the target was missed' build/bin/bench_value_checks
  section 'Two hosts (target: 0.9 of what the longer of computing and sending allows)' two_hosts
  section 'Saving and loading (targets: in the last column; copy, disk and PyTorch measured side by side)' saving
  section 'Planning a save of Llama 3 405B on 16,384 ranks (targets: in its lines)' \
    or_say 'a target was missed' build/bin/bench_checkpoint_plan
  section 'Four axes on eight ranks against one rank, per core (target: 0.85)' build/bin/bench_four_axes --rounds "$rounds"
  if [ -n "$python" ]; then
    printf '\n## %s\n\n' \
      'The trainer against PyTorch (targets: 1.0 at hidden 512, 1.5 at hidden 128, 2.0 of data parallelism alone and with experts)'
    set --
    if [ "$quick" = yes ]; then set -- --rounds 1 --steps 6; fi
    python3 benchmarks/llama_vs_pytorch.py --python "$python" "$@"
  fi
  if [ "$quick" = no ]; then section 'Compile time (limits in the last column)' compile_times; fi
  : >build/benchmarks.done  # marks the end, because a pipe hides the exit code of an earlier failure
} | tee "$out"
rm build/benchmarks.done
echo "The table is in $out."
