// program: files
#include "train_llama/data/tokens.hpp"

#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "plait/io/atomic_file.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::token_format;
using plait::token_source;

template <class T>
void append(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

template <class T>
std::string raw(const std::vector<T>& values) {
  std::string out;
  for (T v : values) append(out, v);
  return out;
}

/// A Megatron index over sequences of these lengths; each sequence is a document.
std::string index_of(const std::vector<std::int32_t>& lengths, std::uint8_t code, std::int64_t item) {
  std::string out("MMIDIDX\0\0", 9);
  append<std::uint64_t>(out, 1);
  append<std::uint8_t>(out, code);
  append<std::uint64_t>(out, lengths.size());
  append<std::uint64_t>(out, lengths.size() + 1);
  out += raw(lengths);
  std::int64_t offset = 0;
  for (std::int32_t n : lengths) {
    append<std::int64_t>(out, offset);
    offset += n * item;
  }
  for (std::size_t d = 0; d <= lengths.size(); ++d) append<std::int64_t>(out, static_cast<std::int64_t>(d));
  return out;
}

std::vector<std::int64_t> all(const token_source& source) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(source.size()));
  source.read(0, source.size(), out.data());
  return out;
}

token_source open(std::vector<std::string> paths, token_format format = token_format::automatic,
                  std::int64_t vocab = 256) {
  return token_source({.paths = std::move(paths), .format = format, .vocab = vocab});
}

using tokens = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("bytes: several files are one stream, readable across their border") {
  temp_folder dir;
  const auto source = open({dir.write("a.txt", "abc"), dir.write("b", "\xff"), dir.write("c.md", "de")});
  CHECK(source.format() == token_format::bytes);
  CHECK(source.size() == 6);
  CHECK(all(source) == tokens{'a', 'b', 'c', 255, 'd', 'e'});
  tokens part(3);
  source.read(2, 3, part.data());
  CHECK(part == tokens{'c', 255, 'd'});
  source.read(6, 0, part.data());
  const token_source copy = source;
  CHECK(all(copy) == all(source));
  CHECK_ERROR(source.read(5, 2, part.data()), "--data", "[5, 5 + 2)", "has 6");
  CHECK_ERROR(source.read(-1, 2, part.data()), "--data");
  CHECK_ERROR(source.read(0, INT64_MAX, part.data()), "--data");
}

TEST_CASE("nanogpt: flat uint16") {
  temp_folder dir;
  const auto path = dir.write("train.bin", raw<std::uint16_t>({0, 1, 50256, 65535}));
  const auto source = open({path}, token_format::automatic, 65536);
  CHECK(source.format() == token_format::nanogpt);
  CHECK(all(source) == tokens{0, 1, 50256, 65535});
  CHECK(all(open({path}, token_format::bytes)).size() == 8);

  const auto small = open({path}, token_format::nanogpt, 50257);
  CHECK_ERROR(plait::token_counts(small), "--data", "train.bin", "token 65535", "position 3", "--model", "50257");
  CHECK_ERROR(open({dir.write("odd.bin", "abc")}), "--data", "odd.bin", "3 bytes");
  CHECK_ERROR(open({dir.write("c.bin", raw<std::int32_t>({20240520, 1, 2}))}), "llm.c, for tokens of 16 bits");
  CHECK_ERROR(open({dir.write("c.bin", raw<std::int32_t>({20240801, 7, 2}))}), "llm.c, for tokens of 32 bits");
}

TEST_CASE("megatron: every integer type, by index, by tokens, by common prefix") {
  temp_folder dir;
  const auto check = [&](auto zero, std::uint8_t code) {
    using T = decltype(zero);
    dir.write("set.bin", raw<T>({1, 2, 3, 4, 100}));
    dir.write("set.idx", index_of({2, 0, 3}, code, sizeof(T)));
    for (const char* name : {"set", "set.bin", "set.idx"}) {
      const auto source = open({dir / name});
      CHECK(source.format() == token_format::megatron);
      CHECK(all(source) == tokens{1, 2, 3, 4, 100});
    }
  };
  check(std::uint8_t{}, 1);
  check(std::int8_t{}, 2);
  check(std::int16_t{}, 3);
  check(std::int32_t{}, 4);
  check(std::int64_t{}, 5);
  check(std::uint16_t{}, 8);
  CHECK(open({dir / "set.bin"}, token_format::nanogpt).size() == 5);  // the option overrides the .idx

  dir.write("modes.bin", "abc");
  dir.write("modes.idx", index_of({1, 2}, 1, 1) + std::string(2, '\0'));
  CHECK(open({dir / "modes"}).size() == 3);
  dir.write("neg.bin", raw<std::int32_t>({5, -3}));
  dir.write("neg.idx", index_of({2}, 4, 4));
  CHECK_ERROR(plait::token_counts(open({dir / "neg"})), "token -3", "position 1");
}

