// Exchanges of rows between the ranks of a mixture's experts: the concept that a policy models, and the default
// exchange by all-to-all.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/host_values.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/kernels.hpp"

namespace plait {

/// The ranks that exchange rows, at least two. All members are equal on all of them. Expert e of peer p has number p *
/// experts + e. If peers have different numbers of experts, some numbers have no expert and so no rows.
struct expert_group {
  any_communicator* ranks = nullptr;              ///< the peers, in their order
  std::int64_t peers = 1, experts = 0;            ///< number of ranks, and the largest number of experts on one
  std::int64_t all_experts = 0;                   ///< of the mixture; more than the peers' if other ranks have some
  std::int64_t width = 0;                         ///< elements of a row
  std::int64_t most_sent = 0, most_received = 0;  ///< the most rows that one peer can send, and receive
};

/// The numbers of rows of one pass, on the host.
struct expert_rows {
  std::int64_t choices = 0;         ///< of this rank's tokens; a choice whose expert no peer has sends no row
  std::int64_t leaving = 0;         ///< rows that this rank sends
  std::vector<std::int64_t> begin;  ///< [experts + 1], the first row of each local expert, then the number of local
                                    ///< rows
};

/// The origins of experts' rows: for each row the peer, and the token on that peer.
struct row_origins {
  std::vector<std::int32_t> peers, tokens;
};

/// An exchange of rows of type T between the ranks of experts, for one layer. A policy of a mixture, or its strategy,
/// names it:
///
///     template <class T, class Device>
///     using exchange = nccl_ep_exchange<T, Device>;
///
/// The layer constructs X(device, group) in its own constructor and after each `resize`. All members are collective
/// over the group, and all ranks call them in the same order. Their work is in the device's main stream.
/// - `open(device, counts, rows)` returns the route of one forward pass. `counts` [2, peers, experts] is on the device:
///   the first half has the numbers of rows to send, and the second half is scratch memory. `open` sets `leaving` and
///   `begin`, so it waits for the device, because buffers and products take their sizes on the host.
/// - `dispatch(device, route, rows, meanwhile)` takes rows [leaving, width], ordered by peer and then by expert. It
///   returns the received rows, [here, width], ordered by expert. The order within an expert is free, but must be the
///   same in all calls of a route. It calls `meanwhile()` once, if possible while rows are in flight.
/// - `combine(device, route, rows)` is its inverse: [here, width] to [leaving, width], each row back in its place.
///
/// A forward pass calls each member once. The backward pass is the mirror, on the same route: `dispatch` moves
/// gradients of the experts' outputs, and `combine` those of their inputs. No member sums rows or applies weights.
///
/// Padded rows also require `open_padded(device, counts, rows)`, the route of all passes: `counts` [peers, experts] is
/// on the host, and has the rows that every peer sends to each expert. Then no member may wait for the device.
/// Deterministic sums also require `origins(device, route, tokens)`: the origin of each local row, given the tokens of
/// the sent rows, int32 [leaving] on the device. A dry run counts the default exchange. If a route has `visit(f)`,
/// which calls f for each buffer, its buffers are offloaded with the activations.
template <class X, class Device>
concept expert_exchange =
    compute_device<Device> && std::constructible_from<X, Device&, const expert_group&> && std::copyable<X> &&
    std::movable<typename X::route> &&
    requires(const X& x, Device& on, const typename X::route& r, host_values<std::int32_t, Device>& counts,
             expert_rows& rows, buffer<Device> memory, void (&meanwhile)()) {
      { x.open(on, counts, rows) } -> std::same_as<typename X::route>;
      { x.dispatch(on, r, std::move(memory), meanwhile) } -> std::same_as<buffer<Device>>;
      { x.combine(on, r, std::move(memory)) } -> std::same_as<buffer<Device>>;
    };

/// Exchanges rows by all-to-all through the communicator: first the counts, then exactly the existing rows. An expert's
/// rows are ordered by peer, then as they were sent.
template <class T, compute_device Device>
class all_to_all_exchange {
 public:
  /// The numbers of rows to and from each peer, and their order.
  struct route {
    std::vector<std::size_t> sent, sent_at, received, received_at;
    std::vector<std::int32_t> arrived;  ///< [peers, experts]
    buffer<Device> sorted, unsorted;    ///< order by expert of the received rows, and its inverse
    std::size_t leaving() const { return sent_at.back() + sent.back(); }
    std::size_t here() const { return received_at.back() + received.back(); }

