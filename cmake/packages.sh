# shellcheck shell=sh disable=SC2034
# Sourced by examples/run.sh and tests/run.sh. install_packages NAME... installs missing Debian packages, and does not
# call apt if none is missing.

install_packages() {
  missing=""
  for package in "$@"; do
    if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q '^install ok installed$'; then
      missing="$missing $package"
    fi
  done
  if [ -z "$missing" ]; then
    return 0
  fi
  if [ "$(id -u)" != 0 ]; then
    echo "these packages are missing, and only root may install them:$missing" >&2
    return 1
  fi
  echo "installing:$missing"
  export DEBIAN_FRONTEND=noninteractive
  # A new machine has no lists, and an old list names files that no longer exist. So lists are renewed if needed.
  apt-get update -qq
  # shellcheck disable=SC2086  # a list of names
  apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

plait_build_packages="g++ cmake ninja-build ccache pkg-config libdnnl-dev ocl-icd-opencl-dev libopenblas-dev libfmt-dev
  nlohmann-json3-dev libcli11-dev libpcre2-dev libutf8proc-dev liburing-dev"
plait_mpi_packages="libopenmpi-dev openmpi-bin"
plait_test_packages="doctest-dev libbenchmark-dev python3 clang-16 libclang-rt-16-dev lld-16 clang-format-16"

# Heavy translation units take up to 2 GB each.
plait_jobs() {
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo)
  if [ "$memory" -lt 1 ]; then memory=1; fi
  if [ "$cores" -gt "$memory" ]; then echo "$memory"; else echo "$cores"; fi
}
