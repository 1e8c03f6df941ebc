#include "attention_cp_reference.cpp"
#include "attention_reference.cpp"
