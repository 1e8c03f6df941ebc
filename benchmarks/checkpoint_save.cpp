// checkpoint_save [--megabytes N] [--rounds N] [--rows N] [--io auto|uring|threads] [--directory DIR] [--json FILE]
#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "plait/checkpoint/load_state.hpp"
#include "plait/checkpoint/saver.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/comm/threads.hpp"
#include "plait/io/byte_buffer.hpp"
#include "plait/io/crc32c.hpp"
#include "plait/io/posix_file_system.hpp"
#include "timing.hpp"

/// Measures saving and loading of a training state by four in-process ranks, and the limits of memory and disk. In each
/// round the same bytes are also handled without plait: copied, written in the same blocks with the same sync, and
/// read. They are also read, summed up and copied, which is slower if the disk uses time of the same processors. Files
/// are dropped from the page cache before they are read. The state is matrices that tp shards, and dp has twice.
namespace {

using namespace plait;

std::int64_t rows = 1024;
constexpr std::int64_t columns = 4096;
constexpr std::size_t block = std::size_t{8} << 20;

struct matrices_of {
  matrices_of(const context<cpu>& ctx, std::int64_t matrices) : parts(static_cast<std::size_t>(matrices)) {
    const std::int64_t ranks = ctx.ranks.shape().extent(axis_of<tp>);
    where.dims = 2;
    where.global = {rows, columns};
    where.local = {rows / ranks, columns};
    where.offset = {ctx.ranks.coordinate(axis_of<tp>) * rows / ranks, 0};
    for (auto& part : parts) part.assign(static_cast<std::size_t>(where.local_size()), 0.5F);
  }
  std::vector<held_tensor> held() {
    std::vector<held_tensor> all;
    for (auto& part : parts) {
      held_tensor& h = all.emplace_back();
      h.name = "matrix." + std::to_string(all.size());
      h.shape = {rows, columns};
      h.part = where;
      h.end = where.local_size();
      h.copies = axis_list(axis_of<dp>);
      h.type = dtype::f32;
      h.read = [&part](std::int64_t from, std::int64_t to, std::byte* out) {
        copy_past_cache(out, reinterpret_cast<const std::byte*>(part.data() + from),
                        static_cast<std::size_t>(to - from) * sizeof(float));
      };
      h.write = [&part](const std::byte* in) { std::memcpy(part.data(), in, part.size() * sizeof(float)); };
      h.target = [&part] { return reinterpret_cast<std::byte*>(part.data()); };
    }
    return all;
  }
  box where;
  std::vector<std::vector<float>> parts;
};

/// Calls body(context, communicator of all ranks) on dp x tp ranks.
template <class Body>
void on_ranks(int dp_ranks, int tp_ranks, const Body& body) {
  mesh_shape shape;
  shape.add(axis_of<dp>, dp_ranks);
  shape.add(axis_of<tp>, tp_ranks);
  threads::run(dp_ranks * tp_ranks, [&](threads::communicator c) {
    world ranks(shape, any_communicator(c));
    cpu device;
    const context<cpu> ctx{device, ranks, {}, 1};
    body(ctx, ranks.root());
  });
}

/// Waits until the disk is idle, and drops the files from the cache.
void forget(const std::string& directory) {
  ::sync();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // removed files are freed in the background
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    const int file = ::open(entry.path().c_str(), O_RDONLY);
    if (file < 0 || ::posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED) != 0) fail("cannot drop what is in the cache");
    ::close(file);
  }
}

