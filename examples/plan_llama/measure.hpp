#pragma once

#include <cstdint>
#include <string>

/// Measures this machine with `ranks` ranks and writes its description to `path`. Ranks are threads of this process;
/// for the backend mpi they are the processes of mpirun. It takes under a minute. `argc` and `argv` are the program's.
/// Throws
/// `plait::error` with --ranks or --backend.
void calibrate_to(const std::string& path, std::int64_t ranks, const std::string& backend, int argc, char** argv);
