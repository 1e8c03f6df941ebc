#!/bin/sh
# The trainer on meshes of threads: its log, its picture and its text. Every mesh, strategy, way of storing parameters
# and kind of recomputation has the losses, gradient norms and initial weights of one rank.
# timeout: 240
. "$(dirname "$0")/lib/common.sh"

train d1 --precision double --sample 40 --plot d1.svg --held-out 0.001
logs check d1.jsonl 5 falls
[ "$(logs get d1.jsonl bytes_sent)" = "{}" ] || fail "one rank sent bytes"
[ "$(logs get d1.jsonl parameters)" = 34976 ] || fail "the number of parameters is wrong"
[ -s d1.svg ] || fail "there is no picture"
python3 -c '
import sys, xml.etree.ElementTree as tree
names = {e.tag.split("}")[1] for e in tree.parse(sys.argv[1]).iter()}
sys.exit(0 if {"svg", "path", "text"} <= names else f"{sys.argv[1]} has only {names}")' d1.svg || fail "the picture"
[ "$(logs get d1.jsonl held_out_loss)" != null ] || fail "nothing was held out"
sampled d1 | grep -q '^And ' || fail "no text was sampled: $(cat d1.out)"

# Held-out data shift the training data, so all compared runs hold out the same.
d="--precision double --sample 40 --held-out 0.001"
# shellcheck disable=SC2086  # lists of options
{
  against d1 1e-10 d_sp $d --mesh dp=2,tp=2
  against d1 1e-10 d_sp_sharded $d --mesh dp=2,tp=2 --data-parallel zero3 --recompute selective
  against d1 1e-10 d_tp $d --mesh dp=2,tp=2 --strategy tp --recompute full
  against d1 1e-10 d_tp_sharded $d --mesh dp=4,tp=2 --micro-batch 2 --strategy tp --data-parallel zero2
  against d1 1e-10 d_heads $d --mesh dp=1,tp=4
  against d1 1e-10 d_heads_tp $d --mesh tp=4 --strategy tp --recompute selective
  against d1 1e-10 d_dp $d --mesh dp=8 --micro-batch 1 --data-parallel zero1 --overlap off
  against d1 1e-10 d_ones $d --mesh dp=2 --micro-batch 1
  against d1 1e-10 d_hybrid $d --mesh dp=2,cp=2 --data-parallel zero2 --replicate-over dp
}
for name in d_sp d_sp_sharded d_tp d_tp_sharded d_heads d_heads_tp d_dp d_ones d_hybrid; do
  [ "$(sampled d1)" = "$(sampled $name)" ] || fail "$name samples another text: $(sampled $name)"
  # A microbatch takes 2, 4 or 8 of the 26 held-out sequences.
  python3 -c 'import sys; a, b = map(float, sys.argv[1:]); sys.exit(abs(a - b) > 1e-10)' \
    "$(logs get d1.jsonl held_out_loss)" "$(logs get $name.jsonl held_out_loss)" || fail "$name holds out other sequences"
done

m="--precision double --sample 0 --optimizer muon"
# shellcheck disable=SC2086  # lists of options
{
  train m1 $m
  logs check m1.jsonl 5 falls
  [ "$(hash_of m1)" != "$(hash_of d1)" ] || fail "--optimizer muon is AdamW"
  against m1 1e-10 m_sp $m --mesh dp=2,tp=2
  against m1 1e-10 m_pp $m --mesh pp=2,cp=2,tp=2
  against m1 1e-10 m_tp_sharded $m --mesh dp=2,tp=2 --strategy tp --data-parallel zero3 --shard whole
  train m_original $m --muon-scale original --muon-lr-ratio 5 --muon-momentum 0.9
  logs check m_original.jsonl 5 falls
  [ "$(hash_of m1)" != "$(hash_of m_original)" ] || fail "no --muon option counts"
}

train f1 --sample 0
logs check f1.jsonl 5 falls
against f1 1e-5 f_sp --sample 0 --mesh dp=2,tp=2
against f1 1e-5 f_sp_sharded --sample 0 --mesh dp=2,tp=2 --data-parallel zero1 --recompute full
against f1 1e-5 f_tp --sample 0 --mesh dp=2,tp=2 --strategy tp
against f1 1e-5 f_uneven --sample 0 --mesh cp=3,tp=2 --data-parallel zero2  # the ranks do not divide the sequence
train w1 --sample 0 --attention-mask window:5
[ "$(hash_of w1)" != "$(hash_of f1)" ] || fail "--attention-mask hides nothing"
against w1 1e-5 w_cp --sample 0 --attention-mask window:5 --mesh dp=2,cp=2
against f1 1e-5 f_tp_sharded --sample 0 --mesh dp=2,tp=4 --strategy tp --data-parallel zero3 --reshard-after-forward off \
  --recompute selective
