#!/usr/bin/env bash
# Lints and tests of crates/burn-shard-nccl with CUDA's memory compiled in: over the double, and as far as
# NVIDIA's own library goes without a GPU; then the stages of scripts/gpu-check.sh, over the double.
# Fetches that library from PyPI if it is missing.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

BURN_SHARD_NCCL=$(scripts/fetch-nccl.sh)
export BURN_SHARD_NCCL
# That of the oldest driver that is supported, see scripts/gpu-build.sh.
export CUDARC_CUDA_VERSION="${CUDARC_CUDA_VERSION:-12080}"
cargo clippy --locked -p burn-shard-nccl --features cuda --all-targets -- -D warnings
cargo test --locked -p burn-shard-nccl --features cuda
cargo test --locked -p burn-shard-nccl --features cuda --test real -- --ignored

folder=$(GPU_PROFILE=dev scripts/gpu-build.sh double | tail -n 1)
folder=$(cd "$folder" && pwd)
"$folder/gpu-check.sh" --double
# It notices losses that differ.
printf '1.5\n1.25\n' >"$folder/a" && printf '1.5\n1.2501\n' >"$folder/b"
"$folder/gpu-check.sh" losses "$folder/a" "$folder/a"
if "$folder/gpu-check.sh" losses "$folder/a" "$folder/b"; then
    echo 'losses that differ were not noticed' >&2
    exit 1
fi
