#!/bin/sh
# Model directories of Hugging Face: training starts from one on any mesh, also as a pipeline, and writes one at the
# end.
# timeout: 240
# runs: with --all
. "$(dirname "$0")/lib/common.sh"
models=$SOURCE/tests/data

# begun NAME DIRECTORY ARGUMENTS...: trains from a directory; the log is NAME.jsonl, the output NAME.out.
begun() {
  name=$1 from=$2
  shift 2
  timeout 60 "$trainer" --init-from "$from" --data "$text" --seq 32 --global-batch 8 --sample 0 --log "$name.jsonl" \
    "$@" >"$name.out" 2>"$name.err" || fail "$name ($*) ended with $?: $(cat "$name.err")"
}
same_tensors() { python3 "$here/lib/tensors.py" "$@" || fail "$* have other tensors"; }

# A directory that is read and written again, on any mesh, is unchanged.
for model in mha gqa_tied qwen2 qwen3; do
  for mesh in tp=1 dp=2,pp=2,tp=2 pp=2,tp=4 pp=2,cp=2; do
    case $model:$mesh in qwen*:*tp=4) continue ;; esac
    out=${model}_$mesh
    begun "$out" "$models/llama_$model" --steps 0 --mesh "$mesh" --export-hf "$out"
    grep -q "^weights: [0-9]* tensors of '$models/llama_$model'" "$out.out" || fail "no source: $(cat "$out.out")"
    grep -q "^the model is in '$out'" "$out.out" || fail "no directory: $(cat "$out.out")"
    same_tensors "$models/llama_$model" "$out"
  done
done

# Mixtures of experts: results do not depend on the mesh, and a step resumes with experts on other ranks.
for model in mixtral qwen3_moe dots1 olmoe; do
  begun "$model" "$models/llama_$model" --steps 0 --mesh pp=2,ep=2,tp=2 --export-hf "out_$model"
  same_tensors "$models/llama_$model" "out_$model"
done
losses="--balance-loss 0.1 --balance-over step --router-z-loss 0.01 --expert-limit 1.5 --expert-bias-rate 0.01"
# shellcheck disable=SC2086
begun experts "$models/llama_dots1" --steps 4 --lr-schedule constant $losses
# shellcheck disable=SC2086
begun again "$models/llama_dots1" --steps 2 --lr-schedule constant $losses --mesh dp=2,ep=2,tp=2 --micro-batch 2 \
  --data-parallel zero3 --checkpoint-dir steps --save-every 2
grep -q ', as predicted from the types but for the rows of experts' again.out || fail "$(cat again.out)"
# shellcheck disable=SC2086
train again --resume steps --steps 4 --lr-schedule constant $losses --mesh pp=2,ep=4 --micro-batch 1 --sample 0 \
  --model "$models/llama_dots1/config.json"
grep '^{"step"' again.jsonl >both.jsonl
tail -n 1 again.jsonl >>both.jsonl
logs same experts.jsonl both.jsonl 1e-5
# shellcheck disable=SC2086
begun experts_bf16 "$models/llama_dots1" --steps 4 --lr-schedule constant $losses --precision bf16 --mesh ep=2,tp=2
logs same experts.jsonl experts_bf16.jsonl 0.05
python3 - experts.jsonl both.jsonl <<'PY' || fail "routers differ"
import json, sys
one, other = ([json.loads(line) for line in open(file)][:4] for file in sys.argv[1:])
for a, b in zip(one, other):
    assert 0.1 < a["auxiliary"] < 1 and abs(a["auxiliary"] - b["auxiliary"]) < 1e-6, (a, b)
    assert 1 <= a["expert_imbalance"] <= 4 and abs(a["expert_imbalance"] - b["expert_imbalance"]) < 0.02, (a, b)
    assert list(a["routers"]) == list(b["routers"]) and len(a["routers"]) > 0, (a, b)
    for of, same in zip(a["routers"].values(), b["routers"].values()):
        assert sum(of["load"]) == sum(same["load"]) and sum(map(abs, map(int.__sub__, of["load"], same["load"]))) < 5, (a, b)
        assert sum(of["dropped"]) > 0 and abs(of["entropy"] - same["entropy"]) < 1e-4, (a, b)
