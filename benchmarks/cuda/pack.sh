#!/bin/sh
# Compiles the tests and benchmarks for GPUs and the trainer, on a machine with nvcc, with or without a GPU. Packs the
# stripped programs and the scripts that run them. A GPU machine then needs only this folder, its driver and CUDA's
# libraries.
#
#   sh benchmarks/cuda/pack.sh [--out DIR] [--build DIR] [--architectures LIST] [--frontend DIR]
#
# The folder is build-gpu, at most 40 MB; the builds are in build-pack. --frontend is the folder `include` of
# NVIDIA/cudnn-frontend; without it, pip downloads the wheel nvidia-cudnn-frontend.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
. "$root/cmake/packages.sh"
out=$root/build-gpu
build=$root/build-pack
architectures=90a
frontend=
while [ $# -gt 0 ]; do
  case "$1" in
    --out | --build | --architectures | --frontend)
      if [ $# -lt 2 ]; then echo "$1 needs a value" >&2; exit 2; fi
      case "$1" in
        --out) out=$2 ;;
        --build) build=$2 ;;
        --architectures) architectures=$2 ;;
        --frontend) frontend=$2 ;;
      esac
      shift 2
      ;;
    *) echo "unknown argument '$1'; legal are --out, --build, --architectures and --frontend" >&2; exit 2 ;;
  esac
done
# shellcheck disable=SC2086,SC2154  # a list of names
install_packages $plait_build_packages doctest-dev clang-16 lld-16 xz-utils
mkdir -p "$out" "$build"
out=$(cd "$out" && pwd)
build=$(cd "$build" && pwd)

sh "$root/benchmarks/cuda/headers.sh" "$build/headers" ${frontend:+"$frontend"}

# A GPU machine has neither oneDNN nor fmt, and the tests and benchmarks need neither.
cmake -S "$root/benchmarks/cuda" -B "$build/programs" -G Ninja -DPLAIT_CUDA_ARCHITECTURES="$architectures" \
  -DPLAIT_HEADERS="$build/headers" -DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON
cmake --build "$build/programs" -j "$(plait_jobs)" --target plait_cuda_benchmarks plait_cuda_tests -- -k 0
# The trainer's work is in kernels and libraries, so clang's -O1 is enough, and compiles in a third of the time.
cmake -S "$root" -B "$build/trainer" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=clang++-16 \
  -DCMAKE_CUDA_HOST_COMPILER=g++ -DCMAKE_CXX_FLAGS=-march=x86-64-v3 "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG" \
  -DCMAKE_EXE_LINKER_FLAGS=-fuse-ld=lld -DPLAIT_TRAINER_JOINED=ON -DPLAIT_NATIVE=OFF -DPLAIT_BUILD_TESTS=OFF \
  -DPLAIT_BUILD_BENCHMARKS=OFF -DPLAIT_CUDA_ARCHITECTURES="$architectures" -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON \
  -DPLAIT_CUDNN_FRONTEND_INCLUDE_DIR="$build/headers/include"
cmake --build "$build/trainer" -j "$(plait_jobs)" --target train_llama

# Copies the libraries of the trainer that a GPU machine lacks: all but the C and C++ run times and CUDA's.
stage=$build/stage
rm -rf "$stage"
mkdir -p "$stage/lib" "$stage/tests"
cp "$build"/programs/bench_cuda_* "$stage"
find "$build/programs/tests" -maxdepth 1 -type f -name 'cuda_*' -perm -u+x -exec cp {} "$stage/tests" \;
cp "$build/trainer/bin/train_llama" "$stage/train_llama.bin"
cp "$root/examples/data/kjv.txt" "$stage"
ldd "$stage/train_llama.bin" | sed -n 's|.* => \(/[^ ]*\) .*|\1|p' |
  grep -vE '/(libc|libm|libdl|librt|libpthread|libstdc[+][+]|libgcc_s|ld-linux[^/]*|libcu[^/]*|libnv[^/]*|libnccl)[.]so' |
  xargs -I '{}' cp -L '{}' "$stage/lib"
cat >"$stage/train_llama" <<'TEXT'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$here/lib exec "$here/train_llama.bin" "$@"
TEXT
chmod +x "$stage/train_llama"
find "$stage" -type f \( -name 'cuda_*' -o -name 'bench_*' -o -name '*.bin' -o -name '*.so*' \) -exec strip -s {} +
tar cf - -C "$stage" . | xz -6 -T 0 --lzma2=dict=64MiB >"$out/programs.tar.xz"

mkdir -p "$out/benchmarks/cuda" "$out/tests/cuda"
for file in run.sh step.sh table.py rows.py losses.py pytorch_step.py; do cp "$root/benchmarks/cuda/$file" "$out/benchmarks/cuda"; done
cp "$root/tests/cuda/sanitize.sh" "$out/tests/cuda"
cp "$root/benchmarks/cuda/call.sh" "$root"/benchmarks/cuda/call[123].sh "$out"
size=$(du -sk "$out" | cut -f 1)
du -sk "$stage" "$out" "$out/programs.tar.xz"
if [ "$size" -gt 40960 ]; then echo "$out has $size KiB, more than 40 MiB" >&2; exit 1; fi
