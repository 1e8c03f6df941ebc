#!/bin/sh
# consumer/plain.sh WAY: compiles programs with plait's headers without CMake, by `-I` alone.
#   hidden    a context made in one shared library, layers in another, both with hidden symbols
#   warnings  every header and a program, with all warnings as errors, without run-time type information and with the
#             undefined-behaviour sanitizer by the guide's flags, under g++ and, if found, clang. A program's macros with
#             names that plait uses keep their values, and headers compile after them
#   nvcc      a program on GPUs by the README's line, with all warnings of nvcc and its host compiler as errors; and the
#             errors of other compilers for its layers
#   openmp    a program with its own OpenMP threads, whose number plait does not change
#   language  a compiler in C++17 mode prints one message, and a compiler without exceptions another
# PLAIT_SOURCE names plait's folder, CXX the compiler, CLANG a second compiler and NVCC nvcc, both empty if not found.
set -eu

way=$1
here=$(cd "$(dirname "$0")" && pwd)
include=$PLAIT_SOURCE/include
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
openblas=$(pkg-config --cflags openblas | sed 's/-I/-isystem /g')

fails() {
  echo "failed: $*" >&2
  exit 1
}

# Every header that needs neither a GPU nor MPI nor liburing.
headers() {
  (cd "$include" && find plait -name '*.hpp' | grep -Ev 'cuda|nccl|cudnn|mpi|uring' | sort)
}

