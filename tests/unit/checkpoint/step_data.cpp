// program: steps
#include "plait/checkpoint/step_data.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "plait/io/posix_file_system.hpp"
#include "support/memory_file_system.hpp"
#include "support/temp_folder.hpp"

using namespace plait;
using namespace plait::test;

namespace {

/// A file whose bytes are functions of their offset, and whose reads wait at a gate: `let(n)` lets n more of them
/// finish. Reads that start at an offset in `bad` fail.
class gated_file final : public open_file {
 public:
  gated_file() : open_file("gated") {}
  void let(std::size_t n) {
    {
      const std::lock_guard lock(mutex_);
      may_end_ += n;
    }
    changed_.notify_all();
  }
  /// Waits until this number of reads have started.
  void await_begun(std::size_t n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= n; });
  }
  std::size_t begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  std::size_t most_at_once() const { return most_; }
  /// The number of bytes of memory that reads have filled.
  std::size_t touched() const { return touched_.size(); }
  static std::byte value(std::uint64_t at) { return static_cast<std::byte>(at * 7 + at / 256); }
  std::uint64_t size() const override { return 1 << 20; }

  std::set<std::uint64_t> bad;

 private:
  std::size_t write_some(std::uint64_t, std::span<const std::byte>) override { fail("nobody writes"); }
  std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
    std::unique_lock lock(mutex_);
    ++begun_;
    most_ = std::max(most_, ++in_flight_);
    changed_.notify_all();
    changed_.wait(lock, [&] { return may_end_ > 0; });
    --may_end_;
    --in_flight_;
    for (std::byte& b : bytes) touched_.insert(&b);
    if (bad.count(offset) != 0) fail({"cannot read at ", offset});
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(offset + i);
    return bytes.size();
  }
  void sync_once() override {}

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::size_t begun_ = 0, may_end_ = 0, in_flight_ = 0, most_ = 0;
  mutable std::set<const std::byte*> touched_;
};

/// Blocks of 100 bytes.
struct blocks {
  struct block : file_block {
    std::size_t number = 0;
  };
  std::optional<block> next() {
    if (asked == count) return std::nullopt;
    if (asked == fails_at) fail("no more blocks");
    block b;
    b.file = file;
    b.position = 100 * asked;
    b.bytes = 100;
    b.number = asked++;
    return b;
  }
  void use(block& b, std::span<const std::byte> bytes) const {
    for (std::size_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] != gated_file::value(b.position + i)) fail({"block ", b.number, " has other bytes"});
  }
  void used(block& b) {
    if (b.number == refused) fail({"block ", b.number, " is refused"});
    done.push_back(b.number);
  }
  bool has(std::size_t number) const { return std::find(done.begin(), done.end(), number) != done.end(); }

  std::shared_ptr<gated_file> file = std::make_shared<gated_file>();
  std::size_t count = 6, asked = 0, fails_at = SIZE_MAX, refused = SIZE_MAX;
  std::vector<std::size_t> done;
};

constexpr std::size_t every_read = 1000;

}  // namespace

TEST_CASE("every block is read and used once, by any number of threads, in memory for one block each") {
  for (const int threads : {1, 2, 5, 9}) {
    blocks source;
    source.count = 200;
    source.file->let(every_read);
    read_ahead<blocks> ahead(source, threads, 100);
    ahead.finish();
    std::sort(source.done.begin(), source.done.end());
    CHECK(source.done.size() == 200);
    CHECK(std::adjacent_find(source.done.begin(), source.done.end()) == source.done.end());
    CHECK(source.file->touched() <= 100 * static_cast<std::size_t>(threads));
    CHECK(ahead.memory() <= 4096 * static_cast<std::size_t>(threads));
    ahead.finish();  // all reads have finished
  }
}

TEST_CASE("a read waits for memory in use by another, and the caller for the block that it requests") {
  blocks source;
  read_ahead<blocks> ahead(source, 2, 100);
  source.file->await_begun(2);
  CHECK(source.file->begun() == 2);
  source.file->let(1);
  source.file->await_begun(3);  // the other file's memory is free again
  CHECK(source.file->begun() == 3);
  CHECK(ahead.wait([&] { return source.done.size() == 1; }));
  source.file->let(1);
  CHECK(ahead.wait([&] { return source.has(0) || source.has(1); }));
  source.file->let(every_read);
  CHECK(ahead.wait([&] { return source.has(4); }));
  ahead.finish();
  CHECK(source.done.size() == 6);
  CHECK(source.file->most_at_once() == 2);
}

