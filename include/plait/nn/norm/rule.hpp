// The derivation of norms: how a norm's weight lies and is used, from the layout of its input.
#pragma once

#include "plait/layout/spec.hpp"
#include "plait/nn/parameter/use.hpp"

namespace plait::detail {

/// Norms work over the last dim, which may be sharded; weights lie like it and are used replicated where rows vary.
struct norm_derivation {
  layout stored, used;
  plait::verdict verdict;
};
constexpr norm_derivation derive_norm(const layout& x) {
  norm_derivation d;
  d.stored.dims.push_back(x.dims.back());
  d.used = use_of(d.stored, x);
  d.verdict = normalize(x, d.used, x.dims.back().dim).verdict;
  return d;
}

template <class Input>
struct norm_value {
  static constexpr norm_derivation derivation = derive_norm(layout_v<Input>);
  static constexpr verdict value = derivation.verdict;
};

}  // namespace plait::detail
