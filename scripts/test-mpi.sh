#!/usr/bin/env bash
# Lints and tests of crates/burn-shard-mpi with its feature, and the example, under mpirun. Installs what is
# missing, by apt. `scripts/test-mpi.sh example` does the last only.
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
    scripts/apt.sh "${packages[@]}"
fi

# The example trains to the same losses, to the last bit, with MPI and with threads.
example() {
    local scratch strategy program=("${CARGO_TARGET_DIR:-target}/debug/bert-large")
    # As the other tests build it, so that Burn is not built again.
    cargo test --no-run --locked --features bert-large/mpi --test program
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064 # the folder of now
    trap "rm -rf '$scratch'" EXIT
    export XDG_CACHE_HOME=$scratch
    for strategy in zero2 zero3; do
        program=("${program[0]}" --strategy "$strategy" --steps 3 --micro-batch 2 --seq-len 32 --dropout 0)
        # Not bound: as many threads per rank as with threads.
        mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 "${program[@]}" \
            --comm mpi --losses "$scratch/mpi" |
            tee "$scratch/output"
        grep -q 'on 2 ranks (processes)' "$scratch/output"
        "${program[@]}" --world-size 2 --losses "$scratch/threads" >/dev/null
        [[ $(wc -l <"$scratch/mpi") == 4 ]]
        cmp "$scratch/mpi" "$scratch/threads"
        echo "the example, $strategy: 2 ranks of MPI have the losses of 2 threads"
    done
}

mpirun --version | head -n 1
if [[ ${1:-} == example ]]; then
    example
    exit
fi
cargo clippy -p burn-shard-mpi --all-targets --features mpi --locked -- -D warnings
RUSTDOCFLAGS='-D warnings' \
    cargo doc -p burn-shard-mpi --features mpi --no-deps --document-private-items --locked
# The jobs of one test after the other: each has up to four ranks.
cargo test -p burn-shard-mpi --features mpi --locked -- --test-threads=1
example
