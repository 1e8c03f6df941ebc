// Measures the host time of a typed NCCL collective against NCCL's own call: one rank, a small sum in place.
#include "harness.hpp"
#include "plait/comm/launch/nccl.hpp"
#include "plait/comm/typed.hpp"
#include "plait/core/tag.hpp"

namespace {

using namespace bench;

void check(ncclResult_t status, const char* doing) {
  if (status != ncclSuccess) plait::fail(std::string("NCCL: ") + ncclGetErrorString(status) + ", " + doing);
}

/// A communicator of NCCL, made as by a program without plait.
class raw_communicator {
 public:
  raw_communicator() {
    ncclUniqueId id;
    check(ncclGetUniqueId(&id), "starting");
    check(ncclCommInitRank(&comm_, 1, id, 0), "starting");
  }
  raw_communicator(const raw_communicator&) = delete;
  raw_communicator& operator=(const raw_communicator&) = delete;
  ~raw_communicator() { ncclCommDestroy(comm_); }
  ncclComm_t get() const { return comm_; }

 private:
  ncclComm_t comm_ = nullptr;
};

void measure(const options& o, parts&) {
  using before = plait::spec<plait::hidden, plait::partial<plait::tp>>;
  using after = plait::spec<plait::hidden, plait::replicate<plait::tp>>;
  plait::nccl::run({0}, cuda::options{}, plait::nccl::options{}, [&](plait::nccl::communicator& comm, cuda& device) {
    const raw_communicator raw;
    constexpr std::size_t n = 1024;
    const auto x = random_arrays<float>(device, n, 1);
    float* const data = x(0);
    const cudaStream_t stream = device.main_stream().handle();
    const plait::typed_group<plait::nccl::communicator, plait::tp> group(comm);
    const plait::rank_place here{plait::mesh<plait::axis<plait::tp, 1>>::static_shape(), 0,
                                 plait::sizes_of<plait::hidden>(n)};
    const std::pair<const char*, std::function<void()>> ways[] = {
        {"raw", [&] { check(ncclAllReduce(data, data, n, ncclFloat32, ncclSum, raw.get(), stream), "summing"); }},
        {"untyped", [&] { comm.all_reduce(data, data, n, plait::dtype::f32, plait::reduce_op::sum); }},
        {"typed", [&] { group.all_reduce<after>(plait::part<float, before>(here, data)); }}};
    constexpr std::size_t count = 3;
    std::vector<double> times[count];
    const int repeats = o.tiny ? 4 : 100;  // so few that a stream takes them without making the host wait
    for (int round = 0; round < (o.tiny ? 2 : 60); ++round) {
      for (std::size_t i = 0; i < count; ++i) {
        device.synchronize();
        const double begin = now();
        for (int k = 0; k < repeats; ++k) ways[i].second();
        const double seconds = (now() - begin) / repeats;
        if (round > 0) times[i].push_back(seconds);
      }
    }
    device.synchronize();
    const double base = median(times[0]);
    row("collective.raw", base * 1e9).print();
    row("collective.typed", median(times[2]) * 1e9).print();
    row("collective.types", (median(times[2]) - median(times[1])) * 1e9).print();
    row("collective.overhead", (median(times[2]) - base) * 1e9).print();
  });
}

}  // namespace

int main(int count, char** arguments) { return bench::run_main(count, arguments, {}, measure); }
