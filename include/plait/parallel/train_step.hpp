#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "plait/optim/adamw.hpp"
#include "plait/optim/gradient_norm.hpp"
#include "plait/parallel/step_result.hpp"

namespace plait {

/// Completes a scalar in the device's memory that is partial over `axes`.
template <compute_device Device>
void resolve_in_place(context<Device>& ctx, const axis_list& axes, double* value) {
  axis_list ordered;
  for (axis_id axis : ctx.ranks.shape().axes)
    if (axes.contains(axis)) ordered.push_back(axis);
  ordered = ctx.ranks.pruned(ordered);
  if (!ordered.empty()) ctx.ranks.group(ordered).all_reduce(value, value, 1, dtype::f64, reduce_op::sum);
}

/// The same for a number on the host.
template <compute_device Device>
double resolve_scalar(context<Device>& ctx, const axis_list& axes, double value) {
  auto there = make_buffer<double>(ctx.device, 1);
  ctx.device.upload(there.data(), &value, sizeof value, ctx.device.main_stream());
  resolve_in_place(ctx, axes, there.template data<double>());
  ctx.device.download(&value, there.data(), sizeof value, ctx.device.main_stream());
  return value;
}

/// This rank's part of the numbers of a microbatch's tokens, in host memory, where data comes from.
template <class T>
class host_numbers {
 public:
  explicit host_numbers(const box& part) : part_(part), values_(static_cast<std::size_t>(part.local_size())) {}
  T* data() { return values_.data(); }
  const T* data() const { return values_.data(); }
  std::int64_t size() const { return part_.local_size(); }
  /// Where this part lies in the microbatch over the whole mesh.
  const box& part() const { return part_; }

 private:
  box part_;
  std::vector<T> values_;
};
/// Token ids or labels.
using host_tokens = host_numbers<std::int64_t>;
/// Where the document of each token begins (see `context::document_starts`).
using host_starts = host_numbers<std::int32_t>;

/// Puts `from` where the model can read it.
template <class T, class To, compute_device Device>
void upload(context<Device>& ctx, const host_numbers<T>& from, To& to) {
  ctx.device.upload(to.data(), from.data(), static_cast<std::size_t>(from.size()) * sizeof(T),
                    ctx.device.main_stream());
}

/// A model whose layers lie on several ranks, such as `pipeline`: it runs a step's microbatches itself, and what is
/// known of a part only is summed over its stages.
template <class Model, class Device>
concept staged_model = requires(Model& m, context<Device>& ctx, double* value) {
  m.sum_over_stages(ctx, value);
  m.reduce_gradients(ctx);
};

/// One optimizer step over any number of microbatches, in three parts:
///
///     step.load(ctx, fill);      // data to the device
///     step.run(ctx);             // everything else; waits for nothing, the same work in every step
///     step.result(ctx);          // the numbers of the step, which waits for it
///
/// The loss is the sum over all tokens of the global batch divided by their number, whatever the layout and the number
/// of microbatches; there is no other scale anywhere.
template <class Model, class Precision, compute_device Device>
class training_step {
  using tokens = typename Model::tokens;

 public:
  training_step(context<Device>& ctx, Model& model, adamw<Precision, Device>& optimizer, std::int64_t microbatches,
                double clip)
      : model_(model), optimizer_(optimizer), clip_(clip), numbers_(make_buffer<double>(ctx.device, count)) {
    for (std::int64_t i = 0; i < microbatches; ++i) {
      batch_.emplace_back(tokens(ctx), tokens(ctx));
      if (packed())
        starts_.push_back(make_buffer<std::int32_t>(ctx.device, static_cast<std::size_t>(batch_[0].first.size())));
    }
  }

  /// `fill(i, ids, labels)` provides microbatch i on the host; labels equal to `ignore_index` do not count. It is
  /// called for every microbatch before the first pass, because the number of counted tokens scales the gradients.
  /// Where sequences are packed from documents (`attention_options::documents`), it is `fill(i, ids, labels, starts)`.
  template <class Fill>
  void load(context<Device>& ctx, Fill&& fill) {
    const std::int64_t ignored = model_.options().loss.ignore_index;
    double counted = 0;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      host_tokens ids(batch_[i].first.part()), labels(batch_[i].second.part());
      if constexpr (std::invocable<Fill&, std::int64_t, host_tokens&, host_tokens&, host_starts&>) {
        host_starts starts(ids.part());
        fill(static_cast<std::int64_t>(i), ids, labels, starts);
        if (packed()) upload(ctx, starts, starts_[i]);
      } else {
        if (packed())
          fail("training_step: attention_options::documents is set, so fill must take (i, ids, labels, starts)");
        fill(static_cast<std::int64_t>(i), ids, labels);
      }
      for (std::int64_t t = 0; t < labels.size(); ++t) counted += labels.data()[t] != ignored;
      upload(ctx, ids, batch_[i].first);
      upload(ctx, labels, batch_[i].second);
    }
    ctx.device.upload(number(own_tokens), &counted, sizeof counted, ctx.device.main_stream());
  }

