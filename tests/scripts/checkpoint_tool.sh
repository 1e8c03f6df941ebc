#!/bin/sh
# checkpoint_tool on saved steps: it lists and verifies them, compares steps of two layouts, and writes whole tensors as
# a safetensors file. Errors name damaged files and wrong arguments, and no file is overwritten.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"
tool=$BIN/checkpoint_tool
[ -x "$tool" ] || fail "$tool is not there; build it first"

steps() { python3 "$here/lib/steps.py" "$@" || fail "steps.py $*"; }
# expect CODE ARGUMENTS...: runs the tool; its output is in the files out and err.
expect() {
  code=$1
  shift
  got=0
  timeout 30 "$tool" "$@" >out 2>err || got=$?
  [ "$got" = "$code" ] || fail "checkpoint_tool $* ended with $got, not $code: $(cat out err)"
}
# says FILE TEXT: a line of FILE contains TEXT.
says() { grep -qF -e "$2" "$1" || fail "'$2' is missing: $(cat out err)"; }
# refused TEXT ARGUMENTS...: exit code 2, and one line that starts with TEXT.
refused() {
  begins=$1
  shift
  expect 2 "$@"
  [ "$(wc -l <err)" = 1 ] || fail "checkpoint_tool $*: not one line: $(cat err)"
  case $(cat err) in
    "checkpoint_tool: $begins"*) ;;
    *) fail "checkpoint_tool $* says '$(cat err)', not '$begins'" ;;
  esac
}

# convert DIRECTORY ARGUMENTS...: converts a model directory to a step by the trainer.
convert() {
  timeout 60 "$trainer" --init-from "$@" --seq 32 --steps 0 --sample 0 >convert.out 2>convert.err ||
    fail "train_llama --init-from $* ended with $?: $(cat convert.err)"
}

train tp --steps 4 --sample 0 --mesh tp=2 --checkpoint-dir tp --save-every 2
train pp --steps 4 --sample 0 --mesh pp=2,tp=2 --resume tp/step-00000002 --checkpoint-dir pp
train zero --steps 4 --sample 0 --mesh dp=2,tp=2 --data-parallel zero3 --resume tp/step-00000002 --checkpoint-dir zero
two=tp/step-00000002 four=tp/step-00000004 piped=pp/step-00000004 cut=zero/step-00000004

# Lists a step.
expect 0 inspect tp
[ "$(awk 'NR > 1 { print $1, $4, $5, $NF }' out | tr '\n' ' ')" = "4 63 2 yes 2 63 2 yes " ] ||
  fail "inspect of a folder: $(cat out)"
for step in $four $cut; do
  expect 0 inspect "$step" --json --tensors --files
  cp out inspected.json
  steps inspected "$step" inspected.json
done
expect 0 inspect $cut/ --tensors --files
says out "zero/step-00000004: step 4, "
grep -q '^exp_avg_sq  F32 ' out || fail "there are no totals: $(cat out)"
grep -Eq '^model.layers.1.mlp.up_proj.weight +F32 +64x32 +[2-9] +8.19 kB$' out || fail "no such tensor: $(cat out)"
grep -Eq '^data/w00003.safetensors .* kB ' out || fail "no such file: $(cat out)"
grep -Eq '^data of a writer: max/mean 1\.0[0-9]*$' out || fail "no balance: $(cat out)"
grep -Eq '^train.samples +32$' out || fail "no place in the data: $(cat out)"

# Every part of the step is verified.
expect 0 verify tp
says out "2 steps whole: "
says out "0 damaged, 0 faults"
expect 0 verify $cut
grep -Eq '^zero/step-00000004: whole, .* kB read in [0-9.]+ s, [0-9.]+ GB/s$' out || fail "no summary: $(cat out)"
expect 0 verify "$work/tp/../zero/step-00000004//"

