// The definitions of collectives.hpp, which includes them unless PLAIT_COMPILED is defined.
#pragma once

#include <cstddef>
#include <utility>

#include "plait/core/error.hpp"
#include "plait/core/macros_off.hpp"
#include "plait/layout/describe.hpp"
#include "plait/layout/local_box.hpp"

namespace plait::detail {

PLAIT_INLINE linear_collectives::linear_collectives(world& ranks, const dim_sizes& sizes, const shared_linears& d,
                                                    const std::string& name) {
  const mesh_shape& mesh = ranks.shape();
  const linear_layouts& first = d.branches[0];
  for (const dim_placement& p : d.input.dims) {
    const std::int64_t local = sizes.of(p.dim) / mesh.size(d.gathered.axes_of(p.dim));
    (!first.weight.has(p.dim) ? rows_ : first.output.has(p.dim) ? batches_ : inner_) *= local;
  }
  made_for_ = made_for(mesh, ranks.rank(), sizes, {&d.input});
  executor gather(d.input, d.gathered, ranks, sizes, "input of " + name);
  executor spread(gather.backward(), ranks, sizes, "gradient of the input of " + name);
  for (const linear_layouts& b : d.branches) {
    columns_.push_back(local_elements(b.weight, mesh, sizes) / inner_ / batches_);
    total_ += columns_.back();
    made_for_.add(sizes, b.output);
  }
  dim_sizes side_by_side_sizes = sizes;
  executor resolve = resolution(ranks, side_by_side_sizes, d, name);
  executor unresolve(resolve.backward(), ranks, side_by_side_sizes, "gradient of the output of " + name);
  forward_input_ = {std::move(gather), rows(), inner_};
  backward_input_ = {std::move(spread), rows(), inner_};
  forward_output_ = {std::move(resolve), rows(), total_};
  backward_output_ = {std::move(unresolve), rows(), total_};
}

PLAIT_INLINE executor linear_collectives::resolution(world& ranks, dim_sizes& sizes, const shared_linears& d,
                                                     const std::string& name) const {
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
  return executor(product, output, ranks, sizes, "output of " + name);
}

PLAIT_INLINE void linear_collectives::split_into_chunks(std::int64_t chunks, const std::string& name) {
  check_overlap(name, chunks, forward_input_.moves(), forward_output_.moves());
  check_overlap(name, chunks, backward_output_.moves(), backward_input_.moves());
  forward_input_.split_into_chunks(chunks, "input of " + name);
  backward_input_.split_into_chunks(chunks, "gradient of the input of " + name);
  forward_output_.split_into_chunks(chunks, "output of " + name);
  backward_output_.split_into_chunks(chunks, "gradient of the output of " + name);
  chunks_ = chunks;
}

PLAIT_INLINE void linear_collectives::take_sizes(world& ranks, const dim_sizes& sizes, const shared_linears& d,
                                                 const std::string& name) {
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

}  // namespace plait::detail

#include "plait/core/macros_on.hpp"