TEST_CASE("an error in the background reaches the caller, reading stops, and all threads end") {
  for (const int threads : {1, 3}) {
    blocks reads, uses, names;
    reads.file->bad = {300};
    uses.refused = 3;
    names.fails_at = 3;
    for (blocks* const source : {&reads, &uses, &names}) {
      source->count = 100;
      source->file->let(every_read);
      read_ahead<blocks> ahead(*source, threads, 100);
      CHECK_FALSE(ahead.wait([&] { return source->has(3); }));
      const std::size_t asked = source->asked, done = source->done.size();
      if (threads == 1) CHECK(asked == (source == &names ? 3 : 4));
      CHECK_ERROR(ahead.finish(), source == &reads  ? "cannot read at 300"
                                  : source == &uses ? "block 3 is refused"
                                                    : "no more blocks");
      CHECK_FALSE(ahead.wait([] { return true; }));
      CHECK(source->asked == asked);
      CHECK(source->done.size() == done);
    }
  }
}

TEST_CASE("if several blocks fail, the error is that of the first") {
  blocks source;
  source.file->bad = {0, 100, 200};
  read_ahead<blocks> ahead(source, 3, 100);
  source.file->await_begun(3);
  source.file->let(every_read);
  CHECK_ERROR(ahead.finish(), "cannot read at 0");
  CHECK(source.file->begun() == 3);
}

TEST_CASE("a caller that stops waits only for reads that have started") {
  blocks source;
  source.count = 100;
  {
    read_ahead<blocks> ahead(source, 2, 100);
    source.file->let(5);
    source.file->await_begun(7);
    ahead.cancel();
    source.file->let(2);
  }
  CHECK(source.file->begun() == 7);
}

TEST_CASE("a block may have its own destination, and be larger than the memory for one") {
  struct to_place {
    using block = file_block;
    std::optional<block> next() {
      if (asked) return std::nullopt;
      asked = true;
      block b;
      b.file = file;
      b.bytes = place.size();
      b.into = place.data();
      return b;
    }
    void use(block& b, std::span<const std::byte> bytes) { there = bytes.data() == b.into; }
    void used(block&) {}
    std::shared_ptr<gated_file> file = std::make_shared<gated_file>();
    std::vector<std::byte> place = std::vector<std::byte>(10000);
    bool asked = false, there = false;
  } source;
  source.file->let(every_read);
  read_ahead<to_place> ahead(source, 2, 100);
  ahead.finish();
  CHECK(source.there);
  CHECK(source.place.back() == gated_file::value(9999));
}

TEST_CASE("no blocks to read, and results that are never requested") {
  blocks source;
  source.count = 0;
  read_ahead<blocks> ahead(source, 3, 100);
  ahead.finish();
  CHECK(ahead.wait([] { return false; }));
}

namespace {

/// A step made without a saver: tensors of any type in boxes, in several files, which may start inside a page.
struct hand_made_step {
  hand_made_step(file_system& f, std::string where, std::size_t file_count) : files(f), path(std::move(where)) {
    for (std::size_t i = 0; i < file_count; ++i) {
      saved.files.push_back({"w" + std::to_string(i), 0, 0, 0});
      data.emplace_back();
    }
  }
  /// Adds some bytes that belong to no tensor.
  void skip(std::size_t file, std::size_t bytes) { data[file].append(bytes, '\x5a'); }
  /// Adds a tensor whose `i`-th box, of a grid of `parts` boxes, is in file `file_of(i)`. Elements count up.
  void add(
      const std::string& name, dtype type, std::vector<std::int64_t> shape, std::vector<std::int64_t> parts,
      const std::function<std::size_t(std::int64_t)>& file_of = [](std::int64_t) { return 0; }) {
    stored_tensor& t = saved.tensors.emplace_back();
    t.name = name;
    t.dtype = safetensors_dtype_of(type);
    t.shape = shape;
    std::int64_t boxes = 1;
    for (const std::int64_t n : parts) boxes *= n;
    for (std::int64_t i = 0; i < boxes; ++i) {
      stored_box b;
      std::int64_t rest = i;
      for (std::size_t d = shape.size(); d-- > 0; rest /= parts[d]) {
        const std::int64_t k = rest % parts[d];
        b.offset[d] = shape[d] * k / parts[d];
        b.extent[d] = shape[d] * (k + 1) / parts[d] - b.offset[d];
      }
      const box where = t.box_of(b);
      if (where.local_size() == 0) continue;
      const std::string bytes = elements(where, type);
      b.stored.file = static_cast<std::uint32_t>(file_of(i));
      b.stored.crc32c = crc32c(std::as_bytes(std::span(bytes)));
      b.stored.position = data[b.stored.file].size();
      b.stored.bytes = bytes.size();
      data[b.stored.file] += bytes;
      t.boxes.push_back(b);
    }
  }
  void write() {
    files.make_directory(path);
    for (std::size_t i = 0; i < data.size(); ++i) {
      saved.files[i].bytes = data[i].size();
      files.create(path + "/" + saved.files[i].path)->write(0, std::as_bytes(std::span(data[i])));
    }
  }
  /// The elements of a box, row-major, of this type; each is a function of its index in the tensor.
  static std::string elements(const box& where, dtype type) {
    std::string out;
    for (std::int64_t i = 0; i < where.local_size(); ++i) {
      std::int64_t rest = i, place = 0, stride = 1;
      for (int d = where.dims; d-- > 0; rest /= where.local[d]) {
        place += (where.offset[d] + rest % where.local[d]) * stride;
        stride *= where.global[d];
      }
      const auto value = static_cast<float>(place % 251);  // exact in every type
      const double wide = value;
      const bf16 narrow = to_bf16(value);
      out.append(type == dtype::f64   ? reinterpret_cast<const char*>(&wide)
                 : type == dtype::f32 ? reinterpret_cast<const char*>(&value)
                                      : reinterpret_cast<const char*>(&narrow),
                 size_of(type));
    }
    return out;
  }

