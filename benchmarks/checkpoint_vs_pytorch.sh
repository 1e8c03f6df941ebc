#!/bin/sh
# Saving and loading beside PyTorch's distributed checkpoint: the same state, ranks and disk, one after the other.
#
#   checkpoint_vs_pytorch.sh BENCH_CHECKPOINT_SAVE MEGABYTES ROUNDS [PYTHON]
#
# Without PYTHON, which must have torch, plait alone is measured. Ends with 1 where a target is missed.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bench=$1 megabytes=$2 rounds=$3 python=${4:-}
folder=build/benchmark-checkpoint
status=0
"$bench" --megabytes "$megabytes" --rounds "$rounds" --directory "$folder" --json "$folder.json" || status=1
[ -n "$python" ] || exit "$status"
timeout 600 "$python" "$here/pytorch_checkpoint.py" "$folder" "$megabytes" "$rounds" >"$folder.pytorch.json" \
  2>"$folder.log" || { cat "$folder.log" >&2; echo "PyTorch's part ended with an error or took over 600 s" >&2; exit 1; }
python3 - "$folder.json" "$folder.pytorch.json" <<'PY' || status=1
import json, sys
plait, torch = (json.loads(open(path).read()) for path in sys.argv[1:])
rows = [("training waits, against a synchronous save", "stall", "save", 10),
        ("training waits, against async_save", "stall", "stall", 10),
        ("from the call until the step is committed", "whole", "save", 3),
        ("load on the same layout", "load", "load", 1),
        ("load on another layout", "reshard", "reshard", 3)]
missed = 0
print(f"\n{'':46} {'plait':>9} {'PyTorch':>9} {'ratio':>7}")
for text, ours, theirs, target in rows:
    ratio = torch[theirs] / plait[ours]
    missed += ratio < target
    print(f"{text:46} {plait[ours]:8.3f}s {torch[theirs]:8.3f}s {ratio:7.1f}   (at least {target})"
          + ("  MISSED" if ratio < target else ""))
sys.exit(missed > 0)
PY
exit "$status"
