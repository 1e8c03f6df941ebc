// Compares plait's kernels that need one pass, or fewer bytes, with the calls that they replace: each pair in turn, on
// the shapes of a Llama. A row has the factor by which plait's way is faster.
#include "harness.hpp"
#include "library_calls.hpp"
#include "plait/kernels/cuda/launchers.hpp"
#include "plait/kernels/kernels.hpp"

namespace {

using namespace bench;
namespace kernels = plait::kernels;

/// Two ways to one result; `calls` is the number of calls of the first way in a step.
struct pair_of_ways {
  std::string id, other_is;
  timed_call own, other;
  double calls;
};

class pairs {
 public:
  pairs(cuda& where, const options& o, const shapes& s)
      : device(where), o_(o), tokens(s.tokens), model(s.model), microbatches(s.microbatches) {}

  bool wants(const std::string& name) const { return o_.wants("choice." + name); }
  template <class Own, class Other>
  void add(const std::string& name, const std::string& other_is, int sets, double calls, Own own, Other other) {
    const std::string id = "choice." + name;
    all.push_back({id, other_is, {id, 0, sets, std::move(own)}, {id + ".other", 0, sets, std::move(other)}, calls});
  }
  cuda& device;
  const options& o_;
  std::int64_t tokens;
  plait::llama_config model;
  std::int64_t microbatches;
  std::vector<pair_of_ways> all;
};

/// Keys that are rotated in the pass that copies them out of the fused projection, as context parallelism needs them.
void add_rope(pairs& c, std::int64_t table_rows) {
  if (!c.wants("rope_into_copy")) return;
  const std::int64_t head = c.model.head_dim, heads = c.model.kv_heads, width = heads * head;
  const std::int64_t row = (c.model.heads + 2 * heads) * head;
  const auto bytes = static_cast<double>(2 * 2 * c.tokens * width);
  const int sets = c.o_.sets(bytes);
  const auto qkv = random_arrays<bf16>(c.device, c.tokens * row, sets);
  const auto keys = random_arrays<bf16>(c.device, c.tokens * width, sets);
  const auto cosine = random_arrays<float>(c.device, table_rows * head / 2, 1),
             sine = random_arrays<float>(c.device, table_rows * head / 2, 1);
  const std::int64_t tokens = c.tokens;
  c.add(
      "rope_into_copy", "a copy, then a rotation", sets, 0,
      [=, &c](int i) {
        kernels::rope_forward(c.device, static_cast<const bf16*>(qkv(i)), row, keys(i),
                              static_cast<const float*>(cosine(0)), static_cast<const float*>(sine(0)), tokens, heads,
                              head, width, table_rows);
      },
      [=, &c](int i) {
        kernels::copy_2d(c.device, qkv(i), keys(i), tokens, width * 2, row * 2, width * 2);
        kernels::rope_forward(c.device, keys(i), width, keys(i), static_cast<const float*>(cosine(0)),
                              static_cast<const float*>(sine(0)), tokens, heads, head, width, table_rows);
      });
}

void add_residual_norm(pairs& c) {
  if (!c.wants("residual_norm")) return;
  const std::int64_t rows = c.tokens, columns = c.model.hidden, n = rows * columns;
  const int sets = c.o_.sets(static_cast<double>(4 * 2 * n));
  const auto x = random_arrays<bf16>(c.device, n, sets), addend = random_arrays<bf16>(c.device, n, sets);
  const auto weight = random_arrays<bf16>(c.device, columns, 1);
  const arrays<bf16> sum(c.device, n, sets), y(c.device, n, sets);
  const arrays<float> inverse(c.device, rows, 1);
  const double eps = c.model.rms_eps;
  c.add(
      "residual_norm", "a sum, then a norm", sets, 0,
      [=, &c](int i) {
        kernels::norm_forward(c.device, x(i), weight(0), nullptr, y(i), nullptr, inverse(0), rows, columns, eps,
                              addend(i), sum(i));
      },
      [=, &c](int i) {
        kernels::add(c.device, x(i), addend(i), sum(i), n);
        kernels::norm_forward(c.device, sum(i), weight(0), nullptr, y(i), nullptr, inverse(0), rows, columns, eps);
      });
}

/// Gradients of the weight of gate and up: the first of a step, one with a bias beside it, and one in bf16.
void add_weight_gradients(pairs& c) {
  if (!c.wants("first_gradient") && !c.wants("bias_gradient") && !c.wants("narrow_gradient")) return;
  const std::int64_t out = 2 * c.model.ffn, in = c.model.hidden, t = c.tokens;
  const auto dy = random_arrays<bf16>(c.device, t * out, 1), x = random_arrays<bf16>(c.device, t * in, 1, -0.02, 0.02);
  const arrays<float> gradient(c.device, out * in, 1), bias(c.device, out, 1);
  const auto narrow = random_arrays<bf16>(c.device, out * in, 1);
  const auto product = [=, &c](auto* to, double beta) {
    c.device.gemm(true, false, out, in, t, 1.0, static_cast<const bf16*>(dy(0)), out, static_cast<const bf16*>(x(0)),
                  in, beta, to, in);
  };
  const auto first = static_cast<double>(c.model.layers);
  c.add(
      "first_gradient", "zeros, then a product that adds", 1, first, [=](int) { product(gradient(0), 0.0); },
      [=, &c](int) {
        c.device.zero(gradient(0), static_cast<std::size_t>(out * in) * sizeof(float), c.device.main_stream());
        product(gradient(0), 1.0);
      });
  c.add(
      "bias_gradient", "a product, then a sum of rows", 1, 0,
      [=, &c](int) {
        if (!c.device.gemm_with_row_sums(true, false, out, in, t, 1.0, static_cast<const bf16*>(dy(0)), out,
                                         static_cast<const bf16*>(x(0)), in, 1.0, gradient(0), in, bias(0)))
          plait::fail("cuBLASLt has no algorithm for a product and a bias' gradient together");
      },
      [=, &c](int) {
        product(gradient(0), 1.0);
        kernels::bias_gradient(c.device, static_cast<const bf16*>(dy(0)), bias(0), t, out, std::int64_t{0});
      });
  c.add(
      "narrow_gradient", "added to floats", 1, 0, [=](int) { product(narrow(0), 1.0); },
      [=](int) { product(gradient(0), 1.0); });
}

/// AdamW on one large tensor, with gradients and moments in bf16, against all floats.
void add_narrow_adamw(pairs& c) {
  if (!c.wants("narrow_adamw")) return;
  const std::int64_t n = c.model.hidden * c.model.ffn * (c.o_.tiny ? 1 : 8);
  const auto master = random_arrays<float>(c.device, n, 1), gradient = random_arrays<float>(c.device, n, 1),
             m = random_arrays<float>(c.device, n, 1), v = random_arrays<float>(c.device, n, 1, 0, 1);
  const auto narrow = random_arrays<bf16>(c.device, n, 1), narrow_m = random_arrays<bf16>(c.device, n, 1),
             narrow_v = random_arrays<bf16>(c.device, n, 1, 0, 1);
  const arrays<bf16> weight(c.device, n, 1);
  const auto numbers = kernels::adamw_scalars_of({}, 1e-5, 100);
  const arrays<kernels::adamw_scalars> scalars(c.device, 1, 1);
  c.device.upload(scalars(0), &numbers, sizeof numbers, c.device.main_stream());
  plait::box whole;
  whole.dims = 1;
  whole.global[0] = whole.local[0] = n;
  using wide_tensor = kernels::adamw_tensor<float, float, bf16>;
  using narrow_tensor = kernels::adamw_rounded_tensor<float, bf16, bf16, bf16>;
  const wide_tensor wide{master(0), gradient(0), m(0), v(0), weight(0), n, 0.1};
  const narrow_tensor half{master(0),
                           narrow(0),
                           narrow_m(0),
                           narrow_v(0),
                           nullptr,
                           nullptr,
                           weight(0),
                           n,
                           0,
                           0.1,
                           {kernels::run_map::of(whole), 0, 9}};
  c.add(
      "narrow_adamw", "gradients and moments in float", 1, 0,
      [=, &c, keep = std::make_tuple(master, narrow, narrow_m, narrow_v, weight)](int) {
        kernels::adamw_update(c.device, std::span<const narrow_tensor>(&half, 1), {}, scalars(0));
      },
      [=, &c, keep = std::make_tuple(master, gradient, m, v, weight)](int) {
        kernels::adamw_update(c.device, std::span<const wide_tensor>(&wide, 1), {}, scalars(0));
      });
}

/// Calls library(scratch, bytes) with the scratch memory that it asks for.
template <class Call>
arrays<unsigned char> scratch_for(cuda& device, Call&& library) {
  std::size_t bytes = 0;
  library(nullptr, bytes);
  return arrays<unsigned char>(device, static_cast<std::int64_t>(std::max<std::size_t>(bytes, 1)), 1);
}

/// Sums, maps and the sort, against CUB's.
void add_library(pairs& c) {
  if (!c.wants("sum_squares") && !c.wants("sum") && !c.wants("cast") && !c.wants("sort")) return;
  const std::int64_t n = c.model.hidden * c.model.ffn * (c.o_.tiny ? 1 : 8);
  const cudaStream_t stream = c.device.main_stream().handle();
  const auto x = random_arrays<float>(c.device, n, 1);
  const arrays<bf16> y(c.device, n, 1);
  const arrays<double> total(c.device, 1, 1);
  const arrays<float> narrow_total(c.device, 1, 1);
  const kernels::const_elements<float> all{x(0), n};
  const auto squares = [=](void* scratch, std::size_t& bytes) {
    library::sum_squares(x(0), n, total(0), scratch, bytes, stream);
  };
  const auto of_squares = scratch_for(c.device, squares);
  c.add(
      "sum_squares", "CUB's", 1, 0,
      [=, &c](int) {
        kernels::add_sum_squares(c.device, std::span<const kernels::const_elements<float>>(&all, 1), total(0));
      },
      [=](int) {
        auto bytes = static_cast<std::size_t>(of_squares.all());
        squares(of_squares(0), bytes);
      });
  const auto sum = [=](void* scratch, std::size_t& bytes) {
    library::sum(x(0), n, narrow_total(0), scratch, bytes, stream);
  };
  const auto of_sum = scratch_for(c.device, sum);
  c.add(
      "sum", "CUB's, in float", 1, 0, [=, &c](int) { kernels::sum(c.device, x(0), n, total(0)); },
      [=](int) {
        auto bytes = static_cast<std::size_t>(of_sum.all());
        sum(of_sum(0), bytes);
      });
  c.add(
      "cast", "CUB's map", 1, 0, [=, &c](int) { kernels::cast(c.device, x(0), y(0), n); },
      [=](int) { library::cast(x(0), y(0), n, stream); });

  const auto count = static_cast<int>(c.tokens);
  int bits = 1;
  while (c.model.vocab >> bits != 0) ++bits;
  const arrays<std::uint32_t> keys(c.device, 2 * c.tokens, 1);
  const arrays<int> values(c.device, 2 * c.tokens, 1);
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(2 * c.tokens));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::uint32_t>((i * 2654435761u >> 7) % static_cast<std::uint64_t>(c.model.vocab));
  c.device.upload(keys(0), ids.data(), ids.size() * sizeof ids[0], c.device.main_stream());
  c.device.zero(values(0), static_cast<std::size_t>(2 * c.tokens) * sizeof(int), c.device.main_stream());
  const auto sort = [=](void* scratch, std::size_t& bytes) {
    std::uint32_t* const k[] = {keys(0), keys(0) + count};
    int* const v[] = {values(0), values(0) + count};
    library::sort_pairs(k, v, count, bits, scratch, bytes, stream);
  };
  const auto of_sort = scratch_for(c.device, sort);
  c.add(
      "sort", "CUB's, called with memory at hand", 1, static_cast<double>(c.microbatches),
      [=, &c](int) {
        kernels::detail::key_values both{{keys(0), keys(0) + count}, {values(0), values(0) + count}};
        kernels::detail::sort_pairs(c.device, both, count, bits);
      },
      [=](int) {
        auto bytes = static_cast<std::size_t>(of_sort.all());
        sort(of_sort(0), bytes);
      });
}