  file_system& files;
  std::string path;
  manifest saved;
  std::vector<std::string> data;
};

/// Reads boxes of a step and keeps the results.
struct wanted_list {
  void add(const stored_tensor& t, const box& where, dtype type) {
    memory.push_back(std::make_unique<std::string>(static_cast<std::size_t>(where.local_size()) * size_of(type), '#'));
    all.push_back({&t, where, reinterpret_cast<std::byte*>(memory.back()->data()), type, all.size()});
  }
  std::size_t wrong() const {
    std::size_t n = 0;
    for (std::size_t i = 0; i < all.size(); ++i)
      n += *memory[i] != hand_made_step::elements(all[i].wanted, *all[i].type) ? 1 : 0;
    return n;
  }
  std::vector<wanted_box> all;
  std::vector<std::unique_ptr<std::string>> memory;
};

box whole_of(const stored_tensor& t) {
  stored_box b;
  std::copy(t.shape.begin(), t.shape.end(), b.extent.begin());
  return t.box_of(b);
}
box random_box(const stored_tensor& t, std::mt19937& random) {
  box b = whole_of(t);
  for (int d = 0; d < b.dims; ++d) {
    b.offset[d] = static_cast<std::int64_t>(random()) % b.global[d];
    b.local[d] = 1 + static_cast<std::int64_t>(random()) % (b.global[d] - b.offset[d]);
  }
  return b;
}
constexpr dtype types[] = {dtype::f64, dtype::f32, dtype::bf16};

}  // namespace

TEST_CASE("all boxes of all tensors, of any type, reach their destinations, with any number of parallel reads") {
  std::mt19937 random(7);
  memory_file_system files;
  hand_made_step step(files, "step", 3);
  for (int i = 0; i < 40; ++i) {
    std::vector<std::int64_t> shape, parts;
    for (std::size_t d = 0, dims = random() % 4; d < dims; ++d) {
      shape.push_back(1 + static_cast<std::int64_t>(random() % 9));
      parts.push_back(1 + static_cast<std::int64_t>(random() % 3));
    }
    if (random() % 4 == 0) step.skip(random() % 3, random() % 70);
    step.add("t" + std::to_string(i), types[random() % 3], shape, parts, [&](std::int64_t) { return random() % 3; });
  }
  step.write();
  for (const std::size_t bytes : {64, 100, 700, 4096, 1 << 20}) {
    for (const int threads : {1, 2, 5}) {
      CAPTURE(bytes);
      CAPTURE(threads);
      wanted_list wanted;
      std::vector<std::size_t> parts;
      for (const stored_tensor& t : step.saved.tensors) {
        if (random() % 2 == 0) wanted.add(t, whole_of(t), types[random() % 3]);
        wanted.add(t, random_box(t, random), types[random() % 3]);
      }
      step_data reader(files, step.path, step.saved);
      reads_ahead ahead(step.saved, reader, wanted.all, {threads, bytes});
      for (std::size_t i = 0; i < wanted.all.size(); ++i) {
        CHECK(ahead.wait(i));
        CHECK(*wanted.memory[i] == hand_made_step::elements(wanted.all[i].wanted, *wanted.all[i].type));
      }
      ahead.finish();
      CHECK(wanted.wrong() == 0);
    }
  }
}

