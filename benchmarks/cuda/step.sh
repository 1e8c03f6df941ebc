#!/bin/sh
# shellcheck disable=SC2154
# One step of run.sh, which sets root, out, build, headers, python, quick and capability.
#
#   sh benchmarks/cuda/step.sh STEP
set -u

configure() {
  ninja=
  if command -v ninja >/dev/null; then ninja='-G Ninja'; fi
  # shellcheck disable=SC2086  # no word or two
  cmake -S "$root/benchmarks/cuda" -B "$build" $ninja -DPLAIT_CUDA_ARCHITECTURES="$capability" \
    -DPLAIT_HEADERS="$headers"
}

make_all() {
  keep=--keep-going
  if [ -f "$build/build.ninja" ]; then keep='-k 0'; fi
  targets=$(cmake --build "$build" --target help | grep -o 'plait_cuda_[a-z]*' | sort -u)
  # shellcheck disable=SC2086  # lists of words
  cmake --build "$build" -j "$(nproc)" --target $targets -- $keep
}

# What can be built is built, whatever fails beside it; without cuDNN where that does not compile here.
build() {
  if make_all; then return 0; fi
  if cmake --build "$build" --target bench_attention_library >/dev/null 2>&1; then return 1; fi
  cmake -S "$root/benchmarks/cuda" -B "$build" -DPLAIT_USE_CUDNN=OFF && make_all
  echo "cuDNN's attention does not compile here (see above): built without it"
  return 1
}

tests() {
  if ! ls "$build"/tests/cuda_* >/dev/null 2>&1; then
    echo "no tests were built: doctest/doctest.h is missing (--headers), or they did not compile"
    return 1
  fi
  ctest --test-dir "$build" -L '^cuda$' --output-on-failure --no-tests=error
}

# measure RESULTS PROGRAM ARGUMENT...: a program's lines of results go to a file of their own.
measure() {
  results=$out/$1.jsonl
  program=$build/bench_cuda_$2
  shift 2
  rm -f "$results"
  if [ ! -x "$program" ]; then
    echo "$program was not built: configure.log says what is missing, build.log what did not compile"
    return 1
  fi
  # shellcheck disable=SC2086  # a word or none
  "$program" $quick "$@" >"$results"
}

# A step that does not run, perhaps for want of memory, is tried with half the tokens, and counts as failed.
train() {
  code=0
  if ! measure "step-$1" step --seq "$1"; then
    code=1
    echo "the step failed with all tokens; again with 8192"
    measure "step-$1" step --seq "$1" --tokens 8192
  fi
  if grep -qs '"attention": "cudnn"' "$out/step-$1.jsonl"; then
    measure "step-$1-own" step --seq "$1" --attention own || code=1
  fi
  measure "step-$1-measured" step --seq "$1" --products measured || code=1
  if grep -qs '"attention": "cudnn"' "$out/step-$1.jsonl"; then
    measure "step-$1-measured-any" step --seq "$1" --products measured --attention-sums any || code=1
  fi
  return $code
}

pytorch() {
  results=$out/pytorch-$1.jsonl
  rm -f "$results"
  # shellcheck disable=SC2086  # a word or none
  if "$python" "$root/benchmarks/cuda/pytorch_step.py" --seq "$1" $quick >"$results"; then return 0; fi
  echo "PyTorch's step failed; again without torch.compile"
  # shellcheck disable=SC2086  # a word or none
  "$python" "$root/benchmarks/cuda/pytorch_step.py" --seq "$1" --no-compile $quick >"$results"
  return 1
}

case "$1" in
  configure | build | tests) "$1" ;;
  sanitize)
    tools='memcheck racecheck'
    if [ -n "$quick" ]; then tools=memcheck; fi
    # shellcheck disable=SC2086  # a list of words
    sh "$root/tests/cuda/sanitize.sh" "$build/tests" $tools
    ;;
  memory | linears | attention | choices | collective) measure "$1" "$1" ;;
  step-*) train "${1#step-}" ;;
  pytorch-*) pytorch "${1#pytorch-}" ;;
  *) echo "there is no step '$1'"; exit 2 ;;
esac
