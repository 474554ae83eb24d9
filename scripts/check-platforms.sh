#!/usr/bin/env bash
# Type-checks for systems that CI does not run on: nothing is linked, so that neither their linkers nor their
# SDKs are needed. See docs/platforms.md.
#
#   scripts/check-platforms.sh           for macOS everything with its tests; for Windows everything, and the tests
#                                        of the crates without Burn
#   scripts/check-platforms.sh core      the crates without Burn only
#   scripts/check-platforms.sh try       installs the standard libraries, and says why if they cannot be had
set -Eeuo pipefail
cd "$(dirname "$0")/.."

windows=x86_64-pc-windows-gnu
macos=aarch64-apple-darwin

for target in "$windows" "$macos"; do
    # `rustc` knows the folder of a standard library whether or not it is there.
    if [[ -d $(rustc --print target-libdir --target "$target") ]]; then
        continue
    fi
    if ! command -v rustup >/dev/null; then
        echo "Rust's standard library for $target is missing, and there is no rustup to install it" >&2
        exit 1
    fi
    timeout 300 rustup target add "$target"
done
if [[ ${1:-} == try ]]; then
    exit
fi

core=()
# burn-shard-nccl comes along with the launcher, without its tests: their double of NCCL needs Unix.
for crate in alloc checkpoint comm launch mpi; do
    core+=(-p "burn-shard-$crate")
done

# check TARGET PACKAGES...
check() {
    cargo clippy --locked --target "$@" -- -D warnings
}

check "$windows" "${core[@]}" --all-targets
if [[ ${1:-} == core ]]; then
    check "$macos" "${core[@]}" --all-targets
else
    check "$macos" --all-targets
    # Without tests and examples: some of these start the double of NCCL.
    check "$windows"
fi
