#include <doctest/doctest.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "plait/checkpoint/step_data.hpp"
#include "support/temp_folder.hpp"

using namespace plait;

namespace {

/// A file whose bytes are what their place says, and whose reads wait at a gate: `let(n)` lets n more of them end.
/// Reads that begin at a place in `bad` fail.
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
  /// Waits until so many reads have begun.
  void await_begun(std::size_t n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return begun_ >= n; });
  }
  std::size_t begun() const {
    const std::lock_guard lock(mutex_);
    return begun_;
  }
  std::size_t most_at_once() const { return most_; }
  /// Bytes of memory that have been read to.
  std::size_t touched() const { return touched_.size(); }
  static std::byte value(std::uint64_t at) { return static_cast<std::byte>(at * 7 + at / 256); }
  std::uint64_t size() const override { return 1 << 20; }

  std::set<std::uint64_t> bad;

 private:
  std::size_t write_some(std::uint64_t, std::span<const std::byte>) override { fail("nobody writes"); }
  std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
    std::unique_lock lock(mutex_);
    ++begun_;
    most_ = std::max(most_, ++under_way_);
    changed_.notify_all();
    changed_.wait(lock, [&] { return may_end_ > 0; });
    --may_end_;
    --under_way_;
    for (std::byte& b : bytes) touched_.insert(&b);
    if (bad.count(offset) != 0) fail({"cannot read at ", offset});
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(offset + i);
    return bytes.size();
  }
  void sync_once() override {}

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  mutable std::size_t begun_ = 0, may_end_ = 0, under_way_ = 0, most_ = 0;
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

constexpr std::size_t all = 1000;

}  // namespace

TEST_CASE("every block is read and used once, by however many threads, in memory for one block each") {
  for (const int threads : {1, 2, 5, 9}) {
    blocks source;
    source.count = 200;
    source.file->let(all);
    read_ahead<blocks> ahead(source, threads, 100);
    ahead.finish();
    std::sort(source.done.begin(), source.done.end());
    CHECK(source.done.size() == 200);
    CHECK(std::adjacent_find(source.done.begin(), source.done.end()) == source.done.end());
    CHECK(source.file->touched() <= 100 * static_cast<std::size_t>(threads));
    CHECK(ahead.memory() <= 4096 * static_cast<std::size_t>(threads));
    ahead.finish();  // there is nothing more to wait for
  }
}

TEST_CASE("a read waits for memory that another still has, and the caller for the block that it asks for") {
  blocks source;
  read_ahead<blocks> ahead(source, 2, 100);
  source.file->await_begun(2);
  CHECK(source.file->begun() == 2);
  source.file->let(1);
  source.file->await_begun(3);  // the other's memory is free
  CHECK(source.file->begun() == 3);
  CHECK(ahead.wait([&] { return source.done.size() == 1; }));
  source.file->let(1);
  CHECK(ahead.wait([&] { return source.has(0) || source.has(1); }));
  source.file->let(all);
  CHECK(ahead.wait([&] { return source.has(4); }));
  ahead.finish();
  CHECK(source.done.size() == 6);
  CHECK(source.file->most_at_once() == 2);
}

TEST_CASE("whatever fails in the background, the caller is told, nothing more is read, and no thread is at work") {
  for (const int threads : {1, 3}) {
    blocks reads, uses, names;
    reads.file->bad = {300};
    uses.refused = 3;
    names.fails_at = 3;
    for (blocks* const source : {&reads, &uses, &names}) {
      source->count = 100;
      source->file->let(all);
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

TEST_CASE("of several blocks that fail, the first is told") {
  blocks source;
  source.file->bad = {0, 100, 200};
  read_ahead<blocks> ahead(source, 3, 100);
  source.file->await_begun(3);
  source.file->let(all);
  CHECK_ERROR(ahead.finish(), "cannot read at 0");
  CHECK(source.file->begun() == 3);
}

TEST_CASE("whoever gives up waits for what is being read, and for no more") {
  blocks source;
  source.count = 100;
  {
    read_ahead<blocks> ahead(source, 2, 100);
    source.file->let(5);
    source.file->await_begun(7);
    ahead.give_up();
    source.file->let(2);
  }
  CHECK(source.file->begun() == 7);
}

TEST_CASE("a block may say where it goes, and be larger than the memory for one") {
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
  source.file->let(all);
  read_ahead<to_place> ahead(source, 2, 100);
  ahead.finish();
  CHECK(source.there);
  CHECK(source.place.back() == gated_file::value(9999));
}

TEST_CASE("nothing to read, and nobody who waits") {
  blocks source;
  source.count = 0;
  read_ahead<blocks> ahead(source, 3, 100);
  ahead.finish();
  CHECK(ahead.wait([] { return false; }));
}
