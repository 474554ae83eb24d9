#!/usr/bin/env bash
# Puts NVIDIA's libnccl.so.2 into a cache, from PyPI's package, and prints its path. No GPU is needed
# to load it, nor anything of CUDA: the runtime is linked into it.
#
#   BURN_SHARD_NCCL=$(scripts/fetch-nccl.sh) \
#       cargo test -p burn-shard-nccl --locked --test real -- --ignored
set -Eeuo pipefail

folder=$("$(dirname "$0")/wheel.sh" nvidia-nccl-cu12)
printf '%s\n' "$folder/nvidia/nccl/lib/libnccl.so.2"
