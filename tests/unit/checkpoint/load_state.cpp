// program: saver
#include "plait/checkpoint/load_state.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Saves the steps 1 to `last`; the seed of a step's tensors is its number.
void save_steps(memory_file_system& files, std::pair<int, int> mesh = {2, 2}, std::uint64_t last = 1) {
  on_savers(mesh, files, {}, [&](saving_rank& r) {
    for (std::uint64_t step = 1; step <= last; ++step) {
      r.mine.fill(step);
      r.save(step);
      r.wait();
    }
  });
}

}  // namespace

TEST_CASE("other meshes load the same, and each element is read once per group of ranks that need it") {
  memory_file_system files;
  save_steps(files);
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

TEST_CASE("reading in place gives the same without a second copy, and errors still name damage") {
  memory_file_system files;
  save_steps(files);
  for (const auto& [dp_ranks, tp_ranks] : std::vector<std::pair<int, int>>{{1, 1}, {4, 1}, {1, 3}, {3, 2}}) {
    on_ranks({dp_ranks, tp_ranks}, [&, alone = dp_ranks == 1](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 0);
      auto held = other.held(true);
      bool copied = false;
      if (alone) held[0].write = [&](const std::byte*) { copied = true; };  // no other rank has these rows
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

TEST_CASE("large boxes are read to any address, with and without the system's cache") {
  temp_folder dir;
  constexpr std::int64_t elements = (std::int64_t{9} << 20) / 4 + 5;  // several pieces; the last one is shorter
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    std::vector<float> memory(2 * elements + 1);
    const auto held_at =
        [&](std::size_t first) {  // elements of `memory`; in one case the second tensor starts inside a page
          std::vector<held_tensor> held;
          for (std::size_t i = 0; i < 2; ++i) {
            float* const values = memory.data() + first + i * elements;
            held_tensor& h = held.emplace_back(held_in_memory(i == 0 ? "a" : "b", values, elements));
            h.copies = axis_list(axis_of<tp>);
            h.target = [=] { return reinterpret_cast<std::byte*>(values); };
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

TEST_CASE("numbers of one width are converted to another") {
  memory_file_system files;
  save_steps(files);
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

TEST_CASE("NaN and infinity are loaded unchanged, and as nothing else") {
  memory_file_system files;
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    std::vector<std::int64_t> counts(own_tensors::elements);
    for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = (std::int64_t{1} << 60) + static_cast<std::int64_t>(i);
    const auto held_by = [&](std::vector<std::int64_t>& values) {
      held_tensor h = held_in_memory("counts", values.data(), own_tensors::elements);
      h.copies = axis_list(axis_of<dp>, axis_of<tp>);
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
  save_steps(files);
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
    // An error of one rank is an error of all.
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
                "'steps/step-00000001/data' is neither a saved step nor a folder that has one");
  });
}

TEST_CASE("rules allow intended differences") {
  memory_file_system files;
  save_steps(files);
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

TEST_CASE("an error names damage, nothing changes, and a step without its mark is skipped") {
  memory_file_system files;
  save_steps(files, {2, 1}, 2);
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
      REQUIRE(loaded.invalid_steps.size() == 1);
      CHECK(loaded.invalid_steps[0].path == "steps/step-00000002");
      CHECK(contains(loaded.invalid_steps[0].reason, "manifest"));
    }
    CHECK(other == own_tensors(ctx, 1));
  });
}

namespace {

/// Matrices whose columns are sharded over tensor-parallel ranks, as in row-parallel linears. Each data rank has all of
/// a part, or a range of it, as ZeRO splits it. Every element is a function of its index.
struct columns {
  columns(const context<cpu>& ctx, std::int64_t rows, std::int64_t width, int count, bool cut_over_data)
      : ctx_(ctx), rows_(rows), width_(width), cut_(cut_over_data) {
    const mesh_shape& mesh = ctx.ranks.shape();
    part_ = part_of(mesh, ctx.ranks.rank());
    const std::int64_t data = mesh.extent(axis_of<dp>), own = ctx.ranks.coordinate(axis_of<dp>), n = part_.local_size();
    begin_ = cut_ ? n * own / data : 0;
    end_ = cut_ ? n * (own + 1) / data : n;
    for (int k = 0; k < count; ++k) values_.emplace_back(static_cast<std::size_t>(end_ - begin_), -1.0F);
  }
  box part_of(const mesh_shape& mesh, std::int64_t rank) const {
    const std::int64_t ranks = mesh.extent(axis_of<tp>);
    box b;
    b.dims = 2;
    b.global = {rows_, width_};
    b.local = {rows_, width_ / ranks};
    b.offset = {0, width_ / ranks * mesh.coordinate(rank, axis_of<tp>)};
    return b;
  }
  float expected(std::size_t k, std::int64_t i) const {
    const std::int64_t row = (begin_ + i) / part_.local[1], column = part_.offset[1] + (begin_ + i) % part_.local[1];
    return static_cast<float>(row * width_ + column + 7 * static_cast<std::int64_t>(k)) / 64;
  }
  void fill() {
    for (std::size_t k = 0; k < values_.size(); ++k)
      for (std::int64_t i = 0; i < end_ - begin_; ++i) values_[k][static_cast<std::size_t>(i)] = expected(k, i);
  }
  std::int64_t wrong() const {
    std::int64_t n = 0;
    for (std::size_t k = 0; k < values_.size(); ++k)
      for (std::int64_t i = 0; i < end_ - begin_; ++i) n += values_[k][static_cast<std::size_t>(i)] != expected(k, i);
    return n;
  }
  std::vector<held_tensor> held() {
    std::vector<held_tensor> all;
    for (std::size_t k = 0; k < values_.size(); ++k) {
      held_tensor& h = all.emplace_back(held_in_memory(cat({"matrix", k}), values_[k].data(), end_ - begin_, begin_));
      h.shape = {rows_, width_};
      h.part = part_;
      if (!cut_ && ctx_.ranks.shape().extent(axis_of<dp>) > 1) h.copies.push_back(axis_of<dp>);
      if (ctx_.ranks.shape().extent(axis_of<tp>) > 1) h.across.push_back(axis_of<tp>);
      h.part_across = [this, axes = h.across](std::int64_t i) {
        const mesh_shape& mesh = ctx_.ranks.shape();
        return part_of(mesh, plait::detail::rank_in_group(mesh, ctx_.ranks.rank(), axes, i));
      };
    }
    return all;
  }

 private:
  const context<cpu>& ctx_;
  std::int64_t rows_, width_;
  bool cut_;
  box part_;
  std::int64_t begin_ = 0, end_ = 0;
  std::deque<std::vector<float>> values_;
};

struct layout_of_columns {
  int dp = 1, tp = 1;
  bool cut = false;
};
struct matrices {
  std::int64_t rows, width;
  int count;
};

/// A device whose memory the loader treats as inaccessible to the host.
struct device_apart : cpu {};

void save(memory_file_system& files, const layout_of_columns& how, const matrices& m) {
  on_ranks({how.dp, how.tp}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    columns mine(ctx, m.rows, m.width, m.count, how.cut);
    mine.fill();
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.tensors = mine.held()});
    for (const finished_save& s : saver.wait(ctx.device)) CHECK(s.failure == "");
  });
}

}  // namespace

TEST_CASE("parts of short rows: each byte is read once, for any saved and requested columns") {
  const std::vector<layout_of_columns> layouts = {{1, 1},       {1, 2}, {1, 4},       {2, 2}, {1, 6},
                                                  {2, 1, true}, {3, 2}, {3, 4, true}, {2, 6}, {4, 2, true}};
  for (const matrices& m : {matrices{40, 12, 3}, {5, 24, 2}, {1, 12, 1}, {3, 12000, 1}})
    for (const layout_of_columns& from : layouts) {
      memory_file_system files;
      save(files, from, m);
      for (const layout_of_columns& to : layouts) {
        CAPTURE(m.rows);
        CAPTURE(m.width);
        CAPTURE(from.tp);
        CAPTURE(to.dp);
        CAPTURE(to.tp);
        on_ranks({to.dp, to.tp}, [&](const context<cpu>& ctx, any_communicator& ranks) {
          columns other(ctx, m.rows, m.width, m.count, to.cut);
          const loaded_state loaded = load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files);
          CHECK(other.wrong() == 0);
          const double read = all_reduce_scalar(ctx.device, ranks, static_cast<double>(loaded.bytes), reduce_op::sum);
          CHECK(read <= 1.1 * static_cast<double>(4 * m.rows * m.width * m.count));
        });
      }
    }
}

