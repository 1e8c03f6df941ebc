#!/bin/sh
# Saving and loading beside PyTorch's distributed checkpoint: the same state, ranks and disk, one after the other.
#
#   checkpoint_vs_pytorch.sh BENCH_CHECKPOINT_SAVE MEGABYTES ROUNDS [PYTHON [ROWS]]
#
# Without PYTHON, which must have torch, plait alone is measured. The state is matrices of ROWS x 4096 floats, by default
# 1024. Ends with 1 where a target is missed; the limit is the ratio that the copy alone, or the disk alone, would have.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bench=$1 megabytes=$2 rounds=$3 python=${4:-} rows=${5:-1024}
folder=build/benchmark-checkpoint
status=0
"$bench" --megabytes "$megabytes" --rounds "$rounds" --rows "$rows" --directory "$folder" --json "$folder.json" || status=1
[ -n "$python" ] || exit "$status"
timeout 600 "$python" "$here/pytorch_checkpoint.py" "$folder" "$megabytes" "$rounds" "$rows" >"$folder.pytorch.json" \
  2>"$folder.log" || { cat "$folder.log" >&2; echo "PyTorch's part ended with an error or took over 600 s" >&2; exit 1; }
python3 - "$folder.json" "$folder.pytorch.json" <<'PY' || status=1
import json, sys
plait, torch = (json.loads(open(path).read()) for path in sys.argv[1:])
rows = [("training waits, against a synchronous save", "stall", "save", "copy", 10),
        ("training waits, against async_save", "stall", "stall", "copy", 10),
        ("until committed, against async_save", "whole", "async", "write", 3),
        ("until committed, against a synchronous save", "whole", "save", "write", 3),
        ("load on the same layout", "load", "load", "read", 1),
        ("load on another layout", "reshard", "reshard", "read", 3)]
missed = 0
print(f"\n{'':46} {'plait':>9} {'PyTorch':>9} {'ratio':>7} {'limit':>7}")
for text, ours, theirs, alone, target in rows:
    ratio, limit = (torch[theirs] / plait[key] for key in (ours, alone))  # the limit: the copy, or the disk, alone
    missed += ratio < target
    print(f"{text:46} {plait[ours]:8.3f}s {torch[theirs]:8.3f}s {ratio:7.1f} {limit:7.1f}   (at least {target})"
          + ("  MISSED" if ratio < target else "") + (", beyond the limit" if limit < target else ""))
sys.exit(missed > 0)
PY
exit "$status"
