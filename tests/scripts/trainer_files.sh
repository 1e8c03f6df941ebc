#!/bin/sh
# Files and streams that change, fill up or close during a run: the run ends with an error text, or continues and
# reports the error at the end. It damages no other file.
# timeout: 400
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

# ends_with CODE TEXT: checks the previous run, whose exit code is in $code.
ends_with() {
  [ "$code" = "$1" ] || fail "$3: exit code $code and not $1: $(cat stderr)"
  grep -q "^train_llama: .*$2" stderr || fail "$3: '$2' is not in: $(cat stderr)"
}
run() {
  code=0
  timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --steps 3 --sample 0 "$@" 2>stderr || code=$?
}
endless() {
  timeout 60 "$trainer" --model config.json --seq 32 --steps 1000000 --warmup 0 --sample 0 --mesh dp=2 "$@" >endless.out 2>stderr &
  watcher=$!
}

# With a full standard output, a run loses its printed text only. A closed one, as of a run detached from its terminal,
# counts as /dev/null.
run --log full.jsonl >/dev/full
ends_with 1 'standard output could not be written, .*: No space left on device' 'a full stdout'
[ "$(logs get full.jsonl steps)" = 3 ] || fail "a full stdout ends the run"
run --log closed.jsonl --checkpoint-dir closed >&-
[ "$code" = 0 ] || fail "a closed stdout: exit code $code: $(cat stderr)"
[ "$(logs get closed.jsonl steps)" = 3 ] || fail "a closed stdout ends the run"
[ -f closed/step-00000003/COMMIT ] || fail "a closed stdout costs the state: $(ls closed)"
mkfifo pipe
: <pipe &
run --log piped.jsonl >pipe
wait $!
ends_with 1 'standard output could not be written, .*: Broken pipe' 'a reader that went away'
[ "$(logs get piped.jsonl steps)" = 3 ] || fail "a broken pipe ends the run"
# The same for other outputs: training continues without the log, and the other results are written.
run --log /dev/full --checkpoint-dir logfull >stdout
ends_with 1 "--log: cannot append to '/dev/full': No space left on device" 'a full log'
grep -q "/dev/full': No space left on device; the run continues without it" stderr || fail "a full log is not told at once: $(cat stderr)"
[ -f logfull/step-00000003/COMMIT ] || fail "a full log costs the state: $(ls logfull)"
grep -q '^3 steps in ' stdout || fail "a full log ends the run: $(cat stdout)"
run --plot /dev/full --export-hf exported >/dev/null
ends_with 1 '--plot: .*/dev/full' 'a full picture'
[ -f exported/model.safetensors ] || fail "a full picture costs the model: $(ls exported)"
run --dry-run >/dev/full
ends_with 1 'standard output could not be written' 'a plan'

# A log has one writer. A limit of file sizes gives an error text.
endless --data "$text" --log shared.jsonl
wait_until test -s shared.jsonl
run --log shared.jsonl >/dev/null
ends_with 1 "--log: 'shared.jsonl' is being written by another run" 'a shared log'
kill -s TERM "$(ps -o pid= --ppid "$watcher" | tr -d ' ')"
wait "$watcher" || true
[ "$(logs get shared.jsonl steps)" -gt 0 ] || fail "the run that had the log has lost it"
(ulimit -f 2; code=0; timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --steps 30 --sample 0 \
  --log limited.jsonl 2>&1 >/dev/null || code=$?; echo "$code" >limited.code) | cat >stderr
[ "$(cat limited.code)" = 1 ] || fail "a limit of the log's size: exit code $(cat limited.code): $(cat stderr)"
grep -q "^train_llama: --log: cannot append to 'limited.jsonl': File too large$" stderr || fail "a limit of the log's size: $(cat stderr)"
grep -q ' left  step 30/30 ' stderr || fail "a limit of the log's size ends the run: $(cat stderr)"

# Data that are truncated while they are read.
head -c 400000 "$text" >shrinking.txt
endless --data shrinking.txt --log shrinking.jsonl
wait_until test -s shrinking.jsonl
: >shrinking.txt
code=0
wait "$watcher" || code=$?
ends_with 1 "'shrinking.txt' is truncated: .* it had 400000 bytes when it was opened" 'data that shrink'

