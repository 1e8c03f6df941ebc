#!/bin/sh
# plan_llama finds layouts, prices one layout or a file of them, draws, and refuses invalid input with the field's name.
# timeout: 480
# runs: with --all
. "$(dirname "$0")/lib/base.sh"
cd "$work" || fail "no folder to work in"

plan() { "$BIN/plan_llama" "$@"; }
lacks() { grep -q -- "$1" "$2" || fail "$2 lacks '$1': $(cat "$2")"; }

# A search prints the table, the rule of thumb, reasons, a type, the trainer's options, pictures and a page.
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch-tokens 1M --train-tokens 2T --hour-price 2.5 --top 3 \
  --timeline pipeline.svg --scaling scaling.svg --html page.html --pp 2,4,8 >table.txt || fail "a search"
for line in '^70.6 B parameters, 128 sequences of 8192 tokens in a step (1.05 M tokens), in bf16, 64 H100$' \
  ' candidates, .* legal, .* fit in 85.5 GB' '^8 % of the memory is left free as a margin: layouts keep below 78.7 GB' '^   3 .* GB ' '^rule .*tp=8' 'days *cost' \
  '% of the step is computing; the largest loss is' 'with the schedule simulated: ' "^the pipeline's ranks idle [0-9.]* % of its time; its stages are uneven: rank " '^step: simulated where ranks share links' 'with shared links simulated, stragglers apart: ' 'one step away:' \
  '^in another precision:$' '^  fp8 [0-9.]* % faster: .* s and .* GB, tp=' '^  f32 [0-9.]* % slower: ' \
  'less memory, more time, by formulas:' '^using mesh = pl::mesh<.*pl::axis<pl::pp, [248]>, .*pl::axis<pl::tp, ' \
  '^train_llama --mesh pp=[248],dp='; do
  lacks "$line" table.txt
done

# The message for a layout that is too large gives the excess and a remedy. A given number of chunks is the only one
# searched.
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch 128 --layout tp=8,dp=8 >large.txt || fail "a layout that does not fit"
lacks '^it does not fit: rank 0 of the pipeline needs 116.8 GB, 31.3 GB more than a H100 has; with recompute=full it would, in 1.3[0-9] times its time$' large.txt
plan --model llama-3-405b --cluster h100:8 --seq 8192 --batch 128 --layout tp=8 >larger.txt || fail "a model that does not fit"
lacks ' more than a H100 has; no layout fits: the smallest, .* accelerators would do, as in ' larger.txt
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch 128 --layout tp=1,dp=64,zero=0 >other.txt || fail "a layout that no change makes fit"
lacks ' more than a H100 has; the fastest that fits is tp=[0-9].*, in [0-9.]* times its time$' other.txt
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch 128 --schedule interleaved:4,zb_h1 --pp 4 --tp 8 --top 40 >chunks.txt || fail "chunks"
lacks ' tp=8,.*schedule=interleaved:4,' chunks.txt
grep 'schedule=interleaved:' chunks.txt | grep -qv 'interleaved:4' && fail "other chunks were searched: $(cat chunks.txt)"

# The printed options of the trainer describe the priced layout.
plan --model llama-3-8b --cluster h100:8 --seq 8192 --batch 64 --layout tp=2,cp=2,dp=2,context=ulysses >ulysses.txt || fail "ulysses"
lacks '^train_llama --mesh .* --attention ulysses:contiguous ' ulysses.txt
plan --model llama-3-8b --cluster h100:8 --seq 8192 --batch 64 --layout tp=2,dp=4,sequence_parallel=0 >whole.txt || fail "whole sequences"
lacks '^train_llama --mesh .* --strategy tp ' whole.txt

