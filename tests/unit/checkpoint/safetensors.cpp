// program: files
#include "plait/checkpoint/safetensors.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "plait/checkpoint/weight_files.hpp"
#include "plait/io/atomic_file.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::parse_safetensors;
using plait::safetensors_dtype;
using plait::safetensors_entry;
using plait::safetensors_reader;

/// The bytes of a file with this header and `data` bytes of data.
std::string file_of(const std::string& header, std::size_t data) {
  std::string out(8, '\0');
  const std::uint64_t n = header.size();
  std::memcpy(out.data(), &n, 8);
  return out + header + std::string(data, '\x3f');
}
plait::safetensors_contents parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "x");
}

template <class T>
std::span<const std::byte> bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

const std::string tensor_a = R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})";
const std::string tensor_b = R"("b":{"dtype":"I64","shape":[1],"data_offsets":[24,32]})";

}  // namespace

TEST_CASE("a written file is read unchanged, aligned, with any order of dtypes") {
  static_assert(plait::name_of(safetensors_dtype::boolean) == "BOOL" &&
                plait::name_of(safetensors_dtype::f64) == "F64");
  for (std::size_t i = 0; i < std::size(plait::detail::safetensors_names); ++i) {
    const auto type = static_cast<plait::safetensors_dtype>(i);
    CHECK(plait::find_safetensors_dtype(plait::name_of(type)) == type);
  }
  temp_folder dir;
  const std::vector<std::uint16_t> halves{0x3f80, 0xc000, 0x7f80};  // bf16: 1, -2, infinity
  const std::vector<float> floats{1.5f, -2.25f, 3e-40f, 0.1f, 5, 6};
  const std::vector<double> doubles{1.0 / 3};
  const std::vector<std::int64_t> longs{INT64_MIN, 7};
  const std::string odd_name = "quote\" slash\\ line\n \xc3\xa9";
  plait::write_safetensors(dir / "w.safetensors",
                           {{"half", safetensors_dtype::bf16, {3}, bytes(halves)},
                            {"model.norm.weight", safetensors_dtype::f32, {2, 3}, bytes(floats)},
                            {"scalar", safetensors_dtype::f64, {}, bytes(doubles)},
                            {"none", safetensors_dtype::f32, {0, 1 << 30, 1 << 30, 1 << 30}, {}},
                            {odd_name, safetensors_dtype::i64, {2}, bytes(longs)}},
                           {{"format", "pt"}, {"step", "12"}});
  CHECK(dir.entries() == 1);
  const safetensors_reader reader(dir / "w.safetensors");
  const safetensors_reader copy = reader;
  CHECK(copy.metadata() == plait::safetensors_metadata{{"format", "pt"}, {"step", "12"}});
  REQUIRE(copy.entries().size() == 5);
  CHECK(copy.read<float>("model.norm.weight") == floats);
  CHECK(copy.at("model.norm.weight").shape == std::vector<std::int64_t>{2, 3});
  CHECK(copy.read<double>("scalar") == doubles);
  CHECK(copy.read<plait::bf16>("half").size() == 3);
  for (std::size_t i = 0; i < 3; ++i) CHECK(to_float(copy.read<plait::bf16>("half")[i]) == copy.read<float>("half")[i]);
  for (std::size_t i = 0; i < floats.size(); ++i)
    CHECK(copy.read<plait::bf16>("model.norm.weight")[i].bits == plait::to_bf16(floats[i]).bits);
  CHECK(copy.at("scalar").shape.empty());
  CHECK(copy.read<std::int64_t>(odd_name) == longs);
  CHECK(copy.read<float>("half") == std::vector<float>{1, -2, std::numeric_limits<float>::infinity()});
  CHECK(copy.read<float>("none").empty());
  CHECK(copy.find("hal") == nullptr);
  CHECK(copy.find("halfs") == nullptr);
  CHECK_ERROR(copy.at("absent"), "path", "w.safetensors", "'absent'");
  for (const auto& entry : copy.entries()) {
    CHECK(reinterpret_cast<std::uintptr_t>(entry.bytes.data()) % plait::size_of(entry.dtype) == 0);
  }
  const std::string raw = dir.read("w.safetensors");
  CHECK(raw[8] == '{');
  std::uint64_t header = 0;
  std::memcpy(&header, raw.data(), 8);
  CHECK((8 + header) % 4096 == 0);
  CHECK(plait::safetensors_dtype_of(plait::dtype::bf16) == safetensors_dtype::bf16);
}

