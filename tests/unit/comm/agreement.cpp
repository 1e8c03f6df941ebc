// program: communicators
// Ranks that were started with different settings: every rank gets an error with the rank and the setting.
#include "plait/comm/agreement.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"

using namespace plait;

namespace {

/// The error of each of `ranks`, exchanged through memory of the host or of a device; empty without one.
std::vector<std::string> verdicts(int ranks, bool on_device,
                                  const std::function<std::vector<setting>(int)>& settings_of) {
  std::vector<std::string> texts(static_cast<std::size_t>(ranks));
  threads::run(ranks, [&](threads::communicator c) {
    any_communicator all(c);
    const std::vector<setting> settings = settings_of(c.rank());
    try {
      if (on_device) {
        cpu device;
        require_agreement(device, all, settings);
      } else {
        require_agreement(all, settings);
      }
    } catch (const disagreement& e) {
      texts[static_cast<std::size_t>(c.rank())] = e.what();
    }
    all.barrier();  // the ranks still make the same calls
  });
  return texts;
}

void check_verdict(int ranks, const std::string& expected,
                   const std::function<std::vector<setting>(int)>& settings_of) {
  for (const bool on_device : {false, true}) {
    CAPTURE(on_device);
    for (const std::string& texts : verdicts(ranks, on_device, settings_of)) CHECK(texts == expected);
  }
}

const std::string end = "; every rank needs the same options";

}  // namespace

TEST_CASE("ranks that agree continue, with their settings in any order") {
  for (const int ranks : {1, 2, 5}) {
    check_verdict(ranks, "", [](int) { return std::vector<setting>{}; });
    check_verdict(ranks, "", [](int rank) {
      std::vector<setting> settings = {{"--lr", "0.001"}, {"--steps", "5"}};
      if (rank == 1) std::swap(settings[0], settings[1]);
      return settings;
    });
  }
}

TEST_CASE("one rank differs: its value, and that of the others") {
  check_verdict(2, "rank 1 was started with --lr 0.01, rank 0 with --lr 0.001" + end, [](int rank) {
    return std::vector<setting>{{"--steps", "5"}, {"--lr", rank == 1 ? "0.01" : "0.001"}};
  });
  check_verdict(4, "rank 0 was started with --lr 0.01, ranks 1 to 3 with --lr 0.001" + end, [](int rank) {
    return std::vector<setting>{{"--lr", rank == 0 ? "0.01" : "0.001"}};
  });
  check_verdict(4, "rank 2 was started with --prompt 'And so', ranks 0, 1, 3 with --prompt ''" + end, [](int rank) {
    return std::vector<setting>{{"--prompt", rank == 2 ? "And so" : "''"}};
  });
}

TEST_CASE("a setting that one rank does not have") {
  check_verdict(3, "rank 1 was started without --lr, ranks 0, 2 with --lr 1" + end, [](int rank) {
    std::vector<setting> settings;
    if (rank != 1) settings.push_back({"--lr", "1"});
    return settings;
  });
  check_verdict(3, "rank 2 was started with --extra 1, ranks 0, 1 without --extra" + end, [](int rank) {
    std::vector<setting> settings = {{"--lr", "1"}};
    if (rank == 2) settings.push_back({"--extra", "1"});
    return settings;
  });
  // Two words of one rank differ from the same letters as one word of another.
  check_verdict(2, "rank 1 was started without ab, rank 0 with ab; rank 1 was started with a b, rank 0 without a" + end,
                [](int rank) {
                  const std::string name = rank == 0 ? "ab" : "a", value = rank == 0 ? "" : "b";
                  return std::vector<setting>{{name, value}};
                });
}

TEST_CASE("several ranks differ, in several settings") {
  check_verdict(5,
                "rank 3 was started with --lr 3, ranks 1, 4 with --lr 2, ranks 0, 2 with --lr 1; "
                "rank 4 was started with --steps 9, ranks 0 to 3 with --steps 5" +
                    end,
                [](int rank) {
                  const std::string lr = rank == 3 ? "3" : rank % 3 == 1 ? "2" : "1", steps = rank == 4 ? "9" : "5";
                  return std::vector<setting>{{"--lr", lr}, {"--steps", steps}};
                });
  check_verdict(8,
                "rank 7 was started with --seed 7, rank 6 with --seed 6, rank 5 with --seed 5, rank 0 with --seed 0, "
                "and there are 4 other values" +
                    end,
                [](int rank) {
                  return std::vector<setting>{{"--seed", std::to_string(rank)}};
                });
  check_verdict(2,
                "rank 1 was started with a 1, rank 0 with a 0; rank 1 was started with b 1, rank 0 with b 0; "
                "rank 1 was started with c 1, rank 0 with c 0; they differ in d, e, too" +
                    end,
                [](int rank) {
                  const std::string v = std::to_string(rank);
                  return std::vector<setting>{{"a", v}, {"b", v}, {"c", v}, {"d", v}, {"e", v}, {"f", "same"}};
                });
}

TEST_CASE("a setting that is given twice has all its values") {
  check_verdict(2, "rank 1 was started with --data 'x, z', rank 0 with --data 'x, y'" + end, [](int rank) {
    return std::vector<setting>{{"--data", "x"}, {"--data", rank == 1 ? "z" : "y"}};
  });
}