  /// Forward, backward, reduction, clipping and update. The optimizer's `begin_step` comes before.
  void run(context<Device>& ctx) {
    axis_list sharding;
    for (const dim_placement& p : layout_v<typename tokens::spec>.dims) sharding = union_of(sharding, p.axes);
    ctx.device.copy(number(all_tokens), number(own_tokens), sizeof(double), ctx.device.main_stream());
    resolve_in_place(ctx, sharding, number(all_tokens));
    ctx.device.zero(number(loss), sizeof(double), ctx.device.main_stream());
    model_.visit([&](parameter_base<Precision, Device>& p) {
      p.gather(ctx);
      p.zero_gradient(ctx);
    });
    typename Model::loss_seed seed(ctx);
    kernels::reciprocal(ctx.device, number(all_tokens), seed.data());  // with no token counted there is no gradient
    if constexpr (staged_model<Model, Device>) {
      std::vector<const std::int32_t*> starts;
      for (const buffer<Device>& s : starts_) starts.push_back(s.template data<std::int32_t>());
      model_.run(ctx, batch_, seed, number(loss), starts);
      model_.sum_over_stages(ctx, number(loss));
    } else {
      run_microbatches(ctx, seed);
    }
    resolve_in_place(ctx, layout_v<typename Model::loss_sum::spec>.partial, number(loss));

    gradient_norm<Precision, Device> gradients;
    if constexpr (staged_model<Model, Device>) {
      model_.reduce_gradients(ctx);
      model_.visit_once([&](parameter_base<Precision, Device>& p) { gradients.add(ctx, p); });
    } else {
      model_.visit([&](parameter_base<Precision, Device>& p) {
        p.reduce(ctx);
        gradients.add(ctx, p);
      });
    }
    ctx.device.copy(number(squares), gradients.squares(ctx), sizeof(double), ctx.device.main_stream());
    if constexpr (staged_model<Model, Device>) model_.sum_over_stages(ctx, number(squares));
    kernels::clip(ctx.device, number(squares), clip_, number(norm), number(factor));
    optimizer_.scale_gradients(ctx, number(factor));
    optimizer_.update_all(ctx, model_);
  }

  step_result result(context<Device>& ctx) {
    double numbers[count];
    ctx.device.synchronize();
    ctx.device.download(numbers, numbers_.data(), sizeof numbers, ctx.device.main_stream());
    const double tokens_in_all = numbers[all_tokens];
    return {tokens_in_all > 0 ? numbers[loss] / tokens_in_all : 0.0, numbers[norm],
            static_cast<std::int64_t>(tokens_in_all)};
  }

  const Model& model() const { return model_; }

 private:
  enum place : std::size_t { own_tokens, all_tokens, loss, squares, norm, factor, count };
  void run_microbatches(context<Device>& ctx, const typename Model::loss_seed& seed) {
    const std::int64_t first = ctx.first_sample;
    const std::int32_t* const outside = ctx.document_starts;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
      auto& [ids, labels] = batch_[i];
      if (packed()) ctx.document_starts = starts_[i].template data<std::int32_t>();
      typename Model::saved kept;
      const auto sum = model_.forward(ctx, ids, labels, &kept);
      kernels::accumulate(ctx.device, sum.data(), number(loss), 1);
      model_.backward(ctx, ids, labels, kept, seed);
      if (ctx.deferred) ctx.deferred->run();  // what they read goes with `kept`
      ctx.first_sample += ctx.sizes.of(layout_v<typename tokens::spec>.dims[0].dim);
    }
    ctx.first_sample = first;
    ctx.document_starts = outside;
  }

  /// Whether the model's sequences are packed from documents.
  bool packed() const {
    if constexpr (requires { model_.options().attention.documents; })
      return model_.options().attention.documents;
    else
      return false;
  }

  double* number(place at) { return numbers_.template data<double>() + at; }

  Model& model_;
  adamw<Precision, Device>& optimizer_;
  double clip_;
  std::vector<std::pair<tokens, tokens>> batch_;
  std::vector<buffer<Device>> starts_;  ///< of the documents, for each microbatch, if there are any
  buffer<Device> numbers_;
};

/// One step, with what `training_step` says.
template <class Model, class Precision, compute_device Device, class Fill>
step_result train_step(context<Device>& ctx, Model& model, adamw<Precision, Device>& optimizer,
                       std::int64_t microbatches, double learning_rate, double clip, Fill&& fill) {
  training_step step(ctx, model, optimizer, microbatches, clip);
  step.load(ctx, fill);
  optimizer.begin_step(ctx, learning_rate);
  step.run(ctx);
  return step.result(ctx);
}

}  // namespace plait
