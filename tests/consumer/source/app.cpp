#include <cblas.h>

#include <dnnl.hpp>

#include "all.hpp"

int other();

int main() {
  // Calls both libraries, so they are linked.
  const double x[2] = {3.0, 4.0};
  const bool blas = cblas_ddot(2, x, 1, x, 1) == 25.0;
  const bool dnn = dnnl_version() != nullptr;
  return blas && dnn ? other() : 1;
}
