// The collectives of linears that share an input, as stages before and after their products.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "plait/comm/world.hpp"
#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/device/device.hpp"
#include "plait/layout/check.hpp"
#include "plait/layout/layout.hpp"
#include "plait/nn/layer.hpp"
#include "plait/nn/linear/policy.hpp"
#include "plait/nn/linear/rule.hpp"
#include "plait/tensor/chunked_collective.hpp"
#include "plait/tensor/redistribution.hpp"

namespace plait::detail {

/// A redistribution of a matrix's rows. `gather` runs it before a product and passes the rows on; `reduce` runs it
/// after a product. It runs as a whole, or in chunks that overlap with the product.
class row_stage {
 public:
  row_stage() = default;
  /// The product has `rows` rows; the redistribution moves them as rows of `width` elements.
  row_stage(ready_plan moves, std::int64_t rows, std::int64_t width)
      : moves_(std::move(moves)), rows_(rows), width_(width) {}

  /// Makes later calls overlap with the product, in `chunks` chunks. Throws `plait::error` that names `where`.
  void split_into_chunks(std::int64_t chunks, std::string_view where) {
    if (!trivial()) chunks_ = chunked_collective(moves_, width_, chunks, where);
  }

  const ready_plan& moves() const { return moves_; }
  /// Whether no data is sent, so the product directly reads the input or writes the output.
  bool trivial() const { return moves_.trivial(); }

  /// Returns all rows of `in`: in `room`, or `in` itself if no data is sent.
  template <class T, compute_device Device>
  const T* gather(Device& device, const T* in, buffer<Device>& room) const {
    if (trivial()) return in;
    allocate<T>(device, room);
    moves_.run(device, in, room.data(), dtype_of<T>);
    return room.template data<T>();
  }
  /// Calls use(rows, array of all rows) for each group of rows that arrives, each row once.
  template <class T, compute_device Device, class Use>
  void gather(Device& device, const T* in, buffer<Device>& room, Use&& use) const {
    if (!chunks_) return use(row_range{0, rows_}, gather(device, in, room));
    allocate<T>(device, room);
    const T* const all = room.template data<T>();
    chunks_.gather(device, in, room.data(), dtype_of<T>, [&](std::int64_t first, std::int64_t count) {
      use(row_range{first, count}, all);
    });
  }
  /// Gathers all rows to `room`. If `overlaps`, the gather runs concurrently with the work that follows, until
  /// `whole_gather::finish`.
  template <class T, compute_device Device>
  whole_gather<Device> gather_concurrently(Device& device, const T* in, buffer<Device>& room, bool overlaps) const {
    if (chunks_ && overlaps) {
      allocate<T>(device, room);
      return chunks_.start_whole(device, in, room.data(), dtype_of<T>);
    }
    gather(device, in, room);
    return {};
  }

  /// Reduces the rows that make(rows, to) writes to `out`; it asks for all of `rows` at once or in chunks. The last
  /// chunks may still be in flight when it returns.
  template <class T, compute_device Device, class Make>
  chunks_in_flight<Device> reduce(Device& device, T* out, row_range rows, Make&& make) const {
    if (chunks_)
      return chunks_.reduce(device, out, dtype_of<T>, [&](std::int64_t first, std::int64_t count, void* to) {
        make(row_range{first, count}, static_cast<T*>(to));
      });
    buffer<Device> room;
    T* const product = product_room(device, out + rows.first * width_, room);
    make(rows, product);
    bring(device, product, out);
    return {};
  }
  /// The memory for the product of all rows before `bring`: `room`, or `out` if no data is sent.
  template <class T, compute_device Device>
  T* product_room(Device& device, T* out, buffer<Device>& room) const {
    if (trivial()) return out;
    allocate<T>(device, room);
    return room.template data<T>();
  }
  /// Redistributes the product to `out`.
  template <class T, compute_device Device>
  void bring(Device& device, const T* product, T* out) const {
    if (!trivial()) moves_.run(device, product, out, dtype_of<T>);
  }

 private:
  template <class T, compute_device Device>
  void allocate(Device& device, buffer<Device>& room) const {
    room = make_buffer<T>(device, static_cast<std::size_t>(rows_ * width_));
  }

