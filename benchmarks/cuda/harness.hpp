#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plait/core/error.hpp"
#include "plait/device/cuda.hpp"
#include "plait/device/device.hpp"
#include "plait/kernels/cuda/elementwise.hpp"
#include "plait/kernels/cuda/random.hpp"
#include "plait/models/llama_config.hpp"

/// The harness of the benchmarks on a GPU: options, rows of results as lines of JSON, and times of calls in turn.
namespace bench {

using plait::bf16;
using plait::buffer;
using plait::cuda;

/// The command line of every program: [--tiny] [--quick] [--only PREFIX] [--rounds N] [--NAME NUMBER].
struct options {
  bool tiny = false;   ///< sizes for a CPU, once each, for tests
  bool quick = false;  ///< fewer rounds
  std::string only;    ///< prefix of the ids to measure
  std::vector<std::pair<std::string, std::string>> others;

  static options of(int count, char** arguments, const std::vector<std::string>& known) {
    options o;
    for (int i = 1; i < count; ++i) {
      const std::string name = arguments[i];
      if (name == "--tiny" || name == "--quick") {
        (name == "--tiny" ? o.tiny : o.quick) = true;
        continue;
      }
      const bool legal = name == "--only" || std::find(known.begin(), known.end(), name) != known.end();
      if (!legal || i + 1 == count) {
        std::string text =
            name + (legal ? " needs a value" : " is unknown") + "; there are --tiny, --quick, --only PREFIX";
        for (const std::string& k : known) text += ", " + k + " VALUE";
        plait::fail(text);
      }
      if (name == "--only")
        o.only = arguments[++i];
      else
        o.others.emplace_back(name, arguments[++i]);
    }
    return o;
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    for (const auto& [key, value] : others)
      if (key == name) return value;
    return otherwise;
  }
  std::int64_t number(const std::string& name, std::int64_t otherwise) const {
    const std::string value = text(name, "");
    if (value.empty()) return otherwise;
    char* end = nullptr;
    const std::int64_t n = std::strtoll(value.c_str(), &end, 10);
    if (*end != '\0' || n < 1) plait::fail(name + " is " + value + ", must be a whole number of at least 1");
    return n;
  }
  int rounds() const { return tiny ? 2 : quick ? 5 : 11; }
  /// Returns how many sets of `bytes` of arrays a call uses in turn: together four times as large as the largest cache.
  int sets(double bytes) const { return tiny ? 2 : static_cast<int>(std::clamp(256e6 / bytes + 1, 1.0, 8.0)); }
  /// Whether to measure `id`, or ids that begin with it.
  bool wants(const std::string& id) const {
    return id.compare(0, only.size(), only) == 0 || only.compare(0, id.size(), id) == 0;
  }
};

/// One line of JSON for a result: its id, its value, and numbers and texts that explain it.
class row {
 public:
  row(const std::string& id, double value) : line_("{\"id\": \"" + id + "\"") { number("value", value); }
  row& number(const char* name, double value) {
    char text[64];
    std::snprintf(text, sizeof text, ", \"%s\": %.9g", name, value);
    line_ += text;
    return *this;
  }
  row& text(const char* name, const std::string& value) {
    line_ += std::string(", \"") + name + "\": \"";
    for (const char c : value) {
      if (c == '"' || c == '\\') line_ += '\\';
      line_ += static_cast<unsigned char>(c) >= ' ' ? c : ' ';
    }
    line_ += '"';
    return *this;
  }
  /// Adds the result of the best known way.
  row& known(double value, const char* unit) {
    char rate[64];
    std::snprintf(rate, sizeof rate, "%.3g %s", value, unit);
    return text("known", rate);
  }
  void print() const {
    std::printf("%s}\n", line_.c_str());
    std::fflush(stdout);
  }

 private:
  std::string line_;
};

/// Returns the host's time in seconds.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
  const std::size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle), values.end());
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle] + *std::max_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle))) / 2;
}
/// Returns the median over rounds of f, applied to the times of each round.
template <class F>
double median_of_rounds(const std::vector<double>& a, const std::vector<double>& b, F f) {
  std::vector<double> all;
  for (std::size_t i = 0; i < a.size() && i < b.size(); ++i) all.push_back(f(a[i], b[i]));
  return median(all);
}

/// Measures the seconds of the main stream for the calls that `work` puts into it.
class stopwatch {
 public:
  explicit stopwatch(cuda& device) : device_(device) {
    plait::detail::cuda_check(cudaEventCreate(&begin_), "making an event");
    plait::detail::cuda_check(cudaEventCreate(&end_), "making an event");
  }
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;
  ~stopwatch() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
  }
  template <class Work>
  double seconds(Work&& work) {
    const cudaStream_t stream = device_.main_stream().handle();
    plait::detail::cuda_check(cudaEventRecord(begin_, stream), "recording an event");
    work();
    plait::detail::cuda_check(cudaEventRecord(end_, stream), "recording an event");
    plait::detail::cuda_check(cudaEventSynchronize(end_), "waiting for an event");
    float milliseconds = 0;
    plait::detail::cuda_check(cudaEventElapsedTime(&milliseconds, begin_, end_), "timing");
    return 1e-3 * static_cast<double>(milliseconds);
  }

 private:
  cuda& device_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

