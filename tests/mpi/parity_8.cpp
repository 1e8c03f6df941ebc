// ranks: 8
// timeout: 240
#include "parity.cpp"