  ready_plan moves_;
  chunked_collective chunks_;
  std::int64_t rows_ = 0, width_ = 0;
};

/// The dim of the outputs of several linears, side by side.
struct columns : dim_tag<"columns"> {};

/// Returns the layout that the outputs of all linears with this input share; `a` is the layout of one output. Its own
/// dims become one whole dim, and only axes in `moving` keep their states.
inline layout side_by_side(const layout& a, const layout& input, const axis_list& moving) {
  layout shared;
  for (const dim_placement& p : a.dims)
    if (input.has(p.dim)) shared.dims.push_back(p);
  shared.dims.push_back({dim_of<columns>, {}});
  for (axis_id axis : moving)
    if (!a.sharded_by(axis)) shared.set(axis, a.state_of(axis));
  return shared;
}

/// The collectives of linears that share an input, prepared for the sizes of a context, and the sizes of their
/// products: `batches` times [rows, inner] by [inner, columns], with the columns of all branches.
class linear_collectives {
 public:
  /// `name` is the name of the first weight.
  linear_collectives(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name) {
    const mesh_shape& mesh = ranks.shape();
    const linear_layouts& first = d.branches[0];
    const box gathered = local_box(d.gathered, mesh, sizes, ranks.rank());
    for (std::size_t i = 0; i < d.gathered.dims.size(); ++i) {
      const dim_id dim = d.gathered.dims[i].dim;
      (!first.weight.has(dim) ? rows_ : first.output.has(dim) ? batches_ : inner_) *= gathered.local[i];
    }
    made_for_ = made_for(mesh, ranks.rank(), sizes, {&d.input});
    ready_plan gather(d.input, d.gathered, ranks, sizes, "input of " + name);
    ready_plan spread(gather.backward(), ranks, sizes, "gradient of the input of " + name);
    for (const linear_layouts& b : d.branches) {
      enforce_parts(prune(b.weight, ranks), mesh, sizes, name);  // every rank checks this before a rank without columns
                                                                 // could fail alone
      columns_.push_back(local_box(b.weight, mesh, sizes, ranks.rank()).local_size() / inner_ / batches_);
      total_ += columns_.back();
      made_for_.add(sizes, b.output);
    }
    dim_sizes side_by_side_sizes = sizes;
    ready_plan resolve = resolution(ranks, side_by_side_sizes, d, name);
    ready_plan unresolve(resolve.backward(), ranks, side_by_side_sizes, "gradient of the output of " + name);
    forward_input_ = {std::move(gather), rows(), inner_};
    backward_input_ = {std::move(spread), rows(), inner_};
    forward_output_ = {std::move(resolve), rows(), total_};
    backward_output_ = {std::move(unresolve), rows(), total_};
  }

  /// Overlaps the collectives with their products. Throws if a product has a collective both before and after it.
  void split_into_chunks(std::int64_t chunks, const std::string& name) {
    check_overlap(name, chunks, forward_input_.moves(), forward_output_.moves());
    check_overlap(name, chunks, backward_output_.moves(), backward_input_.moves());
    forward_input_.split_into_chunks(chunks, "input of " + name);
    backward_input_.split_into_chunks(chunks, "gradient of the input of " + name);
    forward_output_.split_into_chunks(chunks, "output of " + name);
    backward_output_.split_into_chunks(chunks, "gradient of the output of " + name);
    chunks_ = chunks;
  }

  /// Prepares everything again for other sizes. Throws, and changes nothing, if a weight's size would change.
  void take_sizes(world& ranks, const dim_sizes& sizes, const shared_linears& d, const std::string& name) {
    made_for_.require_mesh(name, ranks.shape(), ranks.rank());
    linear_collectives now(ranks, sizes, d, name);
    for (const linear_layouts& b : d.branches)
      for (const dim_placement& p : b.placed.dims)
        if (const std::int64_t* const was = made_for_.size_of(p.dim); was && *was != sizes.of(p.dim))
          fail({name, ": resize changes ", p.dim.text(), " from ", *was, " to ", sizes.of(p.dim),
                ", and the weight has this dim: only dims that the weight does not have may change, such as batch and "
                "seq; make another layer for another weight"});
    if (chunks_ != 1) now.split_into_chunks(chunks_, name);
    *this = std::move(now);
  }

  /// Local elements of the input.
  std::int64_t input_size() const { return forward_input_.moves().source().local_size(); }
  /// Local elements of the output, over all branches.
  std::int64_t output_size() const { return forward_output_.moves().target().local_size(); }
  /// Rows of the products, over all batches.
  std::int64_t rows() const { return batches_ * rows_; }

 protected:
  row_stage forward_input_, backward_input_, forward_output_, backward_output_;
  std::int64_t batches_ = 1, rows_ = 1, inner_ = 1, total_ = 0;
  std::vector<std::int64_t> columns_;  ///< of each branch's product
  made_for made_for_;

 private:
  /// Returns the plan from the products to the outputs. `sizes` receives the size of the dim `columns`.
  ready_plan resolution(world& ranks, dim_sizes& sizes, const shared_linears& d, const std::string& name) const {
    layout product = d.branches[0].product, output = d.branches[0].output;
    if (d.branches.size() > 1) {
      const axis_list moving = differing_axes(product, output);
      product = side_by_side(product, d.input, moving);
      output = side_by_side(output, d.input, moving);
      sizes.set(dim_of<columns>, total_);
      for (const linear_layouts& b : d.branches) {
        if (differing_axes(b.product, b.output) == moving && side_by_side(b.product, d.input, moving) == product &&
            side_by_side(b.output, d.input, moving) == output)
          continue;
        fail({"output of ", name, ": linears that share an input must be resolved alike; one goes from ",
              describe(d.branches[0].product), " to ", describe(d.branches[0].output), ", another from ",
              describe(b.product), " to ", describe(b.output)});
      }
    }
    return ready_plan(product, output, ranks, sizes, "output of " + name);
  }

  std::int64_t chunks_ = 1;
};

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