# Equal numbers in other boxes; different numbers; and a tolerance for them.
expect 0 diff $four $piped
says out "tensors: 63 bit-identical, 0 different, 0 in one step only"
[ "$(tail -n 1 out)" = equal ] || fail "diff says $(tail -n 1 out)"
expect 1 diff $four $cut
[ "$(tail -n 1 out)" = different ] || fail "diff says $(tail -n 1 out)"
expect 0 diff $four $cut --tolerance 1e-4
[ "$(tail -n 1 out)" = "equal, within the tolerance" ] || fail "diff says $(tail -n 1 out)"
expect 1 diff $four $cut --tolerance 1e-12
expect 1 diff $two $four --tolerance 1e-4
grep -Eq '^train.samples +16 +32$' out || fail "scalars are not compared: $(cat out)"
grep -Eq '^lm_head.weight +F32 +[0-9]+ +8192 ' out || fail "tensors are not compared: $(cat out)"

# Different tensors and types.
train bf16 --steps 1 --sample 0 --moments bf16 --checkpoint-dir bf16
train muon --steps 1 --sample 0 --optimizer muon --checkpoint-dir muon
expect 1 diff bf16/step-00000001 muon/step-00000001
grep -Eq '^optim.lm_head.weight.exp_avg +BF16 256x32 +F32 256x32$' out || fail "types are not compared: $(cat out)"
says out "only in A: tensor optim.model.layers.0.mlp.up_proj.weight.exp_avg_sq"
expect 1 diff muon/step-00000001 bf16/step-00000001
says out "only in B: tensor optim.model.layers.0.mlp.up_proj.weight.exp_avg_sq"
train adamw --steps 1 --sample 0 --checkpoint-dir adamw
expect 1 diff adamw/step-00000001 muon/step-00000001 --tolerance 100
grep -Eq '^tensors: .* 0 different, [1-9][0-9]* in one step only$' out || fail "names are not compared: $(cat out)"

# Scalars and blobs.
expect 1 diff $two $four --tolerance 100
grep -Eq '^tensors: .* 63 within 100, 0 different, 0 in one step only$' out || fail "the tolerance is not used: $(cat out)"
says out "scalars: 7 equal, 0 within 100, 3 different, 0 in one step only"
cp -r tp first
cp -r tp second
kept=first/step-00000004 changed=second/step-00000004
steps set $kept scalars/noise 0.5
expect 1 diff $kept $changed
says out "only in A: scalar noise"
steps set $changed scalars/noise 0.50001
expect 1 diff $kept $changed
grep -Eq '^noise +0.5 +0.50001$' out || fail "reals are not compared: $(cat out)"
expect 0 diff $kept $changed --tolerance 1e-4
steps set $kept scalars/noise '{"float64": "7ff8000000000000"}'
expect 1 diff $kept $changed --tolerance 1e-4
steps set $changed scalars/noise '{"float64": "7ff8000000000000"}'
expect 0 diff $kept $changed
expect 0 inspect $kept --json
says out '"noise": "nan"'
steps blob $kept vocabulary 'a b c'
expect 1 diff $kept $changed
says out "only in A: blob vocabulary"
steps blob $changed vocabulary 'a b d'
expect 0 verify $changed
expect 0 inspect $changed
grep -Eq '^vocabulary +5 B$' out || fail "blobs are not told: $(cat out)"
expect 1 diff $kept $changed
says out "blob vocabulary differs"
steps blob $kept vocabulary2 x
cp -r $kept third-step
rm -r $changed
mv third-step $changed
expect 0 diff $kept $changed
says out "blobs: 2 equal, 0 different, 0 in one step only"

# Whole tensors in a safetensors file, for other programs.
for step in $four $cut; do
  rm -f all.safetensors weights.safetensors
  expect 0 export-safetensors "$step" all.safetensors
  says out "all.safetensors: 63 tensors, "
  steps exported "$step" all.safetensors
  expect 0 export-safetensors "$step" weights.safetensors --weights-only
  steps exported "$step" weights.safetensors weights
done
cp weights.safetensors kept
refused "OUT: there is 'weights.safetensors' already" export-safetensors $four weights.safetensors
cmp -s weights.safetensors kept || fail "an existing file was changed"
ln -s nowhere dangling
refused "OUT: there is 'dangling' already" export-safetensors $four dangling
refused "OUT: there is '.' already" export-safetensors $four .
refused "OUT: there is '/dev/null' already" export-safetensors $four /dev/null
refused "OUT: cannot create 'none/x.tmp-" export-safetensors $four none/x
refused "OUT: the name of the file to write is empty" export-safetensors $four ''
refused "OUT: 'tp/step-00000004/data/x' lies in the step itself" export-safetensors $four $four/data/x
got=0
(ulimit -f 100 && timeout 30 "$tool" export-safetensors $four limited >out 2>err) || got=$?
[ "$got" = 2 ] || fail "a file size limit: $got"
says err "OUT: cannot write 'limited.tmp-"
[ -z "$(find . -name '*.tmp-*' -o -name limited)" ] || fail "what was not finished is left: $(ls)"

