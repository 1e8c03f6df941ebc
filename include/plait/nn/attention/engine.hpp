// The concept of an attention engine, and what engines are given and make. A strategy names a policy, not an engine:
// nn/attention/policy.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "plait/core/compiled.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/core/precision.hpp"
#include "plait/kernels/kernels.hpp"
#include "plait/layout/local_box.hpp"
#include "plait/nn/attention/policy.hpp"
#include "plait/nn/sequence_order.hpp"
#include "plait/tensor/context.hpp"

namespace plait {

/// One rank's attention as an engine sees it. The local sequence has shape.q_len = shape.k_len tokens; strides are
/// those of the caller's arrays, between tokens, and outputs are [batch, q_len, heads, head_dim] without gaps.
struct attention_part {
  kernels::attention_shape shape;
  /// Where the local tokens of each rank along the policy's axes lie in the text, in the order of those ranks.
  std::vector<std::vector<token_run>> blocks;
  std::size_t mine = 0;                         ///< this rank's block
  bool documents = false;                       ///< whether `first_visible` is given
  std::string name;                             ///< of the layer, for messages
  chosen_policy context = chosen_policy::ring;  ///< for a policy that is chosen at run time
  /// Under canonical numerics, the tokens of a chunk of the sequence: queries of a chunk meet keys of a chunk, and
  /// results are merged in one order of chunks. 0: as is fastest.
  std::int64_t chunk = 0;
};

/// Queries, keys (both rotated) and values; `first_visible` [batch, q_len] are the positions of the first tokens that
/// the local queries may see, such as where their documents begin; null if documents are not packed.
template <class T>
struct attention_inputs {
  const T* q = nullptr;
  const T* k = nullptr;
  const T* v = nullptr;
  const std::int32_t* first_visible = nullptr;
};
template <class G>
struct attention_gradients {
  G* dq = nullptr;
  G* dk = nullptr;
  G* dv = nullptr;
};

/// Computes attention for one layer under a policy: local queries against the whole sequence. It is constructed
/// from (context, attention_part, axes of the policy). `forward` writes o and keeps what `backward` needs; `backward`
/// overwrites the gradients, whose type G is T or the type of statistics. Where `keeps_inputs()`, the caller keeps q, k
/// and v for it.
template <class E, class Precision, class Device>
concept attention_engine =
    std::constructible_from<E, const context<Device>&, const attention_part&, const axis_list&> &&
    std::default_initializable<typename E::saved> &&
    requires(E& e, const E& c, const context<Device>& ctx, const attention_inputs<activation_of<Precision>>& in,
             activation_of<Precision>* o, typename E::saved& kept,
             attention_gradients<activation_of<Precision>> gradients) {
      e.forward(ctx, in, o, &kept);
      e.backward(ctx, in, o, o, kept, gradients);
      { c.keeps_inputs() } -> std::convertible_to<bool>;
    };

namespace detail {

/// `attention_shape` for queries of one run against keys of one run.
inline kernels::attention_shape piece_of(const kernels::attention_shape& whole, const token_run& q, const token_run& k,
                                         const std::int32_t* first_visible) {
  kernels::attention_shape s = whole;
  s.q_batch = s.lse_stride = whole.q_len;
  s.q_len = q.length, s.q_offset = q.position;
  s.k_len = k.length, s.k_offset = k.position;
  s.first_visible = first_visible ? first_visible + q.at : nullptr;
  return s;
}

/// Rows of `width` elements without gaps to rows `stride` apart, in another type if need be.
template <class From, class To, class Device>
void write_rows(Device& device, const From* from, std::int64_t rows, std::int64_t width, To* to, std::int64_t stride) {
  if constexpr (std::is_same_v<From, To>) {
    constexpr auto size = static_cast<std::int64_t>(sizeof(To));
    kernels::copy_2d(device, from, to, rows, width * size, width * size, stride * size);
  } else {
    if (stride == width) return kernels::cast(device, from, to, rows * width);
    auto narrow = make_buffer<To>(device, static_cast<std::size_t>(rows * width));
    kernels::cast(device, from, narrow.template data<To>(), rows * width);
    write_rows(device, narrow.template data<To>(), rows, width, to, stride);
  }
}

template <class T>
void clear(auto& device, T* data, std::int64_t count) {
  device.zero(data, static_cast<std::size_t>(count) * sizeof(T), device.main_stream());
}

/// The runs in pieces of `chunk` tokens, in order of position; as they are where it is 0.
inline std::vector<token_run> in_chunks(const std::vector<token_run>& runs, std::int64_t chunk) {
  if (chunk == 0) return runs;
  std::vector<token_run> all;
  for (const token_run& run : runs)
    for (std::int64_t at = 0; at < run.length; at += chunk) all.push_back({run.at + at, run.position + at, chunk});
  std::sort(all.begin(), all.end(), [](const token_run& a, const token_run& b) { return a.position < b.position; });
  return all;
}

}  // namespace detail

namespace detail {
/// Whether an engine heeds `attention_part::chunk`; those of the library do.
template <class Engine>
inline constexpr bool knows_chunks = requires { requires Engine::in_chunks; };

/// The tokens of a chunk of a sequence; 0 under usual numerics. Throws where an engine knows none, or they do not
/// divide.
template <class Engine>
std::int64_t chunk_of(const numerics& order, std::int64_t length, const std::string& name) {
  if (!order.canonical()) return 0;
  if constexpr (!knows_chunks<Engine>)
    fail({name, ": canonical numerics (deterministic) have no order for the engine of this attention policy"});
  if (length % order.sequence != 0)
    fail({name, ": canonical numerics cut a sequence of ", length, " tokens into ", order.sequence,
          " chunks (numerics::sequence), which do not divide it"});
  return length / order.sequence;
}
}  // namespace detail

/// Throws where a rank's runs of tokens are no whole chunks, in the order that canonical numerics have.
inline void require_whole_chunks(const attention_part& part) {
  if (part.chunk == 0) return;
  for (const auto& block : part.blocks)
    for (const token_run& run : block)
      if (run.position % part.chunk != 0 || run.length % part.chunk != 0)
        fail({part.name, ": canonical numerics cut the sequence into chunks of ", part.chunk,
              " tokens (numerics::sequence), and a rank has a run of ", run.length, " from ", run.position,
              "; legal are more chunks, so that each run is whole ones"});
}
/// Throws for attention without a causal mask where a sequence is cut, as engines hand on earlier keys alone, or where
/// documents are packed in one, as only a causal mask with starts can express where a document ends.
inline void require_causal_or_whole(const attention_part& part) {
  if (!part.shape.causal && part.documents)
    fail({part.name,
          ": attention without a causal mask sees what is behind a token, in other documents too; pack no documents in "
          "a sequence (attention_options::documents), or use a causal mask"});
  if (!part.shape.causal && part.blocks.size() > 1)
    fail({part.name, ": attention without a causal mask needs the whole sequence on each rank; here it is cut into ",
          part.blocks.size()});
}

/// Keys and values of a block of tokens, in runs of the text: token i of batch b at (b * tokens + i) * stride, values
/// with a stride of their own where that is not 0.
template <class T>
struct key_block {
  const T* k = nullptr;
  const T* v = nullptr;
  std::int64_t stride = 0;
  std::int64_t tokens = 0;
  const std::vector<token_run>* runs = nullptr;
  std::int64_t v_stride = 0;

