// Headers that most test programs include, compiled once for all of them; reading them took two thirds of the programs'
// compile time. A test still includes each header that it uses: headers/ compiles each one without this file.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "plait/comm/any_communicator.hpp"
#include "plait/comm/threads.hpp"
#include "plait/device/cpu.hpp"
#if defined(PLAIT_CUDA_STAND_IN) || defined(PLAIT_COMPILED_CUDA)
#include "plait/device/cuda.hpp"
#endif
#include "plait/kernels/kernels.hpp"
#include "plait/layout/check.hpp"
#include "plait/nn.hpp"
#include "plait/tensor/redistribution.hpp"
#include "plait/tensor/tensor.hpp"
#include "plait/train.hpp"
