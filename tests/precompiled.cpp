// Precompiles support/precompiled.hpp.
