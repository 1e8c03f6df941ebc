// program: files
#include "plait/checkpoint/manifest.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "plait/checkpoint/share.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::manifest;
using plait::manifest_text;
using plait::parse_manifest;
using plait::safetensors_dtype;
using plait::stored_box;
using plait::stored_tensor;

stored_box part(std::vector<std::int64_t> offset, std::vector<std::int64_t> extent, std::uint64_t element = 4) {
  stored_box out;
  out.stored.bytes = element;
  for (std::size_t d = 0; d < offset.size(); ++d) {
    out.offset[d] = offset[d];
    out.extent[d] = extent[d];
    out.stored.bytes *= static_cast<std::uint64_t>(extent[d]);
  }
  return out;
}

/// Places all blobs and boxes in one file, one after another.
manifest placed(manifest m) {
  std::uint64_t position = 4096;
  std::uint32_t sum = 1;
  const auto place = [&](plait::stored_bytes& s) {
    s.position = position;
    s.crc32c = sum *= 2654435761u;
    position += s.bytes;
  };
  for (auto& blob : m.blobs) place(blob.stored);
  for (auto& tensor : m.tensors) {
    for (auto& b : tensor.boxes) place(b.stored);
  }
  m.files = {{"data/w00000.safetensors", position, 4096, 7}};
  return m;
}

manifest small() {
  manifest m;
  m.step = 100;
  m.layout = "dp=2, tp=2";
  m.scalars = {{"optim.step", std::int64_t{100}},
               {"lr", 0.1},
               {"big", UINT64_MAX},
               {"debt", INT64_MIN},
               {"on", true},
               {"name", std::string("a\"\n\xc3\xa9")},
               {"best", std::numeric_limits<double>::infinity()},
               {"zero", -0.0},
               {"three", 3.0}};
  m.blobs = {{"tokenizer", {0, 0, 0, 13}}, {"nothing", {0, 0, 0, 0}}};
  m.tensors = {
      {"w", safetensors_dtype::f32, {4, 6}, {part({0, 0}, {2, 6}), part({2, 0}, {2, 2}), part({2, 2}, {2, 4})}},
      {"scalar", safetensors_dtype::f32, {}, {part({}, {})}},
      {"none", safetensors_dtype::bf16, {3, 0, 5}, {}},
      {"half", safetensors_dtype::bf16, {3}, {part({0}, {3}, 2)}}};
  return placed(m);
}

/// The manifest of one tensor.
manifest with(std::vector<std::int64_t> shape, std::vector<stored_box> boxes) {
  manifest m;
  m.tensors = {{"t", safetensors_dtype::f32, std::move(shape), std::move(boxes)}};
  return placed(m);
}

