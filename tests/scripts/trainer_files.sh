#!/bin/sh
# Files and streams that change, fill up or close while a run works: it ends in words, or goes on and says so at the end,
# and eats no other file.
# timeout: 120
. "$(dirname "$0")/lib/common.sh"

# ends_with CODE TEXT: of the run before, whose code is in $code.
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
await() { # await FILE: until something is in it
  for _ in $(seq 200); do
    [ -s "$1" ] && return
    sleep 0.1
  done
  fail "nothing comes into $1: $(cat stderr)"
}

# Standard output that is full or closed costs the run nothing but what it would have said.
run --log full.jsonl >/dev/full
ends_with 1 'standard output could not be written, .*: No space left on device' 'a full stdout'
[ "$(logs get full.jsonl steps)" = 3 ] || fail "a full stdout ends the run"
run --log closed.jsonl --checkpoint-dir closed >&-
ends_with 1 'standard output could not be written' 'a closed stdout'
[ "$(logs get closed.jsonl steps)" = 3 ] || fail "a closed stdout ends the run"
[ -f closed/step-00000003/COMMIT ] || fail "a closed stdout costs the state: $(ls closed)"
mkfifo pipe
: <pipe &
run --log piped.jsonl >pipe
wait $!
ends_with 1 'standard output could not be written, .*: Broken pipe' 'a reader that went away'
[ "$(logs get piped.jsonl steps)" = 3 ] || fail "a broken pipe ends the run"
run --dry-run >/dev/full
ends_with 1 'standard output could not be written' 'a plan'

# A log has one writer; a limit of files' sizes is met in words.
endless --data "$text" --log shared.jsonl
await shared.jsonl
run --log shared.jsonl >/dev/null
ends_with 1 "--log: 'shared.jsonl' is being written by another run" 'a shared log'
kill -s TERM "$(ps -o pid= --ppid "$watcher" | tr -d ' ')"
wait "$watcher" || true
[ "$(logs get shared.jsonl steps)" -gt 0 ] || fail "the run that had the log has lost it"
(ulimit -f 2; code=0; timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --steps 1000 --sample 0 \
  --log limited.jsonl 2>stderr >/dev/null || code=$?; [ "$code" = 1 ]) || fail "a limit of the log's size: $(cat stderr)"
grep -q "^train_llama: .*--log: cannot append to 'limited.jsonl': File too large" stderr || fail "a limit of the log's size: $(cat stderr)"

# Data that become shorter while they are read.
head -c 400000 "$text" >shrinking.txt
endless --data shrinking.txt --log shrinking.jsonl
await shrinking.jsonl
: >shrinking.txt
code=0
wait "$watcher" || code=$?
ends_with 1 "'shrinking.txt' is truncated: .* it had 400000 bytes when it was opened" 'data that shrink'

# What is no file, and what is nested too deep.
for what in --model --data; do
  run --model config.json "$what" /dev/zero >/dev/null
  ends_with 1 "$what.*/dev/zero' *.*is no regular file" "$what of an endless device"
done
mkfifo never
run --data never >/dev/null
ends_with 1 "--data.*never.*is no regular file" 'data from a pipe'
mkfifo never.json
run --model ./never.json >/dev/null
ends_with 1 "--model.*never.json.*is no regular file" 'a model from a pipe'
python3 -c 'print("{\"a\": " + "[" * 80000 + "]" * 80000 + "}")' >deep.json
run --model ./deep.json >/dev/null
ends_with 1 "the JSON has more than 64 levels" 'a model that is nested deep'
