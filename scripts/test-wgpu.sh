#!/usr/bin/env bash
# Lints of what is compiled for devices, and tests of whole models on wgpu: on a GPU, or on Mesa's software
# Vulkan, which is installed by apt if there is no Vulkan driver at all.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

if ! compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null && ! compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null; then
    scripts/apt.sh mesa-vulkan-drivers
fi
# With CUDA's code, which compiles without CUDA (but not without LLVM, which CubeCL's build fetches or
# scripts/setup-llvm.sh installs).
cargo clippy --locked --profile gpu-ci -p burn-shard -p bert-large --features bert-large/cuda,bert-large/wgpu \
    --all-targets -- -D warnings
cargo test --locked --profile gpu-ci -p burn-shard --features wgpu --test wgpu
