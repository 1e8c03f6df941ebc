#!/bin/sh
# Runs the program throws (its path is $1) and checks how it ends. In every case all ranks must end with the reason and
# a non-zero exit code.
program=$1
status=0
expect() {
  how=$1
  text=$2
  start=$(date +%s)
  out=$(mpirun --allow-run-as-root --oversubscribe -n 4 "$program" "$how" 2>&1)
  code=$?
  took=$(($(date +%s) - start))
  if [ "$code" -eq 0 ] || [ "$took" -gt 10 ] || ! printf '%s' "$out" | grep -q -e "$text" ||
      printf '%s' "$out" | grep -q 'not reached'; then
    echo "$how: exit code $code after $took s, expected a failure with the text: $text"
    printf '%s\n' "$out"
    status=1
  fi
}
expect throw 'rank 3: the weights are not finite'
expect throw "all_reduce #1 on 'world' 8 B started"
expect deadline "all_reduce #1 on 'world' (8 B) did not finish within its deadline of 3 s: rank 3 is silent"
expect stop "all_reduce #2 on 'world' (8 B) did not finish within its deadline of 3 s: rank 3 is silent: .*; rank 2 has not called it, and waits for receive #2 on 'world'"
expect abort 'rank 3: called abort: enough'
expect count "rank 1: receive on 'world': got 1 elements, expected 2"
[ "$status" -eq 0 ] && echo 'throws: ok'
exit "$status"
