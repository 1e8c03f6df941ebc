// program: communicators
// Numbers, records and texts of the host, gathered by all ranks or by one of them.
#include "plait/comm/host_values.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"

using namespace plait;

namespace {

struct record {
  std::int32_t rank;
  char letter;
  bool operator==(const record&) const = default;
};

/// The records that rank `of` passes: as many as its rank.
std::vector<record> records_of(int of) { return std::vector<record>(static_cast<std::size_t>(of), {of, 'x'}); }

}  // namespace

TEST_CASE("host values: every rank gets those of all ranks") {
  for (const int ranks : {1, 2, 3}) {
    CAPTURE(ranks);
    threads::run(ranks, [&](threads::communicator c) {
      any_communicator all(c);
      cpu device;
      const int rank = c.rank();
      std::int64_t numbers[] = {rank, -rank};
      all_reduce_values(device, all, numbers, 2, reduce_op::max);
      CHECK(numbers[0] == ranks - 1);
      CHECK(numbers[1] == 0);
      CHECK(all_reduce_scalar(device, all, 0.5, reduce_op::sum) == 0.5 * ranks);

      const auto gathered = gather_all(device, all, {static_cast<std::uint64_t>(rank) + 1}, 2);
      REQUIRE(gathered.size() == 2 * static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r) {
        CHECK(gathered[2 * static_cast<std::size_t>(r)] == static_cast<std::uint64_t>(r) + 1);
        CHECK(gathered[2 * static_cast<std::size_t>(r) + 1] == 0);
      }

      const auto records = gather_records(device, all, records_of(rank));
      REQUIRE(records.size() == static_cast<std::size_t>(ranks));
      for (int r = 0; r < ranks; ++r) CHECK(records[static_cast<std::size_t>(r)] == records_of(r));
      CHECK(gather_equal_records(device, all, std::vector<record>()).size() == static_cast<std::size_t>(ranks));

      CHECK(broadcast_text(device, all, "of rank " + std::to_string(rank), ranks - 1) ==
            "of rank " + std::to_string(ranks - 1));
      CHECK(broadcast_text(device, all, rank == 0 ? "" : "unheard") == "");
    });
  }
}

TEST_CASE("host values: one rank gets the records of all ranks") {
  threads::run(3, [](threads::communicator c) {
    any_communicator all(c);
    cpu device;
    const auto records = gather_records(device, all, records_of(c.rank()), 1);
    if (c.rank() != 1) {
      CHECK(records.empty());
      return;
    }
    REQUIRE(records.size() == 3);
    for (int r = 0; r < 3; ++r) CHECK(records[static_cast<std::size_t>(r)] == records_of(r));
  });
}
