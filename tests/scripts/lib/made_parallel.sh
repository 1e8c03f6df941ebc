# Sourced by tests of programs that were made parallel: `numbers` compares their output with the plain program's,
# `lines` counts the added lines.
. "$(dirname "$0")/lib/base.sh"
text=$SOURCE/examples/data/kjv.txt steps=10 all_ranks='1 2 4' falls='last < first - 0.5'

# numbers PLAIN PROGRAM...: on $all_ranks threads and processes of MPI, each program prints the numbers of the plain one to
# 1e-5. $steps and, if it is not empty, $text are arguments of the programs.
# shellcheck disable=SC2086  # a list of numbers, and a word or none
numbers() {
  plain=$1
  shift
  "$BIN/$plain" $steps $text >"$work/plain" 2>"$work/errors" || fail "$plain: $(cat "$work/errors")"
  [ "$(wc -l <"$work/plain")" = $steps ] || fail "$plain prints other than $steps steps: $(cat "$work/plain")"
  awk 'NR == 1 { first = $4 } { last = $4 } END { exit !('"$falls"') }' "$work/plain" ||
    fail "the loss does not fall: $(cat "$work/plain")"
  mpi="no mpirun: threads alone"
  if command -v mpirun >/dev/null; then
    mpi="no MPI in $1: threads alone"
    # Without MPI, "mpi" is not a valid number of ranks.
    "$BIN/$1" 0 $text mpi >/dev/null 2>&1 && mpi=
  fi
  for program in "$@"; do
    for ranks in $all_ranks; do
      "$BIN/$program" $steps $text $ranks >"$work/$program-$ranks" 2>"$work/errors-$ranks" ||
        fail "$program on $ranks ranks: $(cat "$work/errors-$ranks")"
      same "$program-$ranks"
      [ -z "$mpi" ] || continue
      timeout 60 mpirun -n $ranks --allow-run-as-root --oversubscribe "$BIN/$program" $steps $text mpi \
        >"$work/$program-mpi-$ranks" 2>"$work/errors" || fail "$program by mpirun -n $ranks: $(cat "$work/errors")"
      same "$program-mpi-$ranks"
    done
  done
}
# same NAME: NAME has printed the steps of the plain program: equal words, and numbers that differ by at most 1e-5.
same() {
  paste "$work/plain" "$work/$1" | awk -v steps=$steps -v words="$(head -n 1 "$work/plain" | wc -w)" '
    function apart(a, b) { return a ~ /[0-9]$/ ? b !~ /[0-9]$/ || (a - b) ^ 2 > (1e-5 * a) ^ 2 : a != b }
    { wrong = NF != 2 * words || $1 != "step" || $2 != $(words + 2)
      for (i = 1; i <= words; ++i) wrong = wrong || apart($i, $(i + words)) }
    wrong { bad = 1; print }
    END { exit bad || NR != steps }' >"$work/apart" || fail "$1 is not what plain prints: $(cat "$work/apart")"
}

# lines PROGRAM MOST, in the folder of an example: PROGRAM adds at most MOST lines to plain.cpp. The README gives the
# number and shows lines of the two.
lines() {
  diff plain.cpp "$1" >"$work/diff" && fail "the programs are the same"
  added=$(grep -c '^>' "$work/diff") removed=$(grep -c '^<' "$work/diff")
  [ "$added" -le "$2" ] || fail "$1 adds $added lines to plain.cpp; at most $2 are wanted"
  counted="$(wc -l <plain.cpp) lines, $added added and $removed removed"
  grep -q "$counted" README.md || fail "the README does not say '$counted'"
  sed -n '/^```diff$/,/^```$/p' README.md | grep -v '^```' >"$work/shown"
  [ "$(wc -l <"$work/shown")" -gt 15 ] || fail "the README shows nothing of the difference"
  while IFS= read -r line; do
    case $line in
      -*) file=plain.cpp ;;
      *) file=$1 ;;
    esac
    grep -Fxq -e "${line#?}" "$file" || fail "the README shows '$line', and $file has no such line"
  done <"$work/shown"
}