TEST_CASE("every 16-bit float, and the valid conversions") {
  CHECK(plait::float_from_f16(0x3c00) == 1);
  CHECK(plait::float_from_f16(0xc500) == -5);
  CHECK(plait::float_from_f16(0x7bff) == 65504);
  CHECK(plait::float_from_f16(0x0400) == 0x1p-14f);
  CHECK(plait::float_from_f16(0x0001) == 0x1p-24f);
  CHECK(plait::float_from_f16(0x03ff) == 1023 * 0x1p-24f);
  CHECK(std::signbit(plait::float_from_f16(0x8000)));
  CHECK(plait::float_from_f16(0xfc00) == -std::numeric_limits<float>::infinity());
  CHECK(std::isnan(plait::float_from_f16(0x7e00)));

  const auto as = [](safetensors_dtype type, auto values, auto zero) {
    const safetensors_entry entry{"t", type, {static_cast<std::int64_t>(values.size())}, bytes(values)};
    std::vector<decltype(zero)> out(values.size());
    copy_elements(entry, out.data());
    return out;
  };
  CHECK(as(safetensors_dtype::f16, std::vector<std::uint16_t>{0x3c00}, 0.0) == std::vector<double>{1});
  CHECK(as(safetensors_dtype::f64, std::vector<double>{0.1}, 0.f) == std::vector<float>{0.1f});
  CHECK(as(safetensors_dtype::u8, std::vector<std::uint8_t>{255}, std::int32_t{}) == std::vector<std::int32_t>{255});
  CHECK(as(safetensors_dtype::i64, std::vector<std::int64_t>{-3}, std::int32_t{}) == std::vector<std::int32_t>{-3});
  CHECK_ERROR(as(safetensors_dtype::i64, std::vector<std::int64_t>{1ll << 31}, std::int32_t{}), "'t'", "2147483648",
              "32 bits");
  CHECK_ERROR(as(safetensors_dtype::f32, std::vector<float>{1}, std::int64_t{}), "'t'", "F32", "integers");
  CHECK_ERROR(as(safetensors_dtype::i64, std::vector<std::int64_t>{1}, 0.f), "'t'", "I64", "floating point");
}

TEST_CASE("white space, key order, the place of the metadata and empty files do not matter") {
  CHECK(parse(file_of("{}", 0)).entries.empty());
  CHECK(parse(file_of(" \n\t{" + tensor_b + " , \r\n " + tensor_a + "}  ", 32)).entries.size() == 2);
  const auto out = parse(file_of(
      "{" + tensor_b + R"(,"__metadata__":{"k":"v"},"a":{"data_offsets":[0,24],"shape":[2,3],"dtype":"F32"}})", 32));
  CHECK(out.entries[0].name == "a");
  CHECK(out.entries[1].size() == 1);
  CHECK(out.metadata == plait::safetensors_metadata{{"k", "v"}});
  const std::string scalar = R"("z":{"dtype":"F32","shape":[],"data_offsets":[0,4]})";
  const std::string empty = R"("e":{"dtype":"F32","shape":[0],"data_offsets":[4,4]})";
  const std::string empty_first = R"("f":{"dtype":"U8","shape":[3,0],"data_offsets":[0,0]})";
  CHECK(parse(file_of("{" + scalar + "," + empty + "," + empty_first + "}", 4)).entries.size() == 3);
}