case "$way" in
  hidden)
    flags="-std=c++20 -O0 -fvisibility=hidden -fvisibility-inlines-hidden -I$include $openblas"
    compiler=${CLANG:-$CXX}  # clang takes half of the time
    for library in first second; do
      "$compiler" $flags -fPIC -shared "$here/hidden/$library.cpp" -o "$work/lib$library.so" || fails "$library.cpp"
    done
    "$compiler" $flags "$here/hidden/main.cpp" -o "$work/main" -L"$work" -lfirst -lsecond -Wl,-rpath,"$work" \
      -ldnnl -lopenblas -lgomp -pthread || fails main.cpp
    "$work/main" || fails "two libraries with hidden symbols"
    ;;
  warnings)
    all="-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Werror"
    {
      # Headers of other libraries come first: the macros are not meant for them.
      (cd "$include" && headers | xargs grep -h '^#include <' | sort -u | grep -Ev 'cuda|nccl|mpi|nvtx|dlpack|<omp')
      cat <<'EOF'
#define min(a, b) ((a) < (b) ? (a) : (b))
#define max(a, b) ((a) > (b) ? (a) : (b))
#define None 0L
#define I 17
#define small char
#define check(x) (void)(x)
#define verify(x) (void)(x)
#define require(x) (void)(x)
#define fail() __builtin_abort()
EOF
      headers | sed 's/.*/#include "&"/'
      cat <<'EOF'
static_assert(min(2, 1) == 1 && max(2, 1) == 2 && None == 0 && I == 17 && sizeof(small) == 1);
inline void words(int n) {
  if (n > 99) fail();
  check(n), verify(n), require(n);
}
EOF
      for word in min max None I small check verify require fail; do echo "#undef $word"; done
      # One unit includes all headers and then the program, so the compiler reads them once.
      echo "#include \"$PLAIT_SOURCE/examples/quickstart.cpp\""
    } >"$work/all.cpp"
    without=$(tr '\n' ' ' <"$PLAIT_SOURCE/examples/guide/13_in_your_program.md" | sed -n 's/.*`\(-fno-sanitize=[a-z,-]*\)`.*/\1/p')
    [ -n "$without" ] || fails "the guide has no flag for -fsanitize=undefined"
    compile="-std=c++20 -O1 -fno-rtti -fsanitize=undefined -fsyntax-only $all -I$include $openblas $work/all.cpp"
    "$CXX" $compile $without || fails "$CXX -fsanitize=undefined $without, all headers"
    [ -z "${CLANG:-}" ] || "$CLANG" $compile || fails "$CLANG, all headers"
    # The flags must have an effect: a header with such a warning is an error.
    echo 'template <class T> int narrowed(T n) { return n; } int main() { return narrowed(0L); }' >"$work/bad.cpp"
    if "$CXX" -std=c++20 -fsyntax-only $all "$work/bad.cpp" 2>/dev/null; then fails "a warning passed"; fi
    # Without the protection of macros, even the cheapest headers do not compile.
    mkdir -p "$work/bare/plait/core"
    : >"$work/bare/plait/core/macros_off.hpp"
    grep -Ev '"plait/|quickstart|^#undef' "$work/all.cpp" | sed '/define fail/a #include "plait/algebra.hpp"' >"$work/few.cpp"
    if "$CXX" -std=c++20 -fsyntax-only -I"$work/bare" -I"$include" "$work/few.cpp" 2>/dev/null; then
      fails "the macros are harmless, so the test is"
    fi
    ;;
  nvcc)
    [ -n "${NVCC:-}" ] || { echo "skipped: no nvcc"; exit 77; }
    line=$(sed -n 's/.*`nvcc \([^`]* app.cu [^`]*\)`.*/\1/p' "$PLAIT_SOURCE/README.md")
    [ -n "$line" ] || fails "the README has no line of nvcc's for app.cu"
    cp "$here/nvcc/app.cu" "$work/app.cu"
    ln -s "$include" "$work/include"
    # Without -Wpedantic: the code that nvcc gives the host compiler has GNU line directives and designated
    # initialisers.
    all="-Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion,-Wsign-conversion,-Werror --Werror=all-warnings"
    (cd "$work" && "$NVCC" $line -o app -ccbin "$CXX" $all) || fails "nvcc $line"
    "$work/app" || fails "app.cu"
    # The flags must have an effect: warnings of the host compiler and of nvcc are errors.
    echo 'template <int N> struct held { int at[N]; };' >"$work/host.cu"
    printf '%s\n' 'int host();' '__global__ void kernel() { int unused; }' >"$work/device.cu"
    for bad in host device; do
      if "$NVCC" -std=c++20 -ccbin "$CXX" -c -o "$work/object" $all "$work/$bad.cu" 2>/dev/null; then
        fails "a warning passed: $bad.cu"
      fi
    done
    # With another compiler the first error says this, for each header that declares the device and the layers. Such a
    # file may use layers on the cpu in a program with a GPU, and layers on GPUs that nvcc compiles in another file.
    toolkit=$(dirname "$(readlink -f "$NVCC")")/../include
    for compiler in "$CXX" ${CLANG:-}; do
      compile="$compiler -std=c++20 -fsyntax-only -I$include -isystem $toolkit $openblas $here/nvcc/layers.cpp"
      if $compile 2>"$work/refused.txt"; then fails "$compile: layers without kernels compiled"; fi
      grep 'error:' "$work/refused.txt" | head -1 |
        grep -q 'kernels of layers on GPUs are neither compiled here nor elsewhere: let nvcc compile this file' ||
        { head -20 "$work/refused.txt"; fails "$compile: another error comes first"; }
      way=-DDEVICE=cpu                                              # layers on the cpu in a program with a GPU
      [ "$compiler" = "$CXX" ] || way=-DPLAIT_COMPILED_CUDA  # layers with kernels that another file compiles
      $compile $way || fails "$compile $way"
    done
    ;;
  openmp)
    line=$(sed -n 's/^g++ \(.*\) examples.quickstart.cpp -o quickstart \(.*\)$/\1 app.cpp -o app \2/p' "$PLAIT_SOURCE/README.md")
    [ -n "$line" ] || fails "the README has no line of g++'s for quickstart.cpp"
    cp "$here/openmp/app.cpp" "$work/app.cpp"
    ln -s "$include" "$work/include"
    (cd "$work" && "$CXX" -fopenmp $openblas $(echo "$line" | sed 's/-O2/-O0/')) || fails "$CXX $line"
    "$work/app" || fails "a program with OpenMP threads"
    ;;
  language)
    for compiler in "$CXX" ${CLANG:-}; do
      for header in plait/algebra.hpp plait/nn.hpp plait/train.hpp plait/models/llama.hpp plait/comm/metrics.hpp; do
        echo "#include \"$header\"" >"$work/old.cpp"
        if "$compiler" -std=c++17 -fsyntax-only -I"$include" "$work/old.cpp" 2>"$work/old.txt"; then
          fails "$header compiled as C++17"
        fi
        [ "$(grep -c 'error:' "$work/old.txt")" = 1 ] || { cat "$work/old.txt"; fails "$header: more than one error"; }
        grep -q 'plait needs C++20: compile with -std=c++20' "$work/old.txt" || fails "$header: another error"
        if "$compiler" -std=c++20 -fno-exceptions -fsyntax-only -I"$include" "$work/old.cpp" 2>"$work/old.txt"; then
          fails "$header compiled without exceptions"
        fi
        [ "$(grep -c 'error:' "$work/old.txt")" = 1 ] || { cat "$work/old.txt"; fails "$header: more than one error"; }
        grep -q 'plait needs exceptions: compile without -fno-exceptions' "$work/old.txt" || fails "$header: another error"
      done
    done
    ;;
  *)
    echo "unknown way '$way'" >&2
    exit 2
    ;;
esac
