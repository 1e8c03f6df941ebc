#!/bin/sh
# consumer/run.sh WAY: configures, builds and runs a project that embeds plait, in a temporary folder.
# WAY is find_package, fetch_content, add_subdirectory or cuda_runtime. PLAIT_SOURCE and PLAIT_BUILD name plait's folders.
set -eu

way=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export FETCHCONTENT_UPDATES_DISCONNECTED=ON

configure() { # configure NAME SOURCE ARGUMENTS...: the exit status of CMake, its output in $work/NAME.log
  name=$1
  source=$2
  shift 2
  cmake -S "$source" -B "$work/$name" -DCMAKE_BUILD_TYPE=None "$@" >"$work/$name.log" 2>&1
}

must() {
  "$@" || {
    cat "$work"/*.log
    echo "failed: $*" >&2
    exit 1
  }
}

build_and_run() { # build_and_run NAME PROGRAMS...
  name=$1
  shift
  cmake --build "$work/$name" -j 2 --target "$@" >>"$work/$name.log" 2>&1 || return 1
  for program; do "$work/$name/$program" || return 1; done
}

case "$way" in
  find_package)
    cmake --install "$PLAIT_BUILD" --prefix "$work/prefix" >"$work/install.log" 2>&1 || must false
    must configure app "$here/find_package" -DCMAKE_PREFIX_PATH="$work/prefix"
    must build_and_run app app algebra
    # Without components CMake searches for no library, so the project also works on a machine without oneDNN.
    must configure bare "$here/find_package_bare" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON
    # A component that is not found, or does not exist, is an error with its name.
    if configure without "$here/find_package" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON; then
      must false
    fi
    must grep -q "plait::cpu needs: dnnl" "$work/without.log"
    if configure unknown "$here/find_package_bare" -DCMAKE_PREFIX_PATH="$work/prefix" -DEXTRA_COMPONENT=abacus; then
      must false
    fi
    must grep -q "no component .abacus." "$work/unknown.log"
    # Components with compiled kernels need nvcc; otherwise there is an error.
    if configure language "$here/find_package_bare" -DCMAKE_PREFIX_PATH="$work/prefix" -DEXTRA_COMPONENT=compiled_cuda; then
      must false
    fi
    must grep -Eq "is compiled by nvcc|plait::cuda needs|without its component .compiled_cuda" "$work/language.log"
    # The installed files must not name the folder they were built from.
    if grep -rq "$PLAIT_SOURCE" "$work/prefix"; then
      echo "the installed package names its source folder" >&2
      exit 1
    fi
    ;;
  fetch_content | add_subdirectory)
    must configure app "$here/$way" -DPLAIT_SOURCE="$PLAIT_SOURCE"
    if [ "$way" = fetch_content ]; then  # it has the targets of add_subdirectory, whose test links with them
      must build_and_run app algebra
    else
      must build_and_run app app algebra
    fi
    if [ "$way" = add_subdirectory ]; then
      # The error names a target's missing library where another target links with it, in any folder, and only there.
      if configure without "$here/$way" -DPLAIT_SOURCE="$PLAIT_SOURCE" -DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON \
        -DCMAKE_DISABLE_FIND_PACKAGE_nlohmann_json=ON; then
        must false
      fi
      tr -s '\n ' ' ' <"$work/without.log" >"$work/words"
      must grep -q "app links with plait::cpu, and there is none here: plait::cpu needs: dnnl, nlohmann_json. On Debian: apt-get install libdnnl-dev" \
        "$work/words"
      must configure headers "$here/$way" -DPLAIT_SOURCE="$PLAIT_SOURCE" -DCMAKE_DISABLE_FIND_PACKAGE_dnnl=ON \
        -DHEADERS_ALONE=ON
    fi
    # An embedding project gets the targets and nothing else: no tests, examples, install rules or flags of plait.
    if cmake --build "$work/app" --target help | grep -Eq "train_llama|plait_thread_tests|unit_"; then
      echo "plait's own programs are built in the embedding project" >&2
      exit 1
    fi
    if grep -q -e "-march=native" -e "-Werror" -r "$work/app" --include build.ninja --include flags.make; then
      echo "plait's own flags reach the embedding project" >&2
      exit 1
    fi
    ;;
  cuda_runtime)
    configure app "$here/cuda_runtime" -DPLAIT_SOURCE="$PLAIT_SOURCE" || {
      grep -q "no nvcc" "$work/app.log" || must false
      echo "skipped: no nvcc"
      exit 77
    }
    must cmake --build "$work/app" -j 2 >>"$work/app.log" 2>&1
    # Each program has one runtime: CMake's static one, the shared one that it selects, or plait's if it selects none.
    for program in by_nvcc by_nvcc_shared by_nvcc_none by_cxx; do
      shared=$(readelf -d "$work/app/$program" | grep -c 'NEEDED.*libcudart' || true)
      own=$(nm "$work/app/$program" | grep -c ' [tT] cudaGetDeviceCount$' || true)
      [ $((shared + own)) = 1 ] || {
        echo "$program: $shared shared and $own static CUDA runtimes" >&2
        exit 1
      }
    done
    ;;
  *)
    echo "unknown way '$way'" >&2
    exit 2
    ;;
esac