# Offloading is priced and printed among the trainer's options; the search chooses it if nothing else fits.
plan --model llama-3-8b --cluster h100:8 --seq 8192 --batch 64 --layout dp=8,offload=activations >offload.txt || fail "offload"
lacks '^memory of the host: [0-9.]* GB a rank are offloaded, and 256.0 GB there are$' offload.txt
lacks '^train_llama --mesh .* --device cuda --offload activations$' offload.txt
plan --model llama-3-8b --cluster h100:8 --seq 8192 --batch 64 --loss-chunks 16 --top 1 >chunked.txt || fail "a loss in chunks"
lacks '^   1 .*,loss_chunks=16 ' chunked.txt
lacks '^train_llama --mesh .* --loss-chunks 16$' chunked.txt
plan --model llama-3-70b --cluster h100:8 --seq 8192 --batch 64 --json >only.json || fail "a model that fits with offload alone"
plan --model llama-3-70b --cluster h100:8 --seq 8192 --batch 64 --offload both --top 1 --json >both.json || fail "--offload both"
python3 - <<'PYTHON' || fail "what is offloaded: $(cat only.json both.json)"
import json
for name, legal in (("only.json", ("optimizer", "activations", "both")), ("both.json", ("both",))):
    best = json.load(open(name))["layouts"][0]
    assert best["offload"] in legal and 0 < best["host_bytes"] <= 256e9 and best["fits"], best
    assert abs(sum(best["seconds"].values()) / best["step_seconds"] - 1) < 1e-9, best
PYTHON

# A model with experts: ep is searched, and is an axis of the printed mesh.
experts="--model tiny-experts --cluster cpu:8 --precision f32 --seq 128 --batch 16"
# shellcheck disable=SC2086
{
  plan $experts --top 1000 >experts.txt || fail "a search with experts"
  for ep in 2 4 8; do lacks ",ep=$ep,recompute" experts.txt; done
  lacks ' cp *ep *dp *again  layout$' experts.txt
  plan $experts --ep 4 --top 3 --json >experts.json || fail "a search of one ep"
  plan $experts --layout tp=2,dp=4,ep=2 >ep.txt || fail "a layout with ep"
  lacks '^using mesh = pl::mesh<pl::axis<pl::pp, 1>, pl::axis<pl::dp, 2>, pl::axis<pl::ep, 2>, pl::axis<pl::cp, 1>, pl::axis<pl::tp, 2>>;$' ep.txt
  lacks '^train_llama --mesh pp=1,dp=2,ep=2,cp=1,tp=2 --seq 128 ' ep.txt
  plan $experts --layout tp=2,dp=4,ep=8 --program megatron >folded.txt || fail "whole experts"
  lacks '^train_llama has no option for whole experts over ranks of tp, cp and dp$' folded.txt
}
python3 -c 'import json; assert {l["ep"] for l in json.load(open("experts.json"))["layouts"]} == {4}' || fail "--ep 4: $(cat experts.json)"
for model in mixtral-8x7b-v0.1 qwen1.5-moe-a2.7b qwen3-30b-a3b; do
  plan --model $model --cluster h100:64 --seq 4096 --batch 256 --tp 1,2 --cp 1 --microbatch 1 --top 1 >large.txt || fail "$model"
  lacks '^train_llama --mesh .*,ep=[2-9]' large.txt
done

# Options of the command line apply to every row that does not set them itself.
cat >rows.csv <<'ROWS'
note,program,seq,precision,tp,dp
own,plait,8192,,8,8
other,plait,4096,bf16,8,8
none,,8192,,8,8
ROWS
plan --model llama-3-8b --cluster h100:64 --seq 4096 --batch-tokens 4M --precision f32 --layouts rows.csv >rows.out || fail "rows"
python3 - rows.out <<'PY' || fail "rows: $(cat rows.out)"
import csv, sys
own, other, none = list(csv.DictReader(open(sys.argv[1])))
assert own["step_seconds"] == none["step_seconds"] and own["memory_bytes"] == none["memory_bytes"]
tokens = {name: float(r["tokens_per_second"]) * float(r["step_seconds"]) for name, r in (("own", own), ("other", other))}
assert all(abs(t / 2**22 - 1) < 1e-3 for t in tokens.values()), tokens
assert float(other["products"]) < 0.3 * float(own["products"])
PY

