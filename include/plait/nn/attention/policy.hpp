// The attention policies that a strategy may name: the axes that keep the sequence sharded, and an engine, which is
// only declared here. A policy does not order tokens: tensor/sequence_order.hpp.
#pragma once

#include "plait/layout/spec.hpp"

namespace plait {

template <class Precision, class Device>
class whole_attention;
template <class Precision, class Device>
class ring_attention;
template <class Precision, class Device>
class all_gather_kv_attention;
template <class Precision, class Device, class Inner>
class ulysses_attention;
template <class Precision, class Device>
class chosen_attention;

// Context-parallel policies: how attention sees the whole of a sequence that is sharded. A policy is a type that names
//
//     using axes = type_list<...>;             // over which the sequence of q, k and v stays sharded, in that order
//     template <class Precision, class Device>
//     using engine = ...;                      // models plait::attention_engine (plait/nn/attention/engine.hpp)
//
// and a strategy names the policy: `using attention = plait::ring<cp>;`. These and a user's own are treated alike.

/// No context parallelism: every rank has all tokens of its sequences.
struct whole_sequence {
  using axes = type_list<>;
  template <class Precision, class Device>
  using engine = whole_attention<Precision, Device>;
};

/// Keys and values travel from rank to rank while each computes with the ones that it has (Liu et al. 2023). Partial
/// results are merged by their log-sum-exp, in float at least.
template <axis_like Axis>
struct ring {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = ring_attention<Precision, Device>;
};

/// Keys and values are gathered, queries stay (Dubey et al. 2024, section 3.3.2): cheap where there are few kv heads.
template <axis_like Axis>
struct all_gather_kv {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = all_gather_kv_attention<Precision, Device>;
};

/// Shards heads in place of the sequence while attention runs (Jacobs et al. 2023). `Inner` is what happens to a
/// sequence that is sharded over further axes, outside of `Axis`: `ulysses<a, ring<b>>` is the hybrid of both (Fang and
/// Zhao 2024), for `shard<seq, b, a>`.
template <axis_like Axis, class Inner = whole_sequence>
struct ulysses {
  using axes = concat<typename Inner::axes, type_list<Axis>>;
  template <class Precision, class Device>
  using engine = ulysses_attention<Precision, Device, typename Inner::template engine<Precision, Device>>;
};

/// Which of the three policies above, where a program chooses when it runs.
enum class chosen_policy { ring, all_gather_kv, ulysses };

/// The one that `attention_options::context` names: one type for all of them.
template <axis_like Axis>
struct chosen {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = chosen_attention<Precision, Device>;
};

/// Where the tokens of a sequence go: as in the text, or in zigzag order (see `sequence_order`).
struct contiguous {
  using dim = seq;
};
struct zigzag {
  using dim = zseq;
};

namespace detail {

template <class List>
struct axes_of_list;
template <axis_like... Axes>
struct axes_of_list<type_list<Axes...>> {
  static constexpr axis_list value{axis_of<Axes>...};
};

template <class S>
struct attention_of_strategy {
  using type = whole_sequence;
};
template <class S>
  requires requires { typename S::attention; }
struct attention_of_strategy<S> {
  using type = typename S::attention;
};

}  // namespace detail

template <class P>
concept attention_policy = requires { detail::axes_of_list<typename P::axes>::value; };

/// The axes over which a policy communicates.
template <attention_policy P>
inline constexpr axis_list context_axes = detail::axes_of_list<typename P::axes>::value;

}  // namespace plait