# A model directory has the same bytes as the one that the trainer writes of this step; also in several files, and in
# bf16. Keys of config.json that change no number stay.
sed 's/"vocab_size"/"eos_token_id": [2, 3], "vocab_size"/' config.json >ending.json
for step in $four $cut; do
  rm -rf by_trainer by_tool
  train exporting --model ending.json --steps 4 --sample 0 --resume "$step" --export-hf by_trainer
  grep -q '"eos_token_id": \[' by_trainer/config.json || fail "the token that ends a text is lost: $(cat by_trainer/config.json)"
  expect 0 export-hf "$step" by_tool --config ending.json
  says out "by_tool: "
  diff -r by_trainer by_tool || fail "the tool exports another model than the trainer"
done
expect 0 export-hf $cut sharded --config by_tool --shard-bytes 20000
[ "$(find sharded -name '*.safetensors' | wc -l)" -gt 2 ] || fail "there are $(ls sharded)"
convert sharded --export-hf whole
cmp whole/model.safetensors by_tool/model.safetensors || fail "several files are another model"
expect 0 export-hf $cut rounded --config config.json --dtype BF16
convert by_tool --precision bf16-no-masters --export-hf by_rounding
cmp rounded/model.safetensors by_rounding/model.safetensors || fail "bf16 is rounded in another way"
refused "DIR: 'by_tool' is there already" export-hf $four by_tool --config config.json
refused "DIR: 'tp/step-00000004/x' lies in the step itself" export-hf $four $four/x --config config.json
refused "--config: cannot open 'none'" export-hf $four x --config none
refused "--dtype is F16; legal are F64, F32 and BF16" export-hf $four x --config config.json --dtype F16
refused "--weights-order 'nemo' is unknown" export-hf $four x --config config.json --weights-order nemo
refused "DIR: 'x': shard_bytes is 0" export-hf $four x --config config.json --shard-bytes 0
refused "--config is required" export-hf $four x
sed 's/"num_hidden_layers": [0-9]*/"num_hidden_layers": 1/' config.json >shallow.json
refused "'tp/step-00000004': nothing in the model is 'model.layers.1." export-hf $four x --config shallow.json
sed 's/"intermediate_size": [0-9]*/"intermediate_size": 96/' config.json >wide.json
refused "'tp/step-00000004': 'model.layers.0.mlp.down_proj.weight' has the shape" export-hf $four x --config wide.json
(ulimit -f 20 && timeout 30 "$tool" export-hf $four x --config config.json >out 2>err) && fail "a file size limit"
[ ! -e x ] && [ -z "$(find . -maxdepth 1 -name '*.tmp-*')" ] || fail "what was not finished is left: $(ls)"

# A model directory becomes step 0, in any order of weights. A run on any layout starts from it as from the directory.
mha=$SOURCE/tests/data/llama_mha
expect 0 import-hf "$mha" imported
says out "imported/step-00000000: 21 tensors, "
expect 0 verify imported
for order in megatron meta; do
  python3 "$here/lib/weights_order.py" "$mha" $order $order || fail "no $order"
  expect 0 import-hf $order from_$order --weights-order $order
  expect 0 diff imported/step-00000000 from_$order/step-00000000
done
for order in megatron meta; do
  expect 0 export-hf imported/step-00000000 back_$order --config "$mha" --weights-order $order
  python3 "$here/lib/tensors.py" $order back_$order || fail "another model in the order $order"
done
expect 0 export-hf imported/step-00000000 back --config "$mha"
python3 "$here/lib/tensors.py" "$mha" back || fail "what is imported and exported is another model"
for mixture in dots1 mixtral; do
  of=$SOURCE/tests/data/llama_$mixture
  expect 0 import-hf "$of" $mixture
  expect 0 export-hf $mixture/step-00000000 back_$mixture --config "$of"
  python3 "$here/lib/tensors.py" "$of" back_$mixture || fail "$mixture imported and exported is another model"
