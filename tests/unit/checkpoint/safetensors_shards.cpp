// program: files
#include <doctest/doctest.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "plait/checkpoint/weight_files.hpp"
#include "plait/io/atomic_file.hpp"
#include "support/temp_folder.hpp"

namespace {

using plait::atomic_folder;
using plait::file_of_parts;
using plait::safetensors_declaration;
using plait::safetensors_dtype;
using plait::safetensors_shards;

void make_folder(const std::string& path) { atomic_folder(path, "--out"); }
void make_file(const std::string& path) { file_of_parts::create(path, 8, "--out"); }

}  // namespace

TEST_CASE("tensors are shared out in order, and written in parts by offset") {
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
    // The last elements first, each by itself.
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

TEST_CASE("a folder appears whole or not at all") {
  const temp_folder dir;
  {
    const atomic_folder folder(dir / "model", "--out");
    CHECK(!std::filesystem::exists(dir / "model"));
    std::filesystem::create_directory(folder.temporary() + "/inner");
    CHECK(dir.entries() == 1);
  }
  CHECK(dir.entries() == 0);
  {  // Another process of this number is at it, whose count may be a little further.
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

TEST_CASE("an empty folder that is there is replaced, through a link too, and what is finished is never removed") {
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

  // This process stands in it, whatever it is called.
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