TEST_CASE("megatron: errors name what is malformed") {
  temp_folder dir;
  const std::string good = index_of({2, 3}, 8, 2);
  dir.write("x.bin", raw<std::uint16_t>({1, 2, 3, 4, 5}));
  const std::string path = dir / "x";
  const auto word = [](std::uint64_t v) { return raw<std::uint64_t>({v}); };

  dir.write("x.idx", good);
  CHECK(open({path}).size() == 5);
  const struct {
    std::size_t at;
    std::string bytes;
    std::vector<std::string> parts;
  } cases[] = {{0, "NOT", {"--data", "x.idx", "MMIDIDX"}},
               {9, word(2), {"version 2"}},
               {17, "\x07", {"floating-point", "code 7"}},
               {17, "\x09", {"dtype code 9"}},
               {18, word(~0ull), {"truncated", "sequence lengths"}},
               {26, word(1ull << 61), {"truncated", "document starts"}},
               {26, word(2), {"8 bytes after"}},
               {34, raw<std::int32_t>({-2}), {"sequence 0", "length -2"}},
               {50, word(6), {"sequence 1", "byte 6", "ends at 4"}},
               {58, word(3), {"document 0", "sequence 3"}}};
  for (const auto& c : cases) {
    std::string index = good;
    dir.write("x.idx", index.replace(c.at, c.bytes.size(), c.bytes));
    for (const std::string& part : c.parts) CHECK_ERROR(open({path}), part);
  }
  for (std::size_t n = 0; n < good.size(); ++n) {
    dir.write("x.idx", good.substr(0, n));
    CHECK_THROWS_AS(open({path}), plait::error);
  }

  dir.write("x.idx", good);
  dir.write("x.bin", raw<std::uint16_t>({1, 2, 3, 4}));
  CHECK_ERROR(open({path}), "x.bin", "truncated", "byte 10", "has 8");
  dir.write("x.bin", raw<std::uint16_t>({1, 2, 3, 4, 5, 6}));
  CHECK_ERROR(open({path}), "x.bin", "12 bytes", "describes 10");
  CHECK_ERROR(open({dir / "absent.idx"}), "--data", "absent.idx", "No such file");
}

TEST_CASE("text: a tokenizer makes the tokens of each file") {
  temp_folder dir;
  const auto words = [](std::string_view text) {
    if (text == "bad") plait::fail("no words");
    std::vector<std::int64_t> lengths;
    for (std::size_t at = 0; at < text.size(); at = text.find(' ', at) + 1) {
      lengths.push_back(static_cast<std::int64_t>(std::min(text.find(' ', at), text.size()) - at));
      if (text.find(' ', at) == text.npos) break;
    }
    return lengths;
  };
  const std::vector<std::string> paths{dir.write("a.txt", "two words"), dir.write("b", "and  blanks")};
  const token_source source({.paths = paths}, words);
  CHECK(source.format() == token_format::text);
  CHECK(all(source) == tokens{3, 5, 3, 0, 6});
  CHECK(all(token_source({.paths = paths, .format = token_format::bytes}, words)).size() == 20);
  CHECK(token_source({.paths = {dir.write("c.bin", "ab")}, .vocab = 65536}, words).format() == token_format::nanogpt);
  CHECK_ERROR(token_source({.paths = {dir.write("d", "bad")}}, words), "--data: '", "d': no words");
  CHECK_ERROR(token_source({.paths = {dir.write("e", "")}}, words), "--data", "is empty");
  CHECK_ERROR(plait::token_counts(token_source({.paths = paths, .vocab = 6}, words)), "'/", "token 6 at position 2");
  CHECK_ERROR(open(paths, token_format::text), "--data-format text needs a tokenizer, which makes tokens of it");
}

