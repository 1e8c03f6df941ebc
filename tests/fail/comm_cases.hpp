#pragma once

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/typed.hpp"

/// What the cases of typed collectives share.
namespace cases {

using namespace plait;

using pending = spec<seq, hidden, partial<tp>>;
using complete = spec<seq, hidden, replicate<tp>>;
using scattered = spec<shard<seq, tp>, hidden>;

}  // namespace cases
