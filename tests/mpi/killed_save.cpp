// ranks: 4
// timeout: 180
// Saves step 1, and kills one rank with SIGKILL at a point of saving step 2: mpirun -n 4 killed_save save DIRECTORY
// RANK POINT. Checks the newest step and loads it on another mesh: mpirun -n 2 killed_save check DIRECTORY STEP.
#define DOCTEST_CONFIG_IMPLEMENT  // the headers need doctest; this program has its own checks
#include <doctest/doctest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "plait/checkpoint/verify.hpp"
#include "plait/comm/mpi.hpp"
#include "plait/io/posix_file_system.hpp"
#include "support/saved_tensors.hpp"

using namespace plait;
using namespace plait::test;

namespace {

[[noreturn]] void die() {
  std::raise(SIGKILL);
  std::abort();  // not reached
}

/// A file system that kills the process at a point of a save.
class deadly_files final : public posix_file_system {
 public:
  std::string point;  ///< empty: never

  std::unique_ptr<plait::open_file> create(const std::string& path) override {
    const bool is_data = path.ends_with(".safetensors");
    if (is_data && point == "create") die();
    auto file = posix_file_system::create(path);
    if (!is_data || point.empty()) return file;
    return std::make_unique<deadly_file>(std::move(file), point);
  }
  void rename(const std::string& from, const std::string& to) override {
    if (to.ends_with(point == "note"       ? ".note"
                     : point == "manifest" ? "/manifest.json"
                     : point == "commit"   ? "/COMMIT"
                     : point == "name"     ? "/step-00000002"
                                           : "\n"))
      die();
    posix_file_system::rename(from, to);
    if (point == "named" && to.ends_with("/step-00000002")) die();
  }

 private:
  /// A file that kills the process after half of the first bytes, or before a sync.
  class deadly_file final : public plait::open_file {
   public:
    deadly_file(std::unique_ptr<plait::open_file> file, std::string point)
        : open_file(file->path()), file_(std::move(file)), point_(std::move(point)) {}
    std::uint64_t size() const override { return file_->size(); }

   private:
    std::size_t write_some(std::uint64_t offset, std::span<const std::byte> bytes) override {
      const bool half = point_ == "write";
      file_->write(offset, half ? bytes.first(bytes.size() / 2) : bytes);
      if (half) die();
      return bytes.size();
    }
    std::size_t read_some(std::uint64_t offset, std::span<std::byte> bytes) const override {
      file_->read(offset, bytes);
      return bytes.size();
    }
    void sync_once() override {
      if (point_ == "sync") die();
      file_->sync();
    }

    std::unique_ptr<plait::open_file> file_;
    std::string point_;
  };
};

/// Calls body(context, all ranks) on dp x 2 ranks.
template <class Body>
void on_mesh(mpi::communicator& all, const Body& body) {
  mesh_shape shape;
  shape.add(axis_of<dp>, all.size() / 2);
  shape.add(axis_of<tp>, 2);
  world ranks(shape, any_communicator(all));
  cpu device;
  any_communicator root(all);
  body(context<cpu>{device, ranks, {}, 1}, root);
}

void save(mpi::communicator& all, const std::string& directory, int who, const std::string& point) {
  deadly_files files;
  on_mesh(all, [&](const context<cpu>& ctx, any_communicator& ranks) {
    checkpoint_saver saver(ctx.device, ranks, {.directory = directory, .keep = {.last = 2}, .deadline = 10}, files);
    own_tensors mine(ctx, 1);
    for (const std::uint64_t step : {1, 2}) {
      mine.fill(step);
      saver.save(ctx, step, {.tensors = mine.held()});
      if (step == 1) {
        for (const finished_save& s : saver.wait(ctx.device))
          if (!s.failure.empty()) fail(s.failure);
        if (all.rank() == who) files.point = point;
        all.barrier();  // no rank uses a file now
        all.set_deadline(3);
        continue;
      }
      mine.fill(99);  // the next training step
      for (const finished_save& s : saver.wait(ctx.device))
        if (!s.failure.empty()) fail(s.failure);
    }
  });
  if (all.rank() == 0) std::puts("not reached");
}

void check(mpi::communicator& all, const std::string& directory, std::uint64_t expected) {
  posix_file_system files;
  on_mesh(all, [&](const context<cpu>& ctx, any_communicator& ranks) {
    std::string wrong;
    if (all.rank() == 0) {
      const auto steps = list_steps(files, directory);
      for (const invalid_step& i : steps.invalid) append(wrong, {i.path, ": ", i.reason, "; "});
      for (const committed_step& s : steps.committed)
        for (const std::string& fault : verify_step(files, s.path)) append(wrong, {fault, "; "});
      if (steps.committed.size() != expected) append(wrong, {steps.committed.size(), " steps, not ", expected});
    }
    if (!wrong.empty()) fail(wrong);
    own_tensors other(ctx, 0);
    const loaded_state loaded = load_tensors(ctx, ranks, directory, {.tensors = other.held()}, files);
    if (loaded.step != expected) fail({"the newest step is ", loaded.step, " and not ", expected});
    if (other != own_tensors(ctx, expected)) fail({"step ", expected, " has other numbers than were saved"});
    checkpoint_saver saver(ctx.device, ranks, {.directory = directory}, files);
    saver.save(ctx, 3, {.tensors = other.held()});
    for (const finished_save& s : saver.wait(ctx.device))
      if (!s.failure.empty() || !s.warning.empty()) fail({s.failure, s.warning});
    if (all.rank() == 0)
      for (const directory_entry& entry : files.list(directory))
        if (entry.name.find(".tmp") != entry.name.npos) fail({"'", entry.name, "' is left"});
  });
  if (all.rank() == 0) std::puts("whole");
}

}  // namespace

int main(int argc, char** argv) {
  return mpi::run(argc, argv, [&](mpi::communicator& all) {
    const std::string how = argc > 3 ? argv[1] : "";
    if (how == "save" && argc == 5) return save(all, argv[2], std::atoi(argv[3]), argv[4]);
    if (how == "check") return check(all, argv[2], static_cast<std::uint64_t>(std::atoll(argv[3])));
    fail("killed_save save DIRECTORY RANK POINT; killed_save check DIRECTORY STEP");
  });
}
