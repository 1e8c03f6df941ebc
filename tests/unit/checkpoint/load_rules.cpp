// program: saver
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A step 1 by four ranks.
void save_one(memory_file_system& files) {
  on_ranks({2, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    saver.wait(ctx.device);
  });
}

}  // namespace

TEST_CASE("other meshes load the same, and each element is read once per group of ranks that hold it") {
  memory_file_system files;
  save_one(files);
  for (const auto& [dp_ranks, tp_ranks] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {1, 3}, {3, 2}, {1, 4}}) {
    on_ranks({dp_ranks, tp_ranks}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 0);
      const loaded_state loaded = load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files);
      CHECK(other == own_tensors(ctx, 1));
      const double read = all_reduce_scalar(ctx.device, ranks, static_cast<double>(loaded.bytes), reduce_op::sum);
      CHECK(read <= 1.1 * own_tensors::all_bytes);
    });
  }
}

TEST_CASE("what is read in place is the same, without a second copy, and damage is named all the same") {
  memory_file_system files;
  save_one(files);
  for (const auto& [dp_ranks, tp_ranks] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {1, 3}, {3, 2}}) {
    on_ranks({dp_ranks, tp_ranks}, [&, alone = dp_ranks == 1](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 0);
      auto held = other.held(true);
      bool copied = false;
      if (alone) held[0].write = [&](const std::byte*) { copied = true; };  // no other rank has the same rows
      const loaded_state loaded = load_tensors(ctx, ranks, "steps", {.tensors = held, .in_place = true}, files);
      CHECK(other == own_tensors(ctx, 1));
      CHECK_FALSE(copied);
      const double read = all_reduce_scalar(ctx.device, ranks, static_cast<double>(loaded.bytes), reduce_op::sum);
      CHECK(read <= 1.1 * own_tensors::all_bytes);
    });
  }
  files.contents("steps/step-00000001/data/w00001.safetensors").back() ^= 1;
  on_ranks({1, 3}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors other(ctx, 0);
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = other.held(true), .in_place = true}, files),
                "w00001.safetensors' is damaged: tensor '");
  });
}

TEST_CASE("large boxes are read to wherever they belong, past the system's cache or not") {
  temp_folder dir;
  constexpr std::int64_t elements = (std::int64_t{9} << 20) / 4 + 5;  // several pieces, the last one short
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    std::vector<float> memory(2 * elements + 1);
    const auto held_at =
        [&](std::size_t first) {  // elements of `memory`; two tensors, the second behind a page otherwise
          std::vector<held_tensor> held(2);
          for (std::size_t i = 0; i < 2; ++i) {
            float* const values = memory.data() + first + i * elements;
            held[i].name = i == 0 ? "a" : "b";
            held[i].shape = {elements};
            held[i].part.dims = 1;
            held[i].part.global[0] = held[i].part.local[0] = held[i].end = elements;
            held[i].copies = axis_list(axis_of<tp>);
            held[i].type = dtype::f32;
            held[i].read = [=](std::int64_t from, std::int64_t to, std::byte* out) {
              std::memcpy(out, values + from, static_cast<std::size_t>(to - from) * 4);
            };
            held[i].write = [=](const std::byte* in) { std::memcpy(values, in, elements * 4); };
            held[i].target = [=] { return reinterpret_cast<std::byte*>(values); };
          }
          return held;
        };
    const auto fill = [&] {
      for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<float>(i % 8191);
    };
    fill();
    checkpoint_saver saver(ctx.device, ranks, {.directory = dir / "steps"});
    saver.save(ctx, 1, {.tensors = held_at(0)});
    CHECK(saver.wait(ctx.device).at(0).failure == "");
    for (const bool in_place : {false, true}) {
      for (const std::size_t first : {0, 1}) {
        std::fill(memory.begin(), memory.end(), -1.0F);
        load_tensors(ctx, ranks, dir / "steps", {.tensors = held_at(first), .in_place = in_place});
        bool equal = true;
        for (std::size_t i = 0; i < 2 * elements; ++i)
          equal = equal && memory[first + i] == static_cast<float>(i % 8191);
        CHECK(equal);
        CHECK(memory[first == 0 ? memory.size() - 1 : 0] == -1.0F);
      }
    }
  });
}

TEST_CASE("numbers of one width become those of another") {
  memory_file_system files;
  save_one(files);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors other(ctx, 0), expected(ctx, 1);
    auto held = other.held();
    std::vector<double> wide(static_cast<std::size_t>(held[0].size()));
    held[0].type = dtype::f64;
    held[0].write = [&](const std::byte* in) { std::memcpy(wide.data(), in, wide.size() * sizeof(double)); };
    std::vector<bf16> narrow(static_cast<std::size_t>(held[1].size()));
    held[1].type = dtype::bf16;
    held[1].write = [&](const std::byte* in) { std::memcpy(narrow.data(), in, narrow.size() * sizeof(bf16)); };
    load_tensors(ctx, ranks, "steps", {.tensors = held}, files);
    for (std::size_t i = 0; i < wide.size(); ++i) CHECK(wide[i] == static_cast<double>(expected.rows[i]));
    for (std::size_t i = 0; i < narrow.size(); ++i) CHECK(narrow[i].bits == to_bf16(expected.whole[i]).bits);
  });
}

