#!/usr/bin/env bash
# Lints of what is compiled for devices, and tests on two of them: whole models and the kernels on wgpu, on a GPU or
# on Mesa's software Vulkan, which is installed by apt if there is no Vulkan driver at all; whole models on CubeCL's
# CPU runtime, whose buffers NCCL's double works on as NCCL works on CUDA's.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

if ! compgen -G '/usr/share/vulkan/icd.d/*.json' >/dev/null && ! compgen -G '/etc/vulkan/icd.d/*.json' >/dev/null; then
    scripts/apt.sh mesa-vulkan-drivers
fi
scripts/setup-llvm.sh --all-targets
# With CUDA's code, which compiles without CUDA, and without Burn's fusion. The tests are built with it.
cargo clippy --locked --profile gpu-ci -p burn-shard -p bert-large -p burn-shard-kernel-checks \
    --features bert-large/cuda,bert-large/wgpu,burn-shard/cpu,burn-shard-kernel-checks/wgpu,burn-shard-kernel-checks/cuda \
    --all-targets -- -D warnings
# One selection of packages and features, or CubeCL is built twice.
cargo test --locked --profile gpu-ci -p burn-shard -p burn-shard-kernel-checks \
    --features burn-shard/wgpu,burn-shard/cpu,burn-shard/fusion,burn-shard-kernel-checks/wgpu \
    --test wgpu --test direct --test adam --test norm --test pack --test sgd