TEST_CASE("many tensors are exchanged in few collectives, each below a limit") {
  const matrices many{16, 8, 200};
  memory_file_system files;
  save(files, {1, 1}, many);
  const auto collectives = [&](std::size_t limit) {
    std::uint64_t calls = 0;
    on_ranks({2, 4}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      columns other(ctx, many.rows, many.width, many.count, false);
      load_tensors(ctx, ranks, "steps", {.tensors = other.held(), .exchange_bytes = limit}, files);
      CHECK(other.wrong() == 0);
      if (ranks.rank() != 0) return;
      for (const auto& row : ctx.ranks.ledger().rows)
        for (const auto& kind : row.kinds) calls += kind.calls;
    });
    return calls;
  };
  const std::uint64_t few = collectives(std::size_t{64} << 20), some = collectives(4096), each = collectives(1);
  CHECK(few <= 4);  // one to compare ranges, one for rows, one for copies
  // A rank's part of a tensor has 128 bytes, so 4096 bytes hold the parts of 32 ranks, or 32 tensors that two ranks
  // both have.
  CHECK(some >= few + 8);
  CHECK(some <= few + 40);
  CHECK(each >= 400);
}

TEST_CASE("numbers of another width, and damage in rows that other ranks read") {
  memory_file_system files;
  const matrices m{33, 12, 2};
  save(files, {1, 2}, m);
  on_ranks({2, 3}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    columns other(ctx, m.rows, m.width, m.count, false), expected(ctx, m.rows, m.width, m.count, false);
    auto held = other.held();
    std::vector<double> wide(static_cast<std::size_t>(held[0].size()));
    held[0].type = dtype::f64;
    held[0].write = [&](const std::byte* in) { std::memcpy(wide.data(), in, wide.size() * sizeof(double)); };
    load_tensors(ctx, ranks, "steps", {.tensors = held}, files);
    std::int64_t wrong = 0;
    for (std::size_t i = 0; i < wide.size(); ++i)
      wrong += wide[i] != static_cast<double>(expected.expected(0, static_cast<std::int64_t>(i)));
    CHECK(wrong == 0);
  });
  std::string& data = files.contents("steps/step-00000001/data/w00001.safetensors");
  data[data.size() - 5] ^= 4;
  on_ranks({2, 3}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    columns other(ctx, m.rows, m.width, m.count, false);
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = other.held()}, files),
                "w00001.safetensors' is damaged: tensor 'matrix1' box [", "another checksum");
  });
}

