#!/bin/sh
# The C program of a GPT-2 made parallel: the losses and gradient norms of the plain program, on 1, 2 and 4 threads and
# processes of MPI, tensor-parallel with sequence parallelism and without; few added lines; its page shows lines of the two
# programs. mpi/gpt2_c.cpp compares their gradients tensor by tensor.
# timeout: 400
. "$(dirname "$0")/lib/base.sh"
text=$SOURCE/examples/data/kjv.txt
steps=10
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
cd "$SOURCE/examples/gpt2_c"

# ---- the numbers -------------------------------------------------------------------------------------------------------

"$BIN/gpt2_c_plain" $steps "$text" >"$work/plain" || fail "gpt2_c_plain: $(cat "$work/plain")"
[ "$(wc -l <"$work/plain")" = $steps ] || fail "gpt2_c_plain prints other than $steps steps: $(cat "$work/plain")"
awk 'NR == 1 { first = $4 } { last = $4 } END { exit !(last < first - 0.5) }' "$work/plain" ||
  fail "the loss does not fall: $(cat "$work/plain")"

# same NAME: what NAME has printed are the steps of the plain program, to 1e-5 of every loss and gradient norm.
same() {
  paste "$work/plain" "$work/$1" | awk -v steps=$steps '
    function apart(a, b) { return a == "" || b == "" || (a - b) ^ 2 > (1e-5 * a) ^ 2 }
    NF != 14 || $1 != "step" || $8 != "step" || $2 != $9 || apart($4, $11) || apart($7, $14) { bad = 1; print }
    END { exit bad || NR != steps }' >"$work/apart" || fail "$1 is not what plain prints: $(cat "$work/apart")"
}

mpi="no mpirun: threads alone"
if command -v mpirun >/dev/null; then
  mpi="no MPI in gpt2_c_parallel: threads alone"
  # Without MPI, "mpi" is no number of ranks.
  "$BIN/gpt2_c_parallel" 0 "$text" mpi >/dev/null 2>&1 && mpi=
fi
export OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_hwloc_base_binding_policy=none
for program in gpt2_c_parallel gpt2_c_tensor_parallel; do
  for ranks in 1 2 4; do
    "$BIN/$program" $steps "$text" $ranks >"$work/$program-$ranks" 2>"$work/errors" ||
      fail "$program on $ranks ranks: $(cat "$work/errors")"
    same "$program-$ranks"
    [ -z "$mpi" ] || continue
    timeout 60 mpirun -n $ranks --allow-run-as-root --oversubscribe "$BIN/$program" $steps "$text" mpi \
      >"$work/$program-mpi-$ranks" 2>"$work/errors" || fail "$program by mpirun -n $ranks: $(cat "$work/errors")"
    same "$program-mpi-$ranks"
  done
done

# ---- the lines ---------------------------------------------------------------------------------------------------------

diff plain.cpp parallel.cpp >"$work/diff" && fail "the programs are the same"
added=$(grep -c '^>' "$work/diff") removed=$(grep -c '^<' "$work/diff")
[ "$added" -le 190 ] || fail "parallel.cpp adds $added lines to plain.cpp; at most 190 are wanted"
lines="$(wc -l <plain.cpp) lines, $added added and $removed removed"
grep -q "$lines" README.md || fail "the README does not say '$lines'"
sed -n '/^```diff$/,/^```$/p' README.md | grep -v '^```' >"$work/shown"
[ "$(wc -l <"$work/shown")" -gt 20 ] || fail "the README shows nothing of the difference"
while IFS= read -r line; do
  case $line in
    -*) file=plain.cpp ;;
    *) file=parallel.cpp ;;
  esac
  grep -Fxq -e "${line#?}" $file || fail "the README shows '$line', and $file has no such line"
done <"$work/shown"
[ -z "$mpi" ] || echo "$mpi"