TEST_CASE("errors name what is malformed") {
  const auto refuse = [](const std::string& header, std::size_t data, auto... parts) {
    CHECK_ERROR(parse(file_of(header, data)), "x: ", parts...);
  };
  const auto entry = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"t":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
  };
  CHECK_ERROR(parse("1234567"), "x: ", "7 bytes");
  CHECK_ERROR(parse(std::string(8, '\xff')), "claims 18446744073709551615", "100000000");
  CHECK_ERROR(parse("{\n  \"metadata\": {}\n}"), "x: this is JSON", "name a .safetensors file");
  CHECK_ERROR(parse("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2\n"),
              "x: this is not a safetensors file but a pointer of Git LFS");
  CHECK_ERROR(parse("PK\x03\x04 written by torch.save"), "a zip archive, as PyTorch");
  CHECK_ERROR(parse(file_of("{}", 0).replace(0, 1, "\x03")), "truncated", "claims 3", "2 are left");
  refuse("", 0, "start with {");
  refuse("[]", 0, "start with {");
  refuse("\xef\xbb\xbf{}", 0, "start with {");
  refuse(std::string("{}\0", 3), 0, "zero byte");
  refuse("{} x", 0, "malformed JSON");
  refuse("{\"a\":}", 0, "malformed JSON");
  refuse("{\"\xff\":{}}", 0, "malformed JSON");
  refuse("{" + tensor_a + "," + tensor_a + "}", 24, "'a' appears twice");
  refuse(R"({"__metadata__":{},"__metadata__":{}})", 0, "'__metadata__' appears twice");
  refuse(R"({"__metadata__":{"k":"1","k":"2"}})", 0, "'k' appears twice");
  refuse(R"({"__metadata__":{"k":1}})", 0, "found 1", "__metadata__", "string");
  refuse(R"({"__metadata__":{"k":{}}})", 0, "found an object", "__metadata__");
  refuse(R"({"__metadata__":3})", 0, "__metadata__", "object");
  refuse(R"({"t":[]})", 0, "found an array", "'t'");
  refuse(R"({"t":{}})", 0, "'t' has no dtype");
  refuse(R"({"t":{"dtype":"F32","shape":[]}})", 0, "'t' has no data_offsets");
  refuse(R"({"t":{"dtype":"F32","dtype":"F32"}})", 0, "'t'", "'dtype' twice");
  refuse(R"({"t":{"dtype":"F32","layout":"x"}})", 0, "'t'", "unknown key 'layout'");
  refuse(entry("\"F31\"", "[1]", "[0,4]"), 4, "'t'", "F31", "BF16");
  refuse(entry("4", "[1]", "[0,4]"), 4, "found 4 as dtype of tensor 't'");
  refuse(entry("\"F32\"", "\"1\"", "[0,4]"), 4, "shape of tensor 't'");
  refuse(entry("\"F32\"", "[-1]", "[0,4]"), 4, "found -1 in shape of tensor 't'");
  refuse(entry("\"F32\"", "[1.0]", "[0,4]"), 4, "1.0", "shape");
  refuse(entry("\"F32\"", "[18446744073709551616]", "[0,4]"), 4, "18446744073709551616");
  refuse(entry("\"F32\"", "[9223372036854775808]", "[0,4]"), 4, "9223372036854775808");
  refuse(entry("\"F32\"", "[[1]]", "[0,4]"), 4, "an array", "shape");
  refuse(entry("\"F32\"", "[1]", "[0]"), 4, "'t'", "1 data_offsets");
  refuse(entry("\"F32\"", "[1]", "[0,4,8]"), 4, "'t'", "3 data_offsets");
  refuse(entry("\"F32\"", "[1]", "[4,0]"), 4, "'t'", "[4, 0]");
  refuse(entry("\"F32\"", "[1]", "[0,8]"), 8, "'t'", "[0, 8]", "take 4");
  refuse(entry("\"F32\"", "[2]", "[0,8]"), 7, "'t'", "7 bytes", "truncated");
  refuse(entry("\"F32\"", "[2]", "[0,8]"), 9, "end at byte 8", "has 9");
  refuse(entry("\"F32\"", "[4611686018427387904]", "[0,0]"), 0, "more than 2^63");
  refuse(entry("\"F32\"", "[4294967296,4294967296]", "[0,0]"), 0, "more than 2^63");
  refuse("{" + tensor_b + "}", 32, "'b'", "[24, 32]", "end at 0", "holes");
  refuse("{" + tensor_a + R"(,"c":{"dtype":"U8","shape":[4],"data_offsets":[28,32]}})", 32, "'c'", "[28, 32]",
         "end at 24", "holes");
  refuse("{" + tensor_a + R"(,"c":{"dtype":"U8","shape":[8],"data_offsets":[20,28]}})", 28, "'c'", "[20, 28]",
         "end at 24", "overlaps");
}

