// Over how many tensor-parallel ranks a Llama of given sizes divides. A checkpoint's sizes are fixed, so that advice is
// about the mesh. How the ranks share kv heads: split_tensor_ranks in nn/strategies.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/models/llama_config.hpp"

namespace plait {
namespace detail {

/// Whether each rank has whole groups of the heads that share a kv head, or a whole part of one group.
constexpr bool whole_groups(const llama_config& c, std::int64_t tp) {
  const std::int64_t local = c.heads / tp, group = c.heads / c.kv_heads;
  return local % group == 0 || group % local == 0;
}

}  // namespace detail

/// Whether `tp` tensor-parallel ranks, shared out by `split_tensor_ranks`, divide all that they shard of this model.
constexpr bool divides_over(const llama_config& c, std::int64_t tp) {
  return tp >= 1 && c.heads % tp == 0 && c.ffn % tp == 0 && detail::whole_groups(c, tp);
}

/// The extents of tp up to `most` for which that is so, separated by commas.
inline std::string legal_tensor_ranks(const llama_config& c, std::int64_t most = 64) {
  std::string legal;
  for (std::int64_t tp = 1; tp <= most && tp <= c.heads; ++tp)
    if (divides_over(c, tp)) append(legal, {legal.empty() ? "" : ", ", tp});
  return legal;
}

/// Throws `error`, its text starting with `source`, unless it is so for `tp`: it names the size that does not divide,
/// and the extents that would do.
inline void check_tensor_ranks(const llama_config& c, std::int64_t tp, const std::string& source) {
  if (divides_over(c, tp)) return;
  const std::string advice =
      cat({"; the model's sizes are what they are, and the extents of tp up to 64 that suit all of them are ",
           legal_tensor_ranks(c)});
  const bool heads = c.heads % tp != 0;
  if (heads || c.ffn % tp != 0)
    fail({source, ": tp=", tp, " does not divide the model's ", heads ? "num_attention_heads" : "intermediate_size",
          ", which is ", heads ? c.heads : c.ffn, advice});
  fail({source, ": with tp=", tp, ", each rank has ", c.heads / tp, " of ", c.heads,
        " heads, which are neither whole groups nor a whole part of one group of ", c.heads / c.kv_heads,
        " (num_key_value_heads is ", c.kv_heads, ")", advice});
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
