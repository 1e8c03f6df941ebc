#!/bin/sh
# The examples of user-defined models, GPT-2 and a mixture of experts: a pipeline of tensor-parallel stages has the
# losses of one rank, and learns.
# timeout: 60
. "$(dirname "$0")/lib/base.sh"
same_losses() {  # PROGRAM LINE
  out=$("$BIN/$1" "$SOURCE/examples/data/kjv.txt") || fail "$1: $out"
  for line in "$2" '^the losses differ by [0-9.]*e-1[0-9] at most$'; do
    echo "$out" | grep -q "$line" || fail "the output of $1 lacks '$line': $out"
  done
}
same_losses gpt2 '^step  4  loss 4\.44[0-9]* on one rank, 4\.44[0-9]* with pp=2, tp=2$'
same_losses moe '^step 19  loss 3\.59007187[0-9]* on one rank, 3\.59007187[0-9]* with pp=2, ep=2, tp=2$'
# An error ends it, and every other example, with the error's text, not by std::terminate.
for program in "$SOURCE"/examples/*.cpp "$SOURCE"/examples/guide/*.cpp "$SOURCE"/examples/*/main.cpp; do
  sed -n '/^int main(/,$p' "$program" | grep -q '} catch (const ' || fail "$program: its main catches no error"
done
why=$("$BIN/gpt2" "$SOURCE/no such text" 2>&1) && fail "gpt2 takes a text that is not there"
case $why in
  "gpt2: "*"no such text"*) ;;
  *) fail "without a text, gpt2 says: $why" ;;
esac
