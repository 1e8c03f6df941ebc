// program: layers
// Layers and tensors whose specs do not fit the mesh at run time.
#include <doctest/doctest.h>

#include <functional>
#include <string>

#include "plait/nn/combinators.hpp"
#include "plait/nn/loss.hpp"
#include "plait/nn/norm.hpp"
#include "support/on_mesh.hpp"

using namespace plait;

namespace {

/// The text of the error of `action` in a context on a mesh of one rank with the axes dp and tp.
std::string refusal(const std::function<void(const context<cpu>&)>& action) {
  std::string text;
  test::on_mesh(mesh<axis<dp>, axis<tp>>{1, 1}, sizes_of<batch, hidden, vocab>(2, 4, 8), 1,
                [&](const context<cpu>& ctx) { text = test::text_thrown_by([&] { action(ctx); }); });
  return text;
}
void check_says(const std::string& text, const std::string& where, layout_error code, const std::string& axis) {
  CHECK_MESSAGE(text.find(where + ": " + text_of(code) + " [axis " + axis) != std::string::npos, text);
}

using forgets_tp = spec<shard<batch, dp>, hidden>;
using logits = spec<shard<batch, dp>, shard<vocab, tp>>;

}  // namespace

TEST_CASE("a layer refuses a spec that does not name an axis of the mesh") {
  check_says(refusal([](const context<cpu>& ctx) {
               rms_norm<float, forgets_tp>{ctx, 1e-5, "first"};
             }),
             "first: input", layout_error::axis_unmentioned, "tp");
  check_says(refusal([](const context<cpu>& ctx) {
               layer_norm<float, forgets_tp>{ctx, 1e-5, "second"};
             }),
             "second: input", layout_error::axis_unmentioned, "tp");
  check_says(refusal([](const context<cpu>& ctx) {
               cross_entropy_loss<float, spec<batch, shard<vocab, tp>>, spec<batch>>{ctx, 8};
             }),
             "cross_entropy: logits", layout_error::axis_unmentioned, "dp");
  check_says(refusal([](const context<cpu>& ctx) {
               cross_entropy_loss<float, logits, spec<shard<batch, dp>>>{ctx, 8};
             }),
             "cross_entropy: labels", layout_error::axis_unmentioned, "tp");
}

TEST_CASE("a tensor refuses an axis that the mesh does not have, and need not name all others") {
  check_says(refusal([](const context<cpu>& ctx) { tensor<float, spec<shard<batch, cp>, hidden>>{ctx}; }),
             "tensor <shard<batch, cp>, hidden>", layout_error::axis_unknown, "cp");
  check_says(refusal([](const context<cpu>& ctx) { tensor<float, spec<batch, hidden, partial<ep>>>{ctx}; }),
             "tensor <batch, hidden, partial<ep>>", layout_error::axis_unknown, "ep");
  CHECK(refusal([](const context<cpu>& ctx) { tensor<float, forgets_tp>{ctx}; }).empty());
}

TEST_CASE("a tensor refuses a dim without a size, and one with fewer elements than ranks") {
  CHECK(refusal([](const context<cpu>& ctx) { tensor<float, spec<batch, seq>>{ctx}; }) ==
        "tensor <batch, seq>: the context gives no size for the dim seq");
  const std::string text =
      test::error_on_mesh(mesh<axis<dp>>{2}, sizes_of<batch, hidden>(1, 4), 1,
                          [](const context<cpu>& ctx) { tensor<float, spec<shard<batch, dp>, hidden>>{ctx}; });
  CHECK_MESSAGE(text.find("batch is 1, sharded over dp=2 = 2 ranks; it must be at least 2") != std::string::npos, text);
}
