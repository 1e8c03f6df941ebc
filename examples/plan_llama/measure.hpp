#pragma once

#include <cstdint>
#include <string>

/// Measures this machine with so many ranks, which are threads of this process or, for the backend mpi, the processes
/// that mpirun has started, and writes its description to `path`. It takes under a minute. `argc` and `argv` are the
/// program's. Throws `plait::error` naming --ranks or --backend.
void calibrate_to(const std::string& path, std::int64_t ranks, const std::string& backend, int argc, char** argv);