/// A call to time. `work` is the bytes that it must move, or its operations. Call i uses set i % sets of its arrays, so
/// that caches hold no inputs of a call.
struct timed_call {
  std::string id;
  double work = 0;
  int sets = 1;
  std::function<void(int)> run;
  double step_calls = 0;          ///< number of such calls in a training step
  int repeats = 1;                ///< calls that are timed together; set by `take_turns`
  std::vector<double> seconds{};  ///< seconds of one call, by round
};

/// Runs parts of a program. If one throws, its name is printed, and the others still run.
class parts {
 public:
  template <class Part>
  void run(const std::string& name, Part&& part) {
    try {
      part();
    } catch (const std::exception& e) {
      std::fprintf(stderr, "FAILED %s: %s\n", name.c_str(), e.what());
      failed_ = true;
    }
  }
  /// Returns the exit code of main.
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  bool failed_ = false;
};

/// Times all calls in turn, round by round. Calls shorter than `window` seconds are repeated to fill it. If the first
/// run of a call throws, its name is printed and it is left out.
inline void take_turns(cuda& device, std::vector<timed_call>& calls, const options& o, parts& all,
                       double window = 4e-3) {
  stopwatch watch(device);
  std::vector<timed_call> usable;
  for (timed_call& call : calls) {
    all.run(call.id, [&] {
      for (int i = 0; i < call.sets; ++i) call.run(i);  // allocates memory, chooses algorithms and loads code
      device.synchronize();
      usable.push_back(std::move(call));
    });
  }
  calls = std::move(usable);
  for (timed_call& call : calls) {
    if (o.tiny) continue;
    const double once = watch.seconds([&] {
      for (int i = 0; i < call.sets; ++i) call.run(i);
    }) / call.sets;
    call.repeats = static_cast<int>(std::clamp(window / std::max(once, 1e-7), 1.0, 200.0));
  }
  for (int round = 0; round < o.rounds(); ++round) {
    for (timed_call& call : calls) {
      int next = 0;
      const double seconds = watch.seconds([&] {
        for (int i = 0; i < call.repeats; ++i) call.run(next++ % call.sets);
      });
      call.seconds.push_back(std::max(seconds, 1e-9) / call.repeats);
    }
  }
  device.synchronize();
}

/// Arrays of numbers, several sets of `n` elements each. Copies share the memory.
template <class T>
class arrays {
 public:
  arrays(cuda& device, std::int64_t n, int sets)
      : n_((n + 15) / 16 * 16),
        memory_(std::make_shared<buffer<cuda>>(
            plait::make_buffer<T>(device, static_cast<std::size_t>(n_ * static_cast<std::int64_t>(sets))))) {}
  T* operator()(int set) const { return memory_->template data<T>() + n_ * set; }
  std::int64_t all() const { return static_cast<std::int64_t>(memory_->bytes() / sizeof(T)); }

 private:
  std::int64_t n_;
  std::shared_ptr<buffer<cuda>> memory_;
};

/// Random numbers, because constants would need less power.
template <class T>
arrays<T> random_arrays(cuda& device, std::int64_t n, int sets, double low = -1, double high = 1) {
  arrays<T> made(device, n, sets);
  plait::box whole;
  whole.dims = 1;
  whole.global[0] = whole.local[0] = made.all();
  plait::kernels::fill_uniform(device, made(0), whole, 7, static_cast<std::uint64_t>(n), low, high);
  return made;
}

/// The main function of a program. It calls `body(device, options, parts)`. Without a GPU the exit code is 77.
template <class Body>
int run_main(int count, char** arguments, const std::vector<std::string>& known, Body&& body) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fputs("no CUDA device\n", stderr);
    return 77;
  }
  parts all;
  all.run(count > 0 ? arguments[0] : "benchmark", [&] {
    const options o = options::of(count, arguments, known);
    body(o, all);
  });
  return all.exit_code();
}

/// The model whose shapes are measured, the tokens of a microbatch, and the microbatches of a step.
struct shapes {
  plait::llama_config model;
  std::int64_t tokens = 0;
  std::int64_t microbatches = 8;

  static shapes of(const options& o) {
    shapes s{plait::llama_preset_config("smollm-1.7b"), o.number("--tokens", o.tiny ? 32 : 16384)};
    s.microbatches = o.number("--microbatches", o.tiny ? 2 : 8);
    if (!o.tiny) return s;
    s.model.vocab = 96;
    s.model.hidden = 64;
    s.model.layers = 2;
    s.model.heads = 4;
    s.model.kv_heads = 4;
    s.model.head_dim = 16;
    s.model.ffn = 128;
    return s;
  }
  std::int64_t qkv() const { return (model.heads + 2 * model.kv_heads) * model.head_dim; }
};

}  // namespace bench