void measure(cuda& device, const options& o, parts& all) {
  const shapes s = shapes::of(o);
  pairs c(device, o, s);
  all.run("choice.rope", [&] { add_rope(c, std::min<std::int64_t>(s.tokens, o.tiny ? 8 : 2048)); });
  all.run("choice.residual_norm", [&] { add_residual_norm(c); });
  all.run("choice.gradients", [&] { add_weight_gradients(c); });
  all.run("choice.narrow_adamw", [&] { add_narrow_adamw(c); });
  all.run("choice.library", [&] { add_library(c); });
  for (pair_of_ways& way : c.all) {
    if (!o.wants(way.id)) continue;
    std::vector<timed_call> both{std::move(way.own), std::move(way.other)};
    take_turns(device, both, o, all);
    if (both.size() < 2) continue;  // the failed one has been printed
    const double own = median(both[0].seconds), other = median(both[1].seconds);
    row(way.id, median_of_rounds(both[0].seconds, both[1].seconds, [](double a, double b) { return b / a; }))
        .number("seconds", own)
        .number("other_seconds", other)
        .number("step_calls", way.calls)
        .text("other", way.other_is)
        .print();
  }
}

}  // namespace

int main(int count, char** arguments) {
  return bench::run_main(count, arguments, {"--tokens"}, [](const options& o, parts& all) {
    cuda device;
    measure(device, o, all);
  });
}
