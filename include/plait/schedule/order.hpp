// Verifies that all collectives and messages of a step have one order, over all communicators and all ranks of a mesh.
// Then none can deadlock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/collective.hpp"
#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"
#include "plait/core/types.hpp"
#include "plait/schedule/schedule.hpp"

namespace plait {

/// A communicator from one rank's viewpoint. Two ranks use the same communicator if name and ranks are equal.
struct posted_group {
  std::string name;        ///< its axes and its purpose: "tp", "dp reductions", "pp gradients"
  std::vector<int> ranks;  ///< numbers in the whole mesh, in the communicator's order

  friend bool operator==(const posted_group&, const posted_group&) = default;
};

/// One collective or message that a rank starts.
struct posted_call {
  int group = -1;  ///< index into `posted_program::groups`
  collective kind = collective::barrier;
  /// Elements, as in `call`; 0 for an all-to-all with a count per peer, since counts may differ between ranks.
  std::uint64_t count = 0;
  dtype type = dtype::u8;
  reduce_op op = reduce_op::sum;
  int peer = 0;  ///< the root of a broadcast, or the other rank of a message, as an index in the group
  int tag = 0;   ///< of a message
  /// Calls with the same number are posted together and only wait for each other's completion, such as the messages of
  /// a ring (`comm_group`).
  int together = -1;
  bool asynchronous = false;  ///< whether the rank continues before the call is complete
  int entry = -1;             ///< index of its entry in the rank's program; -1: none
};

/// The collectives and messages that one rank starts in a step, in order.
struct posted_program {
  std::vector<posted_group> groups;
  std::vector<posted_call> calls;
  std::vector<step_entry> entries;  ///< the rank's program; `posted_call::entry` is an index into it

  const posted_group& group_of(const posted_call& c) const { return groups[static_cast<std::size_t>(c.group)]; }
};

/// "all_reduce of 64 over tp in F0.1 of unit 5"
std::string describe(const posted_program& of, const posted_call& c);

enum class order_error : std::uint8_t {
  ok,
  not_a_member,  ///< a rank uses a communicator to which it does not belong
  differ,        ///< the next calls of two ranks on one communicator are different collectives or belong to different
                 ///< entries
  missing,       ///< a rank ends its step without a call for which another rank waits
  cross,         ///< ranks wait for each other in a cycle
};

/// The outcome: ok, or two calls of two ranks that contradict each other.
struct order_verdict {
  order_error code = order_error::ok;
  int rank = -1, other_rank = -1;
  std::string call{}, other_call{};  ///< described; `other_call` is empty if the other rank starts no further call
  int circle = 0;                    ///< for `cross`: the number of ranks in the cycle
  std::int64_t completed = 0;        ///< for a correct step: its number of collectives and messages

  bool ok() const { return code == order_error::ok; }
};

/// "ok", or "rank 1, all_reduce of 64 over tp in F0.0 of unit 2: ...; see rank 0, all_reduce of 64 over cp in ..."
std::string describe(const order_verdict& v);

/// Runs the programs of all ranks of a mesh under the strictest rule: a rank starts its next call when the previous one
/// is complete, even if the call is asynchronous. A collective completes when all ranks of its communicator have
/// reached it, a message when both ranks have. The k-th calls on a communicator belong together. They must be the same
/// collective, with equal length and type, in the same pass of the same unit.
///
/// If all programs end, the calls have one order, in which they completed, and every rank's own order agrees with it.
/// So the step ends under every rule by which backends post calls. For the first incomplete call in that order, each
/// rank has started it or is computing before it. This holds for any number of streams, queues and communicators, any
/// choice of calls that wait, and any limit on calls in flight. A rank waits only for calls that it started before;
/// these come earlier in the order, so they are complete. The proof therefore covers asynchronous calls too.
///
/// Throws if a program refers to a group that it does not have.
order_verdict verify_order(std::span<const posted_program> ranks);

/// Throws `error` with the verdict's text unless `verify_order` accepts the programs.
void require_one_order(std::span<const posted_program> ranks);

}  // namespace plait

#ifndef PLAIT_COMPILED
namespace plait {

PLAIT_INLINE std::string describe(const posted_program& of, const posted_call& c) {
  std::string text = name_of(c.kind);
  if (c.count != 0) text += cat({" of ", c.count});
  text += " over " + of.group_of(c).name;
  const bool sends = c.kind == collective::send;
  if (sends || c.kind == collective::receive)
    text += cat({sends ? " to rank " : " from rank ", of.group_of(c).ranks[static_cast<std::size_t>(c.peer)]});
  if (c.entry < 0) return text + " outside of the step's entries";
  if (static_cast<std::size_t>(c.entry) >= of.entries.size()) return text + " at the end of the step";
  return text + " in " + describe(of.entries[static_cast<std::size_t>(c.entry)]);
}

namespace detail {

/// Runs all ranks' programs as if every call were blocking.
class blocking_run {
 public:
  explicit blocking_run(std::span<const posted_program> ranks) : ranks_(ranks), state_(ranks.size()) {
    std::map<std::pair<std::string, std::vector<int>>, std::size_t> known;
    for (std::size_t r = 0; r < ranks.size(); ++r)
      for (const posted_group& g : ranks[r].groups) {
        const auto [at, made] = known.try_emplace({g.name, g.ranks}, groups_.size());
        if (made) groups_.emplace_back().size = g.ranks.size();
        state_[r].groups.push_back(at->second);
      }
  }

