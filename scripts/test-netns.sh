#!/usr/bin/env bash
# Tests of ranks on two hosts, which are network namespaces with a link between them that is cut. Needs root
# and `ip` (Debian: iproute2). Leaves nothing behind.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

if ((EUID != 0)); then
    echo "network namespaces need root: sudo -E env \"PATH=\$PATH\" $0" >&2
    exit 1
fi
if ! command -v ip >/dev/null; then
    echo 'there is no ip (Debian: apt-get install iproute2)' >&2
    exit 1
fi

first=burn-shard-$$-a
second=burn-shard-$$-b
finish() {
    # Interfaces go with their namespaces.
    ip netns del "$first" 2>/dev/null || true
    ip netns del "$second" 2>/dev/null || true
}
trap finish EXIT

# From 198.18.0.0/15, which is for tests like this.
export BURN_SHARD_TEST_NETNS="$first $second" BURN_SHARD_TEST_ADDRESSES='198.18.77.1 198.18.77.2'
ip netns add "$first"
ip netns add "$second"
ip link add cable netns "$first" type veth peer name cable netns "$second"
for host in "$first 198.18.77.1" "$second 198.18.77.2"; do
    read -r name address <<<"$host"
    ip -n "$name" address add "$address/24" dev cable
    ip -n "$name" link set lo up
    ip -n "$name" link set cable up
done

cargo test -p burn-shard-comm --locked --test hosts -- --ignored "$@"
