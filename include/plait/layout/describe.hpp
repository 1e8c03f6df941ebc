// Layouts, meshes, plans and verdicts in words, and `enforce`, which throws unless a verdict is ok; all at run time.
// The error at compile time is `enforced` in layout/enforce.hpp; the texts of the errors are in layout/errors.hpp.
#pragma once

#include <string>
#include <string_view>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/plan.hpp"

namespace plait {

/// "cp, tp".
std::string describe(const axis_list& axes);

/// A layout as its spec is written: "<shard<seq, cp, tp>, hidden, partial<dp>>".
std::string describe(const layout& a);

/// "2 dp * 4 tp".
std::string describe(const mesh_shape& mesh);

/// "all_gather of seq over cp, tp (varying -> replicated)".
std::string describe(const redistribution_step& s);

/// "<batch, seq, hidden>".
std::string describe(const dim_list& dims);

/// The rule that was broken, then its facts: " [axis tp, dim hidden, varying and replicated]", or, where dims differ,
/// " [weight: <ffn, hidden> expected, <hidden, ffn> given]".
std::string describe(const verdict& v);

/// The two ends of a plan, then one line for each step.
std::string describe(const plan& p);

/// Throws the run-time twin of the `static_assert` unless the verdict is ok. `where` names the layer or the tensor.
inline void enforce(const verdict& v, std::string_view where) {
  if (!v.ok()) fail({where, ": ", describe(v)});
}

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/layout/describe.ipp"  // IWYU pragma: keep
#endif

#include "plait/core/macros_on.hpp"