  order_verdict run() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) moving_.push_back(r);
    while (!moving_.empty()) {
      const std::size_t r = moving_.front();
      moving_.pop_front();
      if (state_[r].open > 0) continue;
      if (order_verdict v = post(r); !v.ok()) return v;
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r)
      if (state_[r].open > 0) return stuck(r);
    order_verdict good;
    good.completed = completed_;
    return good;
  }

 private:
  struct place {
    std::size_t rank, call;
  };
  struct group {
    std::size_t size = 0;
    std::vector<place> here;  ///< the ranks that have reached the next collective
    std::map<std::pair<int, int>, std::pair<std::deque<place>, std::deque<place>>> messages;  ///< sends, receives
  };
  struct rank_state {
    std::vector<std::size_t> groups;
    std::size_t next = 0;   ///< the first call that is not posted
    std::size_t first = 0;  ///< the first posted call that is not complete
    int open = 0;           ///< number of posted calls that are not complete
    std::vector<bool> done;
  };

  const posted_call& call_of(const place& p) const { return ranks_[p.rank].calls[p.call]; }
  static bool is_message(const posted_call& c) { return c.kind == collective::send || c.kind == collective::receive; }

  /// Posts the next call of a rank, and the calls that belong together with it.
  order_verdict post(std::size_t r) {
    rank_state& s = state_[r];
    const std::vector<posted_call>& calls = ranks_[r].calls;
    while (s.open == 0 && s.next < calls.size()) {
      s.first = s.next;
      const int together = calls[s.next].together;
      do {
        ++s.open, ++s.next;
      } while (together >= 0 && s.next < calls.size() && calls[s.next].together == together);
      s.done.assign(s.next - s.first, false);
      for (std::size_t i = s.first; i < s.next; ++i)
        if (order_verdict v = arrive({r, i}); !v.ok()) return v;
    }
    return {};
  }
  order_verdict arrive(const place& p) {
    const posted_call& c = call_of(p);
    const std::vector<std::size_t>& known = state_[p.rank].groups;
    if (c.group < 0 || static_cast<std::size_t>(c.group) >= known.size())
      fail({"verify_order: call ", p.call, " of rank ", p.rank, " is over group ", c.group, " of ", known.size()});
    group& g = groups_[known[static_cast<std::size_t>(c.group)]];
    const std::vector<int>& members = ranks_[p.rank].group_of(c).ranks;
    if (std::find(members.begin(), members.end(), static_cast<int>(p.rank)) == members.end())
      return of(order_error::not_a_member, p, nullptr);
    return is_message(c) ? arrive_message(p, g) : arrive_collective(p, g);
  }
  order_verdict arrive_collective(const place& p, group& g) {
    if (!g.here.empty() && !meet(p, g.here.front())) return of(order_error::differ, p, &g.here.front());
    g.here.push_back(p);
    if (g.here.size() < g.size) return {};
    for (const place& one : std::exchange(g.here, {})) complete(one);
    ++completed_;
    return {};
  }
  order_verdict arrive_message(const place& p, group& g) {
    const posted_call& c = call_of(p);
    const bool sends = c.kind == collective::send;
    const std::vector<int>& members = ranks_[p.rank].group_of(c).ranks;
    if (c.peer < 0 || static_cast<std::size_t>(c.peer) >= members.size())
      return of(order_error::not_a_member, p, nullptr);
    const int self = static_cast<int>(p.rank), peer = members[static_cast<std::size_t>(c.peer)];
    auto& [out, in] = g.messages[sends ? std::pair(self, peer) : std::pair(peer, self)];
    std::deque<place>& theirs = sends ? in : out;
    if (theirs.empty()) {
      (sends ? out : in).push_back(p);
      return {};
    }
    const place other = theirs.front();
    theirs.pop_front();
    const posted_call& d = call_of(other);
    if (c.count != d.count || c.type != d.type || c.tag != d.tag) return of(order_error::differ, p, &other);
    complete(p);
    complete(other);
    ++completed_;
    return {};
  }
  void complete(const place& p) {
    rank_state& s = state_[p.rank];
    s.done[p.call - s.first] = true;
    if (--s.open == 0) moving_.push_back(p.rank);
  }
  /// Whether two ranks' calls are the same collective at the same place of the step.
  bool meet(const place& a, const place& b) const {
    const posted_call &c = call_of(a), &d = call_of(b);
    const bool rooted = c.kind == collective::broadcast;
    if (c.kind != d.kind || c.count != d.count || c.type != d.type || c.op != d.op || (rooted && c.peer != d.peer))
      return false;
    const step_entry *of_a = entry_of(a), *of_b = entry_of(b);
    if (of_a == nullptr || of_b == nullptr) return of_a == of_b;
    if (of_a->op != of_b->op) return false;
    // Ranks that share a collective in a pass run equal passes. For a reduction shared by stages, the unit numbers
    // differ.
    return of_a->op != step_op::pass || *of_a == *of_b;
  }
  const step_entry* entry_of(const place& p) const {
    const int entry = call_of(p).entry;
    const std::vector<step_entry>& all = ranks_[p.rank].entries;
    return entry < 0 || static_cast<std::size_t>(entry) >= all.size() ? nullptr : &all[static_cast<std::size_t>(entry)];
  }

