#!/bin/sh
# Measures the training step with every setting, and PyTorch's step.
. "$(dirname "$0")/call.sh"
call step-2048,pytorch-2048,step-4096,pytorch-4096
