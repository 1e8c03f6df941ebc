#pragma once

// A stand-in for the header-only front end of cuDNN, for tests: graphs of one fused attention or its gradient, in bf16
// with sums in float, with the options that plait uses. Building a graph fails if a dimension, a stride or a name is
// missing, or if cuDNN's documentation does not list the shape. A graph runs as one operation of the handle's stream,
// in scratch memory of a size that the program asks for first. It is one header, as cuDNN's is.

#include <cudnn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stand_in/attention.hpp"

namespace stand_in {

/// Set by tests: the reason why graphs are refused (empty: none), and the number of executions that still fail. And the
/// number of graphs built, and of gradients computed by each algorithm.
inline std::string cudnn_refusal;
inline std::atomic<int> cudnn_graphs{0}, cudnn_failures{0}, cudnn_fixed_gradients{0}, cudnn_other_gradients{0};

}  // namespace stand_in

namespace cudnn_frontend {

enum class DataType_t { NOT_SET, FLOAT, BFLOAT16 };
enum class HeurMode_t { A, B, FALLBACK };
enum class DiagonalAlignment_t { TOP_LEFT, BOTTOM_RIGHT };

class error_object {
 public:
  error_object() = default;
  explicit error_object(std::string why) : bad_(true), why_(std::move(why)) {}
  bool is_good() const { return !bad_; }
  bool is_bad() const { return bad_; }
  std::string get_message() const { return why_; }

 private:
  bool bad_ = false;
  std::string why_;
};

namespace graph {

class Tensor_attributes {
 public:
  using number = std::int64_t;
  Tensor_attributes& set_uid(number uid) { return uid_ = uid, *this; }
  Tensor_attributes& set_dim(std::vector<number> const& dim) { return dim_ = dim, *this; }
  Tensor_attributes& set_stride(std::vector<number> const& stride) { return stride_ = stride, *this; }
  Tensor_attributes& set_data_type(DataType_t type) { return type_ = type, *this; }
  Tensor_attributes& set_output(bool output) { return output_ = output, *this; }

 private:
  friend class Graph;
  number uid_ = 0;
  std::vector<number> dim_, stride_;
  DataType_t type_ = DataType_t::NOT_SET;
  bool output_ = false;
};

/// Options of both passes.
template <class Derived>
class attention_attributes {
 public:
  Derived& set_name(std::string const&) { return self(); }
  Derived& set_attn_scale(float scale) { return scale_ = scale, self(); }
  Derived& set_diagonal_alignment(DiagonalAlignment_t const& a) { return alignment_ = a, self(); }
  Derived& set_diagonal_band_right_bound(std::int64_t bound) { return right_ = bound, has_right_ = true, self(); }
  Derived& set_diagonal_band_left_bound(std::int64_t bound) { return left_ = bound, self(); }

 protected:
  friend class Graph;
  Derived& self() { return static_cast<Derived&>(*this); }
  float scale_ = 1;
  DiagonalAlignment_t alignment_ = DiagonalAlignment_t::TOP_LEFT;
  std::int64_t right_ = 0, left_ = 0;
  bool has_right_ = false;
};
class SDPA_attributes : public attention_attributes<SDPA_attributes> {
 public:
  SDPA_attributes& set_generate_stats(bool stats) { return stats_ = stats, *this; }

 private:
  friend class Graph;
  bool stats_ = false;
};
class SDPA_backward_attributes : public attention_attributes<SDPA_backward_attributes> {
 public:
  SDPA_backward_attributes& set_deterministic_algorithm(bool fixed) { return fixed_ = fixed, *this; }

 private:
  friend class Graph;
  bool fixed_ = false;
};

class Graph {
 public:
  using tensor_ptr = std::shared_ptr<Tensor_attributes>;

  Graph& set_io_data_type(DataType_t type) { return io_ = type, *this; }
  Graph& set_intermediate_data_type(DataType_t type) { return between_ = type, *this; }
  Graph& set_compute_data_type(DataType_t type) { return compute_ = type, *this; }