# A hybrid: priced, printed with its axes as types and as the trainer's options, and searched.
plan --model llama-3-8b --cluster h100:64 --seq 8192 --batch 64 --layout cp=2,dp=32,zero=1,replicate=cp >hybrid.txt || fail "a hybrid"
lacks '^const pl::data_axes axes{.shard = pl::axis_list(pl::axis_of<pl::dp>), .replicate = pl::axis_list(pl::axis_of<pl::cp>)};$' hybrid.txt
lacks '^train_llama --mesh .* --data-parallel zero1 --replicate-over cp$' hybrid.txt
plan --model llama-3-8b --cluster h100:64 --seq 8192 --batch 64 --layout cp=2,dp=32,zero=1,replicate=dp:4 >part.txt || fail "copies along a part of dp"
lacks '^struct dp_copies : pl::axis_tag<"dp_copies"> {};$' part.txt
lacks '^using mesh = pl::mesh<pl::axis<pl::pp, 1>, pl::axis<dp_copies, 4>, pl::axis<pl::dp, 8>, pl::axis<pl::cp, 2>, pl::axis<pl::tp, 1>>;$' part.txt
lacks '^const pl::data_axes axes{.shard = pl::axis_list(pl::axis_of<pl::dp>, pl::axis_of<pl::cp>), .replicate = pl::axis_list(pl::axis_of<dp_copies>)};$' part.txt
lacks '^train_llama has no option for copies along a part of dp$' part.txt
cat >slow.json <<'JSON'
{"like": "h100", "name": "slow", "levels": [{"name": "NVLink", "ranks": 8, "bandwidth": 3.6e11, "latency": 1.5e-6},
                                            {"name": "Ethernet", "ranks": 0, "bandwidth": 3e9, "latency": 2e-5}]}
JSON
plan --model llama-3-8b --cluster slow.json:64 --seq 8192 --batch 128 --zero 3 --cp 1 --microbatch 1 --json >cut.json || fail "a search of ZeRO-3"
plan --model llama-3-8b --cluster h100:64 --seq 8192 --batch 128 --zero 3 --cp 2 --replicate dp,cp --json >only.json || fail "a search of hybrids"
plan --model llama-3-8b --cluster h100:64 --seq 8192 --batch 128 --zero 3 --cp 1 --replicate dp --json >parts.json || fail "a search of parts of dp"
python3 - <<'PYTHON' || fail "hybrids that are searched"
import json
cut, only, parts = (json.load(open(name)) for name in ("cut.json", "only.json", "parts.json"))
assert all(l["replicate"].startswith("dp:") for l in parts["layouts"])
best = cut["layouts"][0]
assert best["replicate"] == "dp:8" and "dp_copies, 8>" in cut["mesh"], best
assert abs(cut["on_links_seconds"] / best["step_seconds"] - 1) < 0.05, cut["on_links_seconds"]  # cut parameters, simulated
assert all(l["replicate"] != "none" and l["zero"] == 3 for l in only["layouts"])
assert all(l["replicate"] in l["layout"] for l in only["layouts"])
PYTHON

# JSON for programs: the numbers of the table, which agree with each other.
plan --model llama-3-405b --cluster h100:1024 --seq 8192 --batch 512 --program nemo --json \
  --layout tp=8,cp=2,pp=8,dp=8,schedule=interleaved:8 >one.json || fail "one layout"
