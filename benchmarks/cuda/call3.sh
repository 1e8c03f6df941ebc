#!/bin/sh
# The trainer on real text, compute-sanitizer on the small tests, Nsight Compute on plait's own kernels.
. "$(dirname "$0")/call.sh"
call trainer,sanitize,profile
