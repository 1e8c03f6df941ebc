#!/bin/sh
# Fills a folder with copies of the header-only libraries that the tests and benchmarks for a GPU need.
#
#   sh benchmarks/cuda/headers.sh DIR [FRONTEND]
#
# FRONTEND is the folder `include` of NVIDIA/cudnn-frontend; without it, pip downloads the wheel nvidia-cudnn-frontend.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then echo "usage: sh $0 DIR [FRONTEND]" >&2; exit 2; fi
mkdir -p "$1"
to=$(cd "$1" && pwd)
for library in doctest nlohmann; do
  if [ ! -d "/usr/include/$library" ]; then
    echo "/usr/include/$library is missing: apt-get install doctest-dev nlohmann-json3-dev" >&2
    exit 1
  fi
  cp -r "/usr/include/$library" "$to"
done
if [ $# = 2 ]; then
  from=$2
else
  from=$to/wheel/include
  if [ ! -f "$from/cudnn_frontend.h" ]; then
    rm -rf "$to/wheel"
    python3 -m pip download -q --no-deps -d "$to/wheel" nvidia-cudnn-frontend
    python3 -m zipfile -e "$to"/wheel/*.whl "$to/wheel"
  fi
fi
if [ ! -f "$from/cudnn_frontend.h" ]; then echo "there is no cudnn_frontend.h in $from" >&2; exit 1; fi
# Copies all of it into a folder of this name, because some of its headers include "../include/...".
mkdir -p "$to/include"
cp -r "$from/." "$to/include"
