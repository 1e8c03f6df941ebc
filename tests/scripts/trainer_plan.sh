#!/bin/sh
# The trainer predicts the time of its step on a described machine, chooses a layout by it, and keeps given options.
# After a run it prints the error of the prediction.
# timeout: 240
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

cat >machine.json <<'JSON'
{"like": "cpu", "name": "small", "memory": 1e9, "cores": 2,
 "levels": [{"name": "shared memory", "ranks": 0, "bandwidth": 2e9, "latency": 5e-6, "launch": 2e-5}]}
JSON
model=config.json
dry() { "$trainer" --model "$model" --seq 32 --global-batch 16 --dry-run "$@"; }
has() { grep -q -- "$1" "$2" || fail "$2 lacks '$1': $(cat "$2")"; }

# A dry run prints the prediction for the given layout, as text and as JSON.
dry --mesh dp=2,tp=2 --data-parallel zero1 --micro-batch 2 --cluster machine.json:4 >given.out || fail "a dry run with --cluster"
has '^prediction on small$' given.out
has '^  step .*: products .*memory-bound kernels' given.out
has '^  bubble ' given.out
has '^  exposed .*over tp .*cp .*dp ' given.out
has '^  memory .*weights .*gradients .*optimizer .*activations' given.out
python3 - <<'PYTHON' || fail "the prediction as JSON"
import json, re
p = json.loads(re.search(r"^  as JSON: (.*)$", open("given.out").read(), re.M)[1])
assert p["layout"].startswith("tp=2,cp=1,pp=1,dp=2,microbatch=2,recompute=none,zero=1"), p["layout"]
assert abs(sum(p["seconds"].values()) / p["step_seconds"] - 1) < 1e-9
assert abs(sum(p["memory"].values()) / p["memory_bytes"] - 1) < 1e-9
assert p["fits"] and p["hardware"] == "small" and p["exposed_seconds"] > 0
PYTHON

# The mesh gives the number of ranks if the option does not. The prediction is plan_llama's price of that layout.
dry --mesh dp=2,tp=2 --data-parallel zero1 --micro-batch 2 --cluster machine.json >alone.out || fail "--cluster without a number"
cmp given.out alone.out || fail "the prediction depends on whether --cluster names the mesh's ranks"
"$BIN/plan_llama" --model config.json --cluster machine.json:4 --precision f32 --seq 32 --batch 16 --json \
  --layout tp=2,dp=2,microbatch=2,zero=1 >plan.json || fail "plan_llama"
python3 - <<'PYTHON' || fail "the trainer's memory and plan_llama's differ"
import json, re
ours = json.loads(re.search(r"^  as JSON: (.*)$", open("given.out").read(), re.M)[1])
theirs = json.load(open("plan.json"))["layouts"][0]
assert ours["memory"] == theirs["memory"] and ours["seconds"]["products"] == theirs["seconds"]["products"]
PYTHON

# chosen NAME ARGUMENTS...: writes the options of --plan auto to NAME.plan, and prints the predicted seconds of a step.
chosen() {
  name=$1
  shift
  dry --plan auto "$@" >"$name.out" || fail "--plan auto $*"
  sed -n 's/^plan: //p' "$name.out" >"$name.plan"
  [ -s "$name.plan" ] || fail "--plan auto $* says no plan: $(cat "$name.out")"
}
seconds() { sed -n 's/.*as JSON: .*"step_seconds": \([^,]*\),.*/\1/p' "$1"; }

# The plan's options give the same prediction, and no other layout that is tried is faster.
chosen best --cluster machine.json:4
# shellcheck disable=SC2046
dry --cluster machine.json:4 $(cat best.plan) >back.out || fail "the chosen options are refused: $(cat best.plan)"
[ "$(seconds best.out)" = "$(seconds back.out)" ] || fail "the plan's prediction is not that of its options"
for other in "--mesh dp=4" "--mesh dp=2,tp=2" "--mesh dp=4 --micro-batch 1" "--mesh pp=2,dp=2 --micro-batch 1" \
  "--mesh cp=2,dp=2" "--mesh tp=2,cp=2 --recompute full"; do
  # shellcheck disable=SC2086
  dry --cluster machine.json:4 $other >other.out || fail "$other"
  python3 -c 'import sys; sys.exit(float(sys.argv[1]) > float(sys.argv[2]) * (1 + 1e-12))' "$(seconds best.out)" "$(seconds other.out)" ||
    fail "$(cat best.plan) is predicted to be slower than $other"