plan --model llama-3-405b --cluster h100:16384 --seq 8192 --batch 2048 --jitter 0.02 --slow-rank 1.1 --json \
  --layout tp=8,pp=16,dp=128,schedule=interleaved:4 >slow_rank.json || fail "jitter and a slow rank"
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch 64 --layout tp=16,dp=4,zero=3 >copies.txt || fail "more ranks than heads of keys"
lacks '^using mesh = pl::mesh<pl::axis<pl::pp, 1>, pl::axis<pl::dp, 4>, pl::axis<pl::cp, 1>, pl::axis<pl::tp, 8>, pl::axis<pl::tp_rep, 2>>;$' copies.txt
plan --model "$SOURCE/tests/data/llama_mha/config.json" --cluster cpu:4 --precision f32 --seq 128 --batch 8 >small.txt || fail "a config.json"
lacks '^train_llama --mesh ' small.txt
plan --model llama-3-8b --cluster a100:16 --seq 4096 --batch 64 --json >search.json || fail "a search as JSON"
python3 - <<'PYTHON' || fail "JSON and pictures"
import json, xml.etree.ElementTree as tree
one, found = json.load(open("one.json")), json.load(open("search.json"))
layout = one["layouts"][0]
assert layout["layout"].startswith("tp=8,cp=2,pp=8,dp=8,microbatch=1,schedule=interleaved:8"), layout["layout"]
assert abs(layout["step_seconds"] / 19.84 - 1) < 0.08, layout["step_seconds"]  # NVIDIA/dgxc-benchmarking v25.04.02
assert abs(sum(layout["seconds"].values()) / layout["step_seconds"] - 1) < 1e-9
assert abs(sum(layout["memory"].values()) / layout["memory_bytes"] - 1) < 1e-9
operations = 6 * (one["parameters"] - 128256 * 16384) + 12 * 126 * 16384 * 8192
mfu = operations * layout["tokens_per_second"] / (1024 * 989.4e12)
assert abs(mfu / layout["mfu"] - 1) < 1e-3, (mfu, layout["mfu"])
disturbed = json.load(open("slow_rank.json"))["disturbed_share"]
assert abs(one["on_links_seconds"] / one["simulated_seconds"] - 1) < 0.06, one
assert 0.05 < disturbed < 0.14, disturbed  # one rank a tenth slower, the others at most 2 %
assert not one["searched"] and found["searched"] and "precisions" not in one
assert [p["precision"] for p in found["precisions"]] == ["f32"], found["precisions"]  # A100 has no fp8
assert found["precisions"][0]["step_seconds"] > found["layouts"][0]["step_seconds"]
steps = [l["ranked_seconds"] for l in found["layouts"]]
assert steps == sorted(steps) and len(steps) == 10
assert found["memory_share"] == 0.92 and found["within_share"]
assert all(l["memory_bytes"] <= 0.92 * 85.6e9 for l in found["layouts"])
assert all(l["fits"] and l["tp"] * l["cp"] * l["pp"] * l["dp"] == 16 for l in found["layouts"])
front = [(l["memory_bytes"], l["step_seconds"]) for l in found["front"]]
assert front == sorted(front) and [s for _, s in front] == sorted((s for _, s in front), reverse=True)
assert found["rule_of_thumb"]["ranked_seconds"] >= steps[0]
for picture in ("pipeline.svg", "scaling.svg"):
    assert tree.parse(picture).getroot().tag.endswith("svg")
page = open("page.html").read()
assert page.count("<svg") == 2 and "one step away" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
PYTHON

