// program: io

#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "plait/io/byte_buffer.hpp"
#include "plait/io/posix_file_system.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::detail::ring_file;

/// The behaviour of the next rings: the result of the n-th write, and which write in flight ends first.
struct script {
  /// The result of a write by its index: bytes written, or a negative error; others write all bytes.
  std::map<std::size_t, std::int64_t> ends;
  bool newest_first = false, cannot_begin = false, breaks = false;
  std::size_t begun = 0, at_once = 0;
} plan;

class scripted_ring final : public plait::write_ring {
 public:
  void submit(int descriptor, std::uint64_t offset, std::span<const std::byte> bytes, std::size_t tag) override {
    if (plan.cannot_begin) plait::fail("the ring takes no write");
    in_flight_.push_back({descriptor, offset, bytes, tag, plan.begun++});
    plan.at_once = std::max(plan.at_once, in_flight_.size());
  }
  ended wait() override {
    if (plan.breaks) plait::fail("the ring broke");
    const one w = plan.newest_first ? in_flight_.back() : in_flight_.front();
    plan.newest_first ? in_flight_.pop_back() : in_flight_.pop_front();
    const auto end = plan.ends.find(w.number);
    const std::int64_t result = end == plan.ends.end() ? static_cast<std::int64_t>(w.bytes.size()) : end->second;
    if (result > 0) {
      const ssize_t written =
          ::pwrite(w.descriptor, w.bytes.data(), static_cast<std::size_t>(result), static_cast<off_t>(w.offset));
      CHECK(written == result);
    }
    return {w.tag, result};
  }

 private:
  struct one {
    int descriptor;
    std::uint64_t offset;
    std::span<const std::byte> bytes;
    std::size_t tag, number;
  };
  std::deque<one> in_flight_;
};

std::unique_ptr<plait::write_ring> make_scripted(unsigned) { return std::make_unique<scripted_ring>(); }
#ifdef PLAIT_WITH_LIBURING
std::unique_ptr<plait::write_ring> make_none(unsigned) { plait::fail("io_uring cannot be set up: not permitted"); }
#endif

/// Blocks of a file, as a save passes them: whole pages, and some bytes at the end.
struct blocks {
  static constexpr std::size_t block = std::size_t{512} << 10, count = 9, tail = 1234, header = 4096;

  blocks() : bytes(block * count + tail) {
    std::mt19937 random(1);
    for (std::size_t i = 0; i < size(); ++i) bytes.data()[i] = static_cast<std::byte>(random());
  }
  static constexpr std::size_t size() { return block * count + tail; }
  void write(plait::open_file& file) {
    file.write(0, std::span<const std::byte>(bytes.data(), header));
    for (std::size_t at = 0; at < size(); at += block)
      file.start_write(header + at, std::span<const std::byte>(bytes.data() + at, std::min(block, size() - at)));
    file.sync();
  }
  bool are_in(const std::string& path) {
    plait::posix_file_system files;
    const std::string text = plait::read_whole(files, path);
    return text.size() == header + size() && std::memcmp(text.data() + header, bytes.data(), size()) == 0;
  }
  plait::byte_buffer bytes;
};

ring_file new_file(const std::string& path) { return {path, O_RDWR | O_CREAT | O_EXCL, "create", make_scripted}; }

}  // namespace

TEST_CASE("several writes of a ring, ended in any order, short or interrupted, write all bytes") {
  temp_folder dir;
  blocks all;
  int n = 0;
  const auto half = static_cast<std::int64_t>(blocks::block / 2);
  for (const bool newest_first : {false, true}) {
    for (const std::map<std::size_t, std::int64_t>& ends : {std::map<std::size_t, std::int64_t>{},
                                                            {{0, half}, {5, 4096}, {8, half}},
                                                            {{2, -EINTR}, {3, -EAGAIN}},
                                                            {{1, -EINVAL}},
                                                            {{4, 4096}, {5, -EINTR}, {6, -EINVAL}}}) {
      plan = {.ends = ends, .newest_first = newest_first};
      const std::string path = dir / std::to_string(n++);
      {
        ring_file file = new_file(path);
        all.write(file);
        CHECK(file.size() == blocks::header + blocks::size());
      }
      CHECK(all.are_in(path));
      CHECK(plan.begun >= blocks::count);
      CHECK(plan.at_once == ring_file::most);
    }
  }
}

TEST_CASE("a later call reports a failed write of a ring by name, and no sync follows") {
  temp_folder dir;
  blocks all;
  int n = 0;
  for (const int error : {EIO, ENOSPC, EFBIG}) {
    for (std::size_t at = 0; at < blocks::count; ++at) {
      plan = {.ends = {{at, -error}}};
      const std::string path = dir / std::to_string(n++);
      ring_file file = new_file(path);
      CHECK_ERROR(all.write(file), "cannot write '" + path + "': " + std::strerror(error));
      CHECK_ERROR(file.finish_writes(), "cannot write '" + path + "': " + std::strerror(error));
      if (at + 1 == blocks::count) CHECK_ERROR(file.sync(), "cannot sync '" + path + "'", "failed before");
    }
  }
  // A write of no bytes, a ring that accepts no write, and one that fails.
  plan = {.ends = {{3, 0}}};
  {
    ring_file file = new_file(dir / "none");
    all.write(file);  // another call writes the rest
  }
  CHECK(all.are_in(dir / "none"));
  plan = {.ends = {}, .cannot_begin = true};
  ring_file refuses = new_file(dir / "refuses");
  CHECK_ERROR(all.write(refuses), "the ring takes no write");
  plan = {.ends = {}, .breaks = true};
  ring_file broken = new_file(dir / "broken");
  CHECK_ERROR(all.write(broken), "the ring broke");
  CHECK_ERROR(broken.start_write(0, std::span<const std::byte>(all.bytes.data(), 5)),
              "the ring of its writes is broken");
}

TEST_CASE("memory is read until all writes have ended, however the file is closed") {
  temp_folder dir;
  plan = {};
  blocks all;
  {
    ring_file file = new_file(dir / "a");
    file.start_write(0, std::span<const std::byte>(all.bytes.data(), blocks::block));
    CHECK(plan.begun == 1);
    CHECK(file.size() == 0);
  }
  plait::posix_file_system files;
  CHECK(files.open(dir / "a")->size() == blocks::block);
}

TEST_CASE("io_uring writes the same where it exists, and is refused by name elsewhere") {
  temp_folder dir;
  blocks all;
  CHECK(plait::choose_files(plait::file_io::threads).io == plait::file_io::threads);
  const plait::chosen_files chosen = plait::choose_files(plait::file_io::automatic);
  CHECK((chosen.io == plait::file_io::uring) == chosen.why.empty());
  if (!chosen.why.empty())
    CHECK_ERROR(plait::choose_files(plait::file_io::uring, "--checkpoint-io"), "--checkpoint-io uring: ", chosen.why,
                "legal here are --checkpoint-io auto and threads");
  int n = 0;
  for (plait::file_system* files : {chosen.files, &plait::machine_files()}) {
    const std::string path = dir / std::to_string(n++);
    {
      const auto file = files->create(path);
      all.write(*file);
    }
    CHECK(all.are_in(path));
  }
#ifdef PLAIT_WITH_LIBURING
  CHECK_ERROR(plait::uring_file_system{make_none}, "io_uring cannot be set up: not permitted");
  // The system refuses a ring that is too large.
  if (chosen.io == plait::file_io::uring) CHECK_ERROR(plait::detail::uring(1U << 31), "io_uring cannot be set up: ");
#else
  CHECK(chosen.why == "this program was built without liburing");
#endif
}
