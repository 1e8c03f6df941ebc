// A context made in one shared library and layers made in another, both with hidden symbols. Reductions sum all 8 rows.
#include <cstdio>
#include <cstring>

#include "tags.hpp"

namespace {
bool right = true;
void expect(bool holds, const char* what) {
  if (!holds) std::printf("wrong: %s\n", what), right = false;
}
}  // namespace

int main() {
  on_the_grid([](const plait::context<plait::cpu>& ctx) {
    expect(norm_gradient(ctx) == 8, "the gradient of a norm's weight");
    expect(linear_gradient(ctx) == 8, "the gradient of a linear's weight");
    expect(float_linear_gradient(ctx) == 8, "the gradient of a linear's weight in float");
    bool refused = false;
    try {
      on_other_axes(ctx);
    } catch (const plait::error& e) {
      refused = std::strstr(e.what(), "dp") != nullptr;
    }
    expect(refused, "an axis that the mesh has not is refused in words, across libraries");
  });
  return right ? 0 : 1;
}