# Paths that are not files, and JSON that is nested too deeply.
for what in --model --data; do
  run --model config.json "$what" /dev/zero >/dev/null
  ends_with 1 "$what.*/dev/zero' *.*is not a regular file" "$what of an endless device"
done
mkfifo never
run --data never >/dev/null
ends_with 1 "--data.*never.*is not a regular file" 'data from a pipe'
mkfifo never.json
run --model ./never.json >/dev/null
ends_with 1 "--model.*never.json.*is not a regular file" 'a model from a pipe'
python3 -c 'print("{\"a\": " + "[" * 80000 + "]" * 80000 + "}")' >deep.json
run --model ./deep.json >/dev/null
ends_with 1 "the JSON has more than 64 levels" 'a model that is nested deep'

# Training states: no other output is written into their folders, by any path, and one run at a time saves there.
run --checkpoint-dir ck --log made.jsonl >/dev/null
[ "$code" = 0 ] || fail "no state is saved: $(cat stderr)"
step=ck/step-00000003
cp -r ck before
ln -s ck linked
ln -s ../"$step/manifest.json" to_manifest
mkdir apart
ln -s "$PWD/$step/manifest.json" apart/manifest.json
mkdir -p spread/step-00000003 elsewhere
cp -r $step/data elsewhere/data
cp $step/manifest.json $step/COMMIT spread/step-00000003
ln -s "$PWD/elsewhere/data" spread/step-00000003/data
ln "$step/manifest.json" hard.json
# kept TEXT ARGUMENTS...: an error with this text, and the states are unchanged.
kept() {
  expected=$1
  shift
  run --steps 4 "$@" >/dev/null
  ends_with 1 "$expected" "$*"
  diff -r ck before || fail "$*: a state has changed"
}
for state in "--resume ck" "--resume $step" "--resume linked" "--resume ./ck/../$step/" "--resume auto --checkpoint-dir ck" \
  "--init-from ck"; do
  option=$(echo "$state" | cut -d ' ' -f 1)
  [ "$state" = "--resume auto --checkpoint-dir ck" ] && option=--checkpoint-dir
  for output in --log --plot --trace --timeline; do
    for path in $step/manifest.json linked/step-00000003/COMMIT apart/manifest.json hard.json; do
      # shellcheck disable=SC2086  # a list of options
      kept "$output names '$path', \(in\|a file of\) $option .*, where training states are kept" $output $path $state
    done
  done
  # shellcheck disable=SC2086
  kept "--export-hf names '$step/model', in $option .*, where training states are kept" --export-hf $step/model $state
done
kept "--log names 'ck/run.jsonl', in --resume ck" --log ck/run.jsonl --resume ck
kept "--log names 'new/run.jsonl', in --checkpoint-dir new" --log new/run.jsonl --checkpoint-dir new
data=$(find elsewhere/data -name '*.safetensors' | head -n 1)
kept "--plot names '$data', a file of --resume spread" --plot "$data" --resume spread
kept "--checkpoint-dir names 'model/states', where --export-hf model makes" --export-hf model --checkpoint-dir model/states
mkdir -p hugging/more
cp "$SOURCE"/tests/data/llama_mha/* hugging
cp config.json hugging/more/notes.json
code=0
timeout 60 "$trainer" --init-from hugging --data "$text" --seq 32 --steps 1 --plot hugging/more/notes.json >/dev/null 2>stderr || code=$?
ends_with 1 "--plot would overwrite 'hugging/more/notes.json', which --init-from reads" 'a file below --init-from'
cmp config.json hugging/more/notes.json || fail "a file below --init-from is gone"

endless --data "$text" --checkpoint-dir shared --save-every 1 --keep 2 --log shared_states.jsonl
wait_until test -s shared_states.jsonl
run --checkpoint-dir shared >/dev/null
ends_with 1 "--checkpoint-dir: .*cannot lock 'shared': another writer" 'a shared --checkpoint-dir'
kill -s TERM "$(ps -o pid= --ppid "$watcher" | tr -d ' ')"
wait "$watcher" || true
"$BIN/checkpoint_tool" verify shared >verified || fail "the run that had the folder: $(cat verified)"
# The lock is free again, and the run knows that there are more steps.
run --checkpoint-dir shared --resume auto --steps 0 >/dev/null
ends_with 1 "were done before --resume auto" 'a --checkpoint-dir that is free again'
