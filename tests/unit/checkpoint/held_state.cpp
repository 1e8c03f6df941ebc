// program: saver
#include "plait/checkpoint/held_state.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;
using boxes = std::vector<staged_share::staged_box>;

namespace {

std::uint64_t sum_of(const boxes& all) {
  std::uint64_t sum = 0;
  for (const auto& b : all) sum += plait::detail::box_sum(b);
  return sum;
}
/// A tensor in boxes, split at the given positions along each dim.
boxes cut(const std::vector<std::vector<std::int64_t>>& places, const std::string& name = "a") {
  boxes all{{name, safetensors_dtype::f32, {}}};
  all[0].where.dims = static_cast<int>(places.size());
  for (std::size_t d = 0; d < places.size(); ++d) {
    boxes next;
    for (const auto& b : all)
      for (std::size_t i = 0; i + 1 < places[d].size(); ++i) {
        next.push_back(b);
        next.back().where.global[d] = places[d].back();
        next.back().where.offset[d] = places[d][i];
        next.back().where.local[d] = places[d][i + 1] - places[d][i];
      }
    all = next;
  }
  return all;
}

/// The text of the error of a save after `change` has changed the ranks' tensors; "" without an error.
std::string error_of_save(const std::function<void(int rank, std::vector<held_tensor>&, std::uint64_t& step)>& change) {
  memory_file_system files;
  std::string text;
  on_ranks({2, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    auto held = mine.held();
    std::uint64_t step = 1;
    change(ranks.rank(), held, step);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    std::string why;
    try {
      saver.save(ctx, step, {.tensors = held});
    } catch (const error_of_all& e) {
      why = e.what();
    }
    for (const finished_save& s : saver.wait(ctx.device)) why += s.failure;
    CHECK(broadcast_text(ctx.device, ranks, why) == why);
    if (ranks.rank() == 0) text = why;
  });
  for (const directory_entry& e : files.list("steps"))
    if (!text.empty()) CHECK(e.name == ".lock");  // the save started nothing, or removed all that it wrote
  return text;
}

}  // namespace

