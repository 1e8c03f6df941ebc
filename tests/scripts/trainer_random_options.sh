#!/bin/sh
# Trainings with options drawn at random: on any layout, and where they go on from another layout's saved step, they have
# the losses, norms and bytes of one rank, and with --deterministic its bits. `ROUNDS=60 SEED=1000 sh ...` draws others.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

python3 "$here/lib/random_options.py" "$trainer" "$text" "${ROUNDS:-6}" "${SEED:-1}" >rounds.out 2>&1 ||
  fail "$(cat rounds.out)"
cat rounds.out
