// The layouts of parallel.c's arrays on the ranks, its collectives, layers and kernels. C and C++ read this file.
#pragma once

#ifdef WITH_MPI
#include "plait/c_mpi.h"
#else
#include "plait/c.h"
#endif
#ifdef PLAIT_C_DEFINE
namespace pl = plait;
using pl::batch, pl::hidden, pl::ffn, pl::tp;
#endif

PLAIT_C_SIZES(mlp, (tp), (batch, hidden, ffn));

PLAIT_C_ARRAY(residual, float, pl::spec<batch, hidden, pl::invariant<tp>>);  // equal on all ranks
PLAIT_C_ARRAY(copies, float, pl::spec<batch, hidden, pl::replicate<tp>>);    // equal, but each rank uses its own copy
PLAIT_C_ARRAY(terms, float, pl::spec<batch, hidden, pl::partial<tp>>);       // of a sum over ranks
PLAIT_C_ARRAY(inner, float, pl::spec<batch, pl::shard<ffn, tp>>);            // each rank has some features
PLAIT_C_ARRAY(up_weight, float, pl::spec<pl::shard<ffn, tp>, hidden>);
PLAIT_C_ARRAY(up_bias, float, pl::spec<pl::shard<ffn, tp>>);
PLAIT_C_ARRAY(down_weight, float, pl::spec<hidden, pl::shard<ffn, tp>>);

PLAIT_C_BIASED_LINEAR(up_layer, residual, inner, up_weight, up_bias);
PLAIT_C_ALL_REDUCE(sum_terms, terms, residual, tp);
PLAIT_C_RELABEL(copies_of_residual, residual, copies);

PLAIT_C_KERNEL(gelu, (inner y, inner x), pl::rule::nonlinear);
PLAIT_C_KERNEL(gelu_gradient, (inner dx, inner dy, inner x), pl::rule::product);
PLAIT_C_KERNEL(down, (terms y, inner x, down_weight w), pl::rule::contraction);
PLAIT_C_KERNEL(down_input_gradient, (inner dx, copies dy, down_weight w), pl::rule::contraction);
PLAIT_C_KERNEL(down_weight_gradient, (down_weight dw, copies dy, inner x), pl::rule::contraction);
PLAIT_C_KERNEL(add_branch, (residual y, residual x, residual branch), pl::rule::sum);
PLAIT_C_KERNEL(add_gradient, (residual dx, residual dbranch), pl::rule::add);
