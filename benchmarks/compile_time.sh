#!/bin/sh
# Measures compilation of plait. Usage: compile_time.sh [FLAGS...]. CXX chooses the compiler (g++), and FLAGS replace
# -O3 -march=native -DNDEBUG. TRAINER is a pattern for the trainer's files to compile (*; empty: none). No cache is
# used. Seconds are processor seconds, the best of a few runs; memory is the peak of one process. Files that need CUDA's
# headers are left out. A second table has the stripped size of three programs, and the libraries that they load. The
# exit code is 1 if a limit is missed, and 2 if something does not compile.
cd "$(dirname "$0")/.." && exec python3 - "$@" <<'PYTHON'
import os, pathlib, re, shlex, subprocess, sys, tempfile

trainer = os.environ.get("TRAINER", "*")
flags = sys.argv[1:] or ["-O3", "-march=native", "-DNDEBUG"]
compiler = shlex.split(os.environ.get("CXX", "g++"))
missed = []


def compile_once(command: list[str]) -> tuple[float, float]:
    """Processor seconds and peak MB of a compiler and of what it starts."""
    child = os.posix_spawnp(command[0], command, os.environ)
    _, status, usage = os.wait4(child, 0)
    if status != 0:
        print(f"does not compile: {shlex.join(command)}", flush=True)
        sys.exit(2)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def measure(name: str, source: pathlib.Path, extra: list[str], runs: int, base: float = 0.0, parts: int = 1,
            seconds_limit: float | None = None, memory_limit: float | None = None) -> float:
    """Prints a row: the best time of `runs`, less `base`, for each of `parts` pieces. Returns the best time itself."""
    command = [*compiler, "-std=c++20", *flags, "-Iinclude", *extra, "-c", str(source), "-o", "/dev/null"]
    results = [compile_once(command) for _ in range(runs)]
    best, memory = min(r[0] for r in results), max(r[1] for r in results)
    shown = (best - base) / parts
    limits = []
    if seconds_limit is not None:
        limits.append(f"{seconds_limit:g} s")
        missed.extend([name] if shown > seconds_limit else [])
    if memory_limit is not None:
        limits.append(f"{memory_limit:g} MB")
        missed.extend([name] if memory > memory_limit else [])
    print(f"{name:<44} {shown:9.3f} {memory:9.0f}   {', '.join(limits)}", flush=True)
    return best


def linked_size(name: str, sources: list[str], extra: list[str], libraries: list[str], folder: str) -> None:
    """Prints the stripped size of a program, and the libraries that it names itself, without the C library's."""
    program = str(pathlib.Path(folder, "program"))
    compile_once([*compiler, "-std=c++20", *flags, "-Iinclude", *extra, *sources, "-o", program, "-Wl,--as-needed", *libraries])
    compile_once(["strip", program])
    needed = re.findall(r"NEEDED.*\[lib([^.\]]*)", subprocess.run(["readelf", "-d", program], capture_output=True, text=True).stdout)
    shown = ", ".join(n for n in needed if n not in ("c", "m", "gcc_s"))
    print(f"{name:<44} {pathlib.Path(program).stat().st_size / 1024:9.0f} kB   {shown}", flush=True)


# A program's own communicator and kernel with types, as a code base uses plait that has everything else itself.
TYPED = """
#include "plait/comm/typed.hpp"
#include "plait/layout/apply.hpp"
using namespace plait;
struct own_communicator {
  void all_reduce(const void*, void*, std::size_t, dtype, reduce_op);
};
void own_communicator::all_reduce(const void*, void*, std::size_t, dtype, reduce_op) {}
static void gelu(float* y, const float* x, std::int64_t n) { for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] * x[i]; }
using net = mesh<axis<tp, 4>>;
using terms = spec<batch, hidden, partial<tp>>;
using rows = spec<batch, hidden, invariant<tp>>;
int main(int argc, char**) {
  const rank_place here{net::static_shape(), argc % 4, sizes_of<batch, hidden>(8, 16)};
  float memory[128] = {}, result[128];
  own_communicator comm;
  const typed_group<own_communicator, tp> over_tp(comm);
  const auto x = over_tp.all_reduce<rows>(part<float, terms>(here, memory));
  const part<float, rows> y(here, result);
  apply(rule::nonlinear, gelu, y, x);
  return static_cast<int>(y.unchecked()[0]);
}
"""

