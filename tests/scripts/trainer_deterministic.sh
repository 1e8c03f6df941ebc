#!/bin/sh
# --deterministic: one hash of the weights, and all digits of losses and norms equal, on every mesh, schedule,
# attention, level of data parallelism, number of microbatches and backend. In float and bf16, with AdamW and Muon, also
# for a run that resumes on another layout. Another hash for sums with other leaves; and its errors.
# timeout: 600
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

cat >config.json <<'JSON'
{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
 "intermediate_size": 64, "vocab_size": 250, "max_position_embeddings": 256}
JSON

# run NAME ARGUMENTS...: a run of the small model, 8 sequences in a step.
run() {
  name=$1
  shift
  timeout 120 ${launch:-} "$trainer" --model "${trained_model:-config.json}" --data "$text" --seq 32 --global-batch 8 --steps "${steps:-4}" --warmup 2 --sample 0 \
    --lr 0.01 --deterministic "${leaves:-8,8,4}" --log "$name.jsonl" "$@" >"$name.out" 2>&1 ||
    fail "$name ($*): $(cat "$name.out")"
}
# one NAME ARGUMENTS...: a run that sends the predicted bytes.
one() {
  run "$@"
  [ "$(logs get "$1.jsonl" bytes_as_predicted)" = true ] || fail "$*: the bytes are not as predicted"
}
# same BASE NAME ARGUMENTS...: a run that sends the predicted bytes and has the bits of BASE.
same() {
  base=$1
  shift
  run "$@"
  logs bits "$base.jsonl" "$1.jsonl" || fail "$*"
}

one f --micro-batch 8
one usual --micro-batch 8 --deterministic off
[ "$(hash_of f)" != "$(hash_of usual)" ] || fail "--deterministic does nothing"
logs losses usual.jsonl f.jsonl 2e-5
same f accumulated --micro-batch 4
same f accumulated4 --micro-batch 2
same f again --micro-batch 8 --recompute full
same f budget --mesh pp=2,dp=2 --micro-batch 1 --recompute budget:200K
same f dp2 --mesh dp=2 --micro-batch 4
same f dp4 --mesh dp=4 --micro-batch 1
same f dp8 --mesh dp=8 --micro-batch 1 --data-parallel zero1
same f zero1 --mesh dp=2 --micro-batch 2 --data-parallel zero1
same f zero2 --mesh dp=4 --micro-batch 2 --data-parallel zero2 --overlap off
same f zero3 --mesh dp=2 --micro-batch 1 --data-parallel zero3
same f tp2 --mesh tp=2 --micro-batch 8
same f tp4 --mesh tp=4 --micro-batch 4
same f tp_alone --mesh tp=4 --micro-batch 8 --strategy tp --recompute selective
same f ring --mesh cp=2 --micro-batch 8 --attention ring:zigzag
same f contiguous --mesh cp=4 --micro-batch 4 --attention ring:contiguous
same f gathered --mesh cp=2 --micro-batch 2 --attention all_gather_kv:zigzag
same f gathered4 --mesh cp=4 --micro-batch 8 --attention all_gather_kv:contiguous
same f ulysses --mesh cp=2 --micro-batch 8 --attention ulysses:zigzag
same f ulysses2 --mesh cp=4 --micro-batch 8 --attention ulysses:contiguous
same f pp1f1b --mesh pp=2 --micro-batch 2
same f pp4 --mesh pp=4 --micro-batch 1 --schedule gpipe
same f zbv --mesh pp=2 --micro-batch 1 --schedule zb_v
same f zbh1 --mesh pp=2,tp=2 --micro-batch 2 --schedule zb_h1
same f interleaved --mesh pp=2,dp=2 --micro-batch 1 --schedule interleaved:2 --data-parallel zero2
same f dp2tp2 --mesh dp=2,tp=2 --micro-batch 2 --data-parallel zero3
same f dp2cp2 --mesh dp=2,cp=2 --micro-batch 2 --data-parallel zero1
same f hybrid --mesh dp=2,cp=2 --micro-batch 2 --data-parallel zero2 --replicate-over dp
same f cp2tp2 --mesh cp=2,tp=2 --micro-batch 4
same f cube --mesh dp=2,cp=2,tp=2 --micro-batch 2 --data-parallel zero2
same f cube3 --mesh dp=2,cp=2,tp=2 --micro-batch 1 --data-parallel zero3 --attention all_gather_kv
same f pipes --mesh pp=2,cp=2,tp=2 --micro-batch 2
same f four --mesh dp=2,pp=2,cp=2,tp=2 --micro-batch 1 --data-parallel zero1 --schedule zb_v
# Ranks with unequally many leaves.
same f tp3 --mesh tp=3 --micro-batch 4
same f cp3 --mesh cp=3 --micro-batch 8 --attention ring:contiguous
same f gathered3 --mesh cp=3 --micro-batch 2 --attention all_gather_kv:contiguous
same f cp2tp3 --mesh cp=2,tp=3 --micro-batch 8 --data-parallel zero1
same f dp2tp3 --mesh dp=2,tp=3 --micro-batch 2 --data-parallel zero3
leaves=8,8,8 one finer --seq 64 --micro-batch 8
leaves=8,8,8 same finer ring3 --seq 64 --mesh cp=3 --micro-batch 8 --attention ring:zigzag
leaves=8,8,8 same finer ring5 --seq 64 --mesh cp=5 --micro-batch 4 --attention ring:contiguous
same f wide --mesh dp=4,tp=4 --micro-batch 1 --data-parallel zero3

