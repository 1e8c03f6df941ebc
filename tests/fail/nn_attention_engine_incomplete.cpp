// expect: the engine of a strategy's attention policy must model plait::attention_engine
#include "plait/nn/strategy.hpp"
#include "plait/nn/attention.hpp"

using namespace plait;

// A user-defined policy whose engine has no backward pass.
template <class Precision, class Device>
class forward_only {
 public:
  struct saved {};
  forward_only() = default;
  forward_only(const context<Device>&, const attention_part&, const axis_list&) {}
  bool keeps_inputs() const { return true; }
  void forward(const context<Device>&, const attention_inputs<Precision>&, Precision*, saved*) {}
#ifdef PLAIT_FAIL_FIX
  template <class G>
  void backward(const context<Device>&, const attention_inputs<Precision>&, const Precision*, const Precision*, saved&, attention_gradients<G>) {}
#endif
};
struct my_policy {
  using axes = type_list<cp>;
  template <class Precision, class Device>
  using engine = forward_only<Precision, Device>;
};
struct my_strategy : megatron_sp {
  using attention = my_policy;
};
template class plait::self_attention<float, my_strategy>;