done
train adapted --model "$mha/config.json" --init-from imported --steps 1 --sample 0 --lora 2 --checkpoint-dir adapted
refused "STEP: 'adapted/step-00000001' has low-rank adapters, such as 'model.layers.0.self_attn.q_proj.lora_A" \
  export-hf adapted/step-00000001 x --config "$mha"
says err "train_llama --init-from adapted/step-00000001 --lora RANK --steps 0 --export-hf x"
expect 0 import-hf back twice
expect 0 diff imported/step-00000000 twice/step-00000000
expect 0 import-hf "$mha" narrow --dtype BF16
expect 0 export-hf imported/step-00000000 narrow_back --config "$mha" --dtype BF16
expect 0 import-hf narrow_back narrow_twice
expect 0 diff narrow/step-00000000 narrow_twice/step-00000000
# Tensors of several types become one type only on request: no number is rounded silently.
mkdir mixed && cp "$mha/config.json" mixed
PYTHONPATH=$here/lib python3 - "$mha/model.safetensors" mixed/model.safetensors <<'PY' || fail "no model of several types"
import safetensors_file, sys
tensors = safetensors_file.read(sys.argv[1])[1]
for name, (_, shape, data) in tensors.items():
    if len(shape) == 2: tensors[name] = "BF16", shape, b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
safetensors_file.write(sys.argv[2], tensors)
PY
expect 0 import-hf mixed of_mixed
refused "'of_mixed/step-00000000' has tensors of several types: '" export-hf of_mixed/step-00000000 x --config mixed
says err "; choose the type of the export by dtype"
expect 0 export-hf of_mixed/step-00000000 one_type --config mixed --dtype F32
expect 0 reshard imported/step-00000000 cut --writers 3
# begin NAME ARGUMENTS...: two training steps.
begin() {
  begun=$1
  shift
  timeout 60 "$trainer" --data "$text" --seq 32 --global-batch 8 --steps 2 --sample 0 --log "$begun.jsonl" "$@" \
    >"$begun.out" 2>"$begun.err" || fail "$begun ($*) ended with $?: $(cat "$begun.err")"
}
begin directory --init-from "$mha" --mesh dp=2
for from in imported cut/step-00000000/ from_meta; do
  begin step --init-from $from --model "$mha/config.json" --mesh dp=2
  grep -q "^weights: those of '.*step-00000000', with a new optimizer$" step.out || fail "no source: $(cat step.out)"
  [ "$(hash_of step)" = "$(hash_of directory)" ] || fail "$from: another run"
done
for mesh in "dp=2,pp=2,tp=2" "tp=4" "dp=2 --data-parallel zero3"; do
  # shellcheck disable=SC2086  # a list of options
  begin other --init-from imported --model "$mha/config.json" --mesh $mesh --export-hf "other_$mesh"
  logs same directory.jsonl other.jsonl 1e-5
done
# Takes the weights of a step of any layout, without its optimizer and number of steps.
for mesh in "tp=2" "dp=2,pp=2" "dp=2,tp=2 --data-parallel zero2"; do
  rm -rf again again_ck
  # shellcheck disable=SC2086
  train again --steps 0 --sample 0 --init-from zero --mesh $mesh --export-hf again --checkpoint-dir again_ck
  python3 "$here/lib/tensors.py" by_tool again || fail "$mesh: other weights than those of the step"
  expect 1 diff $cut again_ck/step-00000000
  says out "tensors: 21 bit-identical, 42 different, 0 in one step only"
