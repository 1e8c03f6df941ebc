#!/bin/sh
# README's first program is examples/quickstart.cpp, prints what README shows, and builds by README's command. On one
# rank it prints the same.
# timeout: 600
. "$(dirname "$0")/lib/base.sh"
readme=$SOURCE/README.md

sed -n '/^```cpp$/,/^```$/p' "$readme" | sed '1d;/^```$/,$d' >"$work/shown.cpp"
diff -u "$SOURCE/examples/quickstart.cpp" "$work/shown.cpp" || fail "README shows another program"
lines=$(wc -l <"$SOURCE/examples/quickstart.cpp")
[ "$lines" -le 44 ] || fail "the program has $lines lines: a comment, 40, and 3 that print an error are wanted"

# Losses to 1e-3: rounding differs between processors.
same() {
  paste "$1" "$2" | awk '{d = $4 - $8; if ($2 != $6 || d > 1e-3 || d < -1e-3) bad = 1} END {exit bad || NR != 10}' ||
    { cat "$1" "$2"; fail "$3"; }
}
grep '^step [0-9]  loss ' "$readme" >"$work/said"
"$BIN/quickstart" | sort >"$work/four" || fail "quickstart ends with $?"
same "$work/said" "$work/four" "it prints other losses than README says"

command=$(grep '^g++ .*quickstart' "$readme") || fail "README has no command for g++"
sed 's/mesh{2, 2}/mesh{1, 1}/' "$SOURCE/examples/quickstart.cpp" >"$work/one.cpp"
grep -q 'mesh{1, 1}' "$work/one.cpp" || fail "the mesh is written in another way"
command=$(echo "$command" | sed "s,examples/quickstart.cpp -o quickstart,$work/one.cpp -o $work/one,")
# Only the build and the output are tested, so it is built without optimisation, in half of the time.
(cd "$SOURCE" && sh -c "$(echo "$command" | sed 's/ -O2 / -O0 /')") || fail "README's command: $command"
"$work/one" >"$work/alone"
same "$work/said" "$work/alone" "one rank prints other losses"