std::string changed(const std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  REQUIRE_MESSAGE(at != text.npos, from);
  return std::string(text).replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("a manifest is unchanged after it is written and read") {
  const manifest m = small();
  const std::string text = manifest_text(m);
  CHECK(parse_manifest(text) == m);
  CHECK(manifest_text(parse_manifest(text)) == text);
  CHECK(contains(text, R"("w": {"dtype": "F32", "shape": [4,6], "boxes": [0,0,2,6,0,4109,48,)"));
  CHECK(parse_manifest(manifest_text({})) == manifest{});
  for (const double value : {-std::numeric_limits<double>::infinity(), std::nan("5"), 5e-324, 1e308, -0.0}) {
    manifest one;
    one.scalars = {{"x", value}};
    const auto back = std::get<double>(parse_manifest(manifest_text(one)).scalars[0].second);
    CHECK(std::bit_cast<std::uint64_t>(back) == std::bit_cast<std::uint64_t>(value));
  }
  CHECK(plait::entry_name(m.tensors[0], m.tensors[0].boxes[1]) == "w[2:4, 0:2]");
  CHECK(plait::entry_name(m.tensors[1], m.tensors[1].boxes[0]) == "scalar");
  CHECK(plait::entry_name(m.tensors[3], m.tensors[3].boxes[0]) == "half");
  const plait::box b = m.tensors[0].box_of(m.tensors[0].boxes[2]);
  CHECK(b.dims == 2);
  CHECK(b.global[1] == 6);
  CHECK(b.offset[1] == 2);
  CHECK(b.local_size() == 8);
}

TEST_CASE("a tensor is covered exactly once, or an error names an element") {
  const auto refuse = [](const manifest& m, auto... parts) {
    CHECK_ERROR(plait::check_manifest(m, "m"), "m: tensor 't'", parts...);
  };
  refuse(with({4, 6}, {part({0, 0}, {2, 6}), part({2, 0}, {2, 2}), part({2, 3}, {2, 3})}),
         "element [2, 2] is in no box");
  refuse(with({4, 6}, {part({0, 0}, {2, 6}), part({2, 0}, {2, 3}), part({2, 2}, {2, 4})}),
         "element [2, 2] is in more than one box: [2:4, 0:3] and [2:4, 2:6]");
  refuse(with({4}, {}), "element [0] is in no box");
  refuse(with({}, {}), "element [] is in no box");
  refuse(with({}, {part({}, {}), part({}, {})}), "element [] is in more than one box: [] and []");
  refuse(with({4}, {part({0}, {4}), part({0}, {4})}), "element [0] is in more than one box");
  refuse(with({2, 2}, {part({0, 0}, {1, 1}), part({1, 1}, {1, 1}), part({0, 0}, {1, 1}), part({1, 1}, {1, 1})}),
         "element [0, 0] is in more");
  // As many elements as the tensor has, but row 0 is there twice and row 1 is missing.
  refuse(with({2, 2}, {part({0, 0}, {1, 2}), part({0, 0}, {1, 2})}), "element [0, 0] is in more");
}

TEST_CASE("random tilings are accepted, and no changed one is") {
  std::mt19937 random(11);
  const auto number = [&](std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random);
  };
  int refused = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const auto dims = static_cast<std::size_t>(number(1, 4));
    std::vector<std::int64_t> shape(dims);
    for (auto& extent : shape) extent = number(1, 6);
    std::vector<stored_box> boxes{part(std::vector<std::int64_t>(dims, 0), shape)};
    for (int cut = 0; cut < 12; ++cut) {  // each iteration halves one box
      stored_box& whole = boxes[static_cast<std::size_t>(number(0, static_cast<std::int64_t>(boxes.size()) - 1))];
      const auto d = static_cast<std::size_t>(number(0, static_cast<std::int64_t>(dims) - 1));
      if (whole.extent[d] < 2) continue;
      const std::int64_t at = number(1, whole.extent[d] - 1);
      stored_box rest = whole;
      rest.offset[d] += at;
      rest.extent[d] -= at;
      whole.extent[d] = at;
      boxes.push_back(rest);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    const auto counted = [&](std::vector<stored_box> some) {
      for (auto& b : some) {
        b.stored.bytes = 4;
        for (std::size_t d = 0; d < dims; ++d) b.stored.bytes *= static_cast<std::uint64_t>(b.extent[d]);
      }
      return with(shape, some);
    };
    plait::check_manifest(counted(boxes), "m");
    // Changes one number such that the box still lies in the tensor.
    auto worse = boxes;
    stored_box& one = worse[static_cast<std::size_t>(number(0, static_cast<std::int64_t>(worse.size()) - 1))];
    const auto d = static_cast<std::size_t>(number(0, static_cast<std::int64_t>(dims) - 1));
    const auto old = one;
    one.offset[d] = number(0, shape[d] - 1);
    one.extent[d] = number(1, shape[d] - one.offset[d]);
    if (one == old) continue;
    CHECK_THROWS_AS(plait::check_manifest(counted(worse), "m"), plait::error);
    ++refused;
  }
  CHECK(refused > 100);
}

