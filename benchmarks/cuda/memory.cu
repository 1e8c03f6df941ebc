// Measures memory-bound kernels on the shapes of a Llama: the bytes that an algorithm must move over its time, as a
// share of the rate of a plain copy in the same round.
#include <set>

#include "harness.hpp"
#include "plait/kernels/kernels.hpp"

namespace {

using namespace bench;
namespace kernels = plait::kernels;

/// The calls to measure.
class calls {
 public:
  calls(cuda& where, const options& o, const shapes& s)
      : device(where), o_(o), tokens(s.tokens), model(s.model), microbatches(static_cast<double>(s.microbatches)) {}

  bool wants(const std::string& name) const { return o_.wants("memory." + name); }
  template <class Run>
  void add(const std::string& name, double bytes, int sets, double step_calls, Run run) {
    all.push_back({"memory." + name, bytes, sets, std::move(run), step_calls});
  }
  /// Returns the number of calls in a step if each layer makes one in each microbatch.
  double layers() const { return microbatches * static_cast<double>(model.layers); }

  cuda& device;
  const options& o_;
  std::int64_t tokens;
  plait::llama_config model;
  double microbatches;
  std::vector<timed_call> all;
};

constexpr double bf = 2, f32 = 4;  // bytes of an element

void add_copies(calls& c) {
  const std::int64_t n = c.o_.tiny ? 4096 : std::int64_t{1} << 27;
  const auto from = random_arrays<float>(c.device, n, 1);
  const arrays<float> to(c.device, n, 1);
  const auto bytes = 2 * f32 * static_cast<double>(n);
  c.all.push_back({"copy.kernel", bytes, 1, [=, &c](int i) { kernels::cast(c.device, from(i), to(i), n); }});
  c.all.push_back({"copy.memcpy", bytes, 1, [=, &c](int i) {
                     c.device.copy(to(i), from(i), static_cast<std::size_t>(n) * sizeof(float), c.device.main_stream());
                   }});
}

void add_norms(calls& c) {
  if (!c.wants("rms_norm") && !c.wants("layer_norm")) return;
  const std::int64_t rows = c.tokens, columns = c.model.hidden, n = rows * columns;
  const auto size = static_cast<double>(n), r = static_cast<double>(rows), w = static_cast<double>(columns);
  const int sets = c.o_.sets(2 * bf * size);
  const auto x = random_arrays<bf16>(c.device, n, sets), dy = random_arrays<bf16>(c.device, n, sets);
  const arrays<bf16> y(c.device, n, sets);
  const auto weight = random_arrays<bf16>(c.device, columns, 1), bias = random_arrays<bf16>(c.device, columns, 1);
  const auto dweight = random_arrays<float>(c.device, columns, 1), dbias = random_arrays<float>(c.device, columns, 1);
  const arrays<float> mean(c.device, rows, 1), inverse(c.device, rows, 1);
  const double eps = c.model.rms_eps;
  const double norms = 2 * c.layers() + c.microbatches;
  c.add("rms_norm_forward", 2 * bf * size + f32 * r + bf * w, sets, norms, [=, &c](int i) {
    kernels::norm_forward(c.device, x(i), weight(0), nullptr, y(i), nullptr, inverse(0), rows, columns, eps);
  });
  const auto addend = random_arrays<bf16>(c.device, n, sets);
  c.add("rms_norm_backward", 4 * bf * size + f32 * r + (bf + 2 * f32) * w, sets, norms, [=, &c](int i) {
    kernels::norm_backward(c.device, x(i), weight(0), dy(i), nullptr, inverse(0), y(i), dweight(0), nullptr, rows,
                           columns, addend(i));
  });
  c.add("layer_norm_forward", 2 * bf * size + 2 * f32 * r + 2 * bf * w, sets, 0, [=, &c](int i) {
    kernels::norm_forward(c.device, x(i), weight(0), bias(0), y(i), mean(0), inverse(0), rows, columns, eps);
  });
  c.add("layer_norm_backward", 3 * bf * size + 2 * f32 * r + (bf + 4 * f32) * w, sets, 0, [=, &c](int i) {
    kernels::norm_backward(c.device, x(i), weight(0), dy(i), mean(0), inverse(0), y(i), dweight(0), dbias(0), rows,
                           columns);
  });
}

void add_swiglu(calls& c) {
  if (!c.wants("swiglu")) return;
  const std::int64_t rows = c.tokens, ffn = c.model.ffn, n = rows * ffn;
  const auto size = static_cast<double>(n);
  const auto gate_up = random_arrays<bf16>(c.device, 2 * n, 1, -4, 4), dy = random_arrays<bf16>(c.device, n, 1);
  const arrays<bf16> y(c.device, n, 1), dgate_up(c.device, 2 * n, 1);
  c.add("swiglu_forward", 3 * bf * size, 1, c.layers(),
        [=, &c](int i) { kernels::swiglu_forward(c.device, gate_up(i), y(i), rows, ffn); });
  c.add("swiglu_backward", 5 * bf * size, 1, c.layers(),
        [=, &c](int i) { kernels::swiglu_backward(c.device, gate_up(i), dy(i), dgate_up(i), rows, ffn); });
}

void add_rope(calls& c, std::int64_t table_rows) {
  if (!c.wants("rope")) return;
  const std::int64_t width = (c.model.heads + 2 * c.model.kv_heads) * c.model.head_dim;
  const std::int64_t turned = c.model.heads + c.model.kv_heads, half = c.model.head_dim / 2;
  const double bytes = 2 * bf * static_cast<double>(c.tokens * turned * c.model.head_dim) +
                       2 * f32 * static_cast<double>(table_rows * half);
  const int sets = c.o_.sets(bytes);
  const auto qkv = random_arrays<bf16>(c.device, c.tokens * width, sets);
  const auto cosine = random_arrays<float>(c.device, table_rows * half, 1);
  const auto sine = random_arrays<float>(c.device, table_rows * half, 1);
  const auto add = [&](const std::string& name, auto rotate) {
    c.add(name, bytes, sets, c.layers(), [=, &c](int i) {
      rotate(c.device, qkv(i), width, qkv(i), static_cast<const float*>(cosine(0)), static_cast<const float*>(sine(0)),
             c.tokens, turned, c.model.head_dim, width, table_rows);
    });
  };
  add("rope_forward", [](auto&&... a) { kernels::rope_forward(a...); });
  add("rope_backward", [](auto&&... a) { kernels::rope_backward(a...); });
}

void add_elementwise(calls& c) {
  const std::int64_t n = c.tokens * c.model.hidden;
  const auto size = static_cast<double>(n);
  if (c.wants("residual_add") || c.wants("dropout")) {
    const int sets = c.o_.sets(2 * bf * size);
    const auto a = random_arrays<bf16>(c.device, n, sets), b = random_arrays<bf16>(c.device, n, sets);
    c.add("residual_add", 3 * bf * size, sets, 0, [=, &c](int i) { kernels::accumulate(c.device, a(i), b(i), n); });
    plait::box part;
    part.dims = 1;
    part.global[0] = part.local[0] = n;
    c.add("dropout", 2 * bf * size, sets, 0,
          [=, &c](int i) { kernels::dropout_forward(c.device, a(i), b(i), part, 3, 5, 0.1); });
  }
  if (c.wants("cast")) {
    const std::int64_t m = c.model.ffn * c.model.hidden;
    const double bytes = (f32 + bf) * static_cast<double>(m);
    const int sets = c.o_.sets(bytes);
    const auto x = random_arrays<float>(c.device, m, sets);
    const arrays<bf16> y(c.device, m, sets);
    c.add("cast", bytes, sets, 0, [=, &c](int i) { kernels::cast(c.device, x(i), y(i), m); });
  }
}

/// Returns token ids, of which `same` percent are one id, and the number of distinct ids.
std::pair<arrays<std::int64_t>, double> token_ids(calls& c, int same) {
  std::vector<std::int64_t> ids(static_cast<std::size_t>(c.tokens));
  std::uint64_t state = 88172645463325252ull;
  for (std::int64_t& id : ids) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;  // xorshift (Marsaglia 2003)
    const bool common = static_cast<int>(state % 100) < same;
    id = common ? 1 : static_cast<std::int64_t>((state >> 20) % static_cast<std::uint64_t>(c.model.vocab));
  }
  const arrays<std::int64_t> there(c.device, c.tokens, 1);
  c.device.upload(there(0), ids.data(), ids.size() * sizeof ids[0], c.device.main_stream());
  return {there, static_cast<double>(std::set<std::int64_t>(ids.begin(), ids.end()).size())};
}