  order_verdict of(order_error code, const place& p, const place* other) const {
    order_verdict v{.code = code, .rank = static_cast<int>(p.rank)};
    v.call = describe(ranks_[p.rank], call_of(p));
    if (other == nullptr) return v;
    v.other_rank = static_cast<int>(other->rank);
    v.other_call = describe(ranks_[other->rank], call_of(*other));
    return v;
  }
  /// The first incomplete call of a waiting rank.
  place open_of(std::size_t r) const {
    const rank_state& s = state_[r];
    const auto at = std::find(s.done.begin(), s.done.end(), false);
    return {r, s.first + static_cast<std::size_t>(at - s.done.begin())};
  }
  /// The rank that has not reached a call.
  std::size_t missing_at(const place& p) const {
    const posted_call& c = call_of(p);
    const std::vector<int>& members = ranks_[p.rank].group_of(c).ranks;
    if (is_message(c)) return static_cast<std::size_t>(members[static_cast<std::size_t>(c.peer)]);
    const group& g = groups_[state_[p.rank].groups[static_cast<std::size_t>(c.group)]];
    for (const int member : members)
      if (std::none_of(g.here.begin(), g.here.end(),
                       [&](const place& one) { return one.rank == static_cast<std::size_t>(member); }))
        return static_cast<std::size_t>(member);
    return p.rank;
  }
  /// Called when no rank can continue: follows the waiting ranks from `r` until there is a cycle or a rank that has
  /// ended.
  order_verdict stuck(std::size_t r) const {
    std::vector<std::size_t> path;
    for (;; r = missing_at(open_of(r))) {
      if (r >= ranks_.size() || state_[r].open == 0) {
        const place last = open_of(path.back());
        order_verdict v = of(order_error::missing, last, nullptr);
        v.other_rank = static_cast<int>(r);
        return v;
      }
      const auto seen = std::find(path.begin(), path.end(), r);
      if (seen != path.end()) {
        const place one = open_of(*seen), two = open_of(path.back());
        order_verdict v = of(order_error::cross, one, &two);
        v.circle = static_cast<int>(path.end() - seen);
        return v;
      }
      path.push_back(r);
    }
  }

  std::span<const posted_program> ranks_;
  std::vector<rank_state> state_;
  std::vector<group> groups_;
  std::deque<std::size_t> moving_;
  std::int64_t completed_ = 0;
};

}  // namespace detail

PLAIT_INLINE order_verdict verify_order(std::span<const posted_program> ranks) {
  return detail::blocking_run(ranks).run();
}

PLAIT_INLINE std::string describe(const order_verdict& v) {
  if (v.ok()) return "ok";
  std::string text = cat({"rank ", v.rank, ", ", v.call, ": "});
  switch (v.code) {
    case order_error::not_a_member:
      return text + "the rank is not in this communicator, or its peer is not";
    case order_error::differ:
      text += "it meets another call on this communicator";
      break;
    case order_error::missing:
      return text + cat({"rank ", v.other_rank, " takes part in it, and its step ends without having started it"});
    default:
      text += v.circle <= 2 ? std::string("two ranks start what they share in different orders, which can deadlock")
                            : cat({v.circle, " ranks wait for each other, which can deadlock"});
  }
  return text + cat({"; see rank ", v.other_rank, ", ", v.other_call});
}

PLAIT_INLINE void require_one_order(std::span<const posted_program> ranks) {
  if (const order_verdict v = verify_order(ranks); !v.ok()) fail({"step: ", describe(v)});
}

}  // namespace plait
#endif

#include "plait/core/macros_on.hpp"
