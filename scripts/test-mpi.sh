#!/usr/bin/env bash
# Lints and tests of crates/burn-shard-mpi with its feature, under mpirun. Installs what is missing, by apt.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

# Debian's package of each thing that is needed, if it is missing.
missing() {
    command -v mpicc >/dev/null || echo libopenmpi-dev
    command -v mpirun >/dev/null || echo openmpi-bin
    compgen -G '/usr/lib/llvm-*/lib/libclang.so*' >/dev/null ||
        compgen -G '/usr/lib/*/libclang*.so*' >/dev/null ||
        [[ -n ${LIBCLANG_PATH:-} ]] || echo libclang-dev
}

mapfile -t packages < <(missing)
if ((${#packages[@]})); then
    if ! command -v apt-get >/dev/null; then
        echo "missing: ${packages[*]} (Debian's names; there is no apt-get here)" >&2
        exit 1
    fi
    apt=(apt-get -o DPkg::Lock::Timeout=600)
    ((EUID == 0)) || apt=(sudo "${apt[@]}")
    "${apt[@]}" update
    DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "${packages[@]}"
fi

mpirun --version | head -n 1
cargo clippy -p burn-shard-mpi --all-targets --features mpi --locked -- -D warnings
RUSTDOCFLAGS='-D warnings' \
    cargo doc -p burn-shard-mpi --features mpi --no-deps --document-private-items --locked
# The jobs of one test after the other: each has up to four ranks.
cargo test -p burn-shard-mpi --features mpi --locked -- --test-threads=1
