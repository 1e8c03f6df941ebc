#!/bin/sh
# Figures: the training step with every setting, and PyTorch's beside it.
. "$(dirname "$0")/call.sh"
call step-2048,pytorch-2048,step-4096,pytorch-4096
