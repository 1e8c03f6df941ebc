// The attention policies of strategies: each names the axes that keep the sequence sharded, and an engine (declared
// here only). The order of tokens is a separate choice: tensor/sequence_order.hpp.
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

// Context-parallel policies define how queries reach all keys of a sharded sequence. A policy is a type with the
// members
//
//     using axes = type_list<...>;             // over which the sequence of q, k and v stays sharded, in that order
//     template <class Precision, class Device>
//     using engine = ...;                      // models plait::attention_engine (plait/nn/attention/engine.hpp)
//
// A strategy names its policy: `using attention = plait::ring<cp>;`. Users' own policies work in the same way.

/// No context parallelism: every rank has all tokens of its sequences.
struct whole_sequence {
  using axes = type_list<>;
  template <class Precision, class Device>
  using engine = whole_attention<Precision, Device>;
};

/// Keys and values travel from rank to rank; each rank computes with the block that it holds (Liu et al. 2023). Partial
/// results are merged by their log-sum-exp, at least in float.
template <axis_like Axis>
struct ring {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = ring_attention<Precision, Device>;
};

/// Keys and values are gathered, queries stay (Dubey et al. 2024, section 3.3.2). This is cheap if there are few kv
/// heads.
template <axis_like Axis>
struct all_gather_kv {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = all_gather_kv_attention<Precision, Device>;
};

/// Shards heads instead of the sequence during attention (Jacobs et al. 2023). `Inner` is the policy for a sequence
/// that is sharded over further axes outside `Axis`. `ulysses<a, ring<b>>` is the hybrid of both (Fang and Zhao 2024),
/// for `shard<seq, b, a>`.
template <axis_like Axis, class Inner = whole_sequence>
struct ulysses {
  using axes = concat<typename Inner::axes, type_list<Axis>>;
  template <class Precision, class Device>
  using engine = ulysses_attention<Precision, Device, typename Inner::template engine<Precision, Device>>;
};

/// The policies among which a program chooses at run time.
enum class chosen_policy { ring, all_gather_kv, ulysses };

/// The policy that `attention_options::context` selects at run time, as one type.
template <axis_like Axis>
struct chosen {
  using axes = type_list<Axis>;
  template <class Precision, class Device>
  using engine = chosen_attention<Precision, Device>;
};

/// The order of a sequence's tokens: as in the text (`contiguous`), or zigzag (see `sequence_order`).
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
