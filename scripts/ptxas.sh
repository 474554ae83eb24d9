#!/usr/bin/env bash
# Prints the path of an assembler of CUDA, fetching it from PyPI first if need be. It needs no GPU.
#
#   PTXAS=$(scripts/ptxas.sh) cargo test -p burn-shard-kernel-checks --features ptx --test ptx
set -Eeuo pipefail

folder=$("$(dirname "$0")/wheel.sh" nvidia-cuda-nvcc-cu12)
ptxas="$folder/nvidia/cuda_nvcc/bin/ptxas"
[[ -x $ptxas ]] || chmod +x "$ptxas"
"$ptxas" --version >/dev/null
printf '%s\n' "$ptxas"
