// program: io
// Large writes that are under way while their caller does something else.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>

#include "plait/io/byte_buffer.hpp"
#include "plait/io/posix_file_system.hpp"
#include "support/temp_folder.hpp"

namespace {

/// Blocks of a file, as a save hands them over: whole pages, and at the end some bytes.
struct blocks {
  static constexpr std::size_t block = std::size_t{512} << 10, count = 9, tail = 1234, header = 4096;

  blocks() : bytes(block * count + tail) {
    std::mt19937 random(1);
    for (std::size_t i = 0; i < size(); ++i) bytes.data()[i] = static_cast<std::byte>(random());
  }
  static constexpr std::size_t size() { return block * count + tail; }
  void start(plait::open_file& file) {
    file.write(0, std::span<const std::byte>(bytes.data(), header));
    for (std::size_t at = 0; at < size(); at += block)
      file.start_write(header + at, std::span<const std::byte>(bytes.data() + at, std::min(block, size() - at)));
  }
  bool are_in(const std::string& path) {
    const std::string text = plait::read_whole(plait::machine_files(), path);
    return text.size() == header + size() && std::memcmp(text.data() + header, bytes.data(), size()) == 0;
  }
  plait::byte_buffer bytes;
};

}  // namespace

TEST_CASE("all bytes of started writes are there after a sync, and after the end of a file without one") {
  temp_folder dir;
  blocks all;
  for (const bool synced : {true, false}) {
    const std::string path = dir / (synced ? "synced" : "closed");
    {
      const auto file = plait::machine_files().create(path);
      all.start(*file);
      if (synced) file->sync();
    }
    CHECK(all.are_in(path));
  }
}

TEST_CASE("a started write that fails is told by a later call, by name, and no sync follows it") {
  temp_folder dir;
  blocks all;
  struct rlimit before {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  for (const std::size_t fits : {std::size_t{0}, blocks::count / 2, blocks::count - 1}) {
    struct rlimit small = before;
    small.rlim_cur = blocks::header + fits * blocks::block;
    const std::string path = dir / std::to_string(fits);
    const auto file = plait::machine_files().create(path);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::string text = error_of([&] { all.start(*file); });
    const std::string synced = error_of([&] { file->sync(); }), again = error_of([&] { file->sync(); });
    ::setrlimit(RLIMIT_FSIZE, &before);
    if (text.empty()) text = synced;
    CHECK(text == "cannot write '" + path + "': File too large");
    CHECK(synced == text);
    CHECK(again.find("failed before") != again.npos);
  }
  std::signal(SIGXFSZ, old);
}