TEST_CASE("every truncation is refused") {
  const std::string file = file_of("{" + tensor_a + "," + tensor_b + "}", 32);
  CHECK(parse(file).entries.size() == 2);
  for (std::size_t n = 0; n < file.size(); ++n) {
    CAPTURE(n);
    CHECK_THROWS_AS(parse(file.substr(0, n)), plait::error);
  }
}

TEST_CASE("after bit flips and random mutations a file is consistent or refused") {
  const std::string good = file_of("{" + tensor_a + "," + tensor_b + R"(,"__metadata__":{"k":"\u00e9"}})", 32);
  std::size_t accepted = 0, refused = 0;
  const auto attempt = [&](const std::string& file) {
    // A copy of the exact size on the heap, so address sanitizer reports a read after its end.
    const std::vector<char> exact(file.begin(), file.end());
    try {
      const auto out = parse_safetensors(std::as_bytes(std::span(exact)), "x");
      std::size_t total = 0;
      for (const auto& e : out.entries) {
        total += e.bytes.size();
        REQUIRE(plait::safetensors_bytes(e.shape, e.dtype) == e.bytes.size());
        unsigned sum = 0;
        for (std::byte b : e.bytes) sum += static_cast<unsigned>(b);
        REQUIRE(sum <= 255 * e.bytes.size());
      }
      REQUIRE(total <= exact.size());
      ++accepted;
    } catch (const plait::error&) {
      ++refused;
    }
  };
  for (std::size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string file = good;
    file[bit / 8] = static_cast<char>(file[bit / 8] ^ (1 << (bit % 8)));
    attempt(file);
  }
  std::mt19937 random(7);
  const std::string alphabet("{}[]\",:0123456789 -.eE\\u\xff\0", 26);
  for (int trial = 0; trial < 20000; ++trial) {
    std::string file = good;
    for (std::uint32_t edits = 1 + random() % 4; edits > 0; --edits) {
      const std::size_t at = random() % (file.size() + 1);
      switch (random() % 4) {
        case 0:
          file.insert(at, 1, alphabet[random() % alphabet.size()]);
          break;
        case 1:
          file.erase(at, random() % 8);
          break;
        case 2:
          file.insert(at, file.substr(random() % (file.size() + 1), random() % 40));
          break;
        default:
          if (at < file.size()) file[at] = alphabet[random() % alphabet.size()];
      }
    }
    if (random() % 2 == 0 && file.size() >= 40) {  // keep the length of the header, so more mutations reach the JSON
      const std::uint64_t n = file.size() - 40;
      std::memcpy(file.data(), &n, 8);
    }
    attempt(file);
  }
  CHECK(accepted > 100);
  CHECK(refused > 10000);
}