  tensor_ptr tensor(Tensor_attributes const& t) { return std::make_shared<Tensor_attributes>(t); }

  std::array<tensor_ptr, 2> sdpa(tensor_ptr q, tensor_ptr k, tensor_ptr v, SDPA_attributes a) {
    keep(a);
    has_stats_ = a.stats_;
    tensors_ = {std::move(q), std::move(k), std::move(v), made(), made()};
    return {tensors_[3], tensors_[4]};
  }
  std::array<tensor_ptr, 3> sdpa_backward(tensor_ptr q, tensor_ptr k, tensor_ptr v, tensor_ptr o, tensor_ptr d_o,
                                          tensor_ptr stats, SDPA_backward_attributes a) {
    keep(a);
    backward_ = has_stats_ = true;
    fixed_ = a.fixed_;
    tensors_ = {std::move(q),   std::move(k), std::move(v), std::move(o), std::move(stats),
                std::move(d_o), made(),       made(),       made()};
    return {tensors_[6], tensors_[7], tensors_[8]};
  }

  error_object build(cudnnHandle_t const& handle, std::vector<HeurMode_t> const& modes) {
    if (handle == nullptr || modes.empty()) return error_object("no handle, or no mode of the heuristics");
    if (!stand_in::cudnn_refusal.empty()) return error_object(stand_in::cudnn_refusal);
    if (const std::string why = fault(); !why.empty()) return error_object(why);
    ++stand_in::cudnn_graphs;
    built_ = true;
    return {};
  }
  error_object get_workspace_size(std::int64_t& bytes) const {
    if (!built_) return error_object("the graph was not built");
    bytes = workspace_bytes();
    return {};
  }
  error_object execute(cudnnHandle_t handle, std::unordered_map<std::int64_t, void*>& arrays, void* workspace) const {
    if (!built_ || handle == nullptr || workspace == nullptr) return error_object("no plan, handle or workspace");
    if (stand_in::cudnn_failures > 0) {
      --stand_in::cudnn_failures;
      return error_object("CUDNN_STATUS_EXECUTION_FAILED");
    }
    std::vector<void*> at;
    for (const tensor_ptr& t : tensors_) {
      const auto found = arrays.find(t->uid_);
      if (found == arrays.end() || found->second == nullptr) return error_object("a tensor has no array");
      at.push_back(found->second);
    }
    const stand_in::attention what = described();
    std::vector<const void*> memory(at.begin(), at.end());
    memory.push_back(workspace);
    const auto run = [=, this_pass = backward_, fixed = fixed_, bytes = workspace_bytes()] {
      std::memset(workspace, 0xff, static_cast<std::size_t>(bytes));
      if (this_pass) {
        ++(fixed ? stand_in::cudnn_fixed_gradients : stand_in::cudnn_other_gradients);
        what.backward(at, fixed);
      } else {
        what.forward(at);
      }
    };
    if (handle->device != stand_in::current_device)
      return error_object(cudaGetErrorString(cudaErrorInvalidResourceHandle));
    const cudaError_t status = stand_in::enqueue_for("cuDNN's attention", handle->stream, memory, run);
    return status == cudaSuccess ? error_object() : error_object(cudaGetErrorString(status));
  }

 private:
  /// As on Hopper: gradients in a fixed order keep one value in bf16 for each score.
  std::int64_t workspace_bytes() const {
    const auto up = [](std::int64_t length, std::int64_t tile) { return (length + tile - 1) / tile * tile; };
    const auto &q = tensors_[0]->dim_, &k = tensors_[1]->dim_;
    return 1000 + (backward_ && fixed_ ? 2 * q[0] * q[1] * up(q[2], 64) * up(k[2], 128) : 0);
  }
  static tensor_ptr made() { return std::make_shared<Tensor_attributes>(); }

  template <class A>
  void keep(const A& a) {
    scale_ = a.scale_, alignment_ = a.alignment_, right_ = a.right_, left_ = a.left_, has_right_ = a.has_right_;
  }