TEST_CASE("numbers of boxes and files are checked without overflow") {
  const auto refuse = [](manifest m, auto... parts) { CHECK_ERROR(plait::check_manifest(m, "m"), "m: ", parts...); };
  const auto edit = [](auto change) {
    manifest m = small();
    change(m);
    return m;
  };
  const auto max = std::numeric_limits<std::int64_t>::max();
  refuse(edit([&](manifest& m) { m.tensors[0].boxes[1].offset[0] = max; }), "'w'", "not in it",
         "9223372036854775807+2");
  refuse(edit([&](manifest& m) { m.tensors[0].boxes[1].extent[1] = max; }), "'w'", "not in it");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].offset[0] = -1; }), "'w'", "not in it");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].extent[0] = 0; }), "'w'", "empty or not in it");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].extent[2] = 1; }), "'w'", "not in it");
  refuse(edit([](manifest& m) { m.tensors[2].boxes = {part({0, 0, 0}, {3, 0, 5})}; }), "'none'", "empty");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].stored.bytes = 15; }), "'w'", "[2:4, 0:2] has 15 bytes",
         "take 16");
  refuse(edit([&](manifest& m) { m.tensors[0].shape = {max, max}; }), "'w'", "2^63");
  refuse(edit([&](manifest& m) { m.tensors[0].shape = {-4, 6}; }), "'w'", "negative");
  refuse(edit([&](manifest& m) { m.tensors[0].shape.resize(7, 1); }), "'w'", "7 dimensions", "up to 6");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].stored.file = 1; }), "'w'", "[2:4, 0:2] is in file 1", "0 to 1");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].stored.position = UINT64_MAX; }), "'w'", "18446744073709551615");
  refuse(edit([](manifest& m) { m.blobs[0].stored.bytes = UINT64_MAX; }), "'tokenizer'", "18446744073709551615 bytes");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].stored.position += 4; }), "'w' begins at byte",
         "no holes or overlaps");
  refuse(edit([](manifest& m) { m.tensors[0].boxes[1].stored.position -= 4; }), "'w' begins at byte",
         "no holes or overlaps");
  refuse(edit([](manifest& m) { m.files[0].bytes += 1; }), "has ", "its last range ends at");
  refuse(edit([](manifest& m) { m.files[0].header_bytes = 4095; }), "the range before it ends at 4095");
  refuse(edit([](manifest& m) { m.files.push_back({"data/b", 5, 6, 0}); }), "'data/b' of 5 bytes has a header of 6");
  refuse(edit([](manifest& m) { m.files.push_back(m.files[0]); }), "listed twice");
  refuse(edit([](manifest& m) { m.tensors[1].name = "w"; }), "tensor 'w' appears twice");
  refuse(edit([](manifest& m) { m.tensors[1].name = "\xff"; }), "not UTF-8");
  refuse(edit([](manifest& m) { m.blobs[1].name = ""; }), "a blob has no name");
  refuse(edit([](manifest& m) { m.blobs[1].name = "tokenizer"; }), "blob 'tokenizer' appears twice");
  refuse(edit([](manifest& m) { m.scalars[1].first = "optim.step"; }), "scalar 'optim.step' appears twice");
  refuse(edit([](manifest& m) { m.scalars[1].second = std::string("\xff"); }), "scalar 'lr' is not UTF-8");
  refuse(edit([](manifest& m) { m.layout = "\xff"; }), "layout is not UTF-8");
  for (const char* path : {"", "x", "/etc/passwd", "data/", "data//x", "data/../x", "data/x/..", "data/./x",
                           "../data/x", "data/a\\b", "data/a\nb", "manifest.json"}) {
    refuse(edit([&](manifest& m) { m.files[0].path = path; }), "is not in the step's directory");
  }
  // Five dimensions that are split, with the largest extents whose product fits in 63 bits.
  const std::int64_t most = 1 << 12;
  refuse(with({most, most, most, most, most}, {part({0, 0, 0, 0, 0}, {1, 1, 1, 1, 1})}),
         "element [0, 0, 0, 0, 1] is in no box");
}

