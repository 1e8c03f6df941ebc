#include "all.hpp"

int other();
int other() { return PLAIT_VERSION_MAJOR < 0 ? 1 : 0; }
