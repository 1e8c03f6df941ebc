// The definitions of order.hpp, which includes them unless PLAIT_COMPILED is defined.
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

#include "plait/core/compiled.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/text.hpp"

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

/// All ranks' programs under the rule that everything blocks where it is started.
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
    std::vector<place> here;  ///< who has come to the next collective
    std::map<std::pair<int, int>, std::pair<std::deque<place>, std::deque<place>>> messages;  ///< sends, receives
  };
  struct rank_state {
    std::vector<std::size_t> groups;
    std::size_t next = 0;   ///< the first call that is not posted
    std::size_t first = 0;  ///< of those that are, and open
    int open = 0;           ///< how many of them are not complete
    std::vector<bool> done;
  };

  const posted_call& call_of(const place& p) const { return ranks_[p.rank].calls[p.call]; }
  static bool is_message(const posted_call& c) { return c.kind == collective::send || c.kind == collective::receive; }

  /// Posts the next call of a rank, with the calls that are posted together with it.
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
  /// Whether two ranks' calls are one collective, from one place of the step.
  bool meet(const place& a, const place& b) const {
    const posted_call &c = call_of(a), &d = call_of(b);
    const bool rooted = c.kind == collective::broadcast;
    if (c.kind != d.kind || c.count != d.count || c.type != d.type || c.op != d.op || (rooted && c.peer != d.peer))
      return false;
    const step_entry *of_a = entry_of(a), *of_b = entry_of(b);
    if (of_a == nullptr || of_b == nullptr) return of_a == of_b;
    if (of_a->op != of_b->op) return false;
    // Ranks that share a collective of a pass run equal passes. Stages that share a reduction have it under different
    // numbers.
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
  /// The first open call of a rank that waits.
  place open_of(std::size_t r) const {
    const rank_state& s = state_[r];
    const auto at = std::find(s.done.begin(), s.done.end(), false);
    return {r, s.first + static_cast<std::size_t>(at - s.done.begin())};
  }
  /// Who has not come to a call.
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
  /// No rank can continue: follows who waits for whom from rank `r`, until there is a circle or an end.
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

#include "plait/core/macros_on.hpp"
