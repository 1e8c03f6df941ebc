#!/bin/sh
# Builds, checks and times plait on a machine with a GPU, and prints one table, which it also writes to
# benchmarks/results/ (or --results) under the GPU's name and the date.
#
#   sh benchmarks/cuda/run.sh [--out DIR] [--quick] [--only STEP,...] [--limit SECONDS] [--headers DIR]
#                             [--python PYTHON] [--build DIR] [--results DIR] [--archive FILE] [--short] [--no-gpu]
#
# Steps, in order: configure, build, machine, tests, memory, linears, attention, choices, collective, step-2048,
# pytorch-2048, step-4096, pytorch-4096, trainer (only from a pack, see pack.sh), sanitize, profile. `--only` names the
# steps to run (step and pytorch mean both lengths). Their results are added to those in --out, so a run may be split
# into several. --limit ends a run in time for its table. --archive keeps logs and results in a .tgz, written again
# after every test and measurement. --short prints a table of at most 11,000 characters. --no-gpu runs without a GPU:
# every program then prints that it skips.
# --headers (or PLAIT_HEADERS) is a folder with copies of header-only libraries that the machine lacks, as headers.sh
# makes it: doctest and nlohmann for the tests, and all of cudnn-frontend/include for cuDNN's attention.
# PYTHON is an interpreter with torch and transformers; python3 by default.
#
# If a step fails, its name is printed at once and in the table. The others still run, and the exit code is 1. A missed
# target does not change the exit code.
set -u

root=$(cd "$(dirname "$0")/../.." && pwd)
out=$root/build-cuda/results
build=$root/build-cuda
headers=${PLAIT_HEADERS:-}
python=python3
tables=$root/benchmarks/results
quick=
all='configure build machine tests memory linears attention choices collective step-2048 pytorch-2048 step-4096 pytorch-4096
  trainer sanitize profile'
archive=
short=
no_gpu=
whole=1000000
only=$all
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=--quick ;;
    --short) short=--short ;;
    --no-gpu) no_gpu=yes ;;
    --out | --only | --limit | --headers | --python | --build | --results | --archive)
      if [ $# -lt 2 ]; then echo "$1 needs a value" >&2; exit 2; fi
      case "$1" in
        --out) out=$2 ;;
        --only) only=$(echo "$2" | tr , ' ' | sed 's/\<step\>\([^-]\|$\)/step-2048 step-4096\1/; s/\<pytorch\>\([^-]\|$\)/pytorch-2048 pytorch-4096\1/') ;;
        --limit) whole=$2 ;;
        --headers) headers=$2 ;;
        --python) python=$2 ;;
        --build) build=$2 ;;
        --results) tables=$2 ;;
        --archive) archive=$2 ;;
      esac
      shift
      ;;
    *) echo "unknown argument '$1'; legal are --out, --quick, --only, --limit, --headers, --python, --build," \
      "--results, --archive, --short and --no-gpu" >&2; exit 2 ;;
  esac
  shift
done
case "$whole" in
  '' | *[!0-9]*) echo "--limit is '$whole', must be a number of seconds" >&2; exit 2 ;;
esac
for step in $only; do
  case " $(echo $all) " in
    *" $step "*) ;;
    *) echo "--only names '$step'; legal are $(echo $all), step and pytorch" >&2; exit 2 ;;
  esac
done

if [ -n "$no_gpu" ]; then
  gpu='no GPU, 9.0'
elif ! gpu=$(nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader 2>&1); then
  echo "FAILED device: nvidia-smi finds no GPU here: $gpu" >&2
  exit 1
fi
name=$(echo "$gpu" | head -n 1 | sed 's/,[^,]*$//')
capability=$(echo "$gpu" | head -n 1 | sed 's/.*, *//; s/\.//')
if [ "$capability" = 90 ]; then capability=90a; fi  # some of Hopper's instructions need this name
if [ -n "$headers" ]; then
  if [ ! -d "$headers" ]; then echo "--headers is $headers, which is no folder" >&2; exit 2; fi
  headers=$(cd "$headers" && pwd)
