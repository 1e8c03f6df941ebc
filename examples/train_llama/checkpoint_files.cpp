#include "checkpoint_files.hpp"

#include <string>

#include "plait/io/machine_files.hpp"

namespace {

plait::chosen_files chosen(const options& opt) {
  using plait::file_io;
  const file_io io = opt.checkpoint_io == "uring"     ? file_io::uring
                     : opt.checkpoint_io == "threads" ? file_io::threads
                                                      : file_io::automatic;
  return plait::choose_files(io, "--checkpoint-io");
}

}  // namespace

plait::file_system& checkpoint_files(const options& opt) { return *chosen(opt).files; }

std::string checkpoint_io_text(const options& opt) {
  if (opt.checkpoint_dir.empty()) return {};
  const plait::chosen_files files = chosen(opt);
  if (files.io == plait::file_io::uring) return "steps are written through io_uring (--checkpoint-io uring)\n";
  return "steps are written by threads" + (files.why.empty() ? "" : ", since " + files.why) +
         " (--checkpoint-io threads)\n";
}
