#!/bin/sh
# shellcheck disable=SC2154
# Runs one step of run.sh, which sets root, out, build, headers, python, quick, capability and archive.
#
#   sh benchmarks/cuda/step.sh STEP
set -u

# Puts all logs and results so far into the archive, if --archive is given.
keep() {
  if [ -z "${archive:-}" ]; then return 0; fi
  tar czf "$archive.new" -C "$(dirname "$out")" "$(basename "$out")" || [ $? = 1 ] || return 1  # 1: a log has grown
  mv "$archive.new" "$archive"
}

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

# Builds all targets that can be built, even if others fail; without cuDNN if that does not compile here.
build() {
  if make_all; then return 0; fi
  if cmake --build "$build" --target bench_attention_library >/dev/null 2>&1; then return 1; fi
  cmake -S "$root/benchmarks/cuda" -B "$build" -DPLAIT_USE_CUDNN=OFF && make_all
  echo "cuDNN's attention does not compile here (see above): built without it"
  return 1
}

# Prints facts about the machine, for readers of the results.
machine() {
  nvidia-smi
  nvcc --version | tail -n 2
  g++ --version | head -n 1
  cmake --version | head -n 1
  "$python" -m pip list 2>/dev/null | grep -iE 'nvidia|torch|transformers|triton'
  ip -br address
  nproc
  free -g
  ldconfig -p | grep -E 'cublasLt|cudart|cudnn|nccl'
  echo "LD_LIBRARY_PATH=${LD_LIBRARY_PATH:-}"
  code=0
  for program in "$build"/bench_cuda_* "$build"/tests/cuda_* "$build"/train_llama; do
    case "$program" in *.o | *.d | *.cmake) continue ;; esac
    if [ ! -f "$program" ] || [ ! -x "$program" ]; then continue; fi
    if ldd "$program" | grep 'not found'; then
      echo "$program lacks these libraries"
      code=1
    fi
  done
  return $code
}

# Prints a name and a program for each file of tests, and the file if a program has several. A file that ends with a
# fault of the GPU then costs no other. Basic tests come first, and those that may need all memory last.
test_files() {
  first='launch kernel_elementwise kernel_norms kernel_losses kernel_embedding kernel_optimizer kernel_random attention'
  last='checkpoint graph level_memory offload leaving_nccl llama memory'
  for program in "$build"/tests/cuda_*; do
    if [ ! -f "$program" ] || [ ! -x "$program" ]; then continue; fi
    files=$("$program" --list-test-cases --reporters=xml 2>/dev/null | sed -n 's/.*filename="\([^"]*\)".*/\1/p' | sort -u)
    if [ "$(printf '%s\n' "$files" | wc -l)" -lt 2 ]; then echo "${program##*/cuda_} $program"; continue; fi
    for file in $files; do
      name=${file##*/}
      echo "${name%.*} $program */$name"
    done
  done | awk -v first="$first" -v last="$last" '
    BEGIN {n = split(first, a); for (i in a) place[a[i]] = i - n - 1; m = split(last, b); for (i in b) place[b[i]] = i}
    {print $1 in place ? place[$1] : 0, $0}' | sort -k1,1n -k2,2 | cut -d" " -f2-
}

# Runs every file of tests by itself, and prints a line for each.
tests() {
  test_files >"$out/test-files"
  if [ ! -s "$out/test-files" ]; then
    echo "no tests were built: doctest/doctest.h is missing (--headers), or they did not compile"
    return 1
  fi
  code=77
  while read -r name program file; do
    begun=$(date +%s)
    timeout 150 "$program" ${file:+--source-file="$file"} >"$out/test-$name.log" 2>&1 </dev/null
    ended=$?
    text="$name, $(($(date +%s) - begun)) s"
    case "$ended" in
      0) echo "passed $text: $(grep -a 'test cases' "$out/test-$name.log" | tail -n 1)"; [ "$code" = 1 ] || code=0 ;;
      77) echo "skipped $text: $(head -n 1 "$out/test-$name.log")" ;;
      *)
        echo "FAILED $text: exit code $ended"
        grep -a -A 12 -E 'TEST CASE|ERROR' "$out/test-$name.log" | head -n 15
        code=1
        ;;
    esac
    keep
  done <"$out/test-files"
  return $code
}

