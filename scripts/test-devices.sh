#!/usr/bin/env bash
# Lints of what is compiled for devices, and tests of whole models on two of them: wgpu, on a GPU or on Mesa's
# software Vulkan, which is installed by apt if there is no Vulkan driver at all; and CubeCL's CPU runtime,
# whose buffers NCCL's double works on as NCCL works on CUDA's.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

if ! compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null && ! compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null; then
    scripts/apt.sh mesa-vulkan-drivers
fi
scripts/setup-llvm.sh --all-targets
# With CUDA's code, which compiles without CUDA, and without Burn's fusion. The tests are built with it.
cargo clippy --locked --profile gpu-ci -p burn-shard -p bert-large \
    --features bert-large/cuda,bert-large/wgpu,burn-shard/cpu --all-targets -- -D warnings
cargo test --locked --profile gpu-ci -p burn-shard --features wgpu,cpu,fusion --test wgpu --test direct
