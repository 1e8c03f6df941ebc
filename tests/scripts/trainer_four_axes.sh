#!/bin/sh
# The trainer on meshes of four axes: with every schedule, attention policy and placement it has the losses, gradient
# norms, initial weights and sampled text of one rank. Also a schedule from a file, and the trace and timeline of a
# step.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

sed 's/"num_hidden_layers": 2/"num_hidden_layers": 5/' config.json >deep.json
common="--model deep.json --global-batch 16 --micro-batch 4 --held-out 0.002"

# like_one TOLERANCE NAME ARGUMENTS...: like one rank, with the bytes that types predict.
like_one() {
  against "one_$precision" "$@"
  grep -q ', as predicted from the types' "$2.out" || fail "$*: $(cat "$2.out")"
}

precision=double
options="$common --precision double --sample 12"
# shellcheck disable=SC2086
{
  train one_double $options
  like_one 1e-10 f_1f1b $options --mesh pp=2,cp=2,tp=2
  like_one 1e-10 f_gpipe $options --mesh pp=4 --schedule gpipe
  like_one 1e-10 f_interleaved $options --mesh pp=2,tp=2 --schedule interleaved:2 --split even
  like_one 1e-10 f_zb_v $options --mesh dp=2,pp=2,cp=2 --micro-batch 2 --schedule zb_v --attention ulysses
  like_one 1e-10 f_dualpipe $options --mesh pp=2,cp=2 --schedule dualpipe_v --attention all_gather_kv:contiguous
  like_one 1e-10 f_automatic $options --mesh pp=2 --schedule automatic --split measured
  like_one 1e-10 f_sharded $options --mesh dp=2,pp=2,tp=2 --micro-batch 2 --schedule zb_h2 --strategy tp \
    --data-parallel zero3 --prefetch 2
  like_one 1e-10 f_cp $options --mesh cp=4,tp=2 --attention all_gather_kv --recompute full
}
for name in f_1f1b f_gpipe f_interleaved f_zb_v f_dualpipe f_automatic f_sharded f_cp; do
  [ "$(sampled one_double)" = "$(sampled $name)" ] || fail "$name samples another text: $(sampled $name)"
done

precision=float
options="$common --sample 0"
# shellcheck disable=SC2086
{
  train one_float $options
  like_one 1e-5 g_zb_h1 $options --mesh pp=2,cp=2,tp=2 --schedule zb_h1 --attention ring
  like_one 1e-5 g_tp $options --mesh pp=5,tp=2 --strategy tp --recompute selective
}

# A user-defined schedule from a file: all forward, then all backward.
{
  echo '0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3'
  echo '1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3'
} >own.csv
# shellcheck disable=SC2086
like_one 1e-5 own $options --mesh pp=2 --schedule own.csv

# The trace of a step.
# shellcheck disable=SC2086
against one_float 1e-5 traced $options --mesh dp=2,pp=2,tp=2 --micro-batch 2 --schedule zb_v --trace step.json \
  --timeline step.svg
grep -q '^bubble of step 3: .* % measured, .* % simulated' traced.out || fail "no bubble: $(cat traced.out)"
grep -q '^communication: hidden .*dp [0-9]*%.*; waited longest over .* ms a step; .* waited .* on rank [0-7]$' traced.out ||
  fail "no communication: $(cat traced.out)"
grep -q ' tok/s .* hidden .*pp [0-9]*%' traced.err || fail "no hidden share: $(cat traced.err)"
if grep -q hidden one_float.err || grep -q '^communication' one_float.out; then fail "one rank communicates"; fi
python3 - step.json step.svg <<'PYTHON' || fail "the trace or the timeline"
import collections, json, sys, xml.etree.ElementTree as tree
events = json.load(open(sys.argv[1]))["traceEvents"]
kinds = collections.Counter((e["pid"], e["cat"]) for e in events if e["ph"] == "X")
for rank in range(8):
    # Two chunks of four microbatches, each with F, I and W.
    if kinds[rank, "compute"] != 24: sys.exit(f"rank {rank} computed {kinds[rank, 'compute']} actions")
    if kinds[rank, "collective"] == 0: sys.exit(f"rank {rank} has no collectives")
    if kinds[rank, "p2p"] == 0: sys.exit(f"rank {rank} has no messages")
axes = {e["args"]["axis"] for e in events if e["ph"] == "X" and e["cat"] == "collective"}
if not {"dp", "tp", "pp"} <= axes: sys.exit(f"collectives over {axes}")
out = {e["id"] for e in events if e["ph"] == "s"}
if not out or out != {e["id"] for e in events if e["ph"] == "f"}: sys.exit("arrows have no ends")
text = "".join(e.text or "" for e in tree.parse(sys.argv[2]).iter())
for word in ("simulated", "measured", "reductions", "update"):
    if word not in text: sys.exit("the timeline has no " + word + ": " + text)
PYTHON
