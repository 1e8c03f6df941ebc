// program: saver
#include <doctest/doctest.h>

#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// Matrices whose columns tensor-parallel ranks share out, as those of row-parallel linears, and of whose parts data
/// ranks hold ranges, as ZeRO cuts them, or all. Every element follows from its place.
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
      held_tensor& h = all.emplace_back();
      auto& values = values_[k];
      h.name = cat({"matrix", k});
      h.shape = {rows_, width_};
      h.part = part_;
      h.begin = begin_, h.end = end_;
      if (!cut_ && ctx_.ranks.shape().extent(axis_of<dp>) > 1) h.copies.push_back(axis_of<dp>);
      if (ctx_.ranks.shape().extent(axis_of<tp>) > 1) h.across.push_back(axis_of<tp>);
      h.part_across = [this, axes = h.across](std::int64_t i) {
        const mesh_shape& mesh = ctx_.ranks.shape();
        return part_of(mesh, plait::detail::rank_in_group(mesh, ctx_.ranks.rank(), axes, i));
      };
      h.type = dtype::f32;
      h.read = [this, &values](std::int64_t from, std::int64_t to, std::byte* out) {
        std::memcpy(out, values.data() + (from - begin_), static_cast<std::size_t>(to - from) * sizeof(float));
      };
      h.write = [&values](const std::byte* in) { std::memcpy(values.data(), in, values.size() * sizeof(float)); };
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

/// A device whose memory the loader takes for one that the host does not see.
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

TEST_CASE("parts of short rows: each byte is read once, whatever columns were saved and are wanted") {
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
  CHECK(few <= 4);  // a look at the ranges, the rows, the copies
  // A rank's part of a tensor is 128 bytes: those of 32 ranks' shares, and of 32 tensors that two hold the same.
  CHECK(some >= few + 8);
  CHECK(some <= few + 40);
  CHECK(each >= 400);
}

TEST_CASE("numbers of another width, and damage in rows that others read") {
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

TEST_CASE("what is exchanged goes through the memory of a device that is not the host's") {
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