# Sending linears' data in chunks changes no number of bytes. It changes no bit of the weights if oneDNN's products of
# fewer rows have the bits of whole ones, as with AVX-512.
equal=bytes_sent
grep -q avx512bw /proc/cpuinfo && equal="bytes_sent weights_hash"
for chunked in f_sp:dp=2,tp=2:sp f_tp:dp=2,tp=2:tp; do
  base=${chunked%%:*} rest=${chunked#*:}
  against "$base" 1e-5 "${base}_chunked" --sample 0 --mesh "${rest%:*}" --strategy "${rest#*:}" --tensor-overlap 3
  for value in $equal; do
    [ "$(logs get "${base}_chunked.jsonl" $value)" = "$(logs get "$base.jsonl" $value)" ] ||
      fail "--tensor-overlap 3 changes the $value of $base"
  done
done
grep -q 'sampled text' f1.out && fail "--sample 0 sampled"

# In bf16, losses and gradient norms are near those of float, on every mesh. A processor without bf16 instructions (as
# an option of oneDNN declares here) has the same results, and the trainer prints that float is faster.
h="--precision bf16 --sample 0"
# shellcheck disable=SC2086  # a list of options
{
  train h1 $h
  against f1 2e-2 h_sp $h --mesh dp=2,tp=2
  against h1 2e-2 h_tp_sharded $h --mesh dp=2,cp=2,tp=2 --strategy tp --data-parallel zero2 --recompute full
  against h1 2e-2 h_stages $h --mesh pp=2 --micro-batch 2
  (
    export DNNL_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
    against h1 2e-2 h_without $h --mesh tp=2
  )
}
[ "$(hash_of h1)" != "$(hash_of f1)" ] || fail "bf16 gives the bits of float"
grep -q 'no instructions for bf16 (avx512_bf16)' h_without.out || fail "nobody says that bf16 is slow"
if grep -q avx512_bf16 /proc/cpuinfo && grep -q 'no instructions' h1.out; then fail "bf16 is said to be slow where it is not"; fi

# Recomputation keeps less: peaks decrease from none to selective to full.
train r_none --sample 0 --recompute none --seq 128
train r_selective --sample 0 --recompute selective --seq 128
train r_full --sample 0 --recompute full --seq 128
none=$(logs get r_none.jsonl peak_bytes) selective=$(logs get r_selective.jsonl peak_bytes)
full=$(logs get r_full.jsonl peak_bytes)
[ "$full" -lt "$selective" ] || fail "peak bytes: full $full, selective $selective"
[ "$selective" -lt "$none" ] || fail "peak bytes: selective $selective, none $none"
# Modes by layer give the same bits; a budget is met by the bytes that a dry run predicts.
for modes in every:2 budget:1500K; do
  train r_some --sample 0 --recompute $modes --seq 128
  [ "$(hash_of r_some)" = "$(hash_of r_none)" ] || fail "--recompute $modes changes bits"
  some=$(logs get r_some.jsonl peak_bytes)
  [ "$full" -lt "$some" ] && [ "$some" -lt "$none" ] || fail "peak bytes: $modes $some, of $full to $none"
done
against r_none 1e-5 r_shared --sample 0 --recompute budget:1500K --seq 128 --mesh dp=2
grep -q '^recompute: of 2 layers, ' r_shared.out || fail "on data ranks a budget recomputes nothing: $(cat r_shared.out)"

# A second run gives the same bits, another seed different ones. With no steps, every mesh has the same initial weights.
train again --sample 0 --mesh dp=2,tp=2
[ "$(hash_of again)" = "$(hash_of f_sp)" ] || fail "a run is not repeatable"
train seed --sample 0 --mesh dp=2,tp=2 --seed 2
[ "$(hash_of seed)" != "$(hash_of f_sp)" ] || fail "the seed changes nothing"
train w1 --steps 0 --sample 0
logs check w1.jsonl 0
hash=$(hash_of w1)
for options in "--mesh dp=2,tp=2" "--mesh tp=4 --strategy tp" "--mesh dp=4,tp=2 --micro-batch 1 --data-parallel zero3" \
  "--mesh dp=2,tp=4 --strategy tp --data-parallel zero1"; do
  # shellcheck disable=SC2086
  train w --steps 0 --sample 0 $options
  [ "$(hash_of w)" = "$hash" ] || fail "$options starts from other weights"
done

# The last value of a repeated option counts, so a script's defaults can be overridden.
train twice --sample 0 --steps 7 --steps 3
logs check twice.jsonl 3