    template <class F>
    void visit(F&& f) {
      f(sorted);
      f(unsorted);
    }
  };

  all_to_all_exchange(Device&, const expert_group& group) : group_(group) {}

  route open(Device& on, host_values<std::int32_t, Device>& counts, expert_rows& rows) const {
    const auto parts = static_cast<std::size_t>(group_.peers * group_.experts);
    std::int32_t *const leaving = counts.data(), *const arriving = leaving + parts;
    group_.ranks->all_to_all(leaving, arriving, static_cast<std::size_t>(group_.experts), dtype::i32);
    std::vector<std::int32_t> values(2 * parts);
    if constexpr (only_counts<Device>)  // a dry run assumes that all experts are chosen equally often
      for (std::int64_t row = 0, of_peers = std::min(group_.peers * group_.experts, group_.all_experts);
           row < rows.choices * of_peers / group_.all_experts; ++row)
        for (const std::size_t at : {std::size_t{0}, parts}) ++values[at + static_cast<std::size_t>(row) % parts];
    else
      counts.download(values.data(), 2 * parts);
    return route_of(on, values, arriving, rows);
  }
  route open_padded(Device& on, const std::vector<std::int32_t>& counts, expert_rows& rows) const {
    std::vector<std::int32_t> values = counts;  // and what arrives: of this rank's experts, the same from all peers
    const std::ptrdiff_t own = group_.ranks->rank() * group_.experts;
    for (std::int64_t p = 0; p < group_.peers; ++p)
      values.insert(values.end(), counts.begin() + own, counts.begin() + own + group_.experts);
    host_values<std::int32_t, Device> arriving(on, counts.size());
    arriving.upload(values.data() + counts.size(), counts.size());
    return route_of(on, values, arriving.data(), rows);
  }

  template <std::invocable Work>
  buffer<Device> dispatch(Device& on, const route& r, buffer<Device> leaving, Work&& meanwhile) const {
    auto came = buffer<Device>::for_collectives(on, bytes(r.here()));
    request arrival = start(leaving, r.sent, r.sent_at, came, r.received, r.received_at);
    meanwhile();
    arrival.wait();
    auto by_expert = buffer<Device>(on, came.bytes());
    take(on, came, r.sorted, by_expert, r);
    return by_expert;
  }
  buffer<Device> combine(Device& on, const route& r, buffer<Device> rows) const {
    auto leaving = buffer<Device>::for_collectives(on, bytes(r.here()));
    auto back = buffer<Device>::for_collectives(on, bytes(r.leaving()));
    take(on, rows, r.unsorted, leaving, r);
    start(leaving, r.received, r.received_at, back, r.sent, r.sent_at).wait();
    return back;
  }

  row_origins origins(Device& on, const route& r, const buffer<Device>& tokens) const {
    std::vector<std::int32_t> there(r.here());
    auto came = buffer<Device>::for_collectives(on, there.size() * sizeof(std::int32_t));
    group_.ranks->all_to_all_v(tokens.data(), r.sent, r.sent_at, came.data(), r.received, r.received_at, dtype::i32);
    if constexpr (!only_counts<Device>)
      on.download(there.data(), came.data(), there.size() * sizeof(std::int32_t), on.main_stream());
    row_origins all;
    std::vector<std::size_t> next = r.received_at;
    for (std::int64_t e = 0; e < group_.experts; ++e)
      for (std::int64_t p = 0; p < group_.peers; ++p)
        for (std::int32_t i = 0; i < count(r, p, e); ++i) {
          all.peers.push_back(static_cast<std::int32_t>(p));
          all.tokens.push_back(there[next[static_cast<std::size_t>(p)]++]);
        }
    return all;
  }

