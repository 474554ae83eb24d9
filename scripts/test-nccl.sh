#!/usr/bin/env bash
# Lints and tests of crates/burn-shard-nccl with CUDA's memory compiled in: over the double, and as far as
# NVIDIA's own library goes without a GPU. Fetches that library from PyPI if it is missing.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

BURN_SHARD_NCCL=$(scripts/fetch-nccl.sh)
export BURN_SHARD_NCCL
cargo clippy --locked -p burn-shard-nccl --features cuda --all-targets -- -D warnings
cargo test --locked -p burn-shard-nccl --features cuda
cargo test --locked -p burn-shard-nccl --features cuda --test real -- --ignored