void add_embedding(calls& c) {
  if (!c.wants("embedding")) return;
  const std::int64_t width = c.model.hidden, vocab = c.model.vocab;
  const auto w = static_cast<double>(width), t = static_cast<double>(c.tokens);
  const auto table = random_arrays<bf16>(c.device, vocab * width, 1);
  const auto gradient = random_arrays<float>(c.device, vocab * width, 1);
  const int sets = c.o_.sets(2 * bf * t * w);
  const auto y = random_arrays<bf16>(c.device, c.tokens * width, sets);
  for (const int same : {0, 50}) {
    const auto [ids, distinct] = token_ids(c, same);
    const std::string name = same == 0 ? "" : "_common_id";
    if (same == 0) {
      c.add("embedding_forward", 8 * t + bf * w * (distinct + t), sets, c.microbatches, [=, &c, ids = ids](int i) {
        kernels::embedding_forward(c.device, ids(0), table(0), y(i), c.tokens, width, 0, vocab, vocab);
      });
    }
    c.add("embedding_backward" + name, 8 * t + w * (bf * t + 2 * f32 * distinct), sets, same == 0 ? c.microbatches : 0,
          [=, &c, ids = ids](int i) {
            kernels::embedding_backward(c.device, ids(0), y(i), gradient(0), c.tokens, width, 0, vocab, vocab);
          });
  }
}

