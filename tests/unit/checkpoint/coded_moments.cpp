// program: saver
// Moments in 8 bits: what a save copies at once is their codes, and they become numbers behind the training.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "plait/checkpoint/held_state.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

using code = optimizer_tensor::code;

/// Codes that begin within a block, and their scales.
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

TEST_CASE("codes are copied at once, and become the numbers they stood for, whatever has become of them") {
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

TEST_CASE("what a save has copied raw becomes elements behind the training, before its checksum") {
  memory_file_system files;
  on_ranks({1, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    coded c(code::first_moment);
    const std::vector<float> expected = c.numbers(0, c.tensor.size);
    const std::thread::id training = std::this_thread::get_id();
    held_tensor h;
    h.name = "moments";
    h.shape = {c.tensor.size};
    h.part.dims = 1;
    h.part.global = h.part.local = {c.tensor.size};
    h.end = c.tensor.size;
    h.type = dtype::bf16;
    h.read = [](std::int64_t, std::int64_t, std::byte*) { FAIL("a save copies codes"); };
    h.read_raw = [&](std::int64_t from, std::int64_t to, std::byte* out) -> std::function<void()> {
      return [&training, rest = detail::read_codes(ctx, c.tensor, from, to, out)] {
        CHECK(std::this_thread::get_id() != training);
        rest();
      };
    };
    std::vector<bf16> loaded(expected.size());
    h.write = [&](const std::byte* in) {
      std::copy_n(in, loaded.size() * sizeof(bf16), reinterpret_cast<std::byte*>(loaded.data()));
    };
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = {h}});
    c.forget();  // training goes on
    CHECK(saver.wait(ctx.device).at(0).failure == "");
    load_tensors(ctx, ranks, "steps", {.tensors = {h}}, files);
    CHECK(as_floats(loaded) == expected);
  });
}