 private:
  /// `values` [2, peers, experts] has the rows to send and those to receive, the latter also in `arriving`.
  route route_of(Device& on, const std::vector<std::int32_t>& values, const std::int32_t* arriving,
                 expert_rows& rows) const {
    const std::size_t parts = values.size() / 2;
    route r;
    take_counts(values.data(), r.sent, r.sent_at);
    take_counts(values.data() + parts, r.received, r.received_at);
    r.arrived.assign(values.begin() + static_cast<std::ptrdiff_t>(parts), values.end());
    rows.leaving = static_cast<std::int64_t>(r.leaving());
    rows.begin.assign(1, 0);
    for (std::int64_t e = 0; e < group_.experts; ++e) {
      rows.begin.push_back(rows.begin.back());
      for (std::int64_t p = 0; p < group_.peers; ++p) rows.begin.back() += count(r, p, e);
    }
    r.sorted = make_buffer<std::int32_t>(on, r.here());
    r.unsorted = make_buffer<std::int32_t>(on, r.here());
    kernels::sort_arrivals(on, arriving, group_.peers, group_.experts, r.sorted.template data<std::int32_t>(),
                           r.unsorted.template data<std::int32_t>());
    return r;
  }
  std::size_t bytes(std::size_t rows) const { return rows * static_cast<std::size_t>(group_.width) * sizeof(T); }
  std::int32_t count(const route& r, std::int64_t peer, std::int64_t expert) const {
    return r.arrived[static_cast<std::size_t>(peer * group_.experts + expert)];
  }
  void take(Device& on, const buffer<Device>& in, const buffer<Device>& from, buffer<Device>& out,
            const route& r) const {
    kernels::gather_rows(on, in.template data<T>(), from.template data<std::int32_t>(), out.template data<T>(),
                         static_cast<std::int64_t>(r.here()), group_.width);
  }
  request start(const buffer<Device>& out, const std::vector<std::size_t>& sent,
                const std::vector<std::size_t>& sent_at, buffer<Device>& in, const std::vector<std::size_t>& received,
                const std::vector<std::size_t>& received_at) const {
    const auto elements = [&](std::vector<std::size_t> rows) {
      for (std::size_t& n : rows) n *= static_cast<std::size_t>(group_.width);
      return rows;
    };
    return group_.ranks->start_all_to_all_v(out.data(), elements(sent), elements(sent_at), in.data(),
                                            elements(received), elements(received_at), dtype_of<T>);
  }
  void take_counts(const std::int32_t* of_experts, std::vector<std::size_t>& counts,
                   std::vector<std::size_t>& begins) const {
    std::size_t all = 0;
    for (std::int64_t p = 0; p < group_.peers; ++p) {
      begins.push_back(all);
      std::size_t rows = 0;
      for (std::int64_t e = 0; e < group_.experts; ++e) rows += static_cast<std::size_t>(*of_experts++);
      counts.push_back(rows);
      all += rows;
    }
  }

  expert_group group_;
};

namespace detail {

template <class X, class Device>
inline constexpr bool gives_origins =
    requires(const X& x, Device& on, const typename X::route& r, const buffer<Device>& tokens) {
      { x.origins(on, r, tokens) } -> std::same_as<row_origins>;
    };

template <class X, class Device>
inline constexpr bool opens_padded =
    requires(const X& x, Device& on, const std::vector<std::int32_t>& counts, expert_rows& rows) {
      { x.open_padded(on, counts, rows) } -> std::same_as<typename X::route>;
    };

/// The exchange that a policy or its strategy names, or the default. If the named type is not an exchange, the default
/// replaces it, so that `accepted` is the only error.
template <class Policy, class T, class Device>
struct exchange_of {
  using type = all_to_all_exchange<T, Device>;
  static constexpr bool accepted = true;
};
template <class X, class T, class Device>
struct named_exchange {
  static constexpr bool accepted = expert_exchange<X, Device>;
  using type = std::conditional_t<accepted, X, all_to_all_exchange<T, Device>>;
};
template <class Policy, class T, class Device>
  requires(!only_counts<Device> && requires { typename Policy::template exchange<T, Device>; })
struct exchange_of<Policy, T, Device> : named_exchange<typename Policy::template exchange<T, Device>, T, Device> {};
template <class Policy, class T, class Device>
  requires(
      !only_counts<Device> && !requires { typename Policy::template exchange<T, Device>; } &&
      requires { typename Policy::derived_from::template exchange<T, Device>; })
struct exchange_of<Policy, T, Device>
    : named_exchange<typename Policy::derived_from::template exchange<T, Device>, T, Device> {};

}  // namespace detail
}  // namespace plait

#include "plait/core/macros_on.hpp"
