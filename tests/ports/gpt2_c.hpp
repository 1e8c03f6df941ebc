// The includes of examples/gpt2_c/parallel.cpp and of bugs in it.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <span>
#include <vector>

#include "../../examples/gpt2_c/blocks.hpp"
#include "plait/comm/typed.hpp"
#include "plait/nn.hpp"
#include "plait/parallel/gradient_norm.hpp"