done
refused "DIR: cannot open 'none'" import-hf none x
refused "DIR: 'megatron': its tensors, such as '" import-hf megatron x
refused "--weights-order 'nemo' is unknown" import-hf "$mha" x --weights-order nemo
refused "--dtype is F16; legal are F64, F32 and BF16" import-hf "$mha" x --dtype F16
refused "FOLDER: step 0 is in 'imported' already" import-hf "$mha" imported
refused "FOLDER: 'back/x' lies in the model directory" import-hf back back/x
refused "FOLDER: 'config.json' is not a directory" import-hf "$mha" config.json
mkdir fewer && cp "$mha/model.safetensors" fewer
sed 's/"num_hidden_layers": 2/"num_hidden_layers": 3/' "$mha/config.json" >fewer/config.json
refused "DIR: 'fewer': the model needs 'model.layers.2.input_layernorm.weight'" import-hf fewer x
(ulimit -f 20 && timeout 30 "$tool" import-hf "$mha" limited_import >out 2>err) && fail "a file size limit"
says err "FOLDER: cannot write 'limited_import/step-00000000.tmp-"
# untrained TEXT ARGUMENTS...: the trainer refuses the arguments.
untrained() {
  expected=$1
  shift
  timeout 30 "$trainer" --data "$text" --seq 32 --steps 2 --sample 0 "$@" >out 2>err && fail "$* was accepted"
  grep -q -e "^train_llama: .*$expected" err || fail "$*: '$expected' is not in: $(cat err)"
}
untrained "--init-from: 'imported/step-00000000' is a saved step that does not have its model's shape.* --model" --init-from imported
untrained "--weights-order meta is for model directories, and --init-from imported is a saved step" \
  --init-from imported --model "$mha/config.json" --weights-order meta
untrained "--resume zero takes the weights of a saved step, and so does --init-from imported" \
  --init-from imported --model "$mha/config.json" --resume zero
untrained "--init-from: checkpoint: 'imported/step-00000000': .*'model.embed_tokens.weight' has the shape" \
  --init-from imported --model config.json --mesh pp=2
untrained "'imported/step-00000000' has weights and no optimizer's state, .*, as --init-from does" \
  --resume imported --model "$mha/config.json"

# A step in another number of files is equal and valid, and a run resumes from it as from the first.
for writers in 1 5 64; do
  expect 0 reshard $cut "by$writers" --writers $writers
  says out "by$writers/step-00000004: 63 tensors, "
  [ "$(find "by$writers/step-00000004/data" -type f | wc -l)" = $writers ] || fail "there are $(ls "by$writers/step-00000004/data")"
  expect 0 verify "by$writers"
  expect 0 diff $cut "by$writers/step-00000004"
done
expect 0 reshard $kept again --writers 3 # with blobs
expect 0 verify again
expect 0 diff $kept again/step-00000004
train straight --steps 6 --sample 0 --mesh dp=2 --resume $cut --on-new-schedule follow
train around --steps 6 --sample 0 --mesh dp=2 --resume by5 --on-new-schedule follow
[ "$(hash_of straight)" = "$(hash_of around)" ] || fail "the step in other files is another state"
refused "FOLDER: step 4 is in 'by5' already" reshard $four by5
refused "FOLDER: step 4 is in 'tp' already" reshard $four tp
refused "FOLDER: 'tp/step-00000004/x' lies in the step itself" reshard $four $four/x
refused "--writers is 0; legal are 1 to 1024" reshard $four x --writers 0
refused "--writers is 1025; legal are 1 to 1024" reshard $four x --writers 1025
refused "STEP: 'tp' is not a step" reshard tp x
refused "FOLDER: 'config.json' is not a directory" reshard $four config.json
(ulimit -f 20 && timeout 30 "$tool" reshard $four limited >out 2>err) && fail "a file size limit"
says err "FOLDER: cannot write 'limited/step-00000004.tmp-"
[ -z "$(find limited -name 'step*')" ] || fail "what was not finished is left: $(find limited)"

