#!/bin/sh
# Installs missing packages (Debian 12, root), builds, and runs tests. It uses clang 16, which takes 0.6 of g++'s time.
#
#   sh tests/run.sh            static assertions, texts of errors, units, parity on small meshes, examples, documents, and
#                              the trainer: its log, its resumed runs, its errors
#   sh tests/run.sh --all      also large meshes, kernels for GPUs on the CPU as a stand-in, nvcc if found, MPI, all
#                              scripts of the trainer, benchmarks, consumers of plait, fuzzing, each header alone.
#                              Address, undefined and thread sanitizers (most units run only with these). g++: all
#                              headers, static assertions, texts of errors, the trainer of the first command, two parity
#                              tests
set -eu

cd "$(dirname "$0")/.."
. cmake/packages.sh

all=no
for argument in "$@"; do
  case "$argument" in
    --all) all=yes ;;
    *)
      echo "unknown argument '$argument'; legal is --all" >&2
      exit 2
      ;;
  esac
done

# shellcheck disable=SC2086  # lists of names
install_packages $plait_build_packages $plait_mpi_packages $plait_test_packages

jobs=$(plait_jobs)
tests_at_once=$((jobs + 1))  # tests wait for ranks, processes and disks in a tenth of their time
started=$(date +%s)
# The targets on which a build spent most time.
slowest() {
  echo "the ten most expensive targets of $1:"
  awk -F'\t' 'NR > 1 {t[$4] = ($2 - $1) / 1000} END {for (o in t) printf "%8.1f s  %s\n", t[o], o}' "$1/.ninja_log" |
    sort -rn | head -n 10
}
say() { echo "== $* ($(($(date +%s) - started)) s)"; }

preset=quick
build=build/quick
benchmarks=OFF
if [ "$all" = yes ]; then
  preset=tests
  build=build/tests-run
  benchmarks=ON
fi
say "$preset: build"
cmake --preset "$preset" -DPLAIT_BUILD_TESTS=ON -DPLAIT_BUILD_BENCHMARKS=$benchmarks >build.log 2>&1 ||
  { cat build.log; rm -f build.log; exit 1; }
rm -f build.log
cmake --build "$build" -j "$jobs"

failed=""
if [ "$all" = yes ]; then
  say "g++: build and tests"
  cmake --preset gcc -DPLAIT_BUILD_BENCHMARKS=OFF >/dev/null
  cmake --build build/gcc -j "$jobs" --target plait_static headers_together train_llama parity_small parity_llama_meshes_float
  ctest --test-dir build/gcc -j "$tests_at_once" --output-on-failure --no-tests=error \
    -R '^(headers[.]together|parity[.](small_(llama|mailbox)|llama_meshes_float))$' || failed="$failed g++"

  say "address and undefined sanitizers: build and tests"
  cmake --preset asan -DPLAIT_BUILD_EXAMPLES=OFF -DPLAIT_BUILD_BENCHMARKS=OFF >/dev/null
  cmake --build build/asan -j "$jobs"
  ctest --test-dir build/asan -j "$tests_at_once" --output-on-failure --no-tests=error -L 'unit|parity|cuda_on_cpu' || failed="$failed asan"

  say "thread sanitizer: build and tests"
  cmake --preset tsan -DPLAIT_BUILD_EXAMPLES=OFF -DPLAIT_BUILD_BENCHMARKS=OFF >/dev/null
  cmake --build build/tsan -j "$jobs" --target plait_thread_tests
  ctest --test-dir build/tsan -j "$tests_at_once" --output-on-failure --no-tests=error -L threads || failed="$failed tsan"
fi

say "$preset: tests"
ctest --test-dir "$build" -j "$tests_at_once" --output-on-failure --no-tests=error || failed="$failed $preset"

slowest "$build"
[ "$all" = no ] || slowest build/asan
say "the end"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
