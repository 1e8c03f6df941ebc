// The inner part of comm/threads.hpp: how one rank of a group joins operations, shares their work and waits for them.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/call.hpp"
#include "plait/comm/request.hpp"
#include "plait/comm/threads/world.hpp"

namespace plait::threads {

namespace detail {

/// The side of a message that a call is: 0 sends, 1 receives; -1 is a collective.
inline int side_of(const call& c) { return c.kind == collective::send ? 0 : c.kind == collective::receive ? 1 : -1; }

/// Refers to what writes a rank's part, for the length of one call. A template in its place would compile the posting
/// of an operation anew for each kind of it.
class filling {
 public:
  template <class Fill>
    requires std::invocable<const Fill&, part&>
  filling(const Fill& fill)  // NOLINT: conversion from a lambda is the purpose
      : fill_(&fill), call_([](const void* f, part& p) { (*static_cast<const Fill*>(f))(p); }) {}
  void operator()(part& p) const { call_(fill_, p); }

 private:
  const void* fill_;
  void (*call_)(const void*, part&);
};

/// One rank of one group: posts operations, shares their work, and waits for them.
class member {
 public:
  member(std::shared_ptr<world> w, std::shared_ptr<group> g, int rank)
      : world_(std::move(w)), group_(std::move(g)), rank_(rank) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(group_->members.size()); }
  int world_rank() const { return group_->members[static_cast<std::size_t>(rank_)]; }
  const group& home() const { return *group_; }
  world& run() { return *world_; }
  /// From now on, operations are on the memory of this engine's device; splits inherit it.
  void use(std::shared_ptr<device_engine> engine) { engine_ = std::move(engine); }
  bool on_device() const { return engine_ != nullptr; }
  /// Refuses memory that the device cannot use; ranks without a device take any.
  void check_memory(const char* what, const void* in, const void* out) const;

  /// Joins the operation of a call; `finish` waits for it. With `starts`, the operation notes when it is finished.
  operation* post(const call& c, bool starts = false);

  /// Joins the collective that is next in this rank's sequence; `fill` writes the rank's part. The last rank to join
  /// does the work, or opens it to those who wait.
  operation* post(signature s, std::uint64_t bytes, const filling& fill);

  /// Joins the oldest message of the same sender, receiver and tag that lacks this side (0 sends, 1 receives), or
  /// begins one.
  operation* post_message(int side, int peer, signature s, const filling& fill);

  /// Waits for the operation, sharing its work, and leaves it. `side` as in post_message, -1 for a collective.
  void finish(operation* op, int side = -1) {
    wait(*op, side);
    if (engine_ != nullptr) leave(*op);
    release(*op);
  }

  std::shared_ptr<member> split(int color, int key, std::string_view label);

  /// Whether finish would not block.
  bool done(operation& op);

  /// finish, when an error cannot be thrown.
  void drop(operation* op, int side) noexcept;

 private:
  int of_world(int rank) const { return group_->members[static_cast<std::size_t>(rank)]; }

  part& part_of(operation& op, int side) { return op.parts[static_cast<std::size_t>(side < 0 ? rank_ : side)]; }

  void wait(operation& op, int side);

  /// The last rank to leave puts the operation back.
  void release(operation& op);

  operation* acquire(std::vector<operation*>& idle, std::size_t parts);
  operation* find_or_begin(const signature& s);
  void widen_window();
  void execute(operation& op);

  /// A device that refuses the work ends all ranks; those that wait for the operation must learn it first.
  void execute_on_device(operation& op);
  void arrive(part& mine);
  void leave(operation& op);
  std::string on_this_rank(const std::exception& e) const;

  void help(operation& op);
  void finished(operation& op) {
    if (op.started()) op.through = comm_clock();
    world_->signal(op, operation::finished);
  }
  /// With the mutex held, by the last rank of a split.
  void make_children(operation& op);

  // Errors, with the mutex held.
  [[noreturn]] void stop(const std::string& doing) const;
  [[noreturn]] void mismatch(const operation& op, const signature& s) const;
  [[noreturn]] void message_mismatch(const operation& op, int side, const signature& s) const;
  /// all_to_all_v: what this rank sends and expects, against those that are here already.
  void check_pairs(const operation& op) const;

  std::shared_ptr<world> world_;
  std::shared_ptr<group> group_;
  int rank_;
  std::uint64_t sequence_ = 0;
  std::uint64_t messages_ = 0;
  std::shared_ptr<device_engine> engine_;  ///< null: the memory is the host's
};

template <int Side>
inline constexpr request_ops request_table = {
    [](void* owner, void* object) { static_cast<member*>(owner)->finish(static_cast<operation*>(object), Side); },
    [](void* owner, void* object) { return static_cast<member*>(owner)->done(*static_cast<operation*>(object)); },
    [](void* owner, void* object) noexcept {
      static_cast<member*>(owner)->drop(static_cast<operation*>(object), Side);
    },
    [](void*, void* object) noexcept { return static_cast<operation*>(object)->finished_at(); }};

}  // namespace detail
}  // namespace plait::threads

#ifndef PLAIT_COMPILED
#include "plait/comm/threads/member.ipp"  // IWYU pragma: keep
#endif
