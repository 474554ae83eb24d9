#!/usr/bin/env bash
# Fuzzes what strangers and ranks may send while ranks meet, and the files of checkpoints and models
# (fuzz/fuzz_targets), some seconds each. Not part of CI: it needs a nightly compiler, and finds more the longer it runs.
#
#   scripts/fuzz.sh             a minute per target
#   scripts/fuzz.sh 3600        an hour per target
#
# What it finds is left in fuzz/artifacts. `cargo fuzz run handshake FILE` repeats it, if cargo-fuzz is installed;
# this script does without: it builds as cargo-fuzz does.
set -Eeuo pipefail
cd "$(dirname "$0")/../fuzz"

seconds=${1:-60}
host=$(rustc +nightly -vV | sed -n 's/^host: //p')
target="${CARGO_TARGET_DIR:-target}"
# The coverage that libFuzzer follows, and AddressSanitizer.
export RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module -Cdebug-assertions=on
    -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters
    -Cllvm-args=-sanitizer-coverage-pc-table -Ccodegen-units=1"
RUSTFLAGS=${RUSTFLAGS//$'\n'/ }
cargo +nightly build --release --target "$host"
for name in handshake manifest messages model; do
    mkdir -p "corpus/$name" artifacts
    "$target/$host/release/$name" -max_total_time="$seconds" -max_len=2048 -rss_limit_mb=1024 \
        -artifact_prefix="artifacts/$name-" "corpus/$name"
done
