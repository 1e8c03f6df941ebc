// The bugs of gpt2_c.txt that compile, as programs made by ports.py.
#include "ports/gpt2_c.hpp"

#include <cstddef>
#include <string>

#include "plait/comm/threads.hpp"
#include "plait/core/text.hpp"
#include "plait/testing/program_parity.hpp"
#include "ports/ports.hpp"

namespace {

thread_local plait::testing::program_run* recorded = nullptr;

template <class Record, class Model>
void record_activations(Record& record, const Model& m) {
  record.add("encoded", m.a.encoded);
  for (std::size_t i = 0; i < std::size(m.a.layer); ++i) {
    const auto& l = m.a.layer[i];
    const auto add = [&](const char* name, const auto& x) { record.add(plait::cat({"layer ", i, " ", name}), x); };
    add("qkv", l.qkv), add("mixed", l.mixed), add("sum1", l.sum1), add("up", l.up), add("sum2", l.sum2);
  }
}
template <class Record, class Model>
void record_gradients(Record& record, Model& m) {
  int number = 0;  // layers use the same names of parameters
  m.visit([&](auto& p) {
    record.add(plait::cat({"gradient ", number++, " of ", p.name()}), p.stored(), p.part(), p.gradient());
  });
}

}  // namespace

#define main program
#include "ports/gpt2_c.inc"
#undef main

int main() {
  std::vector<unsigned char> text(3000);
  for (std::size_t i = 0; i < text.size(); ++i) text[i] = static_cast<unsigned char>(i * i / 7 % 251);
  const auto run = [&](auto* train, int ranks, plait::testing::program_run& into) -> std::string {
    try {
      plait::threads::run(ranks, [&](const plait::any_communicator& c) {
        recorded = &into;
        train(c, 2, text);
      });
    } catch (const plait::error& e) {
      return e.what();
    }
    return "";
  };
  return ports::report(run, right::train, bugs);
}
