#!/usr/bin/env bash
# Tests of the CubeCL kernels: on CubeCL's CPU runtime, and as PTX that CUDA's assembler accepts. Fetches
# LLVM and the assembler from PyPI if they are missing.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

scripts/setup-llvm.sh --all-targets
PTXAS=$(scripts/ptxas.sh)
export PTXAS
cargo clippy --locked --profile gpu-ci -p burn-shard-kernel-checks --features cpu,ptx --all-targets -- -D warnings
cargo test --locked --profile gpu-ci -p burn-shard-kernel-checks --features cpu,ptx
