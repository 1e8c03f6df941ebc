// Two macros that choose how code that names no user's type is compiled: with every file that includes it (the
// default), or once, in a library. A program that links plait::compiled defines PLAIT_COMPILED; that library is
// compiled.cpp, which defines PLAIT_COMPILING. The code itself is in the `.ipp` beside a header, such as
// layout/describe.ipp, and in instantiations that PLAIT_COMPILED_TEMPLATE names, as in nn/parameter.hpp.
#pragma once

#if defined(PLAIT_COMPILING)
#define PLAIT_INLINE
#else
#define PLAIT_INLINE inline
#endif

/// An instantiation that the library provides. nvcc compiles no kernel of the processor, so its files take none.
#if defined(PLAIT_COMPILING)
#define PLAIT_COMPILED_TEMPLATE(...) template __VA_ARGS__;
#elif defined(PLAIT_COMPILED) && !defined(__CUDACC__)
#define PLAIT_COMPILED_TEMPLATE(...) extern template __VA_ARGS__;
#else
#define PLAIT_COMPILED_TEMPLATE(...)
#endif
