#!/bin/sh
# examples/pretrain.cpp prints the same losses on eight ranks and on one, and continues a run on another mesh.
. "$(dirname "$0")/lib/base.sh"
text=$SOURCE/examples/data/kjv.txt
# run NAME STEPS MESH...: runs in the folder NAME, which is created if it does not exist.
run() {
  name=$1 steps=$2
  shift 2
  mkdir -p "$work/$name"
  (cd "$work/$name" && "$BIN/pretrain" "$text" "$steps" threads "$@" >>"$work/$name.txt" 2>&1) ||
    fail "pretrain on $*: $(cat "$work/$name.txt")"
}
# losses NAME: "step loss" of its steps, and "held-out loss".
losses() { sed -n 's/.*step \([0-9]*\)  loss \([0-9.]*\) .*/\1 \2/p; s/^held-out loss/held-out/p' "$work/$1.txt"; }
# same A B: the losses of two runs differ by less than 2e-3.
same() {
  losses "$1" >"$work/a" && losses "$2" >"$work/b"
  paste "$work/a" "$work/b" | awk '{ d = $2 - $4; if ($1 != $3 || d > 2e-3 || d < -2e-3) bad = 1 } END { exit bad || NR < 7 }' ||
    fail "$1 and $2 differ: $(paste "$work/a" "$work/b")"
}
run eight 6 1 2 2 2
run one 6 1 1 1 1
same eight one
grep -q '^saved step 6$' "$work/eight.txt" || fail "no save at the end: $(cat "$work/eight.txt")"
run ended 6 2 1 1 2
run ended 8 1 2 2 1
grep -q '^resumed .*step-00000006$' "$work/ended.txt" || fail "not resumed: $(cat "$work/ended.txt")"
[ "$(losses ended | grep -c '^[78] ')" = 2 ] || fail "not continued: $(cat "$work/ended.txt")"
[ "$(losses ended | wc -l)" = 10 ] || fail "steps are repeated: $(cat "$work/ended.txt")"
for wrong in "/absent 6" "$text 6 mpj"; do
  # shellcheck disable=SC2086  # several arguments
  if "$BIN/pretrain" $wrong >/dev/null 2>"$work/error"; then fail "pretrain $wrong ends well"; fi
  grep -q '^pretrain: ' "$work/error" || fail "pretrain $wrong: $(cat "$work/error")"
done
