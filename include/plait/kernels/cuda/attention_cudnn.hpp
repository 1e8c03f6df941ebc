// cuDNN's fused attention as a library for a device. Programs include this header only if they use cuDNN; otherwise
// attention runs plait's kernels.
#pragma once

// cuDNN's front end prints its graphs with a JSON library by default.
#ifndef CUDNN_FRONTEND_SKIP_JSON_LIB
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#endif
#include <cudnn.h>
#include <cudnn_frontend.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/cuda/attention_backend.hpp"

namespace plait {

struct cudnn_attention_options {
  /// Whether equal inputs give equal bits of dq, dk and dv. cuDNN's other algorithm adds to dq in the order in which
  /// its blocks finish. It is faster: it should save 1 to 1.5 points of a step's utilisation for a Llama of 1.7 billion
  /// parameters on an H100 (derived, not measured). The fixed order also allocates memory that grows with the square of
  /// the sequence (`kernels::attention_shape::fixed_order_bytes`). A shape that needs more memory than the device has
  /// is refused.
  bool deterministic = true;
};

/// cuDNN's fused attention in bf16 (cuDNN 9 with the header-only cudnn_frontend). Plans are made once per shape and
/// kept. Include it in host code where PLAIT_WITH_CUDNN is set, link with cudnn, and give the object to the device.
/// Supports head_dim of multiples of 8 up to 128, and all strides except lse's, but not `first_visible` or
/// `end_visible`. The mask must be full or causal. With a causal mask, queries and keys begin together, with or without
/// a window, or end together (pieces of longer sequences). Only one device and its thread may use it.
class cudnn_attention final : public attention_library {
 public:
  using graph = cudnn_frontend::graph::Graph;

  /// Throws `plait::error` if cuDNN cannot be loaded or finds no GPU.
  explicit cudnn_attention(const cudnn_attention_options& options = {}) : options_(options) {
    if (cudnnGetVersion() < 90000) {
      fail({"cudnn_attention: cuDNN is ", cudnnGetVersion(), ", must be at least 90000 (version 9)"});
    }
    check(cudnnCreate(&handle_), "making a handle; are its libraries in libcudnn's folder, and is there a GPU?");
  }
  cudnn_attention(const cudnn_attention&) = delete;
  cudnn_attention& operator=(const cudnn_attention&) = delete;
  ~cudnn_attention() override { cudnnDestroy(handle_); }

  /// Returns whether the shape is supported. Makes the plans of both directions on the first call for a shape.
  bool supports(const kernels::attention_shape& shape, dtype type) override {
    return type == dtype::bf16 && refusal(shape).empty();
  }

  void forward(cuda& device, const bf16* q, const bf16* k, const bf16* v, bf16* o, float* lse,
               const kernels::attention_shape& shape) override {
    std::unordered_map<std::int64_t, void*> arrays{
        {uid_q, unconst(q)}, {uid_k, unconst(k)}, {uid_v, unconst(v)}, {uid_o, o}, {uid_lse, lse}};
    run(device, shape.checked(), false, arrays);
  }

  void backward(cuda& device, const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                const bf16* d_o, bf16* dq, bf16* dk, bf16* dv, const kernels::attention_shape& shape) override {
    std::unordered_map<std::int64_t, void*> arrays{
        {uid_q, unconst(q)},    {uid_k, unconst(k)}, {uid_v, unconst(v)}, {uid_o, unconst(o)}, {uid_lse, unconst(lse)},
        {uid_do, unconst(d_o)}, {uid_dq, dq},        {uid_dk, dk},        {uid_dv, dv}};
    run(device, shape.checked(), true, arrays);
  }