TEST_CASE("files without data are refused by name") {
  temp_folder dir;
  CHECK_ERROR(open({}), "--data", "no file");
  CHECK_ERROR(open({dir / "absent.txt"}), "--data", "absent.txt", "No such file");
  CHECK_ERROR(open({dir.write("empty.txt", "")}), "--data", "empty.txt", "is empty");
  CHECK_ERROR(open({dir.write("empty.bin", "")}), "--data", "empty.bin", "is empty");
  CHECK_ERROR(open({dir / ""}), "--data", "folder");
  CHECK_ERROR(open({"/dev/zero"}), "--data", "not a regular file");
  CHECK_ERROR(open({dir.write("t.txt", "ab"), dir.write("t.bin", "ab")}), "t.txt", "bytes", "t.bin", "nanogpt");
  CHECK_ERROR(open({dir / "t.txt"}, token_format::automatic, 0), "--model", "vocabulary");
  CHECK_ERROR(plait::token_counts(open({dir / "t.txt"}, token_format::automatic, 98)), "token 98", "98 tokens");
  CHECK_ERROR(token_source({.paths = {"nowhere"}, .flag = "data.train"}), "data.train: ");

  CHECK(plait::token_format_from("nanogpt") == token_format::nanogpt);
  CHECK(plait::token_format_from("auto") == token_format::automatic);
  CHECK_ERROR(plait::token_format_from("json"), "--data-format", "'json'", "auto, bytes, text, megatron, nanogpt");
}

TEST_CASE("content that does not fit a file's name is refused, unless the format is given") {
  temp_folder dir;
  const auto refused = [&](const char* name, const std::string& text, auto... parts) {
    const std::string path = dir.write(name, text);
    CHECK_ERROR(open({path}), "--data", name, parts...);
    const auto meant = std::string(name).ends_with(".bin") ? token_format::nanogpt : token_format::bytes;
    CHECK(open({path}, meant).format() == meant);
  };
  const auto wide = [](auto first, std::int64_t vocab) {
    std::vector<decltype(first)> out;
    for (std::int64_t i = 0; i < 200; ++i) out.push_back(static_cast<decltype(first)>(i * 7919 % vocab));
    return raw(out);
  };
  for (const std::int64_t vocab : {2, 65, 50257, 128256, 262144}) {
    refused("flat.bin", wide(std::int32_t{}, vocab), "tokens of 32 or 64 bits", "write them as uint16");
    refused("flat.bin", wide(std::int64_t{}, vocab), "tokens of 32 or 64 bits");
    if (vocab <= 65536) CHECK(open({dir.write("flat.bin", wide(std::uint16_t{}, vocab))}).size() == 200);
  }
  refused("tokens.npy", "\x93NUMPY\x01", "an array of NumPy's", "bytes of text", "give --data-format bytes");
  refused("tokens.bin", "\x93NUMPY\x01 ", "an array of NumPy's", "uint16", "give --data-format nanogpt");
  refused("t.txt.gz", "\x1f\x8b\x08", "compressed by gzip; unpack it first");
  refused("t.zst", "\x28\xb5\x2f\xfd", "compressed by zstd");
  refused("t.npz", "PK\x03\x04", "a zip archive");
  refused("t.parquet", "PAR1", "Parquet");
  refused("t.txt", "version https://git-lfs.github.com/spec/v1\n", "Git LFS", "git lfs pull");
  refused("tokens.ds", std::string("ab\0c", 4), "no text, as it has zero bytes");
}

namespace {

/// An index of sequences of these lengths, and documents that start at these sequences.
std::string index_of(const std::vector<std::int32_t>& lengths, const std::vector<std::int64_t>& documents) {
  std::string out = index_of(lengths, 8, 2);
  out.resize(out.size() - 8 * (lengths.size() + 1));
  const auto count = static_cast<std::uint64_t>(documents.size());
  std::memcpy(out.data() + 9 + 8 + 1 + 8, &count, sizeof count);
  return out + raw(documents);
}

/// Checks all functions of a stream whose documents start at these positions.
void check_documents(const token_source& source, const std::vector<std::int64_t>& begins) {
  REQUIRE(static_cast<std::int64_t>(begins.size()) == source.size());
  for (std::int64_t from = 0; from < source.size(); ++from)
    for (std::int64_t first = from; first < source.size(); ++first)
      for (std::int64_t count : {std::int64_t{0}, std::int64_t{1}, source.size() - first}) {
        tokens found(static_cast<std::size_t>(count)), expected;
        source.document_starts(from, first, count, found.data());
        for (std::int64_t i = first; i < first + count; ++i)
          expected.push_back(std::max(from, begins[static_cast<std::size_t>(i)]));
        CHECK(found == expected);
      }
}

}  // namespace

