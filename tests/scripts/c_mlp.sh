#!/bin/sh
# A C program made tensor-parallel: it has the losses of the plain program, on 1, 2 and 4 threads and MPI processes. A C
# compiler refuses typical mistakes. Its page shows lines of the programs. unit/c_functions.cpp tests the errors at run
# time.
. "$(dirname "$0")/lib/made_parallel.sh"
cd "$SOURCE/examples/c_mlp"
steps=20 text='' all_ranks='1 2 3 4' falls='last < first / 2'  # three do not divide the features
numbers c_mlp_plain c_mlp_parallel
"$BIN/c_mlp_parallel" 1 65 >"$work/out" 2>&1 && fail "65 ranks have 64 features"
grep -q "ffn is 64, sharded over tp=65 = 65 ranks" "$work/out" || fail "on 65 ranks: $(cat "$work/out")"

# ---- errors of C compilers ----------------------------------------------------------------------------------------------

export LC_ALL=C
compilers=
command -v gcc >/dev/null && compilers=gcc
for compiler in clang-16 clang; do command -v $compiler >/dev/null && { compilers="$compilers $compiler"; break; }; done
[ -n "$compilers" ] || fail "there is no C compiler"
echo '#include "plait/c.h"' >"$work/alone.c"
sed -n '/^PLAIT/p' layouts.h >>"$work/alone.c"

# compile FILE: compiles as C, with all warnings.
compile() {
  $compiler -std=${standard:-c11} -Wall -Wextra -Wpedantic -Wshadow -Werror -fsyntax-only -I. \
    -I"$SOURCE/include" "$1" >"$work/said" 2>&1
}
# refused WHAT TEXT SCRIPT: parallel.c, changed by sed's SCRIPT, is refused with TEXT in one line.
refused() {
  sed "$3" parallel.c >"$work/mistake.c"
  cmp -s parallel.c "$work/mistake.c" && fail "$1: parallel.c has no such line: $3"
  compile "$work/mistake.c" && fail "$1: $compiler takes it"
  grep -Eq "error: .*($2)" "$work/said" || fail "$1: $compiler says $(cat "$work/said")"
}
for compiler in $compilers; do
  for standard in c99 c11 c17; do
    compile "$work/alone.c" || fail "$compiler, $standard, plait/c.h and layouts.h: $(cat "$work/said")"
  done
  standard="c++20 -x c++"  # a C++ file of the program that makes none of the functions
  compile "$work/alone.c" || fail "$compiler, C++, plait/c.h and layouts.h: $(cat "$work/said")"
  standard=c11
  compile parallel.c || fail "$compiler, parallel.c: $(cat "$work/said")"
  # Each text has a form for clang and one for gcc.
  refused "a term in the place of the sum" "'terms'.*'residual'|argument 3 of .add_branch" 's/l->x, branch);/l->x, m->product);/'
  refused "a forgotten sum" "undeclared.*branch|branch.*undeclared" '/= sum_terms/d'
  refused "a second sum" "'residual'.*'terms'|argument 2 of .sum_terms" \
    's/= sum_terms(c, m->product)/= sum_terms(c, sum_terms(c, m->product))/'
  refused "an array of other dims" "'residual'.*'inner'|argument 2 of .down" 's/down(m->product, l->active,/down(m->product, l->x,/'
  refused "the transposed weight" "'up_weight'.*'down_weight'|argument 3 of .down" 's/l->active, l->down_w)/l->active, l->up_w)/'
  refused "a gradient that ranks do not use alone" "'residual'.*'copies'|argument 2 of .down_weight" \
    's/l->ddown_w, dy, /l->ddown_w, m->dx, /'
done

# ---- the lines ---------------------------------------------------------------------------------------------------------

diff plain.c parallel.c >"$work/diff" && fail "the programs are the same"
lines="$(wc -l <plain.c) lines, $(grep -c '^>' "$work/diff") added and $(grep -c '^<' "$work/diff") removed"
grep -q "$lines" README.md || fail "the README does not say '$lines'"
sed -n '/^```\(c\|diff\)$/,/^```$/p' README.md | grep -v '^```' >"$work/shown"
[ "$(wc -l <"$work/shown")" -gt 10 ] || fail "the README shows nothing of the programs"
while IFS= read -r line; do
  case $line in
    -*) file=plain.c text=${line#?} ;;
    +*) file=parallel.c text=${line#?} ;;
    *) file=layouts.h text=$line ;;
  esac
  grep -Fxq -e "$text" $file || fail "the README shows '$line', and $file has no such line"
done <"$work/shown"
[ -z "$mpi" ] || echo "$mpi"