  /// Adds one direction of a checked shape to an empty graph, without a GPU. If `set_sm_version` was called on the
  /// graph, `validate` then tells whether cuDNN supports the shape.
  static void describe(graph& g, const kernels::attention_shape& s, bool backward,
                       const cudnn_attention_options& options) {
    namespace fe = cudnn_frontend;
    g.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    // cuDNN's order of dimensions is [batch, heads, tokens, elements]; the strides give their order in memory.
    const auto settle = [&](const tensor& t, uid name, std::int64_t heads, std::int64_t len, std::int64_t stride) {
      // A gradient or output has the batch stride of the array with the same tokens.
      const std::int64_t batch =
          name == uid_k || name == uid_v || name == uid_dk || name == uid_dv ? s.k_batch : s.q_batch;
      t->set_uid(name)
          .set_dim({s.batch, heads, len, s.head_dim})
          .set_stride({batch * stride, s.head_dim, stride, 1})
          .set_data_type(fe::DataType_t::BFLOAT16);
    };
    const auto settle_lse = [&](const tensor& t) {
      t->set_uid(uid_lse)
          .set_dim({s.batch, s.heads, s.q_len, 1})
          .set_stride({s.heads * s.q_len, s.q_len, 1, 1})
          .set_data_type(fe::DataType_t::FLOAT);
    };
    const auto input = [&](uid name, std::int64_t heads, std::int64_t len, std::int64_t stride) {
      const tensor t = g.tensor(fe::graph::Tensor_attributes());
      settle(t, name, heads, len, stride);
      return t;
    };
    const tensor q = input(uid_q, s.heads, s.q_len, s.q_stride), k = input(uid_k, s.kv_heads, s.k_len, s.k_stride);
    const tensor v = input(uid_v, s.kv_heads, s.k_len, s.v_stride);
    if (!backward) {
      fe::graph::SDPA_attributes attributes;
      attributes.set_name("attention").set_generate_stats(true).set_attn_scale(static_cast<float>(s.scale));
      set_mask(attributes, s);
      const auto [o, lse] = g.sdpa(q, k, v, attributes);
      o->set_output(true);
      settle(o, uid_o, s.heads, s.q_len, s.o_stride);
      lse->set_output(true);
      settle_lse(lse);
    } else {
      const tensor o = input(uid_o, s.heads, s.q_len, s.o_stride), d_o = input(uid_do, s.heads, s.q_len, s.do_stride);
      const tensor lse = g.tensor(fe::graph::Tensor_attributes());
      settle_lse(lse);
      fe::graph::SDPA_backward_attributes attributes;
      attributes.set_name("attention_backward")
          .set_attn_scale(static_cast<float>(s.scale))
          .set_deterministic_algorithm(options.deterministic);
      set_mask(attributes, s);
      const auto [dq, dk, dv] = g.sdpa_backward(q, k, v, o, d_o, lse, attributes);
      for (const tensor& t : {dq, dk, dv}) t->set_output(true);
      settle(dq, uid_dq, s.heads, s.q_len, s.dq_stride);
      settle(dk, uid_dk, s.kv_heads, s.k_len, s.dk_stride);
      settle(dv, uid_dv, s.kv_heads, s.k_len, s.dv_stride);
    }
  }

  /// Returns why a shape is not supported; empty if it is.
  std::string refusal(const kernels::attention_shape& shape) {
    const kernels::attention_shape s = shape.checked();
    if (const std::string reason = impossible(s); !reason.empty()) return reason;
    const std::string& forward = plan_of(s, false).refusal;
    return forward.empty() ? plan_of(s, true).refusal : forward;
  }

 private:
  using tensor = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;
  enum uid : std::int64_t { uid_q = 1, uid_k, uid_v, uid_o, uid_lse, uid_do, uid_dq, uid_dk, uid_dv };
  using key = std::array<std::int64_t, 21>;

  struct plan {
    std::unique_ptr<graph> operations;
    std::size_t workspace = 0;
    std::string refusal;  ///< cuDNN's reason for making no plan
  };

  template <class T>
  static void* unconst(const T* array) {
    return const_cast<T*>(array);
  }
  static void check(cudnnStatus_t status, const char* doing) {
    if (status == CUDNN_STATUS_SUCCESS) return;
    fail({"cuDNN: ", cudnnGetErrorString(status), " on ", doing});
  }

  template <class Attributes>
  static void set_mask(Attributes& attributes, const kernels::attention_shape& s) {
    using alignment = cudnn_frontend::DiagonalAlignment_t;
    if (sees_all(s)) return;
    attributes.set_diagonal_alignment(s.q_offset == s.k_offset ? alignment::TOP_LEFT : alignment::BOTTOM_RIGHT)
        .set_diagonal_band_right_bound(0);
    // cuDNN's bound keeps column + bound > row, as the window does.
    if (window_of(s) > 0) attributes.set_diagonal_band_left_bound(static_cast<int>(window_of(s)));
  }

