#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "plait/comm/communicator.hpp"

namespace plait {

/// A communicator without ranks behind it, for plans that are only looked at: it has a rank, a size and a label, and
/// refuses to communicate. It has one subgroup, itself; a `world` made for planning gives its groups their sizes.
class planned_communicator {
  using counts = std::span<const std::size_t>;

 public:
  planned_communicator() = default;
  planned_communicator(int rank, int size, std::string label) : rank_(rank), size_(size), label_(std::move(label)) {}

  explicit operator bool() const { return size_ > 0; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& label() const { return label_; }

  void all_reduce(const void*, void*, std::size_t, dtype, reduce_op) { refuse("all_reduce"); }
  void all_gather(const void*, void*, std::size_t, dtype) { refuse("all_gather"); }
  void reduce_scatter(const void*, void*, std::size_t, dtype, reduce_op) { refuse("reduce_scatter"); }
  void all_to_all(const void*, void*, std::size_t, dtype) { refuse("all_to_all"); }
  void all_to_all_v(const void*, counts, counts, void*, counts, counts, dtype) { refuse("all_to_all_v"); }
  void broadcast(void*, std::size_t, dtype, int) { refuse("broadcast"); }
  void send(const void*, std::size_t, dtype, int, int = 0) { refuse("send"); }
  void receive(void*, std::size_t, dtype, int, int = 0) { refuse("receive"); }
  void barrier() { refuse("barrier"); }
  request start_all_reduce(const void*, void*, std::size_t, dtype, reduce_op) { refuse("all_reduce"); }
  request start_all_gather(const void*, void*, std::size_t, dtype) { refuse("all_gather"); }
  request start_reduce_scatter(const void*, void*, std::size_t, dtype, reduce_op) { refuse("reduce_scatter"); }
  request start_all_to_all(const void*, void*, std::size_t, dtype) { refuse("all_to_all"); }
  request start_all_to_all_v(const void*, counts, counts, void*, counts, counts, dtype) { refuse("all_to_all_v"); }
  request start_broadcast(void*, std::size_t, dtype, int) { refuse("broadcast"); }
  request start_send(const void*, std::size_t, dtype, int, int = 0) { refuse("send"); }
  request start_receive(void*, std::size_t, dtype, int, int = 0) { refuse("receive"); }
  planned_communicator split(int color, int, std::string_view label = {}) const {
    return color < 0 ? planned_communicator() : planned_communicator(rank_, size_, std::string(label));
  }
  void abort(const std::string&) noexcept {}

 private:
  [[noreturn]] void refuse(const char* what) const {
    fail(std::string(what) + " on group " + label_ + ": this world was made for planning and has no ranks behind it");
  }
  int rank_ = 0, size_ = 0;
  std::string label_;
};

static_assert(communicator<planned_communicator>);

}  // namespace plait
