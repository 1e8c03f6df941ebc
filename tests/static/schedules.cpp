// Schedules are verified, simulated and turned into programs in constant expressions.
#include "plait/schedule/verified.hpp"

using namespace plait;

static_assert(verify<gpipe, pipeline_ranks<4>, microbatches<16>>());
static_assert(verify<one_f_one_b, pipeline_ranks<4>, microbatches<16>>());
static_assert(verify<interleaved<2>, pipeline_ranks<4>, microbatches<16>>());
static_assert(verify<interleaved<4>, pipeline_ranks<4>, microbatches<16>>());
static_assert(verify<zb_h1, pipeline_ranks<4>, microbatches<16>, activations_at_most<4>>());
static_assert(verify<zb_h2, pipeline_ranks<4>, microbatches<16>, activations_at_most<7>>());
static_assert(verify<zb_v, pipeline_ranks<4>, microbatches<16>, activations_at_most<4>>());
static_assert(verify<v_half, pipeline_ranks<4>, microbatches<16>, activations_at_most<4>>());
static_assert(verify<v_min, pipeline_ranks<4>, microbatches<16>, activations_at_most<2>>());
static_assert(verify<dualpipe_v, pipeline_ranks<4>, microbatches<16>, activations_at_most<5>>());
static_assert(verify<one_f_one_b, pipeline_ranks<1>, microbatches<1>>());
static_assert(verify<interleaved<2>, pipeline_ranks<8>, microbatches<32>>());
static_assert(verify<zb_v, pipeline_ranks<8>, microbatches<16>>());

// A user-defined schedule: one stage runs forward and backward of each microbatch before the next one.
struct in_turn {
  static constexpr schedule make(const pipeline_shape& shape) {
    schedule s{"in_turn", shape, {}};
    s.order.resize(static_cast<std::size_t>(shape.ranks));
    for (auto& order : s.order)
      for (int mb = 0; mb < shape.microbatches; ++mb) {
        order.push_back(forward_of(0, mb));
        order.push_back(backward_of(0, mb));
      }
    return s;
  }
};
static_assert(schedule_policy<in_turn> && !schedule_policy<schedule>);
static_assert(verify<in_turn, pipeline_ranks<3>, microbatches<4>>());

static_assert(simulate(make_schedule<one_f_one_b>(4, 16)).makespan == 3 * (16 + 3));
static_assert(peak_activations(make_schedule<one_f_one_b>(4, 16)) == 4);
static_assert(rank_program(make_schedule<one_f_one_b>(2, 1)).front() ==
              std::vector<step_entry>{{step_op::pass, -1, forward_of(0, 0)},
                                      {step_op::send, -1, {}, {transfer_kind::activation, 0, 1, 0}},
                                      {step_op::receive, -1, {}, {transfer_kind::gradient, 1, 0, 0}},
                                      {step_op::pass, -1, backward_of(0, 0)}});

// Stages are assigned to ranks in ascending, then in descending order.
constexpr pipeline_shape shape{.ranks = 4, .chunks = 2, .microbatches = 16, .placement = stage_placement::vee};
static_assert(shape.stages() == 8 && shape.stage_of(3, 1) == 4 && shape.rank_of(7) == 0);
constexpr bool places_agree(stage_placement placement) {
  const pipeline_shape four{.ranks = 3, .chunks = 4, .microbatches = 1, .placement = placement};
  for (int rank = 0; rank < four.ranks; ++rank)
    for (int chunk = 0; chunk < four.chunks; ++chunk) {
      const int stage = four.stage_of(rank, chunk);
      if (four.rank_of(stage) != rank || four.chunk_of(stage) != chunk) return false;
    }
  return true;
}
static_assert(places_agree(stage_placement::straight) && places_agree(stage_placement::vee));