# Wrong arguments.
refused "PATH: there is no 'none'" inspect none
refused "PATH: there is no 'none/step-00000001'" verify none/step-00000001
refused "PATH: 'config.json' is not a directory; name a step or a folder of steps" inspect config.json
mkdir empty
refused "PATH: 'empty' holds no steps" inspect empty
refused "PATH: 'empty' holds no steps" verify empty
refused "PATH: the path is empty" inspect ''
refused "A: 'tp' is not a step; name one of those in it, such as tp/step-00000004" diff tp $four
refused "B: 'empty' is not a step, and there is none in it" diff $four empty
refused "STEP: 'tp' is not a step" export-safetensors tp x
refused "--tensors is for one step" inspect tp --tensors
refused "--tolerance is -1; legal are numbers from 0 on" diff $four $cut --tolerance -1
refused "--tolerance is nan; legal" diff $four $cut --tolerance nan
refused "Could not convert: --tolerance = x" diff $four $cut --tolerance x
refused "B is required" diff $four
refused "give a command: inspect, verify, diff, compare-runs, export-safetensors, export-hf, import-hf or reshard"
refused "The following argument was not expected: list" list
refused "The following argument was not expected: --frob" inspect tp --frob
cp -r $two renamed
refused "PATH: 'renamed' has a manifest, but not the name of its step" inspect renamed
if "$tool" inspect tp >/dev/full 2>err; then fail "a full standard output goes unnoticed"; fi
says err "the output cannot be written"
expect 0 --help
says out "export-safetensors"

# A link to a step; the step as working folder; a layout with control characters of a terminal.
ln -s $four best
expect 0 verify best
(cd $four && timeout 30 "$tool" verify . >/dev/null) || fail "verify does not take ."
cp -r tp odd
steps set odd/step-00000004 layout '"\u001b[2J\u009b31mdp=1\n"'
for command in verify inspect; do
  expect 0 $command odd
  expect 0 $command odd/step-00000004
  if LC_ALL=C grep -q "$(printf '[\033\233]')" out; then fail "$command prints control characters"; fi
done
says out 'layout: \x1b[2J\xc2\x9b31mdp=1\n'

# Damage: verify names it, and other commands write nothing from it.
cp -r tp bad
box=$(steps flip bad/step-00000004 model.layers.0.mlp.down_proj.weight)
expect 1 verify bad/step-00000004
says out "tensor 'model.layers.0.mlp.down_proj.weight' box $box, 4096 bytes from "
says out "bad/step-00000004: 1 fault"
expect 1 verify bad
says out "1 step whole: "
says out "1 damaged, 1 fault"
expect 0 inspect bad # it reads no data
expect 2 diff $four bad/step-00000004
says err "is damaged: tensor 'model.layers.0.mlp.down_proj.weight' box $box"
refused "STEP: 'bad/step-00000004/data/w0000" export-safetensors bad/step-00000004 damaged
[ -z "$(find . -name 'damaged*')" ] || fail "a file is made of damaged tensors"
refused "STEP: 'bad/step-00000004/data/w0000" reshard bad/step-00000004 damaged
[ -z "$(find damaged -name 'step*')" ] || fail "a step is made of damaged tensors"
rm -r damaged

truncate -s -1 bad/step-00000002/data/w00001.safetensors
expect 1 verify bad
says out "0 steps whole; 2 damaged, "
says out "it is truncated"
expect 0 inspect bad
says out "no: 'bad/step-00000002/data/w00001.safetensors' has "
rm bad/step-00000002/data/w00001.safetensors
expect 1 verify bad/step-00000002
says out "cannot open 'bad/step-00000002/data/w00001.safetensors'"
expect 0 inspect bad/step-00000002
says out "not whole: 'bad/step-00000002/data/w00001.safetensors' is missing"

printf ' ' >>bad/step-00000004/manifest.json
left=bad/step-00000006.tmp-0123456789abcdef0123456789abcdef
mkdir "$left" bad/step-00000006.tmp-mine
refused "PATH: 'bad/step-00000004/COMMIT' is not that of its" inspect bad/step-00000004
refused "B: 'bad/step-00000004/COMMIT' is not that of its" diff $four bad/step-00000004
refused "STEP: 'bad/step-00000004/COMMIT' is not that of its" export-safetensors bad/step-00000004 x
expect 0 inspect bad
grep -Eq '^ +4 +- .* no: .*COMMIT. is not that of its directory and manifest' out || fail "a bad manifest: $(cat out)"
says out "leftover of a writer: $left"
expect 0 inspect bad --json
python3 -c '
import json
found = json.load(open("out"))
assert [s["whole"] for s in found["steps"]] == [False, False], found
assert found["leftovers"] == ["'"$left"'"], found' || fail "inspect --json of a folder: $(cat out)"
rm bad/step-00000004/COMMIT
expect 1 verify bad/step-00000004
says out "has no COMMIT, which rank 0 writes last: its save was not finished, or"
