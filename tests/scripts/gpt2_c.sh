#!/bin/sh
# The C program of a GPT-2 made parallel: it has the losses and gradient norms of the plain program on 1, 2 and 4
# threads and MPI processes, tensor-parallel with and without sequence parallelism. It adds few lines. mpi/gpt2_c.cpp
# compares gradients tensor by tensor.
# timeout: 400
. "$(dirname "$0")/lib/made_parallel.sh"
numbers gpt2_c_plain gpt2_c_parallel gpt2_c_tensor_parallel
cd "$SOURCE/examples/gpt2_c"
lines parallel.cpp 190
[ -z "$mpi" ] || echo "$mpi"