TEST_CASE("the sum of boxes is zero if and only if they cover their tensors exactly once") {
  CHECK(sum_of({}) == 0);
  const std::vector<boxes> whole = {cut({}),
                                    cut({{0, 5}}),
                                    cut({{0, 1, 3, 5}}),
                                    cut({{0, 2, 4}, {0, 1, 9}}),
                                    cut({{0, 2, 3}, {0, 7}, {0, 4, 5, 6}}),
                                    cut({{0, 1, 2}, {0, 1, 2}, {0, 3}, {0, 2, 4}, {0, 5}, {0, 1, 6}})};
  for (const boxes& all : whole) {
    CHECK(sum_of(all) == 0);
    for (std::size_t i = 0; i < all.size(); ++i) {
      boxes changed = all;
      changed.erase(changed.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK((sum_of(changed) != 0) == (all.size() > 1));  // a tensor without boxes is not in the notes at all
      changed = all;
      changed.push_back(all[i]);
      CHECK((sum_of(changed) != 0) == (all.size() > 1));  // a duplicate of all boxes shows in the notes
      changed = all;
      changed[i].dtype = safetensors_dtype::bf16;
      CHECK((sum_of(changed) != 0) == (all.size() > 1));
      changed = all;
      changed[i].tensor = "b";
      CHECK((sum_of(changed) != 0) == (all.size() > 1));
      for (int d = 0; d < all[i].where.dims; ++d) {
        changed = all;
        ++changed[i].where.global[static_cast<std::size_t>(d)];
        CHECK(sum_of(changed) != 0);
        changed = all;
        ++changed[i].where.offset[static_cast<std::size_t>(d)];
        CHECK(sum_of(changed) != 0);
        changed = all;
        ++changed[i].where.local[static_cast<std::size_t>(d)];
        CHECK(sum_of(changed) != 0);
      }
    }
  }
  // Different splits of one tensor, and two boxes of equal size that were exchanged.
  boxes mixed = cut({{0, 2, 4}, {0, 9}});
  const boxes halves = cut({{0, 4}, {0, 4, 9}});
  mixed[0] = halves[0];
  CHECK(sum_of(mixed) != 0);
  boxes twice = cut({{0, 2, 4}, {0, 9}});
  twice[1] = twice[0];
  CHECK(sum_of(twice) != 0);
}

TEST_CASE("plans of ranks that do not fit are refused, naming the tensor, before anything is written") {
  CHECK(error_of_save([](int, auto&, auto&) {}) == "");
  const std::string shape = error_of_save([](int rank, auto& held, auto&) {
    if (rank != 3) return;
    held[1].shape = {16};
    held[1].part.global[0] = held[1].part.local[0] = held[1].end = 16;
  });
  CHECK(contains(shape, "checkpoint: step 1 is not saved: the ranks' parts do not make whole tensors, of one type"));
  CHECK(contains(shape, "'whole': rank 0 has F32 [15] in [0:3]; rank 1 has F32 [15] in [3:7]"));
  CHECK(contains(shape, "rank 3 has F32 [16] in [12:16]"));
  CHECK(!contains(shape, "'rows'"));
  const std::string type = error_of_save([](int rank, auto& held, auto&) {
    if (rank == 1) held[0].type = dtype::bf16;
  });
  CHECK(contains(type, "'rows': rank 0 has F32 [13, 6] in "));
  CHECK(contains(type, "rank 1 has BF16 [13, 6] in "));
  const std::string missing = error_of_save([](int rank, auto& held, auto&) {
    if (rank == 2) held.erase(held.begin());
  });
  CHECK(contains(missing, "'rows': rank 0 has "));
  CHECK(!contains(missing, "rank 2 has"));
  const std::string twice = error_of_save([](int, auto& held, auto&) { held[1].copies = axis_list(axis_of<dp>); });
  CHECK(contains(twice, "'whole'"));  // rank 0 finds this
  const std::string names = error_of_save([](int rank, auto& held, auto&) {
    if (rank == 0) held[1].name = "hole";
  });
  CHECK(contains(names, "'hole': rank 0 has F32 [15] in [0:3]"));
  CHECK(contains(names, "'whole': rank 1 has F32 [15] in [3:7]"));
  const std::string steps =
      error_of_save([](int rank, auto&, auto& step) { step += static_cast<std::uint64_t>(rank / 2); });
  CHECK(contains(steps, "nothing is saved: ranks are at different steps: rank 0 1, rank 1 1, rank 2 2, rank 3 2"));
  const std::string unplanned = error_of_save([](int rank, auto& held, auto&) {
    if (rank == 2) held[0].shape = {12, 5};
  });
  CHECK(contains(unplanned, "step 1 is not saved: checkpoint: rows: the dims of its layout do not make its shape"));
}

// Moments in 8 bits: a save copies their codes at once, and decodes them to numbers after training has continued.
namespace {

using code = optimizer_tensor::code;

/// Codes that start inside a block, and their scales.
struct coded {
  explicit coded(code kind, std::int64_t place = 200, std::int64_t n = 700) {
    for (std::int64_t i = 0; i < n; ++i) codes.push_back(static_cast<std::uint8_t>(i * 37 % 256));
    for (std::int64_t i = 0; i < (place + n + kernels::moment_block - 1) / kernels::moment_block; ++i)
      scales.push_back(static_cast<std::uint8_t>(120 + 3 * i));
    tensor.name = "exp_avg";
    tensor.coded = kind;
    tensor.values = reinterpret_cast<std::byte*>(codes.data());
    tensor.scales = reinterpret_cast<std::byte*>(scales.data());
    tensor.place = place;
    tensor.size = n;
  }
  std::vector<float> numbers(std::int64_t from, std::int64_t to) const {
    std::vector<float> out;
    for (std::int64_t i = from; i < to; ++i) {
      const std::uint8_t c = codes[static_cast<std::size_t>(i)];
      const std::uint8_t s = scales[static_cast<std::size_t>((tensor.place + i) / kernels::moment_block)];
      out.push_back(tensor.coded == code::first_moment ? kernels::first_moment(c, s) : kernels::second_moment(c, s));
    }
    return out;
  }
  void forget() {
    std::fill(codes.begin(), codes.end(), std::uint8_t{1});
    std::fill(scales.begin(), scales.end(), std::uint8_t{1});
  }
  std::vector<std::uint8_t> codes, scales;
  optimizer_tensor tensor{};
};

std::vector<float> as_floats(const std::vector<bf16>& in) {
  std::vector<float> out;
  for (const bf16 x : in) out.push_back(to_float(x));
  return out;
}

}  // namespace

TEST_CASE("codes are copied at once, and decoded to their numbers even if the originals change") {
  on_ranks({1, 1}, [](const context<cpu>& ctx, any_communicator&) {
    for (const code kind : {code::first_moment, code::second_moment})
      for (const auto& [from, to] : std::vector<std::pair<std::int64_t, std::int64_t>>{
               {0, 700}, {0, 1}, {55, 57}, {56, 312}, {100, 100}, {300, 699}, {311, 570}}) {
        CAPTURE(from);
        CAPTURE(to);
        coded c(kind);
        const std::vector<float> expected = c.numbers(from, to);
        std::vector<bf16> at_once(expected.size()), later(expected.size());
        detail::read_optimizer(ctx, c.tensor, from, to, reinterpret_cast<std::byte*>(at_once.data()));
        CHECK(as_floats(at_once) == expected);
        const std::function<void()> rest =
            detail::read_codes(ctx, c.tensor, from, to, reinterpret_cast<std::byte*>(later.data()));
        c.forget();
        if (rest) rest();
        CHECK(as_floats(later) == expected);
      }
  });
}

TEST_CASE("raw copies of a save are decoded in the background, before their checksum") {
  memory_file_system files;
  on_ranks({1, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    coded c(code::first_moment);
    const std::vector<float> expected = c.numbers(0, c.tensor.size);
    const std::thread::id training = std::this_thread::get_id();
    std::vector<bf16> loaded(expected.size());
    held_tensor h = held_in_memory("moments", loaded.data(), c.tensor.size);
    h.read = [](std::int64_t, std::int64_t, std::byte*) { FAIL("a save copies codes"); };
    h.read_raw = [&](std::int64_t from, std::int64_t to, std::byte* out) -> std::function<void()> {
      return [&training, rest = detail::read_codes(ctx, c.tensor, from, to, out)] {
        CHECK(std::this_thread::get_id() != training);
        rest();
      };
    };
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = {h}});
    c.forget();  // training continues
    CHECK(saver.wait(ctx.device).at(0).failure == "");
    load_tensors(ctx, ranks, "steps", {.tensors = {h}}, files);
    CHECK(as_floats(loaded) == expected);
  });
}
