#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "support/run_doctest.hpp"

int main(int count, char** arguments) { return plait::test::run_doctest(count, arguments); }