TEST_CASE("the writer refuses files that it could not read") {
  temp_folder dir;
  const std::vector<float> values{1, 2};
  const auto write = [&](std::vector<safetensors_entry> entries, plait::safetensors_metadata metadata = {}) {
    plait::write_safetensors(dir / "w", std::move(entries), metadata);
  };
  const safetensors_entry good{"t", safetensors_dtype::f32, {2}, bytes(values)};
  CHECK_ERROR(write({good, good}), "path", "'t' is used twice");
  CHECK_ERROR(write({{"__metadata__", safetensors_dtype::f32, {2}, bytes(values)}}), "__metadata__");
  CHECK_ERROR(write({{"", safetensors_dtype::f32, {2}, bytes(values)}}), "cannot be the name");
  CHECK_ERROR(write({{"\xff", safetensors_dtype::f32, {2}, bytes(values)}}), "not UTF-8");
  CHECK_ERROR(write({{"t", safetensors_dtype::f32, {3}, bytes(values)}}), "'t'", "8 bytes", "take 12");
  CHECK_ERROR(write({{"t", safetensors_dtype::f32, {-2}, bytes(values)}}), "'t'", "negative");
  CHECK_ERROR(write({good}, {{"k", "1"}, {"k", "2"}}), "'k' is used twice");
  CHECK_ERROR(write({good}, {{"k", "\xff"}}), "'k' is not UTF-8");
  CHECK(dir.entries() == 0);
  CHECK_ERROR(plait::write_safetensors(dir / "absent/w", {good}), "path", "absent/w", "No such file");
  CHECK_ERROR(safetensors_reader(dir / "w"), "path", "No such file");
  CHECK_ERROR(safetensors_reader(dir.write("empty", "")), "path", "empty", "0 bytes");
}

namespace {

using plait::atomic_folder;
using plait::file_of_parts;
using plait::safetensors_declaration;
using plait::safetensors_dtype;
using plait::safetensors_shards;

void make_folder(const std::string& path) { atomic_folder(path, "--out"); }
void make_file(const std::string& path) { file_of_parts::create(path, 8, "--out"); }

}  // namespace

TEST_CASE("tensors are assigned in order, and written in parts by offset") {
  const std::vector<safetensors_declaration> tensors = {{"a", safetensors_dtype::f32, {2, 3}},
                                                        {"b", safetensors_dtype::bf16, {4}},
                                                        {"c", safetensors_dtype::f64, {5}},
                                                        {"d", safetensors_dtype::f32, {0, 7}},
                                                        {"e", safetensors_dtype::f32, {}}};
  for (const auto& [most, count] : {std::pair{1000, 1}, {40, 3}, {32, 3}, {1, 5}}) {
    CAPTURE(most);
    const temp_folder dir;
    const safetensors_shards shards(tensors, static_cast<std::uint64_t>(most), "out");
    REQUIRE(shards.files().size() == static_cast<std::size_t>(count));
    CHECK(shards.files()[0].name ==
          (count == 1 ? "model.safetensors" : "model-00001-of-0000" + std::to_string(count) + ".safetensors"));
    for (const auto& f : shards.files()) {
      CHECK(f.header.size() % 4096 == 0);
      file_of_parts file = file_of_parts::create(dir / f.name, f.bytes, "--out");
      file.write(0, f.header.data(), f.header.size());
      file.close();
    }
    // Reads the elements of the last tensor first, each separately.
    for (std::size_t i = tensors.size(); i-- > 0;) {
      const auto& where = shards.of(tensors[i].name);
      file_of_parts file = file_of_parts::open(dir / shards.files()[where.file].name, "--out");
      const std::uint64_t bytes = *plait::safetensors_bytes(tensors[i].shape, tensors[i].dtype);
      for (std::uint64_t at = bytes; at-- > 0;) {
        const char value = static_cast<char>(i + 1);
        file.write(where.offset + at, &value, 1);
      }
      file.close();
    }
    if (count > 1) dir.write("model.safetensors.index.json", shards.index());
    const plait::safetensors_directory files(dir / "");
    REQUIRE(files.entries().size() == tensors.size());
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& e = files.entries()[i];
      CHECK(e.name == tensors[i].name);
      CHECK(e.dtype == tensors[i].dtype);
      CHECK(e.shape == tensors[i].shape);
      for (const std::byte b : bytes_of(e)) CHECK(b == static_cast<std::byte>(i + 1));
    }
  }
  CHECK_ERROR(safetensors_shards({{"a", safetensors_dtype::f32, {1}}, {"a", safetensors_dtype::f32, {1}}}, 1, "out"),
              "out: the name 'a' is used twice");
}

