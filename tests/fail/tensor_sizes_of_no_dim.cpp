// expect: sizes_of takes dims, and one of these names is a function or a value of the program's, which hides the dim: write plait::batch, or give the function another name
// expect: sizes_of takes dims: structs that derive from plait::dim_tag
// expect: sizes_of takes one size for each dim, in the order of the dims
// errors-at-most: 4
// lines-at-most: 60
#include "plait/tensor/context.hpp"

namespace pl = plait;
using pl::hidden;
using pl::seq;
struct own_dim
#ifdef PLAIT_FAIL_FIX
    : pl::dim_tag<"own_dim">
#endif
{};
#ifndef PLAIT_FAIL_FIX
void batch(int) {}  // hides the dim
#endif
using pl::batch;

inline const auto first = pl::sizes_of<batch, hidden>(8, 64);
inline const auto third = pl::sizes_of<seq, hidden, batch>(16, 64, 8);
inline const auto own = pl::sizes_of<own_dim, hidden>(8, 64);
#ifdef PLAIT_FAIL_FIX
inline const auto one_for_each = pl::sizes_of<seq, hidden>(16, 64);
#else
inline const auto one_for_each = pl::sizes_of<seq, hidden>(64);
#endif
