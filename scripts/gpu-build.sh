#!/usr/bin/env bash
# Builds what scripts/gpu-check.sh runs, on a machine without a GPU: x86-64, glibc of Debian 12 or later.
# The folder it prints holds all that the other machine needs, but for the driver and libnccl.so.2.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

folder="${1:-${CARGO_TARGET_DIR:-target}/gpu-check}"
profile="${GPU_PROFILE:-release}"
target="${CARGO_TARGET_DIR:-target}"
mkdir -p "$folder"

# build PACKAGES FEATURES KIND NAME: KIND is --example or --bin. One line per program that a stage runs.
build() {
    local packages features=$2 kind=$3 name=$4 from
    read -ra packages <<<"$1"
    cargo build --locked --profile "$profile" "${packages[@]/#/-p}" --features "$features" "$kind" "$name"
    from="$target/${profile/dev/debug}"
    [[ $kind == --example ]] && from+=/examples
    install -m 755 "$from/$name" "$folder/$name"
}

# tests PACKAGES FEATURES TEST: the program of one file of tests.
tests() {
    local packages features=$2 name=$3 program
    read -ra packages <<<"$1"
    program=$(cargo test --locked --profile "$profile" "${packages[@]/#/-p}" --features "$features" --test "$name" --no-run 2>&1 |
        tee /dev/stderr | sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
    install -m 755 "$program" "$folder/test-$name"
}

build burn-shard-nccl cuda --example gpu
for name in adam norm pack sgd; do
    tests burn-shard-kernel-checks cuda "$name"
done
build burn-shard-kernel-checks cuda --bin burn-shard-kernel-checks
# One selection of packages and features, or Burn is built twice.
tests 'burn-shard bert-large' bert-large/cuda cuda
build 'burn-shard bert-large' bert-large/cuda --bin bert-large
# Text for it to train on: what the crates of this build say of themselves.
find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -mindepth 3 -maxdepth 3 -name README.md -print0 |
    sort -z | xargs -0 cat >"$folder/text.md"

# For `gpu-check.sh --double`, which tries the checks themselves where there is no GPU.
install -m 755 "$target/${profile/dev/debug}"/deps/libburn_shard_nccl_double.so "$folder/"
install -m 755 scripts/gpu-check.sh "$folder/"
echo "$folder"
