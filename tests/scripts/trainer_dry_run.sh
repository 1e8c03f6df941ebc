#!/bin/sh
# A dry run prints the plan without training, and its bytes are those that a run sends.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

planned() { sed -n 's/^ *bytes sent in a step, by axis: //p' plan.out; }

# The plan of a model with eight billion parameters takes seconds, and less memory than its weights.
python3 - "$trainer" >plan.out <<'PYTHON' || fail "the plan of a large model"
import resource, subprocess, sys
subprocess.run([sys.argv[1], "--model", "llama-3-8b", "--mesh", "dp=2,tp=8", "--seq", "4096", "--dry-run"], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
took, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024  # CPU time, because other programs may run too
if took > 10 or peak > 300e6:
    sys.exit(f"it took {took:.1f} s and {peak / 1e6:.0f} MB")
PYTHON
for line in '^mesh: 16 ranks, dp=2, tp=8' '^model: 8030261248 parameters' 'residual .*shard<seq, cp, tp' \
  'layers.0.self_attn.q_proj.weight .*shard<heads, tp' 'lm_head.weight .*shard<vocab, tp' 'tp .*all_gather .* calls, ' \
  'tp .*reduce_scatter' 'dp .*all_reduce' \
  'order of collectives: [0-9]* collectives and messages of a step stand in one order on all 16 ranks' \
  '^memory of a rank' 'weights .*B$' 'gradients' 'optimizer' 'activations' 'in all' 'at the peak .*B, within a pass'; do
  grep -q "$line" plan.out || fail "the plan lacks '$line': $(cat plan.out)"
done
! grep -q 'layers.1\.' plan.out || fail "the plan lists layers that look alike"

# compare ARGUMENTS...: the plan's bytes of a step, times the number of steps, are the bytes of a run.
compare() {
  rm -rf out && mkdir out
  "$trainer" --model config.json --seq 32 --global-batch 16 --log out/log --plot out/plot "$@" --dry-run >plan.out ||
    fail "the plan of $*"
  [ -z "$(ls -A out)" ] || fail "a dry run wrote $(ls -A out)"
  train run --sample 0 --global-batch 16 --steps 3 "$@"
  logs sent run.jsonl "$(planned)"
}
compare --mesh dp=1,tp=1
compare --mesh dp=2,tp=2
compare --mesh dp=2,tp=2 --strategy tp --micro-batch 2
compare --mesh dp=2,tp=2 --data-parallel zero3 --recompute full --micro-batch 1
compare --mesh dp=1,tp=4 --recompute selective
compare --mesh dp=2,tp=4 --data-parallel zero2 --precision double --micro-batch 2
compare --mesh dp=4,tp=2 --strategy tp --data-parallel zero1 --clip 0 --micro-batch 1
compare --mesh dp=2,tp=2 --optimizer muon
compare --mesh dp=2,tp=2 --data-parallel zero1 --shard whole --optimizer muon --micro-batch 2
compare --mesh dp=2,tp=2 --data-parallel zero2 --shard blocks --moments int8 --precision bf16-no-masters --micro-batch 2
compare --mesh dp=2,tp=2 --data-parallel zero1 --reduce-in bf16 --micro-batch 2
compare --mesh dp=2,pp=2 --data-parallel zero2 --precision bf16 --gradients bf16 --micro-batch 2
compare --mesh dp=2,cp=2 --data-parallel zero3 --precision bf16-no-masters --gradients bf16 --reduce-in float --micro-batch 2

# For 34976 parameters in float, AdamW keeps two numbers each, and Muon one for the 18432 of hidden matrices. In 8 bits,
# each block of up to 256 elements has two one-byte scales.
optimizers_bytes() { "$trainer" --model config.json --seq 32 --dry-run "$@" | sed -n 's/^  optimizer *//p'; }
keeps() {
  kept=$1
  shift
  [ "$(optimizers_bytes "$@")" = "$kept" ] || fail "$*: the optimizer keeps $(optimizers_bytes "$@")"
}
keeps "280 kB" --optimizer adamw
keeps "206 kB" --optimizer muon
keeps "140 kB" --moments bf16
# For adapters it keeps two numbers each, and for the weights that they adapt none.
keeps "32.8 kB" --lora 4
"$trainer" --model config.json --seq 32 --dry-run --lora 4 | grep -q '^  gradients *16.4 kB$' || fail "frozen weights have gradients"
"$trainer" --model config.json --seq 32 --dry-run --lora 4 | grep -q '^adapters: rank 4, alpha 8, 4096 parameters' || fail "no adapters"
keeps "70.2 kB" --moments int8
keeps "280 kB" --precision bf16-no-masters

# A rank writes the planned bytes of a step.
saving="--mesh dp=2,tp=2 --data-parallel zero1 --global-batch 8 --checkpoint-dir saved"
# shellcheck disable=SC2086  # a list of options
"$trainer" --model config.json --seq 32 $saving --resume auto --dry-run >plan.out || fail "the plan of a run that saves"
writes=$(sed -n 's/^  staging .* two copies of the \(.*\) that the rank writes of a step.*/\1/p' plan.out)
[ -n "$writes" ] || fail "the plan says nothing of saving: $(cat plan.out)"
grep -q "^--resume auto: nothing is saved in 'saved' yet$" plan.out || fail "the plan is silent about --resume: $(cat plan.out)"
[ ! -e saved ] || fail "a plan has made a folder"
# shellcheck disable=SC2086
train saves --steps 1 --sample 0 $saving
"$BIN/checkpoint_tool" inspect saved/step-00000001 --files >inspected || fail "no step was saved"
grep -q "^data/w.* $writes " inspected || fail "no rank writes $writes, as the plan says: $(cat inspected)"

# The plan checks the saved step: it exists, is complete by its manifest, and fits the run on any mesh.
cp -r saved untouched
# plans TEXT ARGUMENTS...: the plan has a line with the text.
plans() {
  expected=$1
  shift
  "$trainer" --model config.json --seq 32 --steps 1 --dry-run "$@" >plan.out 2>plan.err || fail "the plan of $*: $(cat plan.err)"
  grep -q -e "$expected" plan.out || fail "$*: '$expected' is not in: $(tail -n 3 plan.out)"
}
step="step 1 of 'saved/step-00000001', 4[0-9][0-9] kB, saved as 'dp=2,tp=2, zero1, schedule 1f1b, float', fits"
for mesh in dp=1 dp=2,pp=2,tp=2 tp=4; do
  plans "^--resume: $step" --resume saved --mesh $mesh
  plans "^--resume: $step" --resume auto --checkpoint-dir saved --mesh $mesh --precision double
  plans "^--init-from: $step" --init-from saved/step-00000001 --mesh $mesh --optimizer muon
done
plans "^--resume: $step" --resume saved --mesh dp=2 --data-parallel zero3 --moments bf16
# A step gives the shape of its model.
"$trainer" --init-from saved --seq 32 --dry-run >plan.out 2>plan.err || fail "a step's own shape: $(cat plan.err)"
grep -q "^--init-from: $step" plan.out || fail "another model than the step's: $(cat plan.out)"
# unplanned TEXT ARGUMENTS...: an error of the plan and of a run.
given="--model config.json --seq 32 --data $text --sample 0 --steps 2"
unplanned() { refused "$@" --dry-run && refused "$@"; }
unplanned "there is no 'absent'" --resume absent
unplanned "nothing in the model is 'optim.*exp_avg_sq'" --resume saved --optimizer muon
sed 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 3/' config.json >deep.json
unplanned "the model needs 'model.layers.2.input_layernorm.weight'" --resume saved --model deep.json --mesh pp=2
unplanned "--model deep.json is not the model of --init-from 'saved/step-00000001': its num_hidden_layers is 3, and the step has 2" \
  --init-from saved --model deep.json
unplanned "--seed is 7, and 'saved/step-00000001' was saved with 1" --resume saved --seed 7
unplanned "--seq is 64, and 'saved/step-00000001' was saved with 32" --resume saved --seq 64
unplanned "--data, --data-weights or --held-out is not what 'saved/step-00000001'" --resume saved --held-out 0.1
unplanned "--checkpoint-dir: 'saved' has step 1 already" --checkpoint-dir saved
unplanned "gives another learning rate than 'saved/step-00000001' was trained with: .* in 1 steps.*, and is .* in 2 steps" \
  --resume saved --on-new-schedule stop
unplanned "--steps is 0, and 1 were done before --resume" --resume saved --steps 0
unplanned "--checkpoint-dir: 'config.json' is not a directory" --checkpoint-dir config.json
unplanned "--checkpoint-dir: .*'none" --checkpoint-dir none/steps
file=$(find saved/step-00000001/data -type f | sort | head -n 1)
truncate -s -1 "$file"
unplanned "'$file'" --resume saved
rm "$file"
unplanned "'$file'" --init-from saved
cp -r untouched/step-00000001/data saved/step-00000001
printf ' ' >>saved/step-00000001/manifest.json
unplanned "'saved/step-00000001/COMMIT' is not that of its directory and manifest" --resume saved/step-00000001
unplanned "no saved step\|none that is whole" --init-from saved
cp untouched/step-00000001/manifest.json saved/step-00000001
diff -r -x .lock saved untouched || fail "a plan has changed what is saved"