done

# A mesh is priced with the trainer's order of axes: neighbouring ranks are stages.
dry --cluster machine.json:4 --mesh dp=2,pp=2 --micro-batch 1 >order.out || fail "dp=2,pp=2"
has ',order=tp-cp-pp-dp"' order.out

# Experts on the axis ep are priced as by plan_llama. The bytes of state are those of the dry run, and ep is chosen.
model=tiny-dots1
# shellcheck disable=SC2046
{
  dry --cluster machine.json:8 --mesh dp=2,ep=2,tp=2 --data-parallel zero1 --micro-batch 1 >mixture.out || fail "experts with --cluster"
  "$BIN/plan_llama" --model tiny-dots1 --cluster machine.json:8 --precision f32 --seq 32 --batch 16 --json \
    --layout tp=2,dp=4,ep=2,zero=1 >mixture.json || fail "plan_llama with experts"
  chosen searched --cluster machine.json:8
  dry --cluster machine.json:8 $(cat searched.plan) >back.out || fail "the chosen options with experts are refused: $(cat searched.plan)"
  chosen ep_kept --cluster machine.json:8 --mesh dp=2,ep=4
}
model=config.json
[ "$(seconds searched.out)" = "$(seconds back.out)" ] || fail "the plan's prediction with experts is not that of its options"
has '^--mesh dp=2,pp=1,ep=4,cp=1,tp=1 ' ep_kept.plan
python3 - <<'PYTHON' || fail "the price of experts: $(cat mixture.out)"
import json, re
text = open("mixture.out").read()
ours = json.loads(re.search(r"^  as JSON: (.*)$", text, re.M)[1])
theirs = json.load(open("mixture.json"))["layouts"][0]
assert ours["memory"] == theirs["memory"] and ours["seconds"]["expert parallelism"] == theirs["seconds"]["expert parallelism"] > 0
units = {"kB": 1e3, "MB": 1e6}
for part in ("weights", "gradients", "optimizer"):
    value, unit = re.search(rf"^  {part} *([0-9.]+) (\wB)$", text, re.M).groups()
    assert abs(float(value) * units[unit] / ours["memory"][part] - 1) < 0.01, (part, value, ours["memory"])
PYTHON

# Given options stay.
chosen kept --cluster machine.json:4 --mesh pp=2,tp=2 --schedule gpipe --micro-batch 2 --recompute selective
has '^--mesh dp=1,pp=2,cp=1,tp=2 --schedule gpipe --data-parallel replicated --micro-batch 2 --recompute selective$' kept.plan
chosen alone --cluster machine.json:4 --mesh dp=4 --schedule interleaved:2 --split even
grep -q -- --schedule alone.plan && fail "a plan without a pipeline has a schedule: $(cat alone.plan)"
chosen zero --cluster machine.json:4 --data-parallel zero2
has ' --data-parallel zero2 ' zero.plan

# A hybrid is priced as the trainer runs it, chosen if it is the fastest, and kept if given.
cat >nodes.json <<'JSON'
{"like": "cpu", "name": "nodes", "memory": 1e9,
 "levels": [{"name": "shared memory", "ranks": 2, "bandwidth": 1e10, "latency": 1e-6, "launch": 1e-6},
            {"name": "a slow network", "ranks": 0, "bandwidth": 1e8, "latency": 1e-4, "launch": 1e-3}]}