TEST_CASE("exchanged data pass through the memory of a device that the host cannot access") {
  const matrices m{24, 12, 9};
  memory_file_system files;
  save(files, {1, 1}, m);
  for (const std::size_t limit : {std::size_t{1}, std::size_t{2000}, std::size_t{64} << 20})
    on_ranks({2, 3}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      device_apart device;
      const context<device_apart> apart{device, ctx.ranks, {}, 1};
      columns other(ctx, m.rows, m.width, m.count, false);
      load_tensors(apart, ranks, "steps", {.tensors = other.held(), .exchange_bytes = limit}, files);
      CHECK(other.wrong() == 0);
    });
}

namespace {

/// Fails each read of a load, one after the other. `in_place`: the tensors have no values, and ranks have started to
/// send.
void fail_each_read(const bool in_place) {
  memory_file_system files;
  on_ranks({2, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    checkpoint_saver saver(ctx.device, ranks, {.directory = "steps"}, files);
    saver.save(ctx, 1, {.blobs = {{"tokenizer", "a b"}}, .tensors = mine.held()});
    CHECK(saver.wait(ctx.device).at(0).failure == "");
  });
  const std::string before = files.image();
  int failures = 0;
  for (std::size_t n = 0;; ++n) {
    CAPTURE(n);
    std::atomic<int> failed_ranks = 0;
    bool reached = false;
    on_ranks({in_place ? 2 : 1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
      own_tensors other(ctx, 7);
      const auto load = [&] {
        const read_sizes blocks{2, 64};
        load_tensors(ctx, ranks, "steps", {.tensors = other.held(in_place), .in_place = in_place, .read_ahead = blocks},
                     files);
      };
      const auto meet = [&] { all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::sum); };
      const std::size_t begin = files.operations();
      meet();
      if (ranks.rank() == 0) files.fail_at(begin + n, fault::io_error);
      meet();
      std::string why;
      try {
        load();
      } catch (const error_of_all& e) {
        why = e.what();
      }
      CHECK(broadcast_text(ctx.device, ranks, why) == why);
      if (!why.empty()) {
        ++failed_ranks;
        CHECK(contains(why, "Input/output error"));
        CHECK(contains(why, "steps"));  // names the file
        if (!in_place) CHECK(other == own_tensors(ctx, 7));
      }
      meet();
      if (ranks.rank() == 0) {
        reached = files.operations() > begin + n;
        files.fail_at(0, fault::io_error);  // the load made fewer operations
      }
      meet();
      load();
      CHECK(other == own_tensors(ctx, 1));
    });
    if (!reached) break;
    CHECK(failed_ranks == (in_place ? 4 : 2));
    ++failures;
  }
  CHECK(failures > 20);
  CHECK(files.image() == before);
}

}  // namespace

TEST_CASE("if any read of a load fails, all ranks get the same error, nothing changes, and the next load works") {
  fail_each_read(false);
}

TEST_CASE("the same in place: ranks that have read their part do not wait for one that failed") {
  fail_each_read(true);
}

TEST_CASE("invalid sizes of reads are refused on all ranks") {
  memory_file_system files;
  save_steps(files, {1, 2});
  on_ranks({1, 2}, [&](const context<cpu>& ctx, any_communicator& ranks) {
    own_tensors mine(ctx, 1);
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = mine.held(), .read_ahead = {0, 4096}}, files),
                "read_ahead.threads is 0; legal are 1 to 64");
    CHECK_ERROR(load_tensors(ctx, ranks, "steps", {.tensors = mine.held(), .read_ahead = {2, 1}}, files),
                "read_ahead.bytes is 1; legal are 64 to 1073741824");
  });
}
