#!/bin/sh
# Checks correctness on a GPU: the machine, every test by name, short benchmarks, one training step.
. "$(dirname "$0")/call.sh"
call machine,tests,memory,linears,attention,choices,collective