  /// The reason why the graph cannot be built; "" if it can.
  std::string fault() const {
    if (tensors_.empty()) return "the graph has no operation";
    if (io_ != DataType_t::BFLOAT16 || between_ != DataType_t::FLOAT || compute_ != DataType_t::FLOAT)
      return "the types are not those of attention in bf16 with sums in float";
    if (!has_stats_) return "no statistics are asked for";
    std::set<std::int64_t> names;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const Tensor_attributes& t = *tensors_[i];
      const bool is_made = backward_ ? i > 5 : i > 2;
      if (t.dim_.size() != 4 || t.stride_.size() != 4) return "a tensor has not four dimensions and strides";
      if (!names.insert(t.uid_).second || t.uid_ == 0) return "a tensor has no name of its own";
      if (t.type_ != (i == 4 ? DataType_t::FLOAT : DataType_t::BFLOAT16)) return "a tensor has a wrong type";
      if (is_made != t.output_) return "an output is not marked as one, or an input is";
      if (i != 4 && (t.stride_[3] != 1 || t.stride_[2] % 8 != 0)) return "elements do not lie as cuDNN wants them";
    }
    const auto &q = tensors_[0]->dim_, &k = tensors_[1]->dim_, &stats = tensors_[4]->dim_;
    if (tensors_[2]->dim_ != k || tensors_[3]->dim_ != q || stats != std::vector<std::int64_t>{q[0], q[1], q[2], 1})
      return "dimensions do not agree";
    if (tensors_[4]->stride_ != std::vector<std::int64_t>{q[1] * q[2], q[2], 1, 1}) return "statistics have gaps";
    if (backward_ &&
        (tensors_[5]->dim_ != q || tensors_[6]->dim_ != q || tensors_[7]->dim_ != k || tensors_[8]->dim_ != k))
      return "dimensions of gradients do not agree";
    if (q[0] != k[0] || q[3] != k[3] || k[1] < 1 || q[1] % k[1] != 0) return "batch, heads or head_dim do not agree";
    if (q[3] % 8 != 0 || q[3] > 128) return "head_dim must be a multiple of 8, at most 128";
    if (left_ > 0 && (!has_right_ || right_ != 0 || alignment_ != DiagonalAlignment_t::TOP_LEFT || q[2] > k[2]))
      return "a left bound needs a causal mask from the top left, and no more queries than keys";
    if (has_right_ && alignment_ == DiagonalAlignment_t::BOTTOM_RIGHT && q[2] > k[2])
      return "a mask from the bottom right has more queries than keys";
    return "";
  }

  stand_in::attention described() const {
    stand_in::attention out;
    const auto &q = tensors_[0]->dim_, &k = tensors_[1]->dim_;
    out.batch = q[0], out.heads = q[1], out.kv_heads = k[1], out.q_len = q[2], out.k_len = k[2], out.head_dim = q[3];
    out.scale = scale_;
    out.causal = has_right_;
    out.shift = right_ + (alignment_ == DiagonalAlignment_t::BOTTOM_RIGHT ? out.k_len - out.q_len : 0);
    out.window = left_;
    for (const tensor_ptr& t : tensors_) out.strides.push_back({t->stride_[0], t->stride_[1], t->stride_[2]});
    return out;
  }

  DataType_t io_ = DataType_t::NOT_SET, between_ = DataType_t::NOT_SET, compute_ = DataType_t::NOT_SET;
  float scale_ = 1;
  DiagonalAlignment_t alignment_ = DiagonalAlignment_t::TOP_LEFT;
  std::int64_t right_ = 0, left_ = 0;
  bool has_right_ = false, has_stats_ = false, backward_ = false, fixed_ = false, built_ = false;
  std::vector<tensor_ptr> tensors_;  ///< q, k, v, o, statistics; do, dq, dk, dv
};

}  // namespace graph
}  // namespace cudnn_frontend