PY

# Adapters of a mixture: equal on every mesh, merged into equal weights, and on the requested linears only.
for linears in all shared attention; do
  options="--steps 4 --lr 0.03 --lr-schedule constant --lora 2 --lora-linears $linears"
  # shellcheck disable=SC2086
  begun "adapted_$linears" "$models/llama_dots1" $options --mesh dp=2,ep=2,tp=2 --data-parallel zero3 --micro-batch 2 \
    --checkpoint-dir "adapted_$linears"
  # shellcheck disable=SC2086
  begun adapted_one "$models/llama_dots1" $options
  { grep '^{"step"' "adapted_$linears.jsonl" && tail -n 1 "adapted_$linears.jsonl"; } >adapted.jsonl
  logs same adapted_one.jsonl adapted.jsonl 1e-5
  python3 - "$linears" "adapted_$linears" <<'PY' || fail "--lora-linears $linears"
import json, math, sys
linears, run = sys.argv[1:]
tensors = json.load(open(f"{run}/step-00000004/manifest.json"))["tensors"]
shapes = {n: t["shape"] for n, t in tensors.items() if ".lora_" in n and not n.startswith("optim.")}
assert any(".experts." in n for n in shapes) == (linears == "all"), shapes
assert any(".shared_expert." in n for n in shapes) == (linears != "attention"), shapes
assert all(".self_attn." in n or ".mlp." in n and ".gate." not in n for n in shapes), shapes
count = sum(map(math.prod, shapes.values()))
assert f"adapters: rank 2, alpha 4, {count} parameters; only these are trained" in open(f"{run}.out").read(), count
PY
done
for mesh in tp=1 pp=2,ep=2,tp=2; do
  timeout 60 "$trainer" --init-from adapted_all --lora 2 --steps 0 --sample 0 --seq 32 --mesh $mesh --export-hf "adapted_$mesh" \
    >merged.out 2>&1 || fail "--export-hf of adapted experts on $mesh: $(cat merged.out)"
done
cmp adapted_tp=1/model.safetensors adapted_pp=2,ep=2,tp=2/model.safetensors || fail "a mesh merges adapters of experts otherwise"
begun on_merged adapted_tp=1 --steps 1 --lora 1
begun on_adapters adapted_all --steps 1 --lora 2
python3 - on_merged.jsonl on_adapters.jsonl <<'PY' || fail "the merged weights are another model"
import json, sys
merged, adapted = (json.loads(open(file).readline())["loss"] for file in sys.argv[1:])
assert abs(merged - adapted) < 1e-5 * adapted, (merged, adapted)
PY
"$trainer" generate adapted_all --sample 3 --prompt x >generated.out 2>&1 || fail "adapted experts: $(cat generated.out)"

# Training from a directory on several meshes equals one rank; a run from the exported directory starts with its
# weights.
begun one "$models/llama_gqa_tied" --steps 3 --export-hf trained_one
logs check one.jsonl 3
n=0
for mesh in "dp=2,pp=2,tp=2" "pp=2 --schedule zb_h1" "dp=2,pp=2 --data-parallel zero3" "dp=2,tp=2 --data-parallel zero1"; do
  n=$((n + 1))
  # shellcheck disable=SC2086  # a list of options
  begun "mesh$n" "$models/llama_gqa_tied" --steps 3 --export-hf "trained$n" --mesh $mesh
  logs same one.jsonl "mesh$n.jsonl" 1e-5
  begun "again$n" "trained$n" --steps 0 --export-hf "again$n" --mesh pp=2
  [ "$(hash_of "mesh$n")" = "$(hash_of "again$n")" ] || fail "$mesh: other weights were exported than were trained"
  same_tensors "trained$n" "again$n"
done
[ "$(hash_of one)" != "$(hash_of gqa_tied_tp=1)" ] || fail "training changed no weight"

