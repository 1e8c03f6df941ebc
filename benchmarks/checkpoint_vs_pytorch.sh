#!/bin/sh
# Compares saving and loading with PyTorch's distributed checkpoint: the same state, ranks and disk, in turn.
#
#   checkpoint_vs_pytorch.sh BENCH_CHECKPOINT_SAVE MEGABYTES ROUNDS [PYTHON [ROWS [TURNS]]]
#
# In each turn, plait and then PyTorch does ROUNDS rounds; the medians count. TURNS is 1 by default. A ratio is of one
# turn. Each line has the median, the least and the largest of the turns. PYTHON must have torch; without it only plait
# is measured. The state is matrices of ROWS x 4096 floats; ROWS is 1024 by default. Ends with 1 if a target is missed.
# The limit is the ratio of only the copy, only the disk's writing, or a read with a checksum and a copy by hand.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bench=$1 megabytes=$2 rounds=$3 python=${4:-} rows=${5:-1024} turns=${6:-1}
folder=build/benchmark-checkpoint
mkdir -p build
for turn in $(seq "$turns"); do
  code=0
  "$bench" --megabytes "$megabytes" --rounds "$rounds" --rows "$rows" --directory "$folder" --json "$folder.$turn.json" \
    >"$folder.log" || code=$?
  [ "$code" -le 1 ] || { cat "$folder.log" >&2; exit 1; }  # 1: a target is missed in this turn
  if [ "$turns" = 1 ]; then
    cat "$folder.log"
  elif [ "$turn" = 1 ]; then
    head -n 1 "$folder.log"
  fi
  [ -n "$python" ] || continue
  timeout 600 "$python" "$here/pytorch_checkpoint.py" "$folder" "$megabytes" "$rounds" "$rows" \
    >"$folder.pytorch.$turn.json" 2>"$folder.log" ||
    { cat "$folder.log" >&2; echo "PyTorch's part ended with an error or took over 600 s" >&2; exit 1; }
done
python3 - "$folder" "$turns" "${python:+pytorch}" <<'PY'
import json, statistics, sys
folder, turns, beside = sys.argv[1], int(sys.argv[2]), bool(sys.argv[3])
read = lambda name: [json.load(open(f"{folder}.{name}{turn}.json")) for turn in range(1, turns + 1)]
plait = read("")
missed = 0

def spread(values):
    return f"{statistics.median(values):7.2f} ({min(values):.2f} to {max(values):.2f})"

def judge(values, target, at_most):
    global missed
    met = statistics.median(values) <= target if at_most else statistics.median(values) >= target
    missed += not met
    return f"   ({'at most' if at_most else 'at least'} {target})" + ("" if met else "  MISSED")

print(f"\n{turns} turn{'s' if turns > 1 else ''}; medians, and the least and the most of them\n")
for text, key, over, target, at_most in [
        ("stall over copy", "stall", "copy", 1.25, True),
        ("load on the same layout over the disk's read", "load", "read", 1.18, True),
        ("load on another layout over the disk's read", "reshard", "read", 1.18, True),
        ("load on another layout over that by hand", "reshard", "by_hand", 1.18, True),
        ("load on another layout over the same", "reshard", "load", 1.2, True)]:
    values = [p[key] / p[over] for p in plait]
    print(f"{text:46} {spread(values):24}" + judge(values, target, at_most))
if beside:
    torch = read("pytorch.")
    print(f"\n{'':46} {'plait':>9} {'PyTorch':>9}   ratio                    limit")
    for text, ours, theirs, alone, target in [
            ("training waits, against a synchronous save", "stall", "save", "copy", 10),
            ("training waits, against async_save", "stall", "stall", "copy", 10),
            ("until committed, against async_save", "whole", "async", "write", 3),
            ("until committed, against a synchronous save", "whole", "save", "write", 3),
            ("load on the same layout", "load", "load", "by_hand", 1),
            ("load on another layout", "reshard", "reshard", "by_hand", 3)]:
        ratios, limits = ([t[theirs] / p[key] for p, t in zip(plait, torch)] for key in (ours, alone))
        limit = statistics.median(limits)
        print(f"{text:46} {statistics.median(p[ours] for p in plait):8.3f}s {statistics.median(t[theirs] for t in torch):8.3f}s"
              f" {spread(ratios):24} {limit:6.1f}" + judge(ratios, target, False)
              + (", beyond the limit" if limit < target else ""))
sys.exit(missed > 0)
PY
