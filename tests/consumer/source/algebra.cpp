#include <plait/core/box.hpp>
#include <plait/core/dtype.hpp>
#include <plait/core/error.hpp>
#include <plait/version.hpp>

int main() { return 0; }