TEST_CASE("a folder appears complete or not at all") {
  const temp_folder dir;
  {
    const atomic_folder folder(dir / "model", "--out");
    CHECK(!std::filesystem::exists(dir / "model"));
    std::filesystem::create_directory(folder.temporary() + "/inner");
    CHECK(dir.entries() == 1);
  }
  CHECK(dir.entries() == 0);
  {  // Another process with this process id is writing, and may have a slightly larger counter.
    const std::string own = atomic_folder(dir / "model", "--out").temporary();
    const std::size_t dash = own.rfind('-') + 1;
    const int count = std::stoi(own.substr(dash));
    for (int i = 1; i < 4; ++i) std::filesystem::create_directory(own.substr(0, dash) + std::to_string(count + i));
    CHECK(atomic_folder(dir / "model", "--out").temporary() == own.substr(0, dash) + std::to_string(count + 4));
    for (int i = 1; i < 4; ++i) std::filesystem::remove(own.substr(0, dash) + std::to_string(count + i));
  }
  for (const char* name : {"model", "empty", "slash/"}) {
    if (name == std::string("empty")) std::filesystem::create_directory(dir / name);
    atomic_folder folder(dir / name, "--out");
    make_file(folder.temporary() + "/file");
    folder.commit();
    CHECK(std::filesystem::exists(std::filesystem::path(dir / name) / "file"));
  }
  CHECK(dir.entries() == 3);
  dir.write("file", "");
  std::filesystem::create_symlink("nowhere", dir / "link");
  for (const char* name : {"model", "model/", "file", "link"})
    CHECK_ERROR(make_folder(dir / name), "--out: '", "is there already; name a folder that is not, or is empty");
  CHECK_ERROR(make_folder(""), "--out: the name of the folder to write is empty");
  for (const char* name : {".", "./", "..", "../.."})
    CHECK_ERROR(make_folder(name), "' is the folder that this runs in, or one above it; name a new one");
  CHECK_ERROR(make_folder(dir / "absent/model"), "--out: cannot make the folder", "absent/model", "No such file");
  atomic_folder late(dir / "late", "--out");
  dir.write("late", "");
  CHECK_ERROR(late.commit(), "late' is there already");
  CHECK_ERROR(make_file(dir / "file"), "--out: cannot open", "File exists");
  CHECK_ERROR(file_of_parts::open(dir / "absent", "--out"), "--out: cannot open", "No such file");
  CHECK_ERROR(file_of_parts::create("/dev/full/x", 1, "--out"), "--out: cannot open", "Not a directory");
}

TEST_CASE("an existing empty folder is replaced, through a link too, and a complete one is never removed") {
  const temp_folder dir;
  std::filesystem::create_directories(dir / "far/empty");
  std::filesystem::create_symlink("far/empty", dir / "link");
  for (const char* name : {"link", "link/"}) make_folder(dir / name);
  CHECK(std::filesystem::is_empty(dir / "far/empty"));
  {
    atomic_folder folder(dir / "link", "--out");
    make_file(folder.temporary() + "/file");
    folder.commit();
  }
  CHECK(std::filesystem::is_symlink(dir / "link"));
  CHECK(std::filesystem::exists(dir / "far/empty/file"));
  CHECK(std::distance(std::filesystem::directory_iterator(dir / "far"), {}) == 1);
  CHECK_ERROR(make_folder(dir / "link"), "--out: '", "is there already; name a folder that is not, or is empty");

  // The working folder of this process, by several names.
  std::filesystem::create_directory_symlink(std::filesystem::current_path(), dir / "here");
  for (const std::string& name : {dir / "here", std::filesystem::current_path().string()})
    CHECK_ERROR(make_folder(name), "' is the folder that this runs in, or one above it; name a new one");

  std::string finished;
  {
    atomic_folder folder(dir / "late", "--out");
    finished = folder.temporary();
    make_file(finished + "/file");
    dir.write("late", "");
    CHECK_ERROR(folder.commit(), "late' is there already", "; the finished folder is '" + finished + "'");
  }
  CHECK(std::filesystem::exists(finished + "/file"));
}