fi
mkdir -p "$out" "$build" || exit 1
out=$(cd "$out" && pwd)
build=$(cd "$build" && pwd)
export root out build headers python quick capability archive
keep() { sh "$root/benchmarks/cuda/step.sh" keep; }

# Programs may have no path to CUDA's libraries, in Python wheels (first, as for PyTorch) or in a toolkit.
wheels=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
for folder in ${wheels:+"$wheels"/*/lib} "${CUDA_PATH:-/usr/local/cuda}"/lib64 "${CUDA_PATH:-/usr/local/cuda}"/lib; do
  if [ -d "$folder" ]; then LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder; fi
done
# A single machine may have no network but this one, and NCCL needs one.
export LD_LIBRARY_PATH NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-lo}" NCCL_DEBUG="${NCCL_DEBUG:-WARN}" PYTHONUNBUFFERED=1
failed=$out/failed
: >"$failed"
started=$(date +%s)

# Prints the limit of a step in seconds: a machine may be available only for minutes.
limit_of() {
  case "$1" in
    build) echo 400 ;;
    tests | step-* | trainer) echo 330 ;;  # a step at 16384 tokens takes 3 to 4 s, and five settings are measured
    pytorch-* | sanitize) echo 240 ;;
    *) echo 150 ;;
  esac
}

# Prints a line for each test program.
named_tests() { grep -h '^\(passed\|skipped\|FAILED\) ' "$out/tests.log"; }

for step in $all; do
  case " $only " in
    *" $step "*) ;;
    *) continue ;;
  esac
  limit=$(limit_of "$step")
  begun=$(date +%s)
  left=$((whole - 5 - (begun - started)))
  if [ "$left" -lt 1 ]; then
    echo "$step (not run: --limit is $whole)" >>"$failed"
    echo "FAILED $step: not run, --limit is $whole"
    continue
  fi
  if [ "$limit" -gt "$left" ]; then limit=$left; fi
  timeout "$limit" sh "$root/benchmarks/cuda/step.sh" "$step" >"$out/$step.log" 2>&1
  code=$?
  keep
  spent=$(($(date +%s) - begun))
  case "$code" in
    0 | 77)
      if [ "$code" = 0 ]; then echo "ok $step, $spent s"; else echo "skipped $step: $(tail -n 1 "$out/$step.log")"; fi
      case "$step" in
        tests) named_tests ;;
        trainer) tail -n 8 "$out/$step.log" ;;
        *) grep -h 'MISSING:\|LEFT OUT:' "$out/$step.log" ;;
      esac
      continue
      ;;
    124) why="ran past its limit of $limit s" ;;
    *) why="exit code $code after $spent s" ;;
  esac
  echo "$step ($why)" >>"$failed"
  echo "FAILED $step: $why; the end of $out/$step.log:"
  if [ "$step" != tests ] || ! named_tests; then tail -n 25 "$out/$step.log"; fi
done

day=$(date +%Y-%m-%d)
file=$tables/$(echo "$name" | tr '[:upper:]' '[:lower:]' | tr -cs 'a-z0-9\n' '-' | sed 's/-*$//')-$day.md
mkdir -p "$tables"
set --
while read -r step; do set -- "$@" --failed "$step"; done <"$failed"
for results in "$out"/*.jsonl; do
  if [ -s "$results" ]; then set -- "$@" "$results"; fi
done
"$python" "$root/benchmarks/cuda/table.py" --title "$name, $day" "$@" >"$file.new" || { rm -f "$file.new"; exit 1; }
mv "$file.new" "$file"
cp "$file" "$out/table.md"
keep
if [ -n "$short" ]; then "$python" "$root/benchmarks/cuda/table.py" --short "$@"; else cat "$file"; fi
echo
echo "The table is in $file, logs and results in ${archive:-$out}."
[ ! -s "$failed" ]