JSON
hybrid="--mesh dp=2,cp=2 --cluster nodes.json:4 --micro-batch 2 --recompute none"
# shellcheck disable=SC2086
{
  dry $hybrid --data-parallel zero3 --replicate-over dp >hybrid.out || fail "a hybrid with --cluster"
  has '"replicate": "dp"' hybrid.out
  dry $hybrid --data-parallel zero3 >over_both.out || fail "cut over dp and cp"
  chosen copies $hybrid --data-parallel zero3
  has ' --data-parallel zero3 --replicate-over dp --micro-batch 2 ' copies.plan
  chosen given $hybrid --replicate-over cp
  has ' --data-parallel zero[123] --replicate-over cp --micro-batch 2 ' given.plan
  chosen none $hybrid --data-parallel zero3 --replicate-over none
  grep -q replicate-over none.plan && fail "--replicate-over none was given: $(cat none.plan)"
}
[ "$(seconds copies.out)" = "$(seconds hybrid.out)" ] || fail "the chosen hybrid is not priced as the given one"
python3 -c 'import sys; sys.exit(float(sys.argv[1]) >= float(sys.argv[2]))' "$(seconds hybrid.out)" "$(seconds over_both.out)" ||
  fail "gathers within a node are no faster than those over a slow network"

# A run with a plan prints the prediction and the measured times.
train planned --cluster machine.json:2 --plan auto --sample 0
has '^plan: --mesh ' planned.out
has '^predicted: .* a step and .* of a rank; measured: .* and .*%)$' planned.out
python3 - <<'PYTHON' || fail "the prediction in the log"
import json
summary = [json.loads(line) for line in open("planned.jsonl")][-1]["summary"]
p = summary["prediction"]
assert p["step_seconds"] > 0 and p["measured_step_seconds"] > 0
assert p["measured_peak_bytes"] == summary["peak_bytes"]
plan = open("planned.out").read().split("plan: ")[1].split("\n")[0].split()
for name, value in zip(plan[::2], plan[1::2]):
    assert summary["options"][name] == value, (name, value, summary["options"])
assert 0.5 < p["allocated_bytes"] / p["measured_peak_bytes"] < 2, p
PYTHON
train unpriced --cluster machine.json --mesh dp=2 --optimizer muon --sample 0
has '^predicted: nothing, as --optimizer muon is not priced; priced are adamw$' unpriced.out

# refuses TEXT ARGUMENTS...
refuses() {
  text=$1
  shift
  dry "$@" >out 2>err && fail "accepted: $*"
  has "$text" err
}
refuses "^train_llama: --plan auto needs --cluster" --plan auto
refuses "--plan auto needs --global-batch" --plan auto --cluster cpu:4 --global-batch 0
refuses "--plan 'best' is unknown; legal are given, auto" --plan best
refuses "--plan auto needs the number of ranks; name it by --cluster, as in cpu:8" --plan auto --cluster cpu
refuses "--cluster: unknown hardware 'gpu'; known are a100" --cluster gpu:4
refuses "--cluster machine.json:4 names 4 ranks and --mesh dp=2 has 2; they must be equal" --cluster machine.json:4 --mesh dp=2
refuses "the extents .* multiply to 2 ranks, and there are 4" --plan auto --cluster machine.json:4 --mesh dp=2
refuses "--plan auto: --optimizer muon is not priced; priced are adamw" --plan auto --cluster machine.json:4 --optimizer muon
refuses "--plan auto: --schedule dualpipe_v is not priced; priced are gpipe, 1f1b" --plan auto --cluster machine.json:4 --schedule dualpipe_v
model=tiny-dots1
refuses "--plan auto: --expert-rows padded is not priced; priced are counted" --plan auto --cluster machine.json:4 --expert-rows padded
refuses "--plan auto: --expert-limit 0.5 is not priced; priced are 0, and 1 or more" --plan auto --cluster machine.json:4 --expert-limit 0.5
model=config.json
refuses "--recompute every:2 is not searched by --plan auto; legal with it are none, selective and full" --plan auto --cluster machine.json:4 --recompute every:2
sed 's/"memory": 1e9/"memory": 1e4/' machine.json >tiny.json
refuses "--plan auto: no layout fits: the smallest, .* more than a small has" --plan auto --cluster tiny.json:4