TEST_CASE("elements that are no real numbers come back as they are, and as nothing else") {
  memory_file_system files;
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    std::vector<std::int64_t> counts(own_tensors::elements);
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = (std::int64_t{1} << 60) + static_cast<std::int64_t>(i);
    const auto held_by = [&](std::vector<std::int64_t>& values) {
      own_tensors any(ctx, 1);
      held_tensor h = any.held()[1];
      h.name = "counts", h.type = dtype::i64;
      h.read = [&values](std::int64_t from, std::int64_t to, std::byte* out) {
        std::memcpy(out, values.data() + from, static_cast<std::size_t>(to - from) * sizeof(std::int64_t));
      };
      h.write = [&values](const std::byte* in) {
        std::memcpy(values.data(), in, values.size() * sizeof(std::int64_t));
      };
      return h;
    };
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = {held_by(counts)}});
    CHECK(saver.wait(ctx.device).at(0).failure == "");
    std::vector<std::int64_t> back(counts.size());
    load_tensors(ctx, ranks, "steps", {.tensors = {held_by(back)}}, files);
    CHECK(back == counts);
    for (const dtype other : {dtype::u8, dtype::i32, dtype::f32}) {
      held_tensor h = held_by(back);
      h.type = other;
      CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = {h}}, files),
                  "'counts' holds I64 elements, and the program's are ");
    }
  });
}

TEST_CASE("missing, unexpected and misshapen tensors are listed together, on all ranks alike, and nothing changes") {
  memory_file_system files;
  save_one(files);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors other(ctx, 9);
    const auto load = [&](std::vector<held_tensor> held) {
      load_tensors(ctx, ranks, "steps", {.tensors = std::move(held)}, files);
    };
    auto renamed = other.held();
    renamed[0].name = "roows";
    CHECK_ERROR(load(renamed), "'steps/step-00000001': the model needs 'roows', which it has not; ",
                "nothing in the model is 'rows'");
    auto shorter = other.held();
    shorter.erase(shorter.begin() + 1);
    CHECK_ERROR(load(shorter), "nothing in the model is 'whole'");
    auto wider = other.held();
    wider[1].shape = {own_tensors::elements / 2, 2};
    CHECK_ERROR(load(wider), "'whole' has the shape [15], and the model needs [7, 2]");
    // One rank's complaint is everybody's.
    auto one = other.held();
    if (ranks.rank() == 1) one[1].name = "hole";
    CHECK_ERROR(load(one), "the model needs 'hole', which it has not");
    CHECK(other == own_tensors(ctx, 9));
    CHECK_ERROR(load_tensors(ctx, ranks, "none", {.tensors = other.held()}, files),
                "there is no 'none'; legal are a saved step and a folder of them");
    CHECK_ERROR(load_tensors(ctx, ranks, "steps/step-00000009", {.tensors = other.held()}, files),
                "there is no 'steps/step-00000009'; there are step-00000001");
    CHECK_ERROR(load_tensors(ctx, ranks, "steps/step-00000001/COMMIT", {.tensors = other.held()}, files),
                "is a file; legal are a saved step and a folder of them");
    CHECK_ERROR(load_tensors(ctx, ranks, "steps/step-00000001/data", {.tensors = other.held()}, files),
                "'steps/step-00000001/data' is no saved step, and no folder that has one");
  });
}

TEST_CASE("what differs by intention is said by rules") {
  memory_file_system files;
  save_one(files);
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors other(ctx, 9);
    auto held = other.held();
    held[0].name = "lines";
    held[1].name = "new";
    const loaded_state loaded =
        load_tensors(ctx, ranks, "steps",
                     {.tensors = held,
                      .stored_name = [](const std::string& name) { return name == "lines" ? "rows" : name; },
                      .may_miss = [](const std::string& name) { return name == "new"; },
                      .may_ignore = [](const std::string& name) { return name == "whole"; }},
                     files);
    CHECK(loaded.step == 1);
    CHECK(other.rows == own_tensors(ctx, 1).rows);
    CHECK(other.whole == own_tensors(ctx, 9).whole);
  });
}

TEST_CASE("damage is named, nothing changes, and a step without its mark is passed over") {
  memory_file_system files;
  on_ranks({2, 1}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    for (const std::uint64_t step : {1, 2}) {
      mine.fill(step);
      saver.save(ctx, step, {.tensors = mine.held()});
      saver.wait(ctx.device);
    }
  });
  const std::string data = "steps/step-00000002/data/w00001.safetensors";
  const std::string whole = files.contents(data);
  for (const auto& [mesh, name] :
       std::vector<std::pair<std::pair<int, int>, const char*>>{{{1, 1}, "one rank"}, {{1, 3}, "three ranks"}}) {
    CAPTURE(name);
    on_ranks(mesh, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 9);
      if (ranks.rank() == 0) files.contents(data).back() ^= 1;
      all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
      CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files),
                  "'steps/step-00000002/data/w00001.safetensors' is damaged: tensor 'whole' box [", "another checksum");
      CHECK(other == own_tensors(ctx, 9));
      all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum);
      if (ranks.rank() == 0) files.contents(data) = whole;
    });
  }
  files.contents("steps/step-00000002/manifest.json").back() ^= 1;
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors other(ctx, 9);
    const loaded_state loaded = load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files);
    CHECK(loaded.step == 1);
    if (ranks.rank() == 0) {
      REQUIRE(loaded.passed_over.size() == 1);
      CHECK(loaded.passed_over[0].path == "steps/step-00000002");
      CHECK(contains(loaded.passed_over[0].reason, "manifest"));
    }
    CHECK(other == own_tensors(ctx, 1));
  });
}