# MPI processes, and a run that resumes on another layout.
if has_mpi; then
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
  launch="mpirun -n 4 --allow-run-as-root --oversubscribe"
  same f mpi --backend mpi --mesh dp=2,tp=2 --micro-batch 2 --data-parallel zero2
  same f mpi_cp --backend mpi --mesh pp=2,cp=2 --micro-batch 4 --attention ring:zigzag
  launch=
fi
# goes_on NAME FIRST THEN: saves after 2 of 4 steps with the options FIRST and resumes with THEN.
goes_on() {
  # shellcheck disable=SC2086  # lists of options
  {
    same f "$1_first" $2 --checkpoint-dir "$1" --save-every 2
    same f "$1" $3 --resume "$1/step-00000002"
  }
}
goes_on moved "--mesh dp=2,tp=2 --micro-batch 2 --data-parallel zero2" "--mesh pp=2,cp=2 --micro-batch 4"
goes_on unequal "--mesh dp=2,tp=3 --micro-batch 2 --data-parallel zero2" "--mesh cp=3 --micro-batch 8 --attention ring:contiguous"
goes_on equal "--mesh cp=2 --micro-batch 8" "--mesh tp=3 --micro-batch 8"
goes_on grown "--mesh cp=2 --micro-batch 8" "--mesh dp=4,tp=2 --micro-batch 1 --data-parallel zero3"

b="--precision bf16"
# shellcheck disable=SC2086  # lists of options
{
  one b $b --micro-batch 8
  same b b_cube $b --mesh dp=2,cp=2,tp=2 --micro-batch 2 --data-parallel zero2
  same b b_pipes $b --mesh pp=2,tp=4 --micro-batch 4
}
# Stochastic rounding of weights and dropout depend on global indices.
n="--precision bf16-no-masters"
r="--dropout 0.1"
# shellcheck disable=SC2086
{
  one n $n --micro-batch 8
  same n n_cube $n --mesh dp=2,cp=2,tp=2 --micro-batch 2 --data-parallel zero3
  one r $r --micro-batch 8
  [ "$(hash_of r)" != "$(hash_of f)" ] || fail "--dropout does nothing"
  same r r_cube $r --mesh dp=2,cp=2,tp=2 --micro-batch 1 --data-parallel zero2
  same r r_pipes $r --mesh pp=2,dp=4 --micro-batch 1 --schedule zb_v
}
m="--optimizer muon"
# shellcheck disable=SC2086
{
  one m $m --micro-batch 8
  same m m_cube $m --mesh dp=2,cp=2,tp=2 --micro-batch 2
  same m m_zero $m --mesh dp=4,tp=2 --micro-batch 1 --data-parallel zero2 --shard whole
  same m m_pipes $m --mesh pp=2,tp=2 --micro-batch 1
}
# A tied table: two layers add to its gradient, and two stages have a copy.
sed 's/{/{"tie_word_embeddings": true, /' config.json >tied.json
t="--model tied.json"
# shellcheck disable=SC2086
{
  one t $t --micro-batch 8
  [ "$(hash_of t)" != "$(hash_of f)" ] || fail "tied.json is not tied"
  same t t_dp $t --mesh dp=2 --micro-batch 2 --data-parallel zero2
  same t t_zbv $t --mesh pp=2,dp=2 --micro-batch 1 --schedule zb_v --data-parallel zero1
  same t t_budget $t --mesh pp=2 --micro-batch 1 --schedule zb_v --recompute budget:300K
  same t t_pipes $t --mesh pp=2,dp=2,tp=2 --micro-batch 2 --schedule 1f1b --data-parallel zero2
}
d="--precision double"
# shellcheck disable=SC2086
{
  one d $d --micro-batch 8
  one d_usual $d --micro-batch 8 --deterministic off
  logs losses d_usual.jsonl d.jsonl 1e-12
  same d d_cube $d --mesh dp=2,cp=2,tp=2 --micro-batch 2 --dropout 0
}

