#!/bin/sh
# The first run on a GPU machine, as far as possible without a GPU. It configures the build with the packages of such a
# machine and with headers copied as documented, and runs the commands of a pack.
# timeout: 600
# runs: with --all
. "$(dirname "$0")/lib/base.sh"
if [ -n "${CUDNN_FRONTEND:-}" ]; then CUDNN_FRONTEND=$(cd "$CUDNN_FRONTEND" && pwd); fi
command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || { echo "there is no nvcc"; exit 77; }
cd "$work"

# cuDNN's front end from its wheel or the given folder; otherwise headers that include each other as its headers do.
for folder in "${CUDNN_FRONTEND:-}" "$(python3 -c "import sysconfig; print(sysconfig.get_path('purelib'))")/include"; do
  if [ -f "$folder/cudnn_frontend.h" ]; then real=$folder; break; fi
done
if [ -z "${real:-}" ]; then
  mkdir -p given/cudnn_frontend
  echo '#include "cudnn_backend_base.h"
#include "cudnn_frontend_Errata.h"' >given/cudnn_frontend.h
  echo '#include "../include/cudnn_frontend_Logging.h"' >given/cudnn_frontend_Errata.h
  touch given/cudnn_backend_base.h given/cudnn_frontend_Logging.h
  frontend=given
else
  frontend=$real
fi
sh "$SOURCE/benchmarks/cuda/headers.sh" headers "$frontend" || fail "headers.sh"

# Packages of this machine that a GPU machine lacks must not be found: their headers do not compile.
for name in fmt/format.h dnnl.hpp dnnl.h cblas.h CLI/CLI.hpp nlohmann/json.hpp doctest/doctest.h benchmark/benchmark.h \
  liburing.h mpi.h; do
  mkdir -p "lacking/$(dirname "$name")"
  echo "#error \"$name is not on a GPU machine\"" >"lacking/$name"
done
lacks=""
for package in dnnl fmt OpenBLAS nlohmann_json CLI11 MPI benchmark doctest PkgConfig; do
  lacks="$lacks -DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"
done
# The programs are compiled but not run, so the fastest compiler and few optimisations are best.
if command -v clang++-16 >/dev/null; then lacks="$lacks -DCMAKE_CXX_COMPILER=clang++-16 -DCMAKE_CUDA_HOST_COMPILER=g++"; fi
# shellcheck disable=SC2086  # a list of words
cmake -S "$SOURCE/benchmarks/cuda" -B build -G Ninja -DPLAIT_CUDA_ARCHITECTURES=90a -DPLAIT_HEADERS="$work/headers" $lacks \
  -DCMAKE_CXX_FLAGS="-isystem $work/lacking" -DCMAKE_CXX_FLAGS_RELEASE=-O0 -DCMAKE_CUDA_FLAGS="-isystem $work/lacking" \
  >configure.log 2>&1 ||
  fail "the build for a GPU alone is not configured: $(tail -n 30 configure.log)"
! grep 'MISSING: .*\(doctest\|nlohmann\)' configure.log || fail "headers.sh left out what the tests need"
grep -q "PLAIT_CUDNN_FRONTEND_INCLUDE_DIR:PATH=$work/headers/include" build/CMakeCache.txt ||
  fail "cuDNN's front end was found elsewhere: $(grep FRONTEND build/CMakeCache.txt)"
echo '#include <cudnn_frontend.h>' | g++ -std=c++20 -fsyntax-only -I headers/include -I "$(dirname "$(dirname \
  "$(readlink -f "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")/include" -DCUDNN_FRONTEND_SKIP_JSON_LIB -x c++ - ||
  fail "cuDNN's front end does not compile as headers.sh copies it"

build() { cmake --build build --target "$@" >build.log 2>&1 || fail "$*: $(grep -A 8 -E 'error|FAILED' build.log | head -n 40)"; }
# Builds two programs, and checks the code of the largest tests: checkpoints, models, graphs. None links the cpu's
# libraries.
build cuda_launch bench_cuda_collective
tests=$(ninja -C build -t targets all | sed -n 's/^\(tests.*joined.*training[.]cpp[.]o\):.*/\1/p' | head -n 1)
check=$(ninja -C build -t commands -s "$tests")
(cd build && sh -c "$check -fsyntax-only") >build.log 2>&1 || fail "$tests: $(grep -A 8 error build.log | head -n 40)"
ldd build/bench_cuda_collective | grep -q libcudart || fail "the benchmark does not link with CUDA's run time"
if [ -n "${real:-}" ]; then
  build cudnn_shapes
  build/cudnn_shapes >shapes.md || fail "cuDNN refuses shapes: $(grep -v '| ok | ok | ok |' shapes.md)"
fi

# A pack of these programs: without a GPU each reports that it skips, and the command succeeds.
mkdir -p pack/benchmarks/cuda pack/tests/cuda pack/programs/tests out
for file in run.sh step.sh table.py rows.py losses.py pytorch_step.py; do cp "$SOURCE/benchmarks/cuda/$file" pack/benchmarks/cuda; done
cp "$SOURCE/tests/cuda/sanitize.sh" pack/tests/cuda
cp "$SOURCE"/benchmarks/cuda/call*.sh pack
for name in memory linears attention choices step collective; do cp build/bench_cuda_collective "pack/programs/bench_cuda_$name"; done
cp build/tests/cuda_launch pack/programs/tests
if nvidia-smi -L >/dev/null 2>&1; then exit 0; fi
for call in 1 2 3; do
  OUT=$work/out PLAIT_NO_GPU=yes sh "pack/call$call.sh" >"call$call.log" 2>&1 ||
    fail "call$call.sh: $(grep -v '^ok' "call$call.log" | head -n 20)"
  ! grep FAILED "call$call.log" || fail "call$call.sh: a step failed"
  tar tzf out/logs.tgz | grep -q 'logs/table.md' || fail "call$call.sh left no archive"
  [ "$(wc -c <"call$call.log")" -le 12000 ] || fail "call$call.sh prints more than 12,000 characters"
done
grep -q '^skipped tests: skipped launch, .*: no CUDA device: skipped' call1.log || fail "the tests did not say that they skip: $(cat call1.log)"
for step in memory linears attention choices collective; do
  grep -q "^skipped $step: no CUDA device" call1.log || fail "$step did not say that it skips: $(cat call1.log)"
done
sh pack/call1.sh >refused.log 2>&1 && fail "a call without a GPU passes"
grep -q 'FAILED device: nvidia-smi finds no GPU here' refused.log || fail "it is not said that there is no GPU: $(cat refused.log)"
if [ -n "${real:-}" ]; then cat shapes.md; else echo "cuDNN's front end is not installed: its shapes were not asked for"; fi
