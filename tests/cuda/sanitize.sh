#!/bin/sh
# Runs the small CUDA tests under compute-sanitizer, which finds accesses out of bounds and races in shared memory.
#
#   sh tests/cuda/sanitize.sh FOLDER_OF_TEST_PROGRAMS [TOOL...]
#
# TOOLs are memcheck and racecheck by default. Exit code 77 without a GPU or without the tool.
set -u

folder=$1
shift
[ $# -gt 0 ] || set -- memcheck racecheck

sanitizer=
for place in "$(command -v compute-sanitizer)" "${CUDA_PATH:-/usr/local/cuda}/bin/compute-sanitizer" \
  /usr/local/cuda/compute-sanitizer/compute-sanitizer; do
  if [ -n "$place" ] && [ -x "$place" ]; then sanitizer=$place; break; fi
done
if [ -z "$sanitizer" ]; then echo 'skipped: compute-sanitizer is not installed'; exit 77; fi
if ! nvidia-smi -L >/dev/null 2>&1; then echo 'skipped: there is no GPU'; exit 77; fi

# Whole models, and programs that wait for other ranks, are too slow when every access is checked.
found=0 code=0
for program in "$folder"/cuda_*; do
  case "$program" in
    *.o | *.d | *llama* | *training* | *comm_* | *_main*) continue ;;
  esac
  if [ ! -f "$program" ] || [ ! -x "$program" ]; then continue; fi
  found=$((found + 1))
  for tool in "$@"; do
    if ! text=$("$sanitizer" --tool "$tool" --error-exitcode 99 "$program" 2>&1); then
      echo "FAILED $tool on $(basename "$program"):"
      echo "$text" | tail -n 40
      code=1
    else
      echo "ok $tool on $(basename "$program")"
    fi
  done
done
if [ "$found" = 0 ]; then echo "FAILED: there are no test programs in $folder"; exit 1; fi
exit $code
