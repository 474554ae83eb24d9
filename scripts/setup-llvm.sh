#!/usr/bin/env bash
# Puts LLVM where CubeCL's build looks for it, from PyPI. Only needed where the download that CubeCL's
# build makes by itself does not work (no access to its host, an offline CI).
#
#   scripts/setup-llvm.sh                 the LLVM of the host's CPU: features `cpu`
#   scripts/setup-llvm.sh --all-targets   NVPTX and all others too: features `cuda`, `ptx`
#
# Needs python3 with pip, 0.5 GB of disk. The place is
# ${XDG_DATA_HOME:-~/.local/share}/tracel/tracel-llvm-<version>; `rm -r` it to start over.
set -euo pipefail

# What tracel-llvm-bundler 23.1.0-4 (CubeCL 0.11.3) asks for; the wheels that carry it are in wheels.txt.
prefix="${XDG_DATA_HOME:-$HOME/.local/share}/tracel/tracel-llvm-23.1.0-4"

packages=(mlc-llvm-static)
# The library that tells whether what is there is enough.
sentinel="$prefix/bin/llvm-config"
case "${1:-}" in
    '') ;;
    --all-targets)
        packages+=(mlc-llvm-static-extra-targets)
        sentinel="$prefix/lib/libLLVMNVPTXCodeGen.a"
        ;;
    *)
        echo "usage: $0 [--all-targets]" >&2
        exit 2
        ;;
esac

if [[ -f $prefix/.tracel-llvm-installed && -f $sentinel ]]; then
    echo "LLVM $("$prefix/bin/llvm-config" --version) is at $prefix"
    exit 0
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for package in "${packages[@]}"; do
    # A cache of its own, since LLVM is needed once: both wheels have a package of the same name.
    folder=$(BURN_SHARD_CACHE=$scratch "$(dirname "$0")/wheel.sh" "$package")
    mkdir -p "$prefix"
    cp -R "$folder/mlc_llvm_static/static/." "$prefix/"
    rm -rf "$folder"
done
chmod +x "$prefix"/bin/*
"$prefix/bin/llvm-config" --version >/dev/null
# Last: an install that was interrupted is not taken for a whole one.
touch "$prefix/.tracel-llvm-installed"
echo "LLVM $("$prefix/bin/llvm-config" --version) is at $prefix"