LINEAR = """
struct in_{i} : dim_tag<"in_{i}"> {{}};
struct out_{i} : dim_tag<"out_{i}"> {{}};
struct policy_{i} {{
  using mesh = net;
  using input = spec<shard<batch, dp>, {input}>;
  using weight = spec<{weight}>;
  using output = spec<shard<batch, dp>, {output}>;
}};
void train(const context<cpu>& ctx, linear<float, policy_{i}>& f, const tensor<float, policy_{i}::input>& x,
           const tensor<float, dual_t<policy_{i}::output>>& dy) {{
  linear<float, policy_{i}>::saved kept;
  f.forward(ctx, x, &kept);
  f.backward(ctx, x, kept, dy);
}}
"""


def linears(count: int) -> str:
    """Linear layers of `count` distinct types, each with dims of its own, column- and row-parallel in turn."""
    text = '#include "plait/nn/linear.hpp"\nusing namespace plait;\nusing net = mesh<axis<dp>, axis<tp>>;\n'
    for i in range(count):
        if i % 2 == 0:
            text += LINEAR.format(i=i, input=f"shard<seq, tp>, in_{i}", weight=f"shard<out_{i}, tp>, in_{i}",
                                  output=f"seq, shard<out_{i}, tp>")
        else:
            text += LINEAR.format(i=i, input=f"seq, shard<in_{i}, tp>", weight=f"out_{i}, shard<in_{i}, tp>",
                                  output=f"shard<seq, tp>, out_{i}")
    return text


PROGRAM = """
#include "plait/comm/threads.hpp"
{linears}
int main() {{
  threads::run(4, [](threads::communicator comm) {{
    cpu device;
    world ranks(net{{2, 2}}.shape(), comm);
    const context<cpu> ctx{{device, ranks, sizes_of<batch, seq, in_0, out_0>(4, 8, 16, 32)}};
    linear<float, policy_0> f(ctx, "f");
    gather_parameters(ctx, f);
    zero_gradients(ctx, f);
    train(ctx, f, tensor<float, policy_0::input>(ctx), tensor<float, dual_t<policy_0::output>>(ctx));
  }});
}}
"""

with tempfile.TemporaryDirectory() as folder:
    def written(name: str, text: str) -> pathlib.Path:
        path = pathlib.Path(folder, name)
        path.write_text(text)
        return path

    algebra = [str(p.relative_to("include")) for floor in ("core", "layout")
               for p in sorted(pathlib.Path("include/plait", floor).glob("*.hpp"))]
    print(f"{shlex.join([*compiler, *flags])}\n{'':<44} {'seconds':>9} {'MB':>9}   limits")
    measure("an empty file", written("empty.cpp", "\n"), [], 5)
    include_all = "".join(f'#include "{header}"\n' for header in algebra)
    measure("including all of the algebra", written("algebra.cpp", include_all), [], 5, seconds_limit=0.5)
    typed = written("typed.cpp", TYPED)
    measure("typed groups and rules alone", typed, [], 2)
    one = measure("one linear, forward and backward", written("one.cpp", linears(1)), [], 2)
    measure("each further distinct linear", written("nine.cpp", linears(9)), [], 2, base=one, parts=8)

    programs = {"a whole program of one linear on four ranks": written("program.cpp", PROGRAM.format(linears=linears(1))),
                "a whole program of a Llama and its step": pathlib.Path("examples/quickstart.cpp")}
    for name, source in programs.items():
        alone = measure(name, source, [], 2)
        linked = measure("  linked with plait::compiled", source, ["-DPLAIT_COMPILED"], 2)
        print(f"  ratio {linked / alone:38.2f}")
    measure("plait::compiled itself", pathlib.Path("include/plait/compiled.cpp"), [], 1)

    libraries = ["-ldnnl", "-lopenblas", "-lfmt", "-lgomp", "-lpthread"]
    one_linear = str(programs["a whole program of one linear on four ranks"])
    print(f"{'':<44} {'stripped':>12}   loads")
    linked_size("typed groups and rules alone", [str(typed)], [], libraries, folder)
    linked_size("a whole program of one linear on four ranks", [one_linear], [], libraries, folder)
    linked_size("  with plait::compiled", [one_linear, "include/plait/compiled.cpp"], ["-DPLAIT_COMPILED", "-ffunction-sections",
                                     "-Wl,--gc-sections"], libraries, folder)

    if trainer:
        extra = ["-Iexamples"]
        for source in sorted(pathlib.Path("examples/train_llama").glob(f"{trainer}.cpp")):
            if source.name.startswith(("cuda_", "gpus")):
                continue
            measure(str(source), source, extra, 1, seconds_limit=60, memory_limit=2048)

if missed:
    sys.exit(f"over the limit: {', '.join(missed)}")
PYTHON