  static bool sees_all(const kernels::attention_shape& s) { return s.visible(0) == s.k_len; }
  /// Returns the window if it hides keys from the last query, else 0.
  static std::int64_t window_of(const kernels::attention_shape& s) {
    return s.mask.first(s.q_offset + s.q_len - 1) > s.k_offset ? s.mask.before + 1 : 0;
  }
  /// Whether the last query sees exactly up to the last key, as in a piece of a longer sequence.
  static bool ends_together(const kernels::attention_shape& s) {
    return s.q_offset + s.q_len == s.k_offset + s.k_len && s.q_len <= s.k_len;
  }
  /// Returns the unsupported property of a checked shape, for which no plan is made; empty if there is none.
  static std::string impossible(const kernels::attention_shape& s) {
    if (s.batch == 0 || s.q_len == 0 || s.k_len == 0) return "batch, q_len and k_len must be at least 1";
    if (s.head_dim % 8 != 0 || s.head_dim > 128) return "head_dim must be a multiple of 8 up to 128";
    if (s.first_visible != nullptr) return "first_visible must not be given";
    if (s.end_visible != nullptr) return "end_visible must not be given";
    if (s.lse_stride != s.q_len) return "lse_stride must be q_len";
    if (!sees_all(s) && s.q_offset != s.k_offset && !ends_together(s)) {
      return "under a causal mask, queries and keys must begin or end together";
    }
    if (!sees_all(s) && (s.mask.after != 0 || s.mask.prefix > s.k_offset)) return "a mask must be causal or full";
    if (window_of(s) > 0 && (s.mask.after != 0 || s.q_offset != s.k_offset || s.q_len > s.k_len)) {
      return "a window must be causal, with equal offsets and q_len at most k_len";
    }
    return {};
  }

  static key key_of(const kernels::attention_shape& s, bool backward) {
    const auto scale = std::bit_cast<std::int64_t>(s.scale);
    return {s.batch,     s.q_len,     s.k_len,     s.heads,    s.kv_heads, s.head_dim,   scale,
            sees_all(s), backward,    s.q_stride,  s.k_stride, s.v_stride, s.o_stride,   s.dq_stride,
            s.dk_stride, s.dv_stride, s.do_stride, s.q_batch,  s.k_batch,  window_of(s), s.q_offset != s.k_offset};
  }

  const plan& plan_of(const kernels::attention_shape& s, bool backward) {
    const auto [at, missing] = plans_.try_emplace(key_of(s, backward));
    if (missing) at->second = make_plan(s, backward);
    return at->second;
  }

  plan make_plan(const kernels::attention_shape& s, bool backward) const {
    plan made;
    made.operations = std::make_unique<graph>();
    graph& g = *made.operations;
    describe(g, s, backward, options_);
    std::int64_t workspace = 0;
    auto status = g.build(handle_, {cudnn_frontend::HeurMode_t::A});
    if (status.is_good()) status = g.get_workspace_size(workspace);
    if (status.is_bad()) {
      made.refusal = status.get_message().empty() ? "no reason given" : status.get_message();
      made.operations.reset();
    }
    made.workspace = static_cast<std::size_t>(workspace);
    std::size_t free = 0, total = 0;
    detail::cuda_check(cudaMemGetInfo(&free, &total), "asking for the device's memory");
    if (made.workspace > total) {
      made.refusal =
          cat({"it needs ", made.workspace, " bytes for itself, and the device has ", total, hint(backward)});
      made.operations.reset();
    }
    return made;
  }

  buffer<cuda> workspace_of(cuda& device, std::size_t bytes, bool backward) const {
    try {
      return make_buffer<std::byte>(device, bytes);
    } catch (const error& e) {
      fail({"cudnn_attention: ", bytes, " bytes for the ", backward ? "backward" : "forward", " pass itself",
            hint(backward), ": ", e.what()});
    }
  }
  /// Returns advice for using less memory, if there is any.
  const char* hint(bool backward) const {
    return backward && options_.deterministic
               ? "; with cudnn_attention_options::deterministic = false it needs far less"
               : "";
  }

  void run(cuda& device, const kernels::attention_shape& s, bool backward,
           std::unordered_map<std::int64_t, void*>& arrays) {
    if (const std::string reason = impossible(s); !reason.empty()) fail({"cudnn_attention: ", reason});
    const plan& p = plan_of(s, backward);
    if (!p.refusal.empty()) fail({"cudnn_attention: cuDNN refuses the shape: ", p.refusal});
    check(cudnnSetStream(handle_, device.main_stream().handle()), "setting the stream");
    auto workspace = workspace_of(device, p.workspace, backward);
    auto status = p.operations->execute(handle_, arrays, workspace.data());
    if (status.is_bad() && !cuda::capturing(device.main_stream())) {  // its kernels may lack memory
      device.release_unused();
      status = p.operations->execute(handle_, arrays, workspace.data());
    }
    if (status.is_bad()) fail({"cudnn_attention: cuDNN failed: ", status.get_message()});
  }

  cudnn_attention_options options_;
  cudnnHandle_t handle_ = nullptr;
  std::map<key, plan> plans_;
};

}  // namespace plait

#include "plait/core/macros_on.hpp"
