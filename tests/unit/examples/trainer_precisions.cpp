// A trainer built for some precisions and strategies runs those; the error for others names a remedy.
#define PLAIT_TRAINER_PRECISIONS float, plait::bf16_gradients
#define PLAIT_TRAINER_STRATEGIES plait::megatron_sp
#include <doctest/doctest.h>

#include <string>
#include <type_traits>

#include "../../../examples/train_llama/options.hpp"

namespace {

/// Returns the precision that the options choose.
std::string chosen(const std::string& precision, const std::string& gradients = "full") {
  options opt;
  opt.precision = precision;
  opt.gradients = gradients;
  return with_types(opt, []<class Precision, class>() {
    return std::string(std::is_same_v<Precision, float>                   ? "float"
                       : std::is_same_v<Precision, plait::bf16_gradients> ? "bf16_gradients"
                                                                          : "another");
  });
}

}  // namespace

TEST_CASE("a trainer for some precisions runs those") {
  CHECK(chosen("float") == "float");
  CHECK(chosen("bf16-no-masters", "bf16") == "bf16_gradients");
}

TEST_CASE("a trainer for some types refuses the others") {
  const auto throws = [](const std::string& named, const auto& choose) {
    const std::string text = named + ": this program was built without it";
    CHECK_THROWS_WITH_AS(static_cast<void>(choose()), doctest::Contains(text.c_str()), plait::error);
  };
  const auto refused = [&](const std::string& named, const auto&... how) {
    throws(named, [&] { return chosen(how...); });
  };
  refused("--precision double", "double");
  refused("--precision bf16", "bf16");
  refused("--precision bf16-no-masters", "bf16-no-masters");
  refused("--precision bf16 with --gradients bf16", "bf16", "bf16");
  options opt;
  const auto any = [&] { return with_types(opt, []<class, class>() { return 0; }); };
  opt.strategy = "tp";
  throws("--strategy tp", any);
  opt.mixture = true;
  throws("--model: the strategy of mixtures of experts", any);
}
