#!/usr/bin/env bash
# Builds what scripts/gpu-check.sh runs, on a machine without a GPU: x86-64, glibc of Debian 12 or later.
#
#   gpu-build.sh kernels  [FOLDER]    NCCL and the CubeCL kernels
#   gpu-build.sh training [FOLDER]    NCCL, parity and BERT-large
#   gpu-build.sh double   [FOLDER]    what the test double of NCCL can stand in for; needs no LLVM, makes no archive
#
# Makes FOLDER/gpu-check-PART.tar.xz, which holds all that the other machine needs but for the driver and
# libnccl.so.2, and fails if it is larger than 60 MiB: a part is what one short job can be given.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

part=${1:-}
case $part in
    kernels | training | double) ;;
    *)
        echo 'usage: gpu-build.sh kernels|training|double [FOLDER]' >&2
        exit 2
        ;;
esac
target="${CARGO_TARGET_DIR:-target}"
out="${2:-$target/gpu-check}"
profile="${GPU_PROFILE:-release}"
most_bytes=$((60 << 20))
folder="$out/$part"
rm -rf "$folder"
mkdir -p "$folder"

# The bindings of the driver's newest functions would not load with older drivers: those of CUDA 12.8 call nothing
# that a driver for 12.0 (525) lacks. Otherwise the version is that of this machine's nvcc, or the newest.
export CUDARC_CUDA_VERSION="${CUDARC_CUDA_VERSION:-12080}"
export CARGO_PROFILE_RELEASE_STRIP=true

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

case $part in
    kernels)
        build burn-shard-nccl cuda --example gpu
        tests burn-shard-kernel-checks cuda gpu
        build burn-shard-kernel-checks cuda --bin burn-shard-kernel-checks
        ;;
    training)
        build burn-shard-nccl cuda --example gpu
        # One selection of packages and features, or Burn is built twice.
        tests 'burn-shard bert-large' bert-large/cuda cuda
        build 'burn-shard bert-large' bert-large/cuda --bin bert-large
        # Text to train on, alike wherever it is built: this repository's own.
        git ls-files -z '*.md' | LC_ALL=C sort -z | xargs -0 cat >"$folder/text.md"
        ;;
    double)
        cargo build --locked --profile "$profile" -p burn-shard-nccl --example gpu
        install -m 755 "$target/${profile/dev/debug}/examples/gpu" "$folder/gpu"
        install -m 755 "$target/${profile/dev/debug}"/deps/libburn_shard_nccl_double.so "$folder/"
        ;;
esac
install -m 755 scripts/gpu-check.sh "$folder/"
if [[ $part == double ]]; then
    echo "$folder"
    exit
fi

# CubeCL links it into kernels at run time; a driver does not bring it.
cuda=$(scripts/wheel.sh nvidia-cuda-nvcc-cu12)/nvidia/cuda_nvcc
install -D -m 644 "$cuda/nvvm/libdevice/libdevice.10.bc" "$folder/cuda/nvvm/libdevice/libdevice.10.bc"
# The example links the double, though a GPU needs none of it.
strip "$folder"/gpu
for program in "$folder"/*; do
    if [[ -x $program && -f $program ]] && ldd "$program" 2>/dev/null | grep 'not found'; then
        echo "$program lacks a library here already" >&2
        exit 1
    fi
done

archive="$out/gpu-check-$part.tar.xz"
tar -C "$out" -cf - "$part" | xz -T0 -9e --lzma2=preset=9e,dict=192MiB >"$archive"
bytes=$(stat -c %s "$archive")
if ((bytes > most_bytes)); then
    echo "$archive has $bytes bytes, more than the $most_bytes that a job may bring along" >&2
    exit 1
fi
echo "$archive ($((bytes >> 20)) MiB)"
