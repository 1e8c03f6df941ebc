#include "support/test_data.hpp"

std::string plait::test::test_data() { return PLAIT_TEST_DATA; }
