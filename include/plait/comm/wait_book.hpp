// Where in its program a rank waited, for what was started where, and over which axes. The program itself is not known
// here: places are numbers, which parallel/executor.hpp gives.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plait/version.hpp"

namespace plait {

/// The seconds that one rank has spent inside communicators since it was made. They are kept by the rank's place, and
/// by the place at which the operation was started. Not synchronised: one for each rank.
class wait_book {
 public:
  struct entry {
    int started;       ///< the place of the start: the place itself for a call, -1 for none
    std::string axes;  ///< as the ledger names them
    double seconds;
  };

  /// The rank is at this place from now on; -1: at none, where nothing is written down.
  void at(int place);
  int place() const { return place_; }

  void add(int started, const std::string& axes, double seconds);

  /// By place; later places had no waits.
  const std::vector<std::vector<entry>>& places() const { return places_; }
  /// Seconds in all, with or without a place.
  double seconds() const { return all_; }

 private:
  int place_ = -1;
  double all_ = 0;
  std::vector<std::vector<entry>> places_;
};

}  // namespace plait

#ifndef PLAIT_COMPILED
#include "plait/comm/wait_book.ipp"  // IWYU pragma: keep
#endif