# Prices a file of layouts in one call; an invalid row gets its reason, and the others are priced.
cat >layouts.csv <<'CSV'
note,tp,pp,dp,schedule,zero
good,8,4,2,zb_v,1
"with, comma",8,8,1,interleaved:5,0
not legal,3,1,2,1f1b,0
CSV
cat >experts.csv <<'CSV'
hidden,layers,heads,kv_heads,head_dim,ffn,vocab,experts,chosen,dp,ep,cp,limited
2048,48,32,4,128,768,151936,128,8,16,16,1,0
2048,48,32,4,128,768,151936,128,8,8,8,2,0
2048,48,32,4,128,768,151936,128,8,8,8,2,1
CSV
plan --cluster h100:16 --seq 4096 --batch 128 --layouts experts.csv >priced_experts.csv || fail "a model of experts"
plan --model llama-3-70b --cluster h100:64 --seq 8192 --batch 64 --layouts layouts.csv >priced.csv || fail "a file of layouts"
python3 - <<'PYTHON' || fail "the priced file: $(cat priced.csv)"
import csv
good, comma, bad = csv.DictReader(open("priced.csv"))
assert float(good["step_seconds"]) > 0 and good["fits"] == "1" and good["ranks"] == "64" and good["refused"] == ""
assert comma["note"] == "with, comma" and float(comma["step_seconds"]) > 0
experts, whole, limited = csv.DictReader(open("priced_experts.csv"))
assert float(limited["experts_seconds"]) > float(whole["experts_seconds"]) > 0, (limited, whole)
assert 0 < float(experts["experts_seconds"]) < float(experts["step_seconds"]) and experts["fits"] == "1", experts
assert bad["step_seconds"] == "" and bad["refused"].startswith("tp is 3 and the model has 64 heads"), bad
PYTHON

# User-defined hardware: a file based on a known machine, and one that --print-hardware wrote.
for known in a100 h100 h200 gh200 b200 gb200 cpu; do
  plan --print-hardware "$known" >"$known.json" || fail "--print-hardware $known"
  plan --print-hardware "./$known.json" | cmp - "$known.json" || fail "what is printed of $known reads back as another machine"
done
cmp h100.json "$SOURCE/examples/plan_llama/hardware/h100.json" ||
  fail "hardware/h100.json is not what is known of h100; write it with --print-hardware"
plan --model llama-3-70b --cluster b200.json:64 --seq 8192 --batch 128 --tp 8 --pp 4 >own.txt || fail "a printed description"
plan --model llama-3-70b --cluster b200:64 --seq 8192 --batch 128 --tp 8 --pp 4 >known.txt
cmp own.txt known.txt || fail "a printed description differs from what it describes"
plan --model llama-3-70b --cluster "$SOURCE/examples/plan_llama/hardware/h100_ethernet.json:256" --seq 8192 --batch 256 --tp 8 --pp 4 --json >slow.json ||
  fail "the description in the repository"
plan --model llama-3-70b --cluster h100:256 --seq 8192 --batch 256 --tp 8 --pp 4 --json >fast.json
python3 -c 'import json; slow, fast = (json.load(open(n))["layouts"][0] for n in ("slow.json", "fast.json"))
assert slow["step_seconds"] > fast["step_seconds"]' || fail "a slower network is no slower"

# A measured description of this machine, which --cluster and the trainer read.
plan --calibrate here.json --ranks 2 >measured.txt || fail "--calibrate"
lacks '^2 ranks on [0-9]* cores: products .* GFLOP/s in f32.*, memory .* GB/s, links .* us; written to ' measured.txt
python3 - <<'PYTHON' || fail "what was measured: $(cat here.json)"
import json, os
h = json.load(open("here.json"))
assert h["cores"] == len(os.sched_getaffinity(0)) and h["name"].endswith(", threads)")
assert 1e8 < h["peak"]["f32"] < 1e13 and 1e8 < h["memory_bandwidth"] < 1e12 and 0 < h["attention_share"] <= 1, h
assert 1e6 < h["levels"][0]["bandwidth"] < 1e12 and h["turn"] >= 0 and h["levels"][0]["message_bandwidth"] > 1e6 and 0 <= h["levels"][0]["latency"] + h["levels"][0]["launch"] < 1, h  # none, where a busy machine hides it
PYTHON
plan --model "$SOURCE/tests/data/llama_mha/config.json" --cluster here.json:4 --precision f32 --seq 128 --batch 8 --json >here.txt ||
  fail "a measured description"
"$BIN/train_llama" --model tiny --cluster here.json:2 --plan auto --global-batch 8 --dry-run >here.txt || fail "the trainer on a measured description"
lacks '^prediction on CPU (' here.txt