void add_cross_entropy(calls& c) {
  if (!c.wants("cross_entropy")) return;
  const std::int64_t rows = c.tokens, vocab = c.model.vocab;
  const auto size = static_cast<double>(rows * vocab), r = static_cast<double>(rows);
  const auto logits = random_arrays<bf16>(c.device, rows * vocab, 1, -4, 4);
  const arrays<bf16> dlogits(c.device, rows * vocab, 1);
  const auto targets = token_ids(c, 0).first;
  const arrays<float> maximum(c.device, rows, 1), sum(c.device, rows, 1), target(c.device, rows, 1),
      loss(c.device, rows, 1);
  const auto scale = random_arrays<float>(c.device, rows, 1);
  const kernels::vocabulary_range range{vocab, 0, vocab};
  c.add("cross_entropy_forward", bf * size + (8 + f32) * r, 1, c.microbatches, [=, &c](int) {
    float* const none = nullptr;
    kernels::cross_entropy_local_statistics(c.device, logits(0), targets(0), maximum(0), sum(0), target(0), none, rows,
                                            range, {});
    kernels::cross_entropy_loss(c.device, targets(0), maximum(0), sum(0), target(0), static_cast<const float*>(nullptr),
                                loss(0), rows, range, {});
  });
  c.add("cross_entropy_backward", 2 * bf * size + (8 + 3 * f32) * r, 1, c.microbatches, [=, &c](int) {
    kernels::cross_entropy_backward(c.device, logits(0), targets(0), maximum(0), sum(0), scale(0), dlogits(0), rows,
                                    range, {});
  });
}

/// Returns the sizes of the parameters of some layers.
std::vector<std::int64_t> parameter_sizes(const calls& c) {
  const plait::llama_config& m = c.model;
  std::vector<std::int64_t> sizes;
  for (int layer = 0; layer < (c.o_.tiny ? 1 : 6); ++layer) {
    for (const std::int64_t rows : {m.heads * m.head_dim, m.kv_heads * m.head_dim, m.kv_heads * m.head_dim, m.hidden,
                                    m.ffn, m.ffn, m.ffn, std::int64_t{1}, std::int64_t{1}})
      sizes.push_back(rows * m.hidden);
  }
  return sizes;
}

void add_optimizer(calls& c) {
  if (!c.wants("adamw") && !c.wants("gradient_norm")) return;
  const std::vector<std::int64_t> sizes = parameter_sizes(c);
  std::int64_t total = 0;
  for (const std::int64_t n : sizes) total += n;
  const auto master = random_arrays<float>(c.device, total, 1), gradient = random_arrays<float>(c.device, total, 1);
  const auto m = random_arrays<float>(c.device, total, 1), v = random_arrays<float>(c.device, total, 1, 0, 1);
  const arrays<bf16> weight(c.device, total, 1);
  using entry = kernels::adamw_tensor<float, float, bf16>;
  std::vector<entry> tensors;
  std::vector<kernels::const_elements<float>> gradients;
  std::int64_t at = 0;
  for (const std::int64_t n : sizes) {
    tensors.push_back({master(0) + at, gradient(0) + at, m(0) + at, v(0) + at, weight(0) + at, n, 0.1});
    gradients.push_back({gradient(0) + at, n});
    at += n;
  }
  const auto numbers = kernels::adamw_scalars_of({}, 1e-5, 100);
  const arrays<kernels::adamw_scalars> scalars(c.device, 1, 1);
  c.device.upload(scalars(0), &numbers, sizeof numbers, c.device.main_stream());
  const arrays<double> norm(c.device, 1, 1);
  const auto elements = static_cast<double>(total);
  // The captured arrays own the memory of the tensors. A step has all layers, and the embedding.
  const double steps = static_cast<double>(plait::parameter_count(c.model)) / elements;
  c.add("adamw", (7 * f32 + bf) * elements, 1, steps,
        [=, &c, keep = std::make_tuple(master, gradient, m, v, weight)](int) {
          kernels::adamw_update(c.device, std::span<const entry>(tensors), {}, scalars(0));
        });
  c.add("gradient_norm", f32 * elements, 1, steps, [=, &c](int) {
    kernels::add_sum_squares(c.device, std::span<const kernels::const_elements<float>>(gradients), norm(0));
  });
}

