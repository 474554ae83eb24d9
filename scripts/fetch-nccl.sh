#!/usr/bin/env bash
# Puts NVIDIA's libnccl.so.2 into a cache, from PyPI's package, and prints its path. No GPU is needed
# to load it, nor anything of CUDA: the runtime is linked into it.
#
#   BURN_SHARD_NCCL=$(scripts/fetch-nccl.sh) \
#       cargo test -p burn-shard-nccl --locked --test real -- --ignored
set -Eeuo pipefail

package=nvidia-nccl-cu12
version=2.30.7
cache="${XDG_CACHE_HOME:-$HOME/.cache}/burn-shard/$package-$version"
library="$cache/nvidia/nccl/lib/libnccl.so.2"

if [[ ! -s $library ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --timeout 30 --retries 3 --dest "$scratch" "$package==$version" >&2
    # A wheel is a zip archive; the name is moved into place whole, so that a copy is never half there.
    python3 - "$scratch" <<'PYTHON'
import glob, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/*.whl")
zipfile.ZipFile(wheel).extract("nvidia/nccl/lib/libnccl.so.2", sys.argv[1])
PYTHON
    mkdir -p "$(dirname "$library")"
    mv "$scratch/nvidia/nccl/lib/libnccl.so.2" "$library.$$"
    mv "$library.$$" "$library"
fi
printf '%s\n' "$library"
