#!/usr/bin/env bash
# Miri and sanitizers over the crates with `unsafe`. Not part of CI: they need a nightly compiler (with its
# components miri and rust-src), and take longer than all of it. Run it when such a crate changes.
#
#   scripts/sanitize.sh miri        the allocator's cache: what its blocks are used for, and when
#   scripts/sanitize.sh address     the allocator and the launcher, with their system calls
#   scripts/sanitize.sh thread      the allocator under threads
set -Eeuo pipefail
cd "$(dirname "$0")/.."

export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/sanitize-${1:-none}"
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
case ${1:-} in
    miri)
        # The tests of tests/ write megabytes, which takes Miri hours. A pool is a static: what it keeps is never freed.
        export MIRIFLAGS=-Zmiri-ignore-leaks
        cargo +nightly miri test --locked -p burn-shard-alloc --lib
        ;;
    address)
        export RUSTFLAGS=-Zsanitizer=address
        cargo +nightly test --locked --target "$host" -p burn-shard-alloc --tests
        cargo +nightly test --locked --target "$host" -p burn-shard-launch --lib --test launch
        ;;
    thread)
        # The standard library has to be built with it too, or its locks are not seen.
        export RUSTFLAGS=-Zsanitizer=thread
        cargo +nightly test --locked --target "$host" -Zbuild-std -p burn-shard-alloc --tests
        ;;
    *)
        echo "usage: $0 miri|address|thread" >&2
        exit 2
        ;;
esac
