// program: steps
#include "plait/checkpoint/verify.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "plait/checkpoint/safetensors.hpp"
#include "support/memory_file_system.hpp"
#include "support/small_step.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::test::memory_file_system;
const std::string step_path = "r/step-00000001";

/// The name in the error when the byte at `position` of a data file is damaged.
std::string name_at(const plait::manifest& m, std::uint32_t file, std::uint64_t position) {
  if (position < m.files[file].header_bytes) return "the header";
  const auto holds = [&](const plait::stored_bytes& s) {
    return s.file == file && s.position <= position && position < s.position + s.bytes;
  };
  for (const auto& blob : m.blobs) {
    if (holds(blob.stored)) return "blob '" + blob.name + "'";
  }
  for (const auto& tensor : m.tensors) {
    for (const auto& part : tensor.boxes) {
      if (holds(part.stored)) return "tensor '" + tensor.name + "' box " + text_of_box(tensor, part);
    }
  }
  return "nothing has this byte";
}

}  // namespace

TEST_CASE("every flipped byte and every truncation of every file of a step is found and named") {
  memory_file_system files;
  plait::step_root writer(files, "r");
  plait::test::save_small_step(files, writer, 1);
  const plait::manifest m = plait::read_step(files, step_path);
  REQUIRE(plait::verify_step(files, step_path).empty());
  for (const char* name : {"COMMIT", "manifest.json"}) {
    std::string& bytes = files.contents(step_path + "/" + name);
    const std::string good = bytes;
    for (std::size_t i = 0; i < good.size(); ++i) {
      for (const int flip : {1, 0x20, 0x80}) {
        bytes[i] = static_cast<char>(good[i] ^ flip);
        const auto found = plait::verify_step(files, step_path);
        REQUIRE(found.size() == 1);
        CHECK(contains(found[0], "'" + step_path + "/COMMIT' is not that of its directory and manifest"));
      }
      bytes[i] = good[i];
      bytes.resize(i);
      CHECK(plait::verify_step(files, step_path).size() == 1);
      bytes = good;
    }
  }
  for (std::uint32_t file = 0; file < 2; ++file) {
    const std::string path = step_path + "/" + m.files[file].path;
    std::string& bytes = files.contents(path);
    const std::string good = bytes;
    for (std::size_t i = 0; i < good.size(); ++i) {
      bytes[i] = static_cast<char>(good[i] ^ (1 << i % 8));
      const auto found = plait::verify_step(files, step_path);
      REQUIRE(found.size() == 1);
      CHECK(contains(found[0], "'" + path + "' is damaged: " + name_at(m, file, i) + ", "));
      CHECK(contains(found[0], " on, has another checksum than when it was written"));
      bytes[i] = good[i];
    }
    for (std::size_t size = 0; size < good.size(); size += size < 4000 ? 97 : 1) {
      bytes.resize(size);
      const auto found = plait::verify_step(files, step_path);
      REQUIRE(found.size() >= 2);
      CHECK(contains(found[0], "'" + path + "' has " + std::to_string(size) + " bytes"));
      CHECK(contains(found[0], "truncated"));
      bool named = false;
      for (const auto& text : found) named = named || text.starts_with(name_at(m, file, size) + " cannot be read");
      CHECK(named);
      CHECK(contains(found[1], "cannot be read: '" + path + "' is truncated"));
      bytes = good;
    }
    bytes = good + "x";
    CHECK(plait::verify_step(files, step_path).size() == 1);
    bytes = good;
    files.rename(path, "r/away");
    const auto found = plait::verify_step(files, step_path);
    CHECK(found.size() == (file == 0 ? 3 : 5));
    CHECK(contains(found[0], "cannot open '" + path));
    CHECK(found[1].starts_with("tensor 'w' box [") == (file == 0));
    files.rename("r/away", path);
  }
  CHECK(plait::verify_step(files, step_path).empty());
  CHECK(contains(plait::verify_step(files, "r/step-00000002").at(0), "has no COMMIT"));
}

