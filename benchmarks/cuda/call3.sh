#!/bin/sh
# Runs the trainer on real text, compute-sanitizer on the small tests, and Nsight Compute on plait's own kernels.
. "$(dirname "$0")/call.sh"
call trainer,sanitize,profile
