#pragma once

#include <string>

namespace plait::test {

/// The path of tests/data. A source of its own defines it, so that a copy of the tree elsewhere compiles only that one
/// differently and finds all others in a compiler cache.
std::string test_data();

}  // namespace plait::test