/// Does the least work of a load on another layout, without plait: two threads of a rank read its file in the loader's
/// blocks, sum them up and copy them to `put`.
void read_by_hand(file_system& files, const std::string& name, std::span<std::byte> put) {
  constexpr std::size_t at_once = std::size_t{4} << 20;
  const auto file = files.open(name);
  const auto work = [&](std::size_t first) {
    byte_buffer memory;
    memory.grow(at_once);
    for (std::size_t at = first * at_once; at < put.size(); at += 2 * at_once) {
      const std::span<std::byte> in(memory.data(), std::min(at_once, put.size() - at));
      file->read(at, in);
      constexpr std::size_t some = std::size_t{128} << 10;
      std::uint32_t sum = 0;
      for (std::size_t i = 0; i < in.size(); i += some) {
        const std::span<std::byte> part = in.subspan(i, std::min(some, in.size() - i));
        sum = crc32c(part, sum);
        std::memcpy(put.data() + at + i, part.data(), part.size());
      }
      volatile std::uint32_t used = sum;
      static_cast<void>(used);
    }
  };
  std::thread other(work, 1);
  work(0);
  other.join();
}

struct times {
  std::vector<double> copy, stall, write, save, read, by_hand, load, reshard;
};

}  // namespace

int main(int argc, char** argv) try {
  const bench::numbers given(argc, argv);
  given.only({"--megabytes", "--rounds", "--rows", "--io", "--directory", "--json"});
  const std::int64_t megabytes = given.of("--megabytes", 768), rounds = given.of("--rounds", 5);
  rows = given.of("--rows", rows);
  const std::string json = given.text("--json", ""), io = given.text("--io", "auto");
  const std::int64_t matrices = std::max<std::int64_t>(1, megabytes * (1 << 20) / (rows * columns * 4));
  // A folder of its own, because it is removed.
  const std::string directory = given.text("--directory", "build") + "/benchmark-checkpoint";
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory + "/raw");
  times t;
  double balance = 0;
  const chosen_files chosen = choose_files(io == "uring"     ? file_io::uring
                                           : io == "threads" ? file_io::threads
                                                             : file_io::automatic);
  file_system& files = *chosen.files;
  for (std::int64_t round = 0; round <= rounds; ++round) {  // the first warms up
    const bool counts = round > 0;
    double saved_bytes = 0;
    on_ranks(2, 2, [&](const context<cpu>& ctx, any_communicator& ranks) {
      const auto longest = [&](double s) { return all_reduce_scalar(ctx.device, ranks, s, reduce_op::max); };
      const auto add = [&](std::vector<double>& to, double s) {
        s = longest(s);
        if (ranks.rank() == 0 && counts) to.push_back(s);
      };
      const auto cold = [&] {
        longest(0);
        if (ranks.rank() == 0) forget(directory);
        longest(0);
      };
      matrices_of mine(ctx, matrices);
      static byte_buffer staged[4];
      byte_buffer& to = staged[ranks.rank()];
      const std::size_t bytes = mine.parts.size() * mine.parts[0].size() * sizeof(float) / 2;
      to.grow(bytes);
      const std::string raw = directory + "/raw/" + std::to_string(ranks.rank());

      checkpoint_saver saver(ctx.device, ranks, {.directory = directory + "/steps", .keep = {.last = 2}}, files);
      const auto number = static_cast<std::uint64_t>(2 * round + 1);
      saver.save(ctx, number, {.tensors = mine.held()});  // allocates the saver's memory
      saver.wait(ctx.device);
      cold();
      saver.save(ctx, number + 1, {.tensors = mine.held()});
      const auto ended = saver.wait(ctx.device);
      if (!ended.at(0).failure.empty()) fail(ended[0].failure);
      add(t.stall, ended[0].stall);
      add(t.save, ended[0].background);
      const double most = longest(static_cast<double>(ended[0].bytes));
      const double all = all_reduce_scalar(ctx.device, ranks, static_cast<double>(ended[0].bytes), reduce_op::sum);
      if (ranks.rank() == 0) balance = 4 * most / all, saved_bytes = all;

      if (files.kind_of(raw)) files.remove_file(raw);
      cold();
      add(t.copy, bench::seconds([&] {
            std::size_t at = 0;
            const std::size_t half = mine.parts[0].size() * sizeof(float) / 2;
            for (const auto& part : mine.parts) std::memcpy(to.data() + at, part.data(), half), at += half;
          }));
      add(t.write, bench::seconds([&] {
            const auto file = files.create(raw);
            for (std::size_t at = 0; at < bytes; at += block)
              file->start_write(at, std::span<const std::byte>(to.data() + at, std::min(block, bytes - at)));
            file->sync();
          }));
      cold();
      add(t.read, bench::seconds([&] {
            const auto file = files.open(raw);
            for (std::size_t at = 0; at < bytes; at += block)
              file->read(at, std::span(to.data() + at, std::min(block, bytes - at)));
          }));
      cold();
      add(t.by_hand, bench::seconds([&] { read_by_hand(files, raw, {to.data(), bytes}); }));
      cold();
      add(t.load, bench::seconds([&] {
            load_tensors(ctx, ranks, directory + "/steps", {.tensors = mine.held(), .in_place = true});
          }));
      if (ranks.rank() == 0) forget(directory);
    });
    on_ranks(1, 4, [&](const context<cpu>& ctx, any_communicator& ranks) {
      matrices_of mine(ctx, matrices);
      all_reduce_scalar(ctx.device, ranks, 0.0, reduce_op::max);  // waits until all ranks have allocated memory
      double s = bench::seconds(
          [&] { load_tensors(ctx, ranks, directory + "/steps", {.tensors = mine.held(), .in_place = true}); });
      s = all_reduce_scalar(ctx.device, ranks, s, reduce_op::max);
      if (ranks.rank() == 0 && counts) t.reshard.push_back(s);
    });
    if (!counts) {
      std::printf("%.0f MB by four ranks through %s, %lld matrices of %lld x %lld floats; medians of %lld rounds\n\n",
                  saved_bytes * 1e-6, chosen.io == file_io::uring ? "io_uring" : "pwrite",
                  static_cast<long long>(matrices), static_cast<long long>(rows), static_cast<long long>(columns),
                  static_cast<long long>(rounds));
    }
  }
  std::filesystem::remove_all(directory);

  const double gigabytes = static_cast<double>(matrices * rows * columns * 4) * 1e-9;
  const auto line = [&](const char* what, const std::vector<double>& of) {
    const double s = bench::median(of);
    std::printf("%-46s %8.3f s %7.2f GB/s\n", what, s, gigabytes / s);
    return s;
  };
  const double copy = line("copy of a rank's share", t.copy);
  const double stall = line("save: training waits", t.stall);
  const double write = line("write and sync, raw", t.write);
  const double save = line("save: behind the training, until committed", t.save);
  const double read = line("read, raw, cold", t.read);
  const double by_hand = line("read, summed up and copied, raw, cold", t.by_hand);
  const double load = line("load on the same layout, cold", t.load);
  const double reshard = line("load on tp=4 instead of dp=2, tp=2, cold", t.reshard);
  if (std::FILE* file = json.empty() ? nullptr : std::fopen(json.c_str(), "w")) {
    std::fprintf(file,
                 "{\"stall\": %g, \"whole\": %g, \"load\": %g, \"reshard\": %g, \"copy\": %g, \"write\": %g, "
                 "\"read\": %g, \"by_hand\": %g}\n",
                 stall, stall + save, load, reshard, copy, write, read, by_hand);
    std::fclose(file);
  }
  int missed = 0;
  const auto target = [&](const char* what, double value, double limit, bool at_most) {
    const bool met = at_most ? value <= limit : value >= limit;
    missed += met ? 0 : 1;
    std::printf("%-46s %8.2f   (%s %.2f)%s\n", what, value, at_most ? "at most" : "at least", limit,
                met ? "" : "  MISSED");
  };
  std::printf("\n");
  target("stall over copy", stall / copy, 1.25, true);
  target("write: of the disk's rate", write / save, 0.90, false);
  target("read: of the disk's rate", read / load, 0.85, false);
  target("resharded load: of the rate by hand", by_hand / reshard, 0.85, false);
  target("resharded load over load", reshard / load, 1.2, true);
  target("bytes of a writer, most over mean", balance, 1.05, true);
  return missed == 0 ? 0 : 1;
} catch (const std::exception& e) {
  std::fprintf(stderr, "checkpoint_save: %s\n", e.what());
  return 2;
}
