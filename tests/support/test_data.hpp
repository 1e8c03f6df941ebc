#pragma once

#include <string>

namespace plait::test {

/// The path of tests/data. A separate source file defines it: a copy of the tree in another folder compiles only that
/// file again and finds all others in a compiler cache.
std::string test_data();

}  // namespace plait::test
