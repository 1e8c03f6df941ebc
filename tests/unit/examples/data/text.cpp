// program: files
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "plait/io/atomic_file.hpp"
#include "support/temp_folder.hpp"
#include "train_llama/data/tokens.hpp"

TEST_CASE("unigram entropy in nats") {
  using counts = std::vector<double>;
  CHECK(plait::entropy(counts{}) == 0);
  CHECK(plait::entropy(counts{4, 0}) == 0);
  CHECK(plait::entropy(counts{2, 2}) == doctest::Approx(std::log(2.0)));
  CHECK(plait::entropy(counts{3, 1}) == doctest::Approx(-0.75 * std::log(0.75) - 0.25 * std::log(0.25)));
  CHECK(plait::entropy(counts(256, 1.0)) == doctest::Approx(std::log(256.0)));

  temp_folder dir;
  const plait::token_source source(
      {.paths = {dir.write("a", std::string(30000, 'x')), dir.write("b", std::string(10000, 'y'))}});
  const counts of_source = plait::token_counts(source);
  CHECK(of_source['x'] == 30000);
  CHECK(plait::entropy(of_source) == doctest::Approx(plait::entropy(counts{3, 1})));
}

TEST_CASE("printing never sends control characters") {
  using plait::printable;
  CHECK(printable("plain\ttext\n") == "plain\ttext\n");
  CHECK(printable("\x1b[31m\r\a\x7f") == "\\x1b[31m\\x0d\\x07\\x7f");
  CHECK(printable(std::string_view("\0", 1)) == "\\x00");
  CHECK(printable("\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80") == "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(printable("\xc2\x9b") == "\\xc2\\x9b");                    // U+009B, a control sequence introducer
  CHECK(printable("\xc3") == "\\xc3");                             // cut off
  CHECK(printable("\xc0\xaf") == "\\xc0\\xaf");                    // overlong
  CHECK(printable("\xe0\x9f\xbf") == "\\xe0\\x9f\\xbf");           // overlong
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // surrogate
  CHECK(printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  CHECK(printable("a\x80z") == "a\\x80z");

  const std::vector<std::int64_t> tokens{'h', 'i', 300, 0xc3, 0xa9, -1, 27};
  CHECK(plait::decode_bytes(tokens) == "hi<300>\xc3\xa9<-1>\\x1b");
  CHECK(plait::encode_bytes("a\xff") == std::vector<std::int64_t>{'a', 255});
}

TEST_CASE("a file is replaced whole or not at all") {
  temp_folder dir;
  const std::string path = dir.write("out", "old");
  std::string beside;
  {
    plait::atomic_file abandoned(path, "--log");
    abandoned.write("half");
    CHECK(dir.entries() == 2);
    for (const auto& entry : std::filesystem::directory_iterator(dir / "."))
      if (entry.path().filename() != "out") beside = entry.path().filename();
  }
  CHECK(dir.read("out") == "old");
  CHECK(dir.entries() == 1);
  plait::write_file_atomically(path, "new", "--log");
  CHECK(dir.read("out") == "new");
  CHECK(dir.entries() == 1);

  // A killed process with the same id has left files of the next two names.
  const std::size_t count = beside.rfind('-') + 1;
  for (const int later : {2, 3})
    dir.write(beside.substr(0, count) + std::to_string(std::stoi(beside.substr(count)) + later), "left");
  plait::write_file_atomically(path, "newer", "--log");
  CHECK(dir.read("out") == "newer");
  CHECK(dir.entries() == 3);

  std::filesystem::create_symlink("out", dir / "link");
  plait::write_file_atomically(dir / "link", "through", "--log");
  CHECK(std::filesystem::is_symlink(dir / "link"));
  CHECK(dir.read("out") == "through");

  plait::write_file_atomically("/dev/null", "gone", "--log");
  CHECK(std::filesystem::is_character_file("/dev/null"));
  CHECK_ERROR(plait::write_file_atomically(dir / "absent/out", "", "--log"), "--log", "absent/out", "No such file");
  CHECK_ERROR(plait::write_file_atomically(dir / "", "", "--log"), "--log", "folder");
  CHECK_ERROR(plait::write_file_atomically("", "", "--log"), "--log", "empty");
  CHECK_ERROR(plait::write_file_atomically("/dev/full", "x", "--log"), "--log", "/dev/full", "No space left");
  CHECK(plait::read_file(path, "--x") == "through");
}
