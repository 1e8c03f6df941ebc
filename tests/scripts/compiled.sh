#!/bin/sh
# A build without CMake: PLAIT_COMPILED, plait/compiled.cpp as a file of the program, and no run-time type information.
# The program prints the same as otherwise. Uses clang, if found, which takes half of g++'s time.
# timeout: 600
# runs: with --all
. "$(dirname "$0")/lib/base.sh"

libraries=$(grep '^g++ .*quickstart' "$SOURCE/README.md" | grep -o ' -l.*') || fail "README has no command for g++"
compiler=$(command -v clang++-16 || echo g++)
# shellcheck disable=SC2086  # a list of options
(cd "$SOURCE" && "$compiler" -std=c++20 -O0 -fno-rtti -DPLAIT_COMPILED -Iinclude examples/quickstart.cpp include/plait/compiled.cpp \
  -o "$work/quickstart" $libraries) || fail "it does not compile"
"$work/quickstart" | sort >"$work/by_hand"
"$BIN/quickstart" | sort >"$work/by_cmake"
# Losses to 1e-3: other compiler flags change rounding.
paste "$work/by_hand" "$work/by_cmake" | awk '{d = $4 - $8; if ($2 != $6 || d > 1e-3 || d < -1e-3) bad = 1} END {exit bad || NR != 10}' ||
  { cat "$work/by_hand" "$work/by_cmake"; fail "it prints other losses"; }