TEST_CASE("documents start where an index says") {
  temp_folder dir;
  dir.write("a.bin", raw<std::uint16_t>({1, 2, 3, 4, 5, 6, 7}));
  // Documents of one sequence, of two, of one without tokens, and of none; the last entry is the end.
  dir.write("a.idx", index_of({3, 1, 0, 2, 1}, {0, 1, 3, 3, 4, 5}));
  const token_source one = open({dir / "a.bin"});
  CHECK(one.knows_documents());
  check_documents(one, {0, 0, 0, 3, 4, 4, 6});

  dir.write("b.bin", raw<std::uint16_t>({1, 2, 3}));
  dir.write("b.idx", index_of({3}, {}));  // a file without documents is one document
  check_documents(open({dir / "a.bin", dir / "b.bin", dir / "a.bin"}),
                  {0, 0, 0, 3, 4, 4, 6, 7, 7, 7, 10, 10, 10, 13, 14, 14, 16});
  dir.write("c.bin", raw<std::uint16_t>({1, 2, 3}));
  dir.write("c.idx", index_of({2, 1}, {1, 2}));  // tokens before the first document are one, too
  check_documents(open({dir / "c.bin"}), {0, 0, 2});
  CHECK_ERROR(one.document_starts(5, 6, 2, nullptr), "[6, 6 + 2)");
  CHECK_ERROR(one.document_starts(5, 4, 1, nullptr), "token 4", "from token 5");
}

TEST_CASE("documents end with a token") {
  temp_folder dir;
  const std::string a = dir.write("a.txt", "ab.c..de."), b = dir.write("b.txt", ".fg");
  const token_source source({.paths = {a, b}, .end_of_document = '.'});
  check_documents(source, {0, 0, 0, 3, 3, 5, 6, 6, 6, 9, 10, 10});
  CHECK_FALSE(open({a}).knows_documents());
  std::int64_t out = 0;
  CHECK_ERROR(open({a}).document_starts(0, 0, 1, &out), "--data: files of format bytes", "--end-of-document");
  CHECK_ERROR(token_source({.paths = {a}, .end_of_document = 256}), "--end-of-document is 256", "0 to 255");
  CHECK_ERROR(token_source({.paths = {a}, .end_of_document = -2}), "--end-of-document is -2");

  // A token instead of an index.
  dir.write("m.bin", raw<std::uint16_t>({1, 2, 3, 4}));
  dir.write("m.idx", index_of({1, 3}, {0, 1, 2}));
  check_documents(open({dir / "m.bin"}), {0, 1, 1, 1});
  check_documents(token_source({.paths = {dir / "m.bin"}, .end_of_document = 2}), {0, 0, 2, 2});
}

TEST_CASE("files that are truncated while they are read end with an error text") {
  temp_folder dir;
  const std::string text = dir.write("t.txt", std::string(100000, 'x'));
  const token_source source = open({text});
  tokens out(10);
  source.read(99000, 10, out.data());
  REQUIRE(::truncate(text.c_str(), 50000) == 0);
  source.read(49990, 10, out.data());
  CHECK_ERROR(source.read(49991, 10, out.data()), "--data: '" + text + "' is truncated", "ends at byte 50000",
              "it had 100000 bytes when it was opened");
  CHECK_ERROR(plait::token_counts(source), "is truncated");

  dir.write("m.bin", raw<std::uint16_t>({1, 2, 3, 4}));
  const std::string index = dir.write("m.idx", index_of({1, 3}, {0, 1, 2}));
  const token_source indexed = open({dir / "m.bin"});
  REQUIRE(::truncate(index.c_str(), 40) == 0);
  CHECK_ERROR(indexed.document_starts(0, 0, 4, out.data()), "m.idx' is truncated");
}

TEST_CASE("a pipe is refused at once, with or without a writer") {
  temp_folder dir;
  const std::string path = dir / "pipe";
  REQUIRE(::mkfifo(path.c_str(), 0600) == 0);
  CHECK_THROWS_WITH(plait::mapped_file(path, "--data"),
                    ("--data: '" + path + "' is not a regular file; pipes and devices cannot be mapped").c_str());
  CHECK_ERROR(open({path}), "--data: cannot open '" + path + "': it is not a regular file");
}

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
  CHECK(printable("\xc3") == "\\xc3");                             // incomplete
  CHECK(printable("\xc0\xaf") == "\\xc0\\xaf");                    // overlong
  CHECK(printable("\xe0\x9f\xbf") == "\\xe0\\x9f\\xbf");           // overlong
  CHECK(printable("\xed\xa0\x80") == "\\xed\\xa0\\x80");           // surrogate
  CHECK(printable("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  CHECK(printable("a\x80z") == "a\\x80z");

  const std::vector<std::int64_t> tokens{'h', 'i', 300, 0xc3, 0xa9, -1, 27};
  CHECK(plait::decode_bytes(tokens) == "hi<300>\xc3\xa9<-1>\\x1b");
  CHECK(plait::encode_bytes("a\xff") == std::vector<std::int64_t>{'a', 255});
}

TEST_CASE("a file is replaced completely or not at all") {
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

  // A killed process with the same id has left files with the next two names.
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