TEST_CASE("the parts of a box that is read in parts combine to its checksum") {
  memory_file_system files;
  hand_made_step step(files, "step", 1);
  step.skip(0, 13);
  step.add("t", dtype::f32, {40, 30}, {2, 1});
  step.write();
  for (const std::size_t bytes : {64, 333, 1 << 20}) {
    wanted_list wanted;
    for (std::int64_t part = 0; part < 3; ++part) {  // columns of both boxes
      box b = whole_of(step.saved.tensors[0]);
      b.offset[1] = 10 * part;
      b.local[1] = 10;
      wanted.add(step.saved.tensors[0], b, dtype::f32);
    }
    step_data reader(files, step.path, step.saved);
    reads_ahead ahead(step.saved, reader, wanted.all, {3, bytes});
    ahead.finish();
    CHECK(wanted.wrong() == 0);
    std::uint32_t sums[2] = {0, 0};
    std::uint64_t all[2] = {0, 0};
    const auto parts = ahead.take_partly_read();
    CHECK(parts.size() == 6);
    for (const auto& [owner, part] : parts) {
      CHECK(owner < 3);
      sums[part.box] ^= part.sum;
      all[part.box] += part.bytes;
    }
    for (std::size_t i = 0; i < 2; ++i) {
      CHECK(sums[i] == step.saved.tensors[0].boxes[i].stored.crc32c);
      CHECK(all[i] == step.saved.tensors[0].boxes[i].stored.bytes);
    }
  }
}

TEST_CASE("neighbouring boxes of a file are read at once, without distant bytes between them") {
  memory_file_system files;
  hand_made_step step(files, "step", 2);
  for (int i = 0; i < 100; ++i)
    step.add("t" + std::to_string(i), dtype::f32, {2, 25}, {2, 1}, [](std::int64_t b) { return b; });
  step.write();
  const auto read = [&](std::size_t every, std::size_t bytes) {
    wanted_list wanted;
    for (std::size_t i = 0; i < 100; i += every)
      wanted.add(step.saved.tensors[i], whole_of(step.saved.tensors[i]), dtype::f32);
    step_data reader(files, step.path, step.saved);
    const std::size_t before = files.operations();
    reads_ahead ahead(step.saved, reader, wanted.all, {2, bytes});
    ahead.finish();
    CHECK(wanted.wrong() == 0);
    return std::pair(files.operations() - before, reader.bytes());
  };
  CHECK(read(1, 1 << 20) == std::pair<std::size_t, std::uint64_t>(2 + 2, 20000));    // two files are opened
  CHECK(read(1, 1000) == std::pair<std::size_t, std::uint64_t>(2 + 20, 20000));      // ten boxes at once
  CHECK(read(2, 1 << 20) == std::pair<std::size_t, std::uint64_t>(2 + 100, 10000));  // one box is skipped after each
}

TEST_CASE("an error names damage or a truncated file, and nothing else is read then") {
  memory_file_system files;
  hand_made_step step(files, "step", 1);
  for (int i = 0; i < 50; ++i) step.add("t" + std::to_string(i), dtype::f32, {100}, {1});
  step.write();
  wanted_list wanted;
  for (const stored_tensor& t : step.saved.tensors) wanted.add(t, whole_of(t), dtype::f32);
  const auto read = [&](std::size_t bytes) {
    step_data reader(files, step.path, step.saved);
    reads_ahead ahead(step.saved, reader, wanted.all, {1, bytes});
    CHECK_FALSE(ahead.wait(49));
    CHECK_FALSE(ahead.wait(0));
    ahead.finish();
  };
  std::string& data = files.contents("step/w0");
  for (const std::size_t bytes : {64, 1000, 1 << 20}) {
    data[4399] ^= 1;
    CHECK_ERROR(read(bytes),
                "'step/w0' is damaged: tensor 't10' box [0:100], 400 bytes from 4000 on, has another checksum");
    data[4399] ^= 1;
    const std::string kept = data;
    data.resize(19999);
    CHECK_ERROR(read(bytes), "'step/w0' is truncated: it ends at byte 19999 and should have ");
    data = kept;
  }
}

namespace {

/// Records each read, and its destination.
struct noted_files final : posix_file_system {
  struct read_of {
    std::uint64_t position;
    std::size_t bytes;
    const std::byte* to;
  };
  class noted final : public detail::posix_file {
   public:
    noted(const std::string& path, noted_files& all) : posix_file(path, O_RDONLY, "open"), all_(all) {}