# Weights in the order of Megatron and of Meta are equal, on any mesh; an order that does not fit the names is an error.
for order in megatron meta; do
  for model in mha gqa_tied; do
    python3 "$here/lib/weights_order.py" "$models/llama_$model" "$order" "${order}_$model" || fail "no $order"
    for mesh in tp=1 dp=2,tp=2 pp=2,tp=4; do
      out=${order}_${model}_$mesh
      begun "$out" "${order}_$model" --weights-order "$order" --steps 0 --mesh "$mesh" --export-hf "$out"
      same_tensors "$models/llama_$model" "$out"
      begun "to_$out" "$models/llama_$model" --export-order "$order" --steps 0 --mesh "$mesh" --export-hf "to_$out"
      same_tensors "${order}_$model" "to_$out"
    done
  done
done

# If all tokens have the same score, the first is drawn on any mesh.
mkdir alike
cp "$models/llama_mha/config.json" alike
PYTHONPATH=$here/lib python3 - "$models/llama_mha/model.safetensors" alike/model.safetensors <<'PY' || fail "no such model"
import safetensors_file, sys
tensors = safetensors_file.read(sys.argv[1])[1]
dtype, shape, data = tensors["lm_head.weight"]
safetensors_file.write(sys.argv[2], tensors | {"lm_head.weight": (dtype, shape, bytes(len(data)))})
PY
for mesh in tp=1 tp=2; do
  begun "alike_$mesh" alike --steps 0 --mesh $mesh --sample 3 --temperature 0 --prompt x
  sed -n '/^sampled text:$/,$p' "alike_$mesh.out" >"alike_$mesh.text"
done
cmp alike_tp=1.text alike_tp=2.text || fail "tp=2 draws another text"
grep -qxF 'x\x00\x00\x00' alike_tp=1.text || fail "not the first token is drawn: $(cat alike_tp=1.text)"

# In bf16 without masters the weights are exported as they are stored.
begun few "$models/llama_mha" --steps 1 --precision bf16-no-masters --mesh pp=2 --export-hf few
grep -q '"torch_dtype": "bfloat16"' few/config.json || fail "the weights are not in bf16: $(cat few/config.json)"
begun few_again few --steps 0 --precision bf16-no-masters --export-hf few_again
same_tensors few few_again

# For a config.json with weights in its folder, the trainer prints that it does not use the weights.
train beside --model "$models/llama_mha/config.json" --sample 0 --steps 1
grep -q "^weights: random ones (--seed 1), not those of 'model.safetensors' beside --model, which --init-from .*llama_mha would load" \
  beside.out || fail "nothing is said of the weights: $(cat beside.out)"
train alone --sample 0 --steps 1
grep -q '^weights:' alone.out && fail "there are no weights: $(cat alone.out)"

given="--data $text --seq 32 --steps 1 --sample 0"
mha=$models/llama_mha
adapted=adapted_all/step-00000004
refused "has adapters of rank 2 and alpha 4, and this run has --lora 2 --lora-alpha 4 --lora-linears shared; legal is --lora 2 --lora-alpha 4" \
  --init-from $adapted --lora 2 --lora-linears shared
refused "'$adapted' has adapters on all linears, and --lora-linears is shared; legal is --lora-linears all" \
  --resume adapted_all --model "$models/llama_dots1/config.json" --lora 2 --lora-linears shared
refused '--mesh: tp=8 is more than the model.s num_attention_heads, which is 4' --init-from "$models/llama_mixtral" --mesh tp=8
refused '--precision bf16-no-masters is not supported for models with experts; legal is float or bf16' \
  --model tiny-experts --precision bf16-no-masters
refused '--gradients bf16 is not supported for models with experts; legal is full' \
  --model tiny-experts --precision bf16 --gradients bf16
refused '--init-from .* leave out --model tiny' --init-from "$mha" --model tiny
refused "--init-from: 'megatron_mha': its tensors, such as '.*', have the names of megatron, and --weights-order is hugging-face; legal is --weights-order megatron" \
  --init-from megatron_mha