void add_merge(calls& c, std::int64_t seq) {
  if (!c.wants("merge_lse") && !c.wants("attention_delta")) return;
  kernels::attention_shape shape;
  shape.batch = c.tokens / seq;
  shape.q_len = shape.k_len = seq;
  shape.heads = shape.kv_heads = c.model.heads;
  shape.head_dim = c.model.head_dim;
  const std::int64_t n = c.tokens * c.model.heads * c.model.head_dim, rows = c.tokens * c.model.heads;
  const auto size = static_cast<double>(n), r = static_cast<double>(rows);
  const double bytes = (2 * f32 + bf) * size + 3 * f32 * r;
  const int sets = c.o_.sets(bytes);
  const auto o = random_arrays<float>(c.device, n, sets), lse = random_arrays<float>(c.device, rows, sets);
  const auto other = random_arrays<bf16>(c.device, n, sets), d_o = random_arrays<bf16>(c.device, n, sets);
  // cuDNN's attention makes these products itself, so a step calls this kernel only with plait's own attention.
  c.add("attention_delta", 2 * bf * size + f32 * r, sets, 0, [=, &c](int i) {
    kernels::attention_delta(c.device, static_cast<const bf16*>(other(i)), static_cast<const bf16*>(d_o(i)), lse(i),
                             shape);
  });
  const auto other_lse = random_arrays<float>(c.device, rows, sets);
  c.add("merge_lse", bytes, sets, 0, [=, &c](int i) {
    kernels::merge_lse(c.device, o(i), lse(i), static_cast<const bf16*>(other(i)),
                       static_cast<const float*>(other_lse(i)), c.model.heads * c.model.head_dim, shape);
  });
}

void measure(cuda& device, const options& o, parts& all) {
  const shapes s = shapes::of(o);
  const std::int64_t seq = std::min<std::int64_t>(s.tokens, o.tiny ? 8 : 2048);
  calls c(device, o, s);
  all.run("copy", [&] { add_copies(c); });
  const std::pair<const char*, std::function<void()>> groups[] = {
      {"memory.norms", [&] { add_norms(c); }},         {"memory.swiglu", [&] { add_swiglu(c); }},
      {"memory.rope", [&] { add_rope(c, seq); }},      {"memory.elementwise", [&] { add_elementwise(c); }},
      {"memory.embedding", [&] { add_embedding(c); }}, {"memory.cross_entropy", [&] { add_cross_entropy(c); }},
      {"memory.optimizer", [&] { add_optimizer(c); }}, {"memory.merge_lse", [&] { add_merge(c, seq); }}};
  for (const auto& [name, group] : groups) all.run(name, group);
  std::vector<timed_call> measured;
  for (timed_call& call : c.all)
    if (call.id.compare(0, 5, "copy.") == 0 || o.wants(call.id)) measured.push_back(std::move(call));
  take_turns(device, measured, o, all);
  if (measured.size() < 2 || measured[1].id != "copy.memcpy") plait::fail("copy: there is nothing to compare with");

  const auto rate = [](const timed_call& call) {
    std::vector<double> rates;
    for (const double t : call.seconds) rates.push_back(call.work / t);
    return rates;
  };
  const std::vector<double> base =
      median(rate(measured[0])) > median(rate(measured[1])) ? rate(measured[0]) : rate(measured[1]);
  for (const timed_call& call : measured) {
    const std::vector<double> own = rate(call);
    const bool is_copy = call.id.compare(0, 5, "copy.") == 0;
    const double share = median_of_rounds(own, base, [](double a, double b) { return a / b; });
    row line(call.id, is_copy ? median(own) / 1e12 : share);
    line.number("terabytes_per_second", median(own) / 1e12)
        .number("bytes", call.work)
        .number("seconds", median(call.seconds));
    if (!is_copy) line.number("step_calls", call.step_calls).known(median(base) / 1e12, "TB/s");
    line.print();
  }
}

}  // namespace

int main(int count, char** arguments) {
  return bench::run_main(count, arguments, {"--tokens"}, [](const options& o, parts& all) {
    cuda device;
    measure(device, o, all);
  });
}
