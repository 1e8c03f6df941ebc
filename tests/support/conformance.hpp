#pragma once

#include "plait/testing/conformance.hpp"

/// The conformance suite and its parts, as tests call them.
namespace plait::test {
using namespace plait::testing::conformance_parts;  // NOLINT: all of it
}  // namespace plait::test