refused "have the names of meta, and --weights-order is megatron" --init-from meta_mha --weights-order megatron
refused "have the names of hugging-face, and --weights-order is meta" --init-from "$mha" --weights-order meta
refused "--weights-order 'nemo' is unknown; legal are hugging-face, megatron, meta" --init-from "$mha" --weights-order nemo
refused "--weights-order meta is for --init-from" --weights-order meta
refused "--export-order meta is for --export-hf" --export-order meta
refused "--export-order 'nemo' is unknown" --export-order nemo --export-hf x
refused "--export-order: the order meta has no tensors for norms of q and k" \
  --init-from "$models/llama_qwen3" --export-hf x --export-order meta
refused "is a file; name the folder that has the model's config.json and weights, '.*llama_mha'" \
  --init-from "$mha/model.safetensors"
refused "is the folder of a model; .*llama_mha/config.json, and with its weights .*--init-from" --model "$mha"
refused "tp=5 is more than .*num_attention_heads, which is 4; .* are 1, 2, 3, 4" --init-from "$mha" --mesh tp=5
refused "--export-hf: 'trained_one' is there already" --init-from "$mha" --export-hf trained_one
refused "--export-hf: cannot make the folder 'absent/new" --export-hf absent/new
refused "--log names 'twice', where --export-hf twice makes a new folder" --export-hf twice --log twice
mkdir full
refused "--plot names './full/loss.svg', where --export-hf full/ makes a new folder" \
  --init-from "$mha" --export-hf full/ --plot ./full/loss.svg
refused "--export-hf: '.' is the folder that this runs in" --init-from "$mha" --export-hf .
refused "--init-from is empty; name a folder" --init-from ""
refused "--export-hf is empty; name a folder" --export-hf ""
refused "--init-from: cannot open 'meta-llama/Llama-3.2-1B': No such file .* is downloaded first" \
  --init-from meta-llama/Llama-3.2-1B
mkdir words
cp "$mha/config.json" "$mha/model.safetensors" words && touch words/tokenizer.model
refused "--data .*kjv.txt: it would be read as bytes, and --init-from words has a tokenizer.model of its own" --init-from words
python3 "$SOURCE/examples/tokenize_text.py" --tokenizer bytes --output tokens "$text" >tokens.out || fail "$(cat tokens.out)"
refused "--data .*kjv.txt: it would be read as bytes, and --init-from words has a tokenizer.model of its own" --init-from words \
  --data tokens.bin "$text" --data-weights 0.8,0.2
timeout 60 "$trainer" --init-from words --data "$text" --data-format bytes --seq 32 --steps 1 --sample 0 >bytes.out ||
  fail "bytes were asked for"
touch words/tokenizer.json

# A conversion needs no data, and copies the tokenizer.
timeout 60 "$trainer" --init-from words --seq 32 --steps 0 --sample 0 --mesh pp=2 --export-hf converted >converted.out ||
  fail "a conversion ended with $?"
same_tensors words converted
[ -f converted/tokenizer.json ] || fail "the tokenizer stayed behind"
timeout 20 "$trainer" --init-from words --seq 32 --steps 0 --held-out 0.1 >stdout 2>stderr && fail "nothing is held out"
grep -q "^train_llama: --data is missing" stderr || fail "nothing to hold out: $(cat stderr)"
mkdir fewer
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' "$mha/config.json" >fewer/config.json
cp "$mha/model.safetensors" fewer/config.tmp && mv fewer/config.tmp fewer/model.safetensors
refused "--init-from: 'fewer': the model needs tensors that are missing: 'model.layers.2.input_layernorm.weight'" \
  --init-from fewer --mesh pp=2
refused "--log would overwrite 'fewer/config.json', which --init-from reads" --init-from "$mha" --init-from fewer \
  --log fewer/config.json
[ -z "$(find . -name '*.tmp-*')" ] || fail "left behind: $(find . -name '*.tmp-*')"