  std::int64_t stride_of_values() const { return v_stride == 0 ? stride : v_stride; }
};

/// The keys and values of the local tokens, where they are.
template <class T>
key_block<T> local_keys(const attention_inputs<T>& in, const kernels::attention_shape& shape,
                        const std::vector<token_run>& runs) {
  const kernels::attention_shape s = shape.checked();
  return {in.k, in.v, s.k_stride, s.k_len, &runs, s.v_stride};
}

/// Keys and values side by side, [batch, tokens, 2, kv_heads, head_dim]: one message.
template <class T, class Device>
void pack_keys_and_values(Device& device, const attention_inputs<T>& in, const kernels::attention_shape& shape,
                          T* block) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(T));
  const kernels::attention_shape s = shape.checked();
  const std::int64_t row = s.kv_heads * s.head_dim * size, tokens = s.batch * s.k_len;
  kernels::copy_2d(device, in.k, block, tokens, row, s.k_stride * size, 2 * row);
  kernels::copy_2d(device, in.v, block + s.kv_heads * s.head_dim, tokens, row, s.v_stride * size, 2 * row);
}

/// The reverse for their gradients, with the strides that the shape names.
template <class S, class G, class Device>
void write_key_gradients(Device& device, const S* block, const kernels::attention_shape& shape,
                         const attention_gradients<G>& out) {
  const kernels::attention_shape s = shape.checked();
  const std::int64_t width = s.kv_heads * s.head_dim, tokens = s.batch * s.k_len;
  auto narrow = make_buffer<S>(device, std::is_same_v<S, G> ? 0 : static_cast<std::size_t>(tokens * width));
  for (const bool keys : {true, false}) {
    const S* const from = block + (keys ? 0 : width);
    G* const to = keys ? out.dk : out.dv;
    const std::int64_t stride = keys ? s.dk_stride : s.dv_stride;
    constexpr auto size = static_cast<std::int64_t>(sizeof(S));
    if constexpr (std::is_same_v<S, G>) {
      kernels::copy_2d(device, from, to, tokens, width * size, 2 * width * size, stride * size);
    } else {
      kernels::copy_2d(device, from, narrow.data(), tokens, width * size, 2 * width * size, width * size);
      detail::write_rows(device, narrow.template data<S>(), tokens, width, to, stride);
    }
  }
}

}  // namespace plait

#include "plait/core/macros_on.hpp"
