// program: io
#include "plait/io/file_system.hpp"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>

#include "plait/io/posix_file_system.hpp"
#include "support/temp_folder.hpp"

namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

/// A file that writes and reads three bytes at a time, stops accepting bytes at byte 20, and whose first sync fails.
class small_steps final : public plait::open_file {
 public:
  small_steps() : open_file("small") {}
  std::uint64_t size() const override { return text.size(); }
  std::string text;
  int syncs = 0;

 private:
  std::size_t write_some(std::uint64_t offset, std::span<const std::byte> some) override {
    const std::size_t n = offset >= 20 ? 0 : std::min<std::size_t>(some.size(), 3);
    text.resize(std::max<std::size_t>(text.size(), offset + n));
    std::memcpy(text.data() + offset, some.data(), n);
    return n;
  }
  std::size_t read_some(std::uint64_t offset, std::span<std::byte> some) const override {
    const std::size_t n = std::min<std::size_t>({some.size(), 3, text.size() - offset});
    std::memcpy(some.data(), text.data() + offset, n);
    return n;
  }
  void sync_once() override {
    if (syncs++ == 0) plait::fail_file("sync", path(), EIO);
  }
};

}  // namespace

TEST_CASE("short writes and reads are completed, the end of a file is an error, a failed sync is final") {
  small_steps file;
  file.write(0, bytes_of("abcdefghijk"));
  CHECK(file.text == "abcdefghijk");
  std::string back(7, ' ');
  file.read(2, std::as_writable_bytes(std::span(back)));
  CHECK(back == "cdefghi");
  CHECK_ERROR(file.read(6, std::as_writable_bytes(std::span(back))), "'small' is truncated", "byte 11", "have 13");
  CHECK_ERROR(file.write(18, bytes_of("abcdef")), "cannot write 'small'", "none of 3 bytes");
  CHECK_ERROR(file.sync(), "cannot sync 'small': Input/output error");
  CHECK_ERROR(file.sync(), "cannot sync 'small'", "failed before");
  CHECK(file.syncs == 1);
}

TEST_CASE("the functions of the system's files") {
  temp_folder dir;
  plait::posix_file_system files;
  {
    const auto file = files.create(dir / "a");
    file->write(3, bytes_of("xyz"));
    file->write(0, bytes_of("uvw"));
    file->sync();
    CHECK(file->size() == 6);
    CHECK(file->descriptor() >= 0);
    CHECK(file->path() == dir / "a");
  }
  CHECK(plait::read_whole(files, dir / "a") == "uvwxyz");
  CHECK_ERROR(plait::read_whole(files, dir / "a", 5), "/a' has 6 bytes, too many for a text of this kind", "up to 5");
  CHECK_ERROR(files.create(dir / "a"), "cannot create '" + (dir / "a") + "': File exists");
  CHECK_ERROR(files.open(dir / "none"), "cannot open '", "none': No such file");
  CHECK_ERROR(files.open(dir / "a")->write(0, bytes_of("x")), "cannot write '", "Bad file descriptor");
  files.make_directory(dir / "d");
  CHECK_ERROR(files.make_directory(dir / "d"), "cannot make the directory '", "exists");
  CHECK_ERROR(files.open(dir / "d"), "d': it is a folder");
  CHECK(::mkfifo((dir / "pipe").c_str(), 0600) == 0);
  CHECK_ERROR(files.open(dir / "pipe"), "pipe': it is not a regular file");
  CHECK(::symlink("a", (dir / "link").c_str()) == 0);
  CHECK(files.list(dir / "") == std::vector<plait::directory_entry>{{"a", plait::file_kind::regular},
                                                                    {"d", plait::file_kind::directory},
                                                                    {"link", plait::file_kind::other},
                                                                    {"pipe", plait::file_kind::other}});
  CHECK(files.kind_of(dir / "link") == plait::file_kind::regular);
  CHECK(files.kind_of(dir / "d") == plait::file_kind::directory);
  CHECK_FALSE(files.kind_of(dir / "none"));
  CHECK_FALSE(files.kind_of(dir / "a/below"));
  files.rename(dir / "a", dir / "d/b");
  CHECK_ERROR(files.rename(dir / "a", dir / "c"), "cannot rename '", "a' to '", "c': No such file");
  CHECK_ERROR(files.remove_directory(dir / "d"), "cannot remove the directory '", "not empty");
  CHECK_ERROR(files.remove_file(dir / "a"), "cannot remove '", "No such file");
  CHECK_ERROR(files.list(dir / "none"), "cannot list '", "No such file");
  files.sync_directory(dir / "d");
  CHECK_ERROR(files.sync_directory(dir / "none"), "cannot sync the directory '", "No such file");
  plait::write_whole(files, dir / "d", "c", "text");
  plait::write_whole(files, dir / "d", "c", "other text");
  CHECK(plait::read_whole(files, dir / "d/c") == "other text");
  CHECK(files.list(dir / "d").size() == 2);
  CHECK(::symlink("..", (dir / "d/up").c_str()) == 0);
  plait::remove_all(files, dir / "d", plait::file_kind::directory);
  CHECK_FALSE(files.kind_of(dir / "d"));
  CHECK(dir.entries() == 2);
}

TEST_CASE("a directory has one writer at a time") {
  temp_folder dir;
  plait::posix_file_system files, others;
  auto lock = files.lock_directory(dir / "");
  CHECK_ERROR(others.lock_directory(dir / ""), "cannot lock '", "another writer, process " + std::to_string(::getpid()),
              "its own directory");
  lock.reset();
  others.lock_directory(dir / "");
  CHECK_ERROR(files.lock_directory(dir / "none"), "cannot lock '", "No such file");
}

TEST_CASE("few of many files are open at once") {
  temp_folder dir;
  plait::posix_file_system files;
  std::vector<std::string> paths;
  for (int i = 0; i < 300; ++i) paths.push_back(dir.write(std::to_string(i), std::string(1, static_cast<char>(i))));
  struct rlimit before {};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  struct rlimit few = before;
  few.rlim_cur = 200;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  bool equal = true;
  {
    plait::open_files all(files, paths);
    for (const int step : {1, 7}) {
      for (int i = 0; i < 300; ++i) {
        const int at = i * step % 300;
        std::byte one{};
        all.at(static_cast<std::size_t>(at)).read(0, std::span(&one, 1));
        equal = equal && one == static_cast<std::byte>(at);
      }
    }
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  CHECK(equal);
}

TEST_CASE("a limit on the size of files gives an error text") {
  temp_folder dir;
  plait::posix_file_system files;
  struct rlimit before {};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  struct rlimit small = before;
  small.rlim_cur = 1000;
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  const auto file = files.create(dir / "a");
  const std::string text = error_of([&] { file->write(0, bytes_of(std::string(2000, 'x'))); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old);
  CHECK(text == "cannot write '" + (dir / "a") + "': File too large");
  CHECK(file->size() == 1000);
}