TEST_CASE("a stream writes a valid safetensors file") {
  memory_file_system files;
  plait::step_root writer(files, "r");
  plait::test::save_small_step(files, writer, 1);
  const plait::manifest m = plait::read_step(files, step_path);
  const std::string& bytes = files.contents(step_path + "/" + m.files[1].path);
  const auto contents = plait::parse_safetensors(std::as_bytes(std::span(bytes)), "x");
  REQUIRE(contents.entries.size() == 4);
  CHECK(m.files[1].header_bytes % 4096 == 0);
  CHECK(bytes[8] == '{');
  CHECK(contents.entries[0].name == "w[2:4, 0:2]");
  CHECK(contents.entries[0].shape == std::vector<std::int64_t>{2, 2});
  CHECK(contents.entries[2].name == "m");
  CHECK(plait::crc32c(contents.entries[2].bytes) == m.tensors[2].boxes[0].stored.crc32c);
  CHECK(plait::crc32c(std::as_bytes(std::span(bytes)).first(m.files[1].header_bytes)) == m.files[1].header_crc32c);
}

TEST_CASE("a stream accepts exactly the declared bytes, in pieces of any length") {
  const auto plan = [] {
    return plait::plan_safetensors({{"none", plait::safetensors_dtype::f32, {0}},
                                    {"a", plait::safetensors_dtype::u8, {5}},
                                    {"empty", plait::safetensors_dtype::f32, {3, 0}},
                                    {"b", plait::safetensors_dtype::u8, {6}},
                                    {"last", plait::safetensors_dtype::f32, {0}}},
                                   {{"format", "pt"}}, "x");
  };
  const std::string text = "hello world";
  const auto data = std::as_bytes(std::span(text));
  CHECK(plan().file_bytes == 4096 + 11);
  CHECK(plan().positions == std::vector<std::uint64_t>{4096, 4096, 4101, 4101, 4107});
  for (std::size_t piece = 1; piece <= text.size(); ++piece) {
    memory_file_system files;
    plait::safetensors_stream stream(files, "f", plan());
    for (std::size_t at = 0; at < text.size(); at += piece)
      stream.append(data.subspan(at, std::min(piece, text.size() - at)));
    stream.append({});
    CHECK_ERROR(stream.append(data.first(1)), "'f': 1 bytes are too many; 0 declared bytes are left");
    stream.finish();
    CHECK(stream.crc32c_of_tensors() ==
          std::vector<std::uint32_t>{0, plait::crc32c(data.first(5)), 0, plait::crc32c(data.subspan(5)), 0});
    const std::string& bytes = files.contents("f");
    const auto contents = plait::parse_safetensors(std::as_bytes(std::span(bytes)), "x");
    CHECK(contents.entries.size() == 5);
    CHECK(contents.metadata == plait::safetensors_metadata{{"format", "pt"}});
    CHECK(bytes.ends_with(text));
  }
  memory_file_system files;
  plait::safetensors_stream stream(files, "f", plan());
  CHECK_ERROR(plait::safetensors_stream(files, "f", plan()), "cannot create 'f': File exists");
  stream.append(data.first(4));
  CHECK_ERROR(stream.finish(), "'f': 7 declared bytes are missing");
}

TEST_CASE("declarations that do not fit in a file") {
  const auto plan = [](std::vector<plait::safetensors_declaration> tensors) {
    return plait::plan_safetensors(tensors, {}, "x");
  };
  const auto u8 = plait::safetensors_dtype::u8;
  CHECK_ERROR(plan({{"t", u8, {-1}}}), "x: tensor 't'", "negative");
  CHECK_ERROR(plan({{"t", u8, {INT64_MAX, 2}}}), "x: tensor 't'", "2^63");
  CHECK_ERROR(plan({{"s", u8, {INT64_MAX}}, {"t", u8, {1}}}), "x: tensor 't'", "2^63");
  CHECK(plan({{"s", u8, {INT64_MAX}}}).bytes[0] == INT64_MAX);
  CHECK_ERROR(plan({{"t", u8, {}}, {"t", u8, {}}}), "'t' is used twice");
  CHECK_ERROR(plan({{std::string(100'000'000, 'n'), u8, {}}}), "1 tensors make a header of ", "use several files");
  CHECK(plan({}).file_bytes == 4096);
}