# Two runs compared by their logs: equal on two layouts, different from the first hashed step with other leaves.
steps=6 one h --micro-batch 8 --log-hashes 2
steps=6 one h_cube --mesh dp=2,cp=2,tp=2 --micro-batch 2 --log-hashes 2
leaves=4,8,4 steps=6 one h_other --micro-batch 8 --log-hashes 2
"$BIN/checkpoint_tool" compare-runs h.jsonl h_cube.jsonl >compared.out || fail "compare-runs: $(cat compared.out)"
! "$BIN/checkpoint_tool" compare-runs h.jsonl h_other.jsonl >compared.out || fail "other leaves compare equal"
grep -q 'model\.' compared.out || fail "compare-runs names no parameter: $(cat compared.out)"

# Other leaves give other sums.
leaves=4,8,4 one other --micro-batch 8
leaves=8,8,2 one coarser --micro-batch 8
for name in other coarser; do
  [ "$(hash_of f)" != "$(hash_of $name)" ] || fail "$name has the same sums"
done

# Experts sharded over ranks, and a run that resumes on other ranks.
cat >experts.json <<'JSON'
{"model_type": "qwen2_moe", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
 "intermediate_size": 64, "vocab_size": 250, "max_position_embeddings": 256, "num_experts": 8, "num_experts_per_tok": 2,
 "moe_intermediate_size": 16, "norm_topk_prob": true, "shared_expert_intermediate_size": 32}
JSON
trained_model=experts.json
losses="--balance-loss 0.1 --router-z-loss 0.01 --expert-limit 1.5"
# shellcheck disable=SC2086
{
  run e --micro-batch 8 $losses
  same e e_ep --mesh dp=2,ep=2 --micro-batch 1 $losses --recompute full
  leaves=8,6,4 run e6 --global-batch 6 --micro-batch 6 $losses
  leaves=8,6,4 same e6 e6_ep3 --mesh ep=3 --global-batch 6 --micro-batch 2 $losses
  same e e_tp --mesh ep=2,tp=2 --micro-batch 4 $losses --data-parallel zero3 --checkpoint-dir e_steps --save-every 2
  same e e_again --mesh pp=2,ep=4 --micro-batch 1 $losses --resume e_steps/step-00000002
}
unset trained_model

given="--model config.json --data $text --seq 32 --global-batch 8 --steps 1 --sample 0 --micro-batch 1"
refused "--deterministic yes: legal are off, and one to three numbers of leaves" --deterministic yes
refused "--deterministic 8,8,2,1: legal are off" --deterministic 8,8,2,1
refused "--deterministic 8,0: legal are off" --deterministic 8,0
refused "which --threads 2 does not have; legal is 1" --deterministic 8 --threads 2
refused "which --moments int8 does not have; legal is full or bf16" --deterministic 8 --moments int8
refused "which --reduce-in bf16 does not have; legal is full" --deterministic 8 --mesh dp=2 --reduce-in bf16
refused "which --tensor-overlap 2 does not have; legal is 1" --deterministic 8 --mesh tp=2 --tensor-overlap 2
refused "has no order for kv heads that ranks share, and --mesh has tp=8 for 4 kv heads; legal are up to 4" \
  --deterministic 8 --mesh tp=8
refused "2 leaves of heads, as many as divide 2 and 8, cannot be divided over tp=4" --deterministic 2,8 --mesh tp=4
refused "4 leaves of samples, cannot be divided over dp=2 and 4 microbatches of 8 sequences in a step; legal are multiples of 8 that divide 8" \
  --deterministic 8,4 --mesh dp=2
refused "16 leaves of samples, cannot be divided over dp=1 and 8 microbatches of 8 sequences" --deterministic 8,16
refused "2 leaves of the sequence, cannot be divided over cp=2 in zigzag order; legal are 4 or more" \
  --deterministic 8,8,2 --mesh cp=2
refused "2 leaves of the sequence, cannot be divided over cp=3; legal are multiples of 3, and 9 or more" \
  --deterministic 8,8,2 --mesh cp=3,tp=3 --attention ring:contiguous
refused "2 leaves of heads, as many as divide 2 and 8, cannot be divided over tp=3; the first number must have a common divisor with 8 that is at least 3" \
  --deterministic 2,8 --mesh tp=3
refused "8 leaves of the sequence, of which each is cut into 8 for norms, do not divide --seq 32" --deterministic 8,8,8
