#!/bin/sh
# Hashes of parameters in logs, and checkpoint_tool compare-runs: it finds equal runs, and the place where others start
# to differ, on any mesh. Errors describe what a log lacks and how it is damaged.
# timeout: 240
# runs: with --all
. "$(dirname "$0")/lib/common.sh"
tool=$BIN/checkpoint_tool
[ -x "$tool" ] || fail "$tool is not there; build it first"

# compare CODE A B: runs the tool; its output is in the files out and err.
compare() {
  got=0
  timeout 30 "$tool" compare-runs "$2" "$3" >out 2>err || got=$?
  [ "$got" = "$1" ] || fail "compare-runs $2 $3 ended with $got, not $1: $(cat out err)"
}
# says TEXT: a line of the output contains TEXT.
says() { grep -qF -e "$1" out || fail "'$1' is missing: $(cat out)"; }
ends() { [ "$(tail -n 1 out)" = "$1" ] || fail "it ends with '$(tail -n 1 out)', not '$1': $(cat out)"; }
# refused TEXT A B: exit code 2, and one line that starts with TEXT.
refused() {
  compare 2 "$2" "$3"
  [ "$(wc -l <err)" = 1 ] || fail "compare-runs $2 $3: not one line: $(cat err)"
  case $(cat err) in
    "checkpoint_tool: $1"*) ;;
    *) fail "compare-runs $2 $3 says '$(cat err)', not '$1'" ;;
  esac
}
# hashes LOG STEPS [gradients]: the log has hashes after these steps, each with the model's names in order, and the last
# ones add up to the summary's. Hashes of gradients are in every step of this run.
hashes() {
  python3 - "$@" <<'PY' || fail "the hashes of $1"
import json, sys
path, steps = sys.argv[1], [int(s) for s in sys.argv[2].split()]
lines = [json.loads(line) for line in open(path)]
found = [line["hashes"] for line in lines if "hashes" in line]
assert [f["step"] for f in found] == steps, [f["step"] for f in found]
layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
         "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
for f in found:
    names = list(f["weights"])
    assert names[0] == "model.embed_tokens.weight" and names[-1] in ("lm_head.weight", "model.norm.weight"), names
    of_layers = [n.split(".") for n in names if ".layers." in n]
    assert [int(n[2]) for n in of_layers] == sorted(int(n[2]) for n in of_layers), names
    for i in {n[2] for n in of_layers}:
        assert sorted(".".join(n[3:-1]) for n in of_layers if n[2] == i) == sorted(layer), names
    assert all(len(h) == 16 and int(h, 16) >= 0 for h in f["weights"].values())
    made = f["step"] > 0 and len(sys.argv) > 3
    assert list(f.get("gradients", {})) == (names if made else []), f
    assert list(f) == ["step", "weights"] + ["gradients"] * made, list(f)
total = sum(h ^ h >> 32 for h in (int(h, 16) for h in found[-1]["weights"].values())) % 2**64
assert f"{total:016x}" == lines[-1]["summary"]["weights_hash"], total
assert lines[-1]["summary"]["bytes_as_predicted"] is True
PY
}
names() { python3 -c '
import json, sys
for line in open(sys.argv[1]):
    line = json.loads(line)
    if "hashes" in line: print(line["hashes"]["step"], *line["hashes"]["weights"])' "$1"; }
weights_of() { python3 -c '
import json, sys
for line in open(sys.argv[1]):
    line = json.loads(line)
    if "hashes" in line and line["hashes"]["step"] == int(sys.argv[2]): print(json.dumps(line["hashes"]["weights"]))' "$1" "$2"; }

# Equal runs; hashes before the first step, after every second, and after the last.
train one --sample 0 --log-hashes 2
hashes one.jsonl "0 2 4 5"
train again --sample 0 --log-hashes 2
compare 0 one.jsonl again.jsonl
says "A: one.jsonl, steps 0 to 5, hashed at 0, 2, 4, 5"
says "steps: 6 equal, 0 different, 0 in one log only; hashes compared at 0, 2, 4, 5"
ends equal
train plain --sample 0
[ "$(hash_of one)" = "$(hash_of plain)" ] || fail "hashing changes the run"
[ "$(logs get one.jsonl bytes_sent)" = "$(logs get plain.jsonl bytes_sent)" ] || fail "hashing counts as sent"
! grep -q '"hashes"' plain.jsonl || fail "there are hashes that nobody asked for"
train longer --sample 0 --log-hashes 100
hashes longer.jsonl "0 5"
compare 0 one.jsonl longer.jsonl
says "no hashes in B: steps 2, 4"
compare 0 longer.jsonl one.jsonl
says "no hashes in A: steps 2, 4"
train none --sample 0 --steps 0 --log-hashes 1
hashes none.jsonl "0"
compare 0 one.jsonl none.jsonl
says "only in A: steps 1 to 5"
ends "equal, in the steps that both have"

# Another seed: all differ from the start.
train seed --sample 0 --log-hashes 2 --seed 2
compare 1 one.jsonl seed.jsonl
says "first difference: step 0, the first that can be compared"
says "parameters at step 0: 16 of 21 differ, the first is model.embed_tokens.weight of model.embed_tokens"
grep -Eq '^model.embed_tokens.weight +model.embed_tokens +[0-9a-f]{16} +[0-9a-f]{16}$' out || fail "no table: $(cat out)"
says "(8 more)"
says "steps: 0 equal, 6 different, 0 in one log only; hashes compared at 0, 2, 4, 5"
ends different

# Another batch order: initial weights are equal, and the first step's loss differs.
train batch --sample 0 --log-hashes 2 --global-batch 4
compare 1 one.jsonl batch.jsonl
says "first difference: step 1; equal before: 0"
grep -Eq '^loss +[0-9.]+ +[0-9.]+$' out || fail "no losses: $(cat out)"
says "first different parameters: step 2; equal at step 0, hashed before it"
says "parameters at step 2: 21 of 21 differ, the first is model.embed_tokens.weight"

# A run resumed from step 4 with another learning rate, with a separate log and with the previous run's log.
train whole --steps 9 --sample 0 --log-hashes 3 --log-gradient-hashes --warmup 0 --checkpoint-dir ck --save-every 4 --keep 9
hashes whole.jsonl "0 3 6 9" gradients
cp whole.jsonl straight.jsonl
train resumed --steps 9 --sample 0 --log-hashes 3 --log-gradient-hashes --warmup 0 --resume ck/step-00000004
compare 0 whole.jsonl resumed.jsonl
says "only in A: steps 0 to 3"
says "no hashes in A: steps 4"
ends "equal, in the steps that both have"
train rate --steps 9 --sample 0 --log-hashes 3 --log-gradient-hashes --warmup 0 --resume ck/step-00000004 --lr 0.001 \
  --on-new-schedule follow
compare 1 whole.jsonl rate.jsonl
says "nothing to compare: steps 4, hashes in one log and numbers in the other"
says "first difference: step 5, the first that can be compared"
grep -Eq '^lr +0\.00[0-9]* +0\.00[0-9]*$' out || fail "no learning rates: $(cat out)"
grep -q '^loss ' out && fail "the loss of step 5 is that of equal weights: $(cat out)"
says "first different parameters: step 6, the first that is hashed in both"
says "gradients at step 6: 21 of 21 differ"
says "parameters at step 6: 21 of 21 differ, the first is model.embed_tokens.weight of model.embed_tokens"
train whole --steps 9 --sample 0 --log-hashes 3 --log-gradient-hashes --warmup 0 --resume ck/step-00000004
compare 0 straight.jsonl whole.jsonl
says "B: the run went back and made steps 5 to 9 again; the last ones count"
ends equal

# One flipped bit of one parameter, in a gradient and in the weights.
python3 - <<'PY'
import json
lines = [json.loads(line) for line in open("straight.jsonl")]
at = next(line["hashes"] for line in lines if line.get("hashes", {}).get("step") == 6)
for kind in "weights", "gradients":
    hashes = at[kind]
    hashes["model.layers.1.mlp.up_proj.weight"] = "0123456789abcdef"
open("changed.jsonl", "w").writelines(json.dumps(line) + "\n" for line in lines)
at["weights"]["model.layers.1.extra.weight"] = at["weights"].pop("model.layers.1.mlp.up_proj.weight")
open("renamed.jsonl", "w").writelines(json.dumps(line) + "\n" for line in lines)
PY
compare 1 straight.jsonl changed.jsonl
says "first difference: step 6; equal before: 0 to 5"
says "gradients at step 6: 1 of 21 differ, the first is model.layers.1.mlp.up_proj.weight of model.layers.1"
says "parameters at step 6: 1 of 21 differ, the first is model.layers.1.mlp.up_proj.weight of model.layers.1"
grep -Eq '^model.layers.1.mlp.up_proj.weight +model.layers.1 +[0-9a-f]{16} +0123456789abcdef$' out || fail "$(cat out)"
says "steps: 9 equal, 1 different, 0 in one log only"
compare 1 straight.jsonl renamed.jsonl
says "only in A: parameter model.layers.1.mlp.up_proj.weight"
says "only in B: parameter model.layers.1.extra.weight"
says "parameters at step 6: all 20 that both have are equal"

# Other meshes list the same names in the same order, and start with the same weights; over stages every bit is equal.
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 4/' config.json >deep.json
sed 's/{"model_type"/{"tie_word_embeddings": true, "model_type"/' deep.json >tied.json
for model in deep tied; do
  train $model --sample 0 --log-hashes 2 --log-gradient-hashes --micro-batch 2 --model $model.json
  hashes $model.jsonl "0 2 4 5" gradients
done
compare 1 deep.jsonl tied.jsonl
says "only in A: parameter lm_head.weight"
n=0
while read -r mesh options; do
  for model in deep tied; do
    n=$((n + 1))
    # shellcheck disable=SC2086  # a list of options
    train other --sample 0 --log-hashes 2 --log-gradient-hashes --micro-batch 2 --model $model.json --mesh "$mesh" $options
    hashes other.jsonl "0 2 4 5" gradients
    names $model.jsonl >expected
    names other.jsonl >found
    cmp -s expected found || fail "$model on $mesh $options: other names, or in another order: $(paste expected found)"
    [ "$(weights_of $model.jsonl 0)" = "$(weights_of other.jsonl 0)" ] || fail "$mesh $options begins with other weights"
    case $mesh/$model in
      pp=2/deep)
        compare 0 deep.jsonl other.jsonl
        ends equal
        ;;
      tp=2/*)
        compare 1 $model.jsonl other.jsonl
        says "first difference: step 1; equal before: 0"
        ;;
    esac
  done
done <<'MESHES'
pp=2
pp=2 --schedule zb_v --split even
pp=2 --schedule interleaved:2 --split even
tp=2
dp=2 --data-parallel zero1
dp=2,pp=2 --data-parallel zero2
dp=2,tp=2 --data-parallel zero3 --prefetch 2
MESHES
[ "$n" = 14 ] || fail "only $n meshes were tried"

# Ranks that are processes.
if has_mpi; then
  common="--mesh dp=2,pp=2 --data-parallel zero2 --micro-batch 2 --sample 0 --log-hashes 2 --log-gradient-hashes"
  # shellcheck disable=SC2086
  train threads --model deep.json $common
  # shellcheck disable=SC2086
  timeout 60 mpirun -n 4 --allow-run-as-root --oversubscribe "$trainer" --backend mpi --model deep.json --data "$text" \
    --seq 32 --global-batch 8 --steps 5 $common --log mpi.jsonl >mpi.out 2>mpi.err || fail "processes: $(tail -n 3 mpi.err)"
  hashes mpi.jsonl "0 2 4 5" gradients
  compare 0 threads.jsonl mpi.jsonl
  ends equal
fi

# A run that is killed leaves an incomplete last line, or a log without a step.
head -c -20 straight.jsonl | sed '$d' >killed.jsonl
printf '{"step": 10, "lo' >>killed.jsonl
compare 0 straight.jsonl killed.jsonl
says "B: its last line is not whole, and left out"
head -n 1 straight.jsonl | head -c 100 >begun.jsonl
refused "B: 'begun.jsonl': no line has a step, and the last is not whole" straight.jsonl begun.jsonl
: >empty.jsonl
refused "A: 'empty.jsonl': no line has a step; legal is a log of a training run" empty.jsonl straight.jsonl
refused "A: 'plain.jsonl' has no hashes, so that nothing is known of its weights; train_llama writes them with --log-hashes N" plain.jsonl straight.jsonl
refused "B: 'config.json', line 1: malformed JSON: " straight.jsonl config.json
refused "B: cannot open 'absent': No such file" straight.jsonl absent
refused "B: '.' is a folder; name a file" straight.jsonl .
sed '3s/.*/{"step": 2, "loss": [], "grad_norm": 1.0, "lr": 1.0}/' straight.jsonl >damaged.jsonl
refused "B: 'damaged.jsonl', line 3: loss is []; legal are numbers and null" straight.jsonl damaged.jsonl
sed '1s/": "[0-9a-f]*"/": "xyz"/' straight.jsonl >damaged.jsonl
refused "B: 'damaged.jsonl', line 1: the hash of 'model.embed_tokens.weight' is \"xyz\"; legal are 16" straight.jsonl damaged.jsonl
sed -n '/"step": 3/p' straight.jsonl >three.jsonl
sed -n '/"step": 6/p' straight.jsonl >six.jsonl
refused "no step has hashes in both logs: A has them at 3, B at 6; give both runs the same --log-hashes" three.jsonl six.jsonl

# The trainer's errors.
unasked() {
  expected=$1
  shift
  timeout 20 "$trainer" --model config.json --data "$text" --seq 32 --steps 2 --sample 0 "$@" >stdout 2>stderr && fail "$* was accepted"
  grep -q -e "^train_llama: .*$expected" stderr || fail "$*: '$expected' is not in: $(cat stderr)"
}
unasked '--log-hashes 5 needs --log, which names the file' --log-hashes 5
unasked '--log-hashes is -1; at least 0 is legal' --log-hashes -1 --log x.jsonl
unasked '--log-gradient-hashes needs --log-hashes, .* at least 1 is legal' --log-gradient-hashes --log x.jsonl
