#!/bin/sh
# Trainings with random options: on any layout, also resumed from another layout's step, they have the losses, norms and
# bytes of one rank, and with --deterministic its bits. `ROUNDS=60 SEED=1000 sh ...` draws other options.
# timeout: 300
# runs: with --all
. "$(dirname "$0")/lib/common.sh"

python3 "$here/lib/random_options.py" "$trainer" "$text" "${ROUNDS:-6}" "${SEED:-1}" >rounds.out 2>&1 ||
  fail "$(cat rounds.out)"
cat rounds.out