# measure RESULTS PROGRAM ARGUMENT...: runs a program, and writes its lines of results to a file, even if it then fails.
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
  ended=$?
  keep
  return $ended
}

# If a step gives no utilisation, perhaps because memory is too small, it is tried with half the tokens, and counts as
# failed. If it fails later, in the times of its kernels, its results are kept.
train() {
  code=0
  measure "step-$1" step --seq "$1" || code=$?
  if [ $code = 77 ]; then return 77; fi
  if [ $code != 0 ] && ! grep -qs '"id": "step[.0-9]*[.]mfu"' "$out/step-$1.jsonl"; then
    echo "the step failed with all tokens; again with 8192"
    measure "step-$1" step --seq "$1" --tokens 8192
  fi
  library=no
  if grep -qs '"attention": "cudnn"' "$out/step-$1.jsonl"; then library=yes; fi
  if [ $library = yes ]; then measure "step-$1-any" step --seq "$1" --attention-sums any || code=1; fi
  measure "step-$1-measured" step --seq "$1" --products measured || code=1
  if [ $library = yes ]; then
    measure "step-$1-measured-any" step --seq "$1" --products measured --attention-sums any || code=1
    measure "step-$1-own" step --seq "$1" --attention own || code=1
  fi
  return $code
}

pytorch() {
  if ! nvidia-smi -L >/dev/null 2>&1; then echo 'no CUDA device'; return 77; fi
  results=$out/pytorch-$1.jsonl
  rm -f "$results"
  # shellcheck disable=SC2086  # a word or none
  if "$python" "$root/benchmarks/cuda/pytorch_step.py" --seq "$1" $quick >"$results"; then return 0; fi
  echo "PyTorch's step failed; again without torch.compile"
  # shellcheck disable=SC2086  # a word or none
  "$python" "$root/benchmarks/cuda/pytorch_step.py" --seq "$1" --no-compile $quick >"$results"
  return 1
}

# Runs the trainer of a pack on real text, for 200 steps in bf16 and in float, launched and replayed, and on the CPU.
# Replayed steps must have the losses of launched ones, to the last bit.
trainer() {
  program=$build/train_llama
  if [ ! -x "$program" ]; then echo "there is no trainer in $build: only a pack has one"; return 77; fi
  if ! nvidia-smi -L >/dev/null 2>&1; then
    "$program" --device cuda --data "$build/kjv.txt" --steps 1
    echo "no CUDA device"
    return 77
  fi
  code=0
  for precision in bf16 float; do
    for graph in on off; do
      name=trainer-$precision-graph-$graph
      rm -f "$out/$name.jsonl"
      timeout 60 "$program" --device cuda --model tiny --data "$build/kjv.txt" --steps 200 --precision $precision \
        --graph $graph --sample 0 --log "$out/$name.steps" || code=1
    done
  done
  timeout 120 "$program" --device cpu --model tiny --data "$build/kjv.txt" --steps 200 --sample 0 \
    --log "$out/trainer-cpu.steps" || code=1
  "$python" "$root/benchmarks/cuda/losses.py" "$out" || code=1
  return $code
}

# Profiles plait's own kernels with Nsight Compute.
profile() {
  if ! command -v ncu >/dev/null; then echo 'ncu is not installed'; return 77; fi
  if ! nvidia-smi -L >/dev/null 2>&1; then echo 'no CUDA device'; return 77; fi
  ncu --clock-control none --set full -k 'regex:attention_.*mma|norm_backward|adamw' -c 6 -f -o "$out/own_kernels" \
    "$build/bench_cuda_attention" --quick --only attention.own
  ncu --clock-control none --set full -k 'regex:norm_backward|adamw' -c 4 -f -o "$out/memory_kernels" \
    "$build/bench_cuda_memory" --quick
}

case "$1" in
  keep | machine | configure | build | tests | trainer | profile) "$1" ;;
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