TEST_CASE("errors name what is malformed") {
  const std::string text = manifest_text(small());
  const auto refuse = [&](const std::string& from, const std::string& to, auto... parts) {
    CHECK_ERROR(parse_manifest(changed(text, from, to), "m"), "m: ", parts...);
  };
  refuse("\"version\": 1", "\"version\": 2", "version is 2", "reads version 1");
  refuse("\"version\": 1,", "", "found the key 'step'", "where the key 'version' is legal");
  refuse("\"version\": 1", "\"version\": 1, \"version\": 1", "found the key 'version'",
         "where the key 'step' is legal");
  refuse("plait checkpoint", "other", "format is 'other'");
  refuse("\"step\": 100", "\"step\": -1", "found -1");
  refuse("\"step\": 100", "\"step\": 1.0", "found 1.0");
  refuse("\"step\": 100,", "", "found the key 'layout'", "where the key 'step' is legal");
  refuse("\"tensors\": {", "\"tensors\": {}, \"more\": {", "found the key 'more' at the start, where its end is legal");
  refuse("\"step\"", "\"stop\"", "found the key 'stop'");
  refuse("\"layout\": \"dp=2, tp=2\"", "\"layout\": null", "found null");
  refuse("[\"data", "[3, \"data", "found 3 in a file, where a string is legal");
  refuse("safetensors\",", "safetensors\",4,", "a file is [path");
  refuse("safetensors\"", "safetensors\", \"x\"", "found the string \"x\"");
  refuse("4096,7]", "4096,4294967296]", "4294967296 does not fit 32 bits");
  refuse("\"float64\"", "\"float32\"", "scalar 'best'", "'float32'");
  refuse("7ff0000000000000", "7ff000000000000", "scalar 'best'", "16 hexadecimal");
  refuse("7ff0000000000000", "+7ff000000000000", "scalar 'best'", "16 hexadecimal");
  refuse("\"on\": true", "\"on\": []", "found an array");
  refuse("\"on\": true", "\"on\": {}", "found the end as the scalar 'on', where the key 'float64' is legal");
  refuse("0,4096,13,", "0,4096,13,1,", "'tokenizer' has 5 numbers");
  refuse("\"F32\"", "\"F33\"", "'w' has the unknown dtype 'F33'");
  refuse("\"F32\"", "1", "found 1", "tensor 'w'");
  refuse("\"dtype\": \"F32\", ", "", "found the key 'shape' in tensor 'w', where the key 'dtype' is legal");
  refuse("\"dtype\": \"F32\", ", "\"dtype\": \"F32\", \"dtype\": \"F32\", ",
         "found the key 'dtype' in tensor 'w', where the key 'shape' is legal");
  refuse("\"dtype\": \"F32\", ", "\"colour\": 1, ", "found the key 'colour' in tensor 'w'");
  refuse("[4,6]", "[4,[6]]", "found an array");
  refuse("[4,6]", "[4,-6]", "found -6");
  refuse("[4,6]", "[4,9223372036854775808]", "'w' has the number 9223372036854775808");
  refuse("[4,6]", "[4,18446744073709551616]", "found 18446744073709551616");
  refuse("[4,6]", "[1,1,1,1,1,1,1]", "7 dimensions");
  refuse("\"boxes\": [0,0", "\"boxes\": [0", "numbers of boxes", "takes 8");
  refuse("{\n", "", "m: ");
  refuse("}\n}\n", "}\n", "malformed JSON");
  refuse("}\n}\n", "}\n} x", "malformed JSON");
  CHECK_ERROR(parse_manifest("", "m"), "m: malformed JSON");
  CHECK_ERROR(parse_manifest("[]", "m"), "m: found an array");
  CHECK_ERROR(parse_manifest("3", "m"), "m: found 3");
  CHECK_ERROR(parse_manifest(std::string(100'000, '['), "m"), "m: found an array");
  CHECK_ERROR(parse_manifest("{\"scalars\": " + std::string(100'000, '{'), "m"),
              "found the key 'scalars' at the start, where the key 'format' is legal");
  CHECK_ERROR(parse_manifest(text + std::string(1, '\0'), "m"), "zero byte");
  for (std::size_t n = 0; n + 1 < text.size(); n += 3) CHECK_THROWS_AS(parse_manifest(text.substr(0, n)), plait::error);
}

namespace {

plait::written_share two_tensors() {
  plait::written_share share{{"data/w00003.safetensors", 1234567890123, 4096, 0xffffffff}, {}};
  plait::stored_tensor& matrix = share.tensors.emplace_back();
  matrix.name = "a \"name\" of 2 words\n";
  matrix.dtype = plait::safetensors_dtype::bf16;
  matrix.shape = {std::numeric_limits<std::int64_t>::max(), 7};
  for (std::int64_t i = 0; i < 3; ++i) {
    plait::stored_box& b = matrix.boxes.emplace_back();
    b.offset = {i << 40, 1};
    b.extent = {1, 6};
    b.stored = {0, static_cast<std::uint32_t>(i), static_cast<std::uint64_t>(i) << 50, 12};
  }
  plait::stored_tensor& scalar = share.tensors.emplace_back();
  scalar.name = "s";
  scalar.dtype = plait::safetensors_dtype::f64;
  scalar.boxes.emplace_back().stored = {0, 1, 2, 8};
  return share;
}

}  // namespace

TEST_CASE("a note has all that a writer has written") {
  const plait::written_share share = two_tensors(), back = plait::parse_note(plait::note_text(share));
  CHECK(back.file == share.file);
  CHECK(back.tensors == share.tensors);
  CHECK_FALSE(back.read_again);
  for (const std::uint64_t step : {std::uint64_t{0}, std::numeric_limits<std::uint64_t>::max()}) {
    plait::written_share again = share;
    again.read_again = step;
    CHECK(plait::parse_note(plait::note_text(again)).read_again == step);
  }
  CHECK(plait::parse_note(plait::note_text({})).tensors.empty());
}

TEST_CASE("a truncated or damaged note is refused") {
  const std::string whole = plait::note_text(two_tensors());
  for (std::size_t n = 0; n < whole.size(); ++n)
    CHECK_ERROR(plait::parse_note(whole.substr(0, n)), "checkpoint: a writer's note");
  const auto refuse = [&](const std::string& from, const std::string& to, auto... parts) {
    CHECK_ERROR(plait::parse_note(changed(whole, from, to)), "checkpoint: a writer's note", parts...);
  };
  CHECK_ERROR(plait::parse_note(whole + "1 "), "malformed JSON: there is '1'");
  refuse("1234567890123", "99999999999999999999", "found 99999999999999999999");
  refuse("\"boxes\": [", "\"boxes\": [18446744073709551615,", "numbers of boxes", "takes 8");
  refuse("\"BF16\"", "\"F33\"", "unknown dtype 'F33'");
  refuse("\"files\": [", "\"files\": [[\"data/x\",1,1,0],", "names 2 files; legal is 1");
  refuse("\"scalars\": {", "\"scalars\": {\"read_again\": 0.5",
         "has the scalar 'read_again'; legal is read_again, a step");
  refuse("\"scalars\": {", "\"scalars\": {\"lr\": 5", "has the scalar 'lr'");
}
