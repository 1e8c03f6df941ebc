#!/bin/sh
# Kills (kill -9) a run that saves after every step at random times, on one rank and on four, again and again. The
# newest step is complete and never older than the newest one before, and a run on another layout resumes from it.
# PLAIT_KILL_ROUNDS sets the number of rounds; PLAIT_KILL_ROUNDS=1000 sh tests/scripts/trainer_kill.sh is the long run.
# To split it into parts with different delays, set PLAIT_KILL_FIRST to the number of earlier rounds.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"
rounds=${PLAIT_KILL_ROUNDS:-6}
first=${PLAIT_KILL_FIRST:-0}
tool=$BIN/checkpoint_tool
delay() { # delay ROUND NANOSECONDS: prints seconds that vary by round, up to three times a run of one step here
  awk -v n="$1" -v run="$2" 'BEGIN {srand(n); printf "%.3f", 1e-9 * run * (0.2 + 2.8 * rand())}'
}

for ranks in 1 4; do
  begun=$(date +%s%N)
  train one --steps 1 --sample 0 --mesh dp=$ranks --micro-batch 2 --checkpoint-dir "one$ranks"
  took=$(($(date +%s%N) - begun))
  last=0
  kept=0
  round=0
  # If the machine is now slower than when it was measured, later rounds take longer, until one reaches a save.
  while [ "$round" -lt "$rounds" ] || { [ "$kept" = 0 ] && [ "$round" -lt $((rounds + 8)) ]; }; do
    [ "$round" -lt "$rounds" ] || took=$((2 * took))
    round=$((round + 1))
    case $ranks$((round % 3)) in
      4[0]) layout="dp=2,tp=2" ;;
      4[1]) layout="dp=2,pp=2 --data-parallel zero1" ;;
      4[2]) layout="dp=4 --micro-batch 2 --data-parallel zero3" ;;
      *) layout="dp=1" ;;
    esac
    # shellcheck disable=SC2086  # a list of options
    "$trainer" --model config.json --data "$text" --seq 32 --global-batch 8 --steps 1000000 --warmup 0 --mesh $layout \
      --checkpoint-dir "by$ranks" --resume auto --save-every 1 --keep 2 >out 2>err &
    program=$!
    sleep "$(delay $((10000 * ranks + first + round)) "$took")"
    kill -s KILL "$program" 2>/dev/null || fail "round $round on $ranks ranks: the run ended by itself: $(cat err)"
    wait "$program" 2>/dev/null || true
    ! grep -q '^train_llama: ' err || fail "round $round on $ranks ranks: $(cat err)"
    newest=$(find "by$ranks" -maxdepth 1 -name 'step-????????' 2>/dev/null | sort | tail -n 1)
    [ -n "$newest" ] || continue
    "$tool" verify "$newest" >verified 2>&1 || fail "round $round on $ranks ranks: $(cat verified)"
    at=$(echo "$newest" | sed 's/.*step-0*//')
    [ "$at" -ge "$last" ] || fail "round $round on $ranks ranks: the newest step is $at, and was $last"
    [ "$at" -eq "$last" ] || kept=$((kept + 1))
    last=$at
  done
  [ "$kept" -gt 0 ] || fail "no round on $ranks ranks came to a save: $(cat out err)"
  echo "$ranks ranks: $round rounds, $kept of them with new steps, the last is $last"
done
