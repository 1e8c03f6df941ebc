// ranks: 16
// timeout: 400
#include "parity.cpp"
