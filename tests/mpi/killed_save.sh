#!/bin/sh
# Kills one rank of four (SIGKILL) at points of a save, by the program killed_save, whose path is $1. Afterwards the
# newest step is the previous one, or the new one if it has its name. That step is complete, and another mesh loads it.
# The other ranks end with an error text: from the launcher or, if the launcher does not stop them, from the deadline of
# the next collective.
program=$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
status=0
round=0
killed() { # killed RANK POINT STEP TEXT OPTIONS...: kills RANK at POINT; then STEP is the newest and TEXT is printed
  who=$1 point=$2 step=$3 text=$4
  shift 4
  round=$((round + 1))
  steps=$folder/$round
  begun=$(date +%s)
  out=$(timeout 60 mpirun --allow-run-as-root --oversubscribe "$@" -n 4 "$program" save "$steps" "$who" "$point" 2>&1)
  code=$?
  took=$(($(date +%s) - begun))
  [ "$#" -eq 0 ] || code=failed  # a launcher with recovery exits with 0 for any exit code of its ranks
  if [ "$code" = 0 ] || [ "$took" -gt 30 ] || ! printf '%s' "$out" | grep -q -e "$text" ||
    printf '%s' "$out" | grep -q 'not reached'; then
    echo "rank $who killed at $point $*: exit code $code after $took s, expected a failure with the text: $text"
    printf '%s\n' "$out"
    status=1
  fi
  checked=$(timeout 60 mpirun --allow-run-as-root --oversubscribe -n 2 "$program" check "$steps" "$step" 2>&1)
  if [ "$checked" != whole ]; then
    echo "rank $who killed at $point $*: the steps are not what they should be:"
    printf '%s\n' "$checked"
    ls -R "$steps"
    status=1
  fi
}
signal='exited on signal 9 (Killed)'
killed 2 create 1 "$signal"
killed 2 write 1 "$signal"
killed 1 sync 1 "$signal"
killed 3 note 1 "$signal"
killed 0 manifest 1 "$signal"
killed 0 commit 1 "$signal"
killed 0 name 1 "$signal"
killed 0 named 2 "$signal"
deadline='did not finish within its deadline of 3'
killed 1 write 1 "$deadline" --enable-recovery
killed 0 named 2 "$deadline" --enable-recovery
[ "$status" -eq 0 ] && echo 'killed_save: ok'
exit "$status"
