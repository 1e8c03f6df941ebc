// A communicator that has a rank and a size but moves nothing, for a program that is to be counted and not run. Its
// calls are counted as any backend's are, by comm/any_communicator.hpp. Next: `world::counting` in comm/world.hpp,
// plan/dry_run.hpp.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"

namespace plait {

/// A communicator without ranks behind it, to find out what a program would send: it has a rank, a size and a label,
/// and every operation is over at once and moves nothing. A `world` made for counting counts its calls as it would
/// those of any other. Its one subgroup is itself, because nobody else can be asked.
class counting_communicator : public verbs<counting_communicator> {
 public:
  counting_communicator() = default;
  counting_communicator(int rank, int size, std::string label) : rank_(rank), size_(size), label_(std::move(label)) {}

  explicit operator bool() const { return size_ > 0; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }
  request start(const call&) { return {}; }
  counting_communicator split(int color, int, std::string_view label = {}) const {
    return color < 0 ? counting_communicator() : counting_communicator(rank_, size_, std::string(label));
  }
  void abort(const std::string&) noexcept {}

 private:
  int rank_ = 0, size_ = 0;
  std::string label_;
};

static_assert(communicator<counting_communicator>);

}  // namespace plait
