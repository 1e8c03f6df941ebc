// The engine of the policy `chosen`: ring, all_gather_kv or ulysses, as the program says when it runs. A strategy that
// names one of these does without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <variant>

#include "plait/nn/attention/context_parallel/all_gather_kv.hpp"
#include "plait/nn/attention/context_parallel/ring.hpp"
#include "plait/nn/attention/context_parallel/ulysses.hpp"

namespace plait {

/// Whichever of the policies over one axis `attention_options::context` names, so that one program serves all of them.
/// How the sequence is sharded is the same for all.
template <class Precision, class Device>
class chosen_attention {
  using T = activation_of<Precision>;
  using ring_engine = ring_attention<Precision, Device>;
  using gathered_engine = all_gather_kv_attention<Precision, Device>;
  using exchanged_engine = ulysses_attention<Precision, Device, whole_attention<Precision, Device>>;

 public:
  static constexpr bool in_chunks = true;
  struct saved {
    std::variant<typename ring_engine::saved, typename gathered_engine::saved, typename exchanged_engine::saved> kept;
  };

  chosen_attention() = default;
  chosen_attention(const context<Device>& ctx, const attention_part& part, const axis_list& axes) {
    switch (part.context) {
      case chosen_policy::ring:
        engine_ = ring_engine(ctx, part, axes);
        break;
      case chosen_policy::all_gather_kv:
        engine_ = gathered_engine(ctx, part, axes);
        break;
      case chosen_policy::ulysses:
        engine_ = exchanged_engine(ctx, part, axes);
        break;
    }
  }

  bool keeps_inputs() const {
    return with(engine_, [](const auto& e, auto) -> bool { return e.keeps_inputs(); });
  }
  void forward(const context<Device>& ctx, const attention_inputs<T>& in, T* o, saved* keep) {
    with(engine_, [&](auto& e, auto which) {
      e.forward(ctx, in, o, keep ? &keep->kept.template emplace<decltype(which)::value>() : nullptr);
    });
  }
  template <class G>
  void backward(const context<Device>& ctx, const attention_inputs<T>& in, const T* o, const T* d_o, saved& kept,
                attention_gradients<G> out) {
    with(engine_,
         [&](auto& e, auto which) { e.backward(ctx, in, o, d_o, std::get<decltype(which)::value>(kept.kept), out); });
  }

 private:
  /// Calls f(engine, its number).
  template <class Engines, class F>
  static auto with(Engines& engines, F&& f) {
    using number = std::size_t;
    switch (engines.index()) {
      case 0:
        return f(std::get<0>(engines), std::integral_constant<number, 0>{});
      case 1:
        return f(std::get<1>(engines), std::integral_constant<number, 1>{});
      default:
        return f(std::get<2>(engines), std::integral_constant<number, 2>{});
    }
  }

  std::variant<ring_engine, gathered_engine, exchanged_engine> engine_;
};

}  // namespace plait