# refuses TEXT ARGUMENTS...: exit code 2 and a text that names the field.
refuses() {
  text=$1
  shift
  plan "$@" >out.txt 2>errors.txt && fail "accepted: $*"
  [ "$(wc -l <errors.txt)" = 1 ] || fail "$*: more than one line: $(cat errors.txt)"
  lacks "$text" errors.txt
}
printf 'tensor\n8\n' >bad.csv
printf 'p\n8\n' >part.csv
printf 'tp,dp, tp\n8,8,8\n' >twice.csv
printf 'tp, dp\n8,x\n' >word.csv
job="--model llama-3-70b --seq 8192 --batch 128"
# shellcheck disable=SC2086  # lists of options
{
  refuses "plan_llama: --cluster: unknown hardware 'h900'; known are a100, h100, h200, gh200, b200, gb200, cpu" $job --cluster h900:8
  refuses "--cluster: 'h100' names no number of accelerators, as in h100:16384" $job --cluster h100
  refuses "no layout fits: the smallest, .* more than a H100 has; .* accelerators would do, as in tp=" $job --cluster h100:8 --offload none
  refuses "--layout: offload is activations and CPU has no host_bandwidth; legal is none, or a description that gives host_bandwidth" \
    $job --cluster cpu:64 --precision f32 --layout tp=8,dp=8,offload=activations
  refuses "offload is optimizer and CPU has no host_bandwidth" $job --cluster cpu:64 --precision f32 --offload none,optimizer
  refuses "--offload: unknown value 'all'; legal are none, optimizer, activations and both" $job --cluster h100:64 --offload all
  refuses "no layout of 128 accelerators is legal: " --model llama-3-70b --seq 8191 --batch 7 --cluster h100:128
  refuses "--batch-tokens: 1000000 tokens are not a whole number of sequences of 8192; the nearest are 999424 and 1007616" \
    --model llama-3-70b --seq 8192 --batch-tokens 1000000 --cluster h100:64
  refuses "--layout: tp is 3 and the model has 64 heads, which it must divide; the nearest are 2 and 4" $job --cluster h100:3 --layout tp=3
  refuses "--layout has 8 ranks and --cluster 64 accelerators" $job --cluster h100:64 --layout tp=8
  refuses "--layout: unknown key 'tensor'; legal are tp, cp, pp" $job --cluster h100:8 --layout tensor=8
  refuses "--layout: replicate is dp:3 and dp 8, which it must divide; the nearest are 2 and 4" $job --cluster h100:64 --layout tp=8,dp=8,replicate=dp:3
  refuses "--replicate: dp:R is priced with --layout, and not searched; dp searches all of dp and its parts" $job --cluster h100:64 --replicate dp:2
  refuses "--layout: ep is 2, the model has 0 experts and dp 8 ranks, which it must both divide; legal is 1" $job --cluster h100:64 --layout tp=8,dp=8,ep=2
  refuses "--precision: A100 has no products in fp8" $job --cluster a100:64 --precision fp8
  refuses "--hour-price is -3; legal is 0 or more" $job --cluster h100:64 --hour-price -3 --train-tokens 2T
  refuses "--hour-price needs --train-tokens, as in 15T" $job --cluster h100:64 --hour-price 3
  refuses "--train-tokens: '2X' is not a number of tokens from 1 on, which B or T may follow, as in 1.5T" $job --cluster h100:64 --train-tokens 2X
  refuses "--batch: '16M' is not a whole number of sequences; a number of tokens, as in 16M, is for --batch-tokens" \
    --model llama-3-70b --seq 8192 --batch 16M --cluster h100:64
  refuses "--layout is empty; give it a value, or leave it out" $job --cluster h100:64 --layout ''
  refuses "--layout: 'tp=8 dp=8' has a space in it; keys are separated by commas" $job --cluster h100:64 --layout 'tp=8 dp=8'
  refuses "--layout prices one layout, and --tp is for a search; leave one of them out" $job --cluster h100:64 --layout tp=8,dp=8 --tp 4
  refuses "--layouts prices the rows of a file, and --json would say nothing" $job --cluster h100:64 --layouts layouts.csv --json
  refuses "--calibrate measures a machine and ends, and --model would say nothing" $job --calibrate here.json --ranks 2
  refuses "--ep is 0; legal is 1 or more" $job --cluster h100:64 --ep 0
  refuses "--tp is 0; legal is 1 or more" $job --cluster h100:64 --tp 4,0
  refuses "--tp is '8x', which is not a whole number, or is too large" $job --cluster h100:64 --tp 8x
  refuses "'8' belongs to no option: --seq takes one word, and has '8192'" --model llama-3-70b --batch 8 --seq 8192 8 --cluster h100:64
  refuses "there is no option --bach; did you mean --batch?" --model llama-3-70b --bach 8
  refuses "no layout of 64 accelerators is legal: tp = 3, cp = 1 and pp = 1 are 3 ranks, which must divide the 64; the nearest are 2 and 4" \
    $job --cluster h100:64 --tp 3
  refuses "no layout of 96 accelerators is legal: pp is 96 with 1 chunks on a rank: 96 stages for 80 layers; use at most 80 stages" \
    $job --cluster h100:96 --pp 96
  refuses "no layout of 64 accelerators is legal: batch is 128 sequences and dp 64 ranks take microbatches of 256; the nearest legal batches are 16384" \
    $job --cluster h100:64 --microbatch 256
  refuses "no layout of 64 accelerators is legal: zero is 3 and pp above 1" $job --cluster h100:64 --pp 4 --zero 3
  refuses "no layout of 64 accelerators is legal: pp is 64 with 2 chunks on a rank: 128 stages for 80 layers" \
    $job --cluster h100:64 --pp 64 --schedule interleaved
  refuses "--schedule: unknown value 'dualpipe_v'; legal are gpipe, 1f1b, interleaved:V" $job --cluster h100:64 --schedule dualpipe_v
  refuses "--model is missing" --cluster h100:8 --seq 8192 --batch 8
  refuses "--model: unknown model 'llama-9'; presets are .*llama-3-8b, .*llama-3-405b, .*; or give the path of a config.json" --model llama-9 --cluster h100:8 --seq 8192 --batch 8
  refuses "line 2: tensor: unknown column; legal are note, .* (.*experts, .*window, .*tied), .* (.*reduced_bytes, .*keeps_fp8, .*), tp, " \
    $job --cluster h100:8 --layouts bad.csv
  refuses "line 2: p: unknown column; legal are note, " $job --cluster h100:8 --layouts part.csv
  refuses "'twice.csv' line 1: the column tp is there twice; leave one out" $job --cluster h100:8 --layouts twice.csv
  refuses "'word.csv' line 2: dp: 'x' is not a whole number from 1 on" $job --cluster h100:8 --layouts word.csv
  refuses "--schedule: the program megatron lacks the schedule zb_h1; legal are 1f1b, interleaved" $job --cluster h100:64 --program megatron --schedule zb_h1
  refuses "--memory-share: Value 1.5 not in range" $job --cluster h100:64 --memory-share 1.5
  refuses "--ranks is 1; legal are 2 to 1024" --calibrate alone.json --ranks 1
  refuses "--ranks is 0; legal are 2 to 1024" --calibrate alone.json
  refuses "--ranks and --backend are for --calibrate" $job --cluster h100:64 --ranks 4
  refuses "--calibrate: cannot write '/nosuch/here.json'" --calibrate /nosuch/here.json --ranks 2
  refuses "--backend: nccl not in {threads,mpi}" --calibrate here.json --ranks 2 --backend nccl
  refuses "there is no option --what" --what
}
