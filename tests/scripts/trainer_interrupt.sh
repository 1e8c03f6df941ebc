#!/bin/sh
# Runs that end early. Ctrl-C ends one after the current step: the summary reports it, there is a picture and no text,
# and the exit code is 130. One that diverges names the step, on one line.
# timeout: 300
. "$(dirname "$0")/lib/common.sh"

has_two_steps() { [ -s run.jsonl ] && [ "$(wc -l <run.jsonl)" -ge 2 ]; }

# interrupt SIGNALS PROGRAM...: signals the program when it has logged two steps; sets $code.
interrupt() {
  signal=$1
  shift
  rm -f run.jsonl run.svg
  timeout 60 "$@" --model config.json --data "$text" --seq 32 --steps 1000000 --log run.jsonl --plot run.svg \
    >run.out 2>run.err &
  watcher=$!
  wait_until has_two_steps
  # The program is the child of `timeout`; a signal would end `timeout` itself.
  program=$(ps -o pid= --ppid "$watcher" | tr -d ' ')
  start=$(date +%s)
  for one in $signal; do kill -s "$one" "$program"; done
  code=0
  wait "$watcher" || code=$?
  [ $(($(date +%s) - start)) -le "$most" ] || fail "$signal: it took more than $most seconds to end"
}

most=10

stopped() {
  [ "$(logs get run.jsonl interrupted)" = true ] || fail "the summary does not say that it was interrupted"
  [ "$(logs get run.jsonl bytes_as_predicted)" = true ] || fail "the bytes are not as predicted"
  [ "$(logs get run.jsonl steps)" = $(($(wc -l <run.jsonl) - 1)) ] || fail "the log and its summary count other steps"
  [ -s run.svg ] || fail "there is no picture"
  ! grep -q 'sampled text' run.out || fail "it went on to sample"
  grep -q '^interrupted: ' run.out || fail "it does not say so: $(cat run.out)"
}

interrupt INT "$trainer" --mesh dp=2,tp=2
[ "$code" = 130 ] || fail "exit code $code after SIGINT: $(cat run.err)"
stopped

# If SIGHUP is ignored, as under nohup, it ends no run.
interrupt "HUP TERM" sh -c 'trap "" HUP; exec "$@"' sh "$trainer" --mesh dp=2,tp=2 --data-parallel zero3
[ "$code" = 143 ] || fail "exit code $code after SIGTERM: $(cat run.err)"
stopped

interrupt HUP "$trainer" --checkpoint-dir hung_up
[ "$code" = 129 ] || fail "exit code $code after SIGHUP: $(cat run.err)"
grep -q "^saved step $(logs get run.jsonl steps): " run.out || fail "SIGHUP saves nothing: $(cat run.out)"
grep -q '^train_llama: the run ends after this step; a second signal ends it at once$' run.err || fail "$(cat run.err)"

if has_mpi; then
  # Open MPI kills processes that have not ended this number of seconds after it asked them to, and always waits so
  # long.
  export OMPI_MCA_odls_base_sigkill_timeout=4
  most=30
  interrupt INT mpirun -n 4 --allow-run-as-root --oversubscribe "$trainer" --backend mpi --mesh dp=2,tp=2
  case $code in 0 | 124) fail "exit code $code of mpirun" ;; esac
  stopped

  # One process of four gets the signal, and all of them end after the same step and save their parts. The gathers of
  # that step are in flight.
  rm -f run.jsonl
  timeout 60 mpirun -n 4 --allow-run-as-root --oversubscribe "$trainer" --backend mpi --mesh dp=2,tp=2 \
    --data-parallel zero1 --model config.json --data "$text" --seq 32 --steps 1000000 --checkpoint-dir one \
    --log run.jsonl >run.out 2>run.err &
  watcher=$!
  wait_until has_two_steps
  launcher=$(ps -o pid= --ppid "$watcher" | tr -d ' ')
  kill -s TERM "$(ps -o pid= --ppid "$launcher" | tail -n 1 | tr -d ' ')"
  code=0
  wait "$watcher" || code=$?
  case $code in 0 | 124) fail "exit code $code of mpirun, of which one process had the signal" ;; esac
  grep -q '^interrupted: ' run.out || fail "it does not say that it was interrupted: $(cat run.out)"
  [ "$(logs get run.jsonl bytes_as_predicted)" = true ] || fail "one signal: the bytes are not as predicted"
  last=$(logs get run.jsonl steps)
  grep -q "^saved step $last: " run.out || fail "not all save step $last: $(cat run.out run.err)"
fi

code=0
timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --steps 50 --mesh dp=2,tp=2 --lr 1e8 --clip 0 \
  --log nan.jsonl --plot nan.svg >nan.out 2>nan.err || code=$?
[ "$code" = 1 ] || fail "exit code $code of a run that diverges"
grep -q '^train_llama: step [1-9][0-9]* has the loss .* try a smaller --lr (now 100000000) or a limit of the norm by --clip (now 0)$' nan.err ||
  fail "a run that diverges says: $(cat nan.err)"
! grep -q 'last operations' nan.err || fail "a run that diverges talks of communication: $(cat nan.err)"
[ "$(logs get nan.jsonl interrupted)" = false ] || fail "a run that diverges counts as interrupted"
[ "$(logs get nan.jsonl steps)" -lt 50 ] || fail "a run that diverges goes on"
[ -s nan.svg ] || fail "a run that diverges leaves no picture"

# A run with the option to skip such steps continues to the end with its old weights, and counts the skipped steps.
code=0
timeout 60 "$trainer" --model config.json --data "$text" --seq 32 --steps 12 --mesh dp=2,tp=2 --lr 1e8 --clip 0 \
  --on-nonfinite skip --log skip.jsonl --sample 8 >skip.out 2>skip.err || code=$?
case $code in
  0) ;;
  1) grep -q '^train_llama: .*no token has a finite score' skip.err || fail "a run that skips says: $(cat skip.err)" ;;
  *) fail "exit code $code of a run that skips steps: $(cat skip.err)" ;;
esac
[ "$(logs get skip.jsonl steps)" = 12 ] || fail "a run that skips steps ends after $(logs get skip.jsonl steps)"
[ "$(logs get skip.jsonl skipped_steps)" -gt 0 ] || fail "no step was skipped"
[ "$(grep -c '"skipped": *true' skip.jsonl)" = "$(logs get skip.jsonl skipped_steps)" ] || fail "skipped steps in the log"
grep -q 'skipped' skip.out || fail "the summary does not tell of skipped steps"
