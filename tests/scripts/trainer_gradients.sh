#!/bin/sh
# Gradients in bf16: on meshes of every kind losses and norms are near those with gradients in float, with half of their
# bytes in memory and in communication. States resume on other layouts, and with gradients of the other type.
# timeout: 180
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

of_log() { logs get "$1.jsonl" "$2"; }
over_dp() { of_log "$1" bytes_sent | sed -n 's/.*"dp": \([0-9]*\).*/\1/p'; }

h="--precision bf16 --sample 0"
n="$h --gradients bf16"
# shellcheck disable=SC2086  # lists of options
{
  train h1 $h
  train n1 $n
  logs check n1.jsonl 5 falls
  grep -q ', bf16, gradients in bf16$' n1.out || fail "the type of the gradients is not printed: $(cat n1.out)"
  [ "$(hash_of n1)" != "$(hash_of h1)" ] || fail "--gradients bf16 gives the bits of float"
  train n_again $n
  [ "$(hash_of n_again)" = "$(hash_of n1)" ] || fail "--gradients bf16 is not repeatable"

  against h1 2e-2 n_sp $n --mesh dp=2,tp=2
  against h1 2e-2 n_zero1 $n --mesh dp=2,cp=2 --data-parallel zero1 --reduce-in float --recompute selective
  against h1 2e-2 n_zero2 $n --mesh dp=4 --micro-batch 1 --data-parallel zero2
  against h1 2e-2 n_zero3 $n --mesh dp=2,tp=2 --micro-batch 2 --data-parallel zero3
  against h1 2e-2 n_hybrid $n --mesh dp=2,cp=2 --data-parallel zero2 --replicate-over dp --reduce-in float
  against h1 2e-2 n_stages $n --mesh pp=2,tp=2 --micro-batch 2 --schedule zb_h1
  against h1 2e-2 n_heads $n --mesh tp=4 --tensor-overlap 2
  against h1 2e-2 n_int8 $n --mesh dp=2 --data-parallel zero2 --shard blocks --moments int8 --micro-batch 2

  # A tied table on the first and the last stage: its gradient is the sum of two.
  sed 's/"hidden_size"/"tie_word_embeddings": true, "hidden_size"/' config.json >tied.json
  train t1 $h --model tied.json
  against t1 2e-2 t_stages $n --model tied.json --mesh dp=2,pp=2 --micro-batch 2 --data-parallel zero1
  against t1 2e-2 t_tp $n --model tied.json --mesh tp=2

  train m1 $h --optimizer muon
  against m1 2e-2 m_sp $n --optimizer muon --mesh dp=2,tp=2 --moments bf16
  against m1 2e-2 m_whole $n --optimizer muon --mesh dp=2,pp=2 --data-parallel zero3 --shard whole --micro-batch 2

  b="--precision bf16-no-masters --sample 0"
  train b1 $b
  against b1 2e-2 b_sp $b --gradients bf16 --mesh dp=2,tp=2
  against b1 2e-2 b_sharded $b --gradients bf16 --mesh dp=2,pp=2 --data-parallel zero3 --reduce-in float --micro-batch 2

  # Bytes over dp are those of float gradients that are reduced in bf16 or, by option, in their type.
  for parallel in replicated zero2; do
    for how in "bf16 full" "full float"; do
      train h_sent $h --mesh dp=2,tp=2 --data-parallel $parallel --reduce-in "${how% *}"
      train n_sent $n --mesh dp=2,tp=2 --data-parallel $parallel --reduce-in "${how#* }"
      [ "$(over_dp n_sent)" = "$(over_dp h_sent)" ] ||
        fail "$parallel, $how: $(over_dp n_sent) bytes over dp, and of gradients in float $(over_dp h_sent)"
    done
  done
  [ "$(over_dp n_sp)" -lt "$(over_dp n_sent)" ] || fail "--reduce-in float sends no more"
}

# The memory of a rank, planned and measured.
plan="--model bench-128 --seq 32 --mesh dp=2,tp=2"
for gradients in full bf16; do
  # shellcheck disable=SC2086
  "$trainer" $plan --precision bf16 --gradients $gradients --dry-run >plan.$gradients || fail "the plan with $gradients"
  train held.$gradients $plan --precision bf16 --gradients $gradients --sample 0 --steps 1
done
grep -q '^step: .*, bf16, gradients in bf16$' plan.bf16 || fail "the plan does not say what gradients are: $(cat plan.bf16)"
python3 - "$(of_log held.full peak_bytes)" "$(of_log held.bf16 peak_bytes)" <<'PYTHON' || fail "the memory of gradients in bf16"
import re, sys
def planned(gradients, row):
    number, unit = re.search(rf"^  {row} +([0-9.]+) ([kMG]?B)$", open(f"plan.{gradients}").read(), re.M).groups()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
saved = planned("full", "gradients") - planned("bf16", "gradients")
assert abs(planned("bf16", "gradients") / planned("full", "gradients") - 0.5) < 0.01, saved
assert planned("bf16", "optimizer") == planned("full", "optimizer")
measured = int(sys.argv[1]) - int(sys.argv[2])
assert abs(measured / saved - 1) < 0.05, f"gradients in bf16 save {measured} bytes of a rank, and were to save {saved:.0f}"
PYTHON

# A state of one layout resumes on another, and with gradients in float; the state records the type.
# shellcheck disable=SC2086
{
  train saving $n --mesh dp=2,tp=2 --data-parallel zero2 --checkpoint-dir states --save-every 3
  "$trainer" --model config.json --seq 32 --steps 5 $n --resume states/step-00000003 --mesh pp=2 --dry-run >plan.out ||
    fail "the plan of a run that goes on"
  grep -q "saved as 'dp=2,tp=2, zero2, schedule 1f1b, bf16, gradients in bf16', fits" plan.out || fail "$(cat plan.out)"
  train ended $n --mesh cp=2,tp=2 --resume states
  [ "$(hash_of ended)" = "$(hash_of saving)" ] || fail "other weights than were saved"
  for how in "$n --mesh pp=2,cp=2 --micro-batch 2" "$n --mesh dp=4 --micro-batch 1 --data-parallel zero3 --reduce-in float" \
    "$h --mesh tp=2"; do
    rm -f onwards.jsonl
    train onwards $how --resume states/step-00000003
    logs losses saving.jsonl onwards.jsonl 5e-3 4
  done
}
