#include <plait/core/box.hpp>
#include <plait/core/error.hpp>
#include <plait/core/types.hpp>
#include <plait/version.hpp>

int main() { return 0; }
