#!/usr/bin/env bash
# Prints the path of an assembler of CUDA, fetching it from PyPI first if need be. It needs no GPU.
#
#   PTXAS=$(scripts/ptxas.sh) cargo test -p burn-shard-kernel-checks --features ptx --test ptx
set -euo pipefail

version=12.9.86
folder="${XDG_CACHE_HOME:-$HOME/.cache}/burn-shard/ptxas-$version"
ptxas="$folder/nvidia/cuda_nvcc/bin/ptxas"
if ! "$ptxas" --version >/dev/null 2>&1; then
    rm -rf "$folder"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-deps --target "$folder" "nvidia-cuda-nvcc-cu12==$version" >&2
    chmod +x "$ptxas"
    "$ptxas" --version >/dev/null
fi
echo "$ptxas"
