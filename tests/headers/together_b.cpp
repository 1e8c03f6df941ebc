#include "all.hpp"

int second_translation_unit();
int second_translation_unit() { return 0; }