   private:
    std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
      {
        const std::lock_guard lock(all_.mutex);
        all_.reads.push_back({offset, bytes.size(), bytes.data()});
      }
      const ssize_t got = ::pread(descriptor(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      return got > 0 ? static_cast<std::size_t>(got) : 0;
    }
    noted_files& all_;
  };
  std::unique_ptr<plait::open_file> open(const std::string& path) override {
    return std::make_unique<noted>(path, *this);
  }
  std::mutex mutex;
  std::vector<read_of> reads;
};

}  // namespace

TEST_CASE("large blocks are page-aligned, in memory for one block a thread, for any number of reads") {
  temp_folder dir;
  noted_files files;
  hand_made_step step(files, dir / "step", 1);
  step.skip(0, 1234);
  for (int i = 0; i < 40; ++i)  // no size is a multiple of a page
    step.add("t" + std::to_string(i), i % 2 == 0 ? dtype::f32 : dtype::bf16, {131, 257}, {1, 1});
  step.write();
  wanted_list wanted;
  for (const stored_tensor& t : step.saved.tensors) wanted.add(t, whole_of(t), dtype::f32);
  constexpr std::size_t bytes = std::size_t{300} << 10, page = 4096;
  step_data reader(files, step.path, step.saved);
  reads_ahead ahead(step.saved, reader, wanted.all, {2, bytes});
  ahead.finish();
  CHECK(wanted.wrong() == 0);
  const std::byte *first = files.reads[0].to, *last = first;
  for (const auto& r : files.reads) {
    if (r.bytes > std::size_t{256} << 10) {
      CHECK(r.position % page == 0);
      CHECK(reinterpret_cast<std::uintptr_t>(r.to) % page == 0);
    }
    first = std::min(first, r.to);
    last = std::max(last, r.to + r.bytes);
  }
  CHECK(files.reads.size() <= step.data[0].size() / (bytes - page) + 1);
  CHECK(static_cast<std::size_t>(last - first) <= 2 * (bytes + 4 * page));
  CHECK(reader.bytes() <= step.data[0].size() + files.reads.size() * 2 * page);
}

TEST_CASE("a large box is read directly to its destination if both have the same offset in a page") {
  temp_folder dir;
  noted_files files;
  hand_made_step step(files, dir / "step", 1);
  step.skip(0, 100);
  step.add("small", dtype::f32, {10}, {1});
  step.add("large", dtype::f32, {600, 1000}, {1, 1});
  step.add("after", dtype::f32, {10}, {1});
  step.write();
  const stored_tensor& large = step.saved.tensors[1];
  constexpr std::size_t page = 4096, bytes = 2400000;
  byte_buffer memory(bytes + 2 * page);
  for (const std::size_t behind : {std::size_t{140}, std::size_t{144}}) {
    wanted_list wanted;
    wanted.add(step.saved.tensors[0], whole_of(step.saved.tensors[0]), dtype::f32);
    wanted.all.push_back({&large, whole_of(large), memory.data() + behind, dtype::f32, 1});
    wanted.memory.push_back(nullptr);
    wanted.add(step.saved.tensors[2], whole_of(step.saved.tensors[2]), dtype::f32);
    files.reads.clear();
    step_data reader(files, step.path, step.saved);
    reads_ahead ahead(step.saved, reader, wanted.all, {2, std::size_t{1} << 20});
    ahead.finish();
    const std::string expected = hand_made_step::elements(whole_of(large), dtype::f32);
    CHECK(std::memcmp(memory.data() + behind, expected.data(), bytes) == 0);
    CHECK(*wanted.memory[0] == hand_made_step::elements(wanted.all[0].wanted, dtype::f32));
    CHECK(*wanted.memory[2] == hand_made_step::elements(wanted.all[2].wanted, dtype::f32));
    std::size_t straight = 0;
    for (const auto& r : files.reads)
      if (r.to >= memory.data() && r.to < memory.data() + memory.size()) straight += r.bytes;
    CHECK(straight == (behind == 140 ? bytes : 0));
  }
}

TEST_CASE("invalid sizes are refused by name") {
  CHECK(fault_of({}, "threads", "bytes") == "");
  CHECK(fault_of({0, 4096}, "threads", "bytes") == "threads is 0; legal are 1 to 64");
  CHECK(fault_of({65, 4096}, "threads", "bytes") == "threads is 65; legal are 1 to 64");
  CHECK(fault_of({1, 63}, "threads", "bytes") == "bytes is 63; legal are 64 to 1073741824");
}
