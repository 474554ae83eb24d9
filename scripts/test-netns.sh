#!/usr/bin/env bash
# Tests of ranks on two hosts, which are network namespaces with a link between them that is cut. Needs root,
# `ip` (Debian: iproute2), and `unshare` and `setpriv` (util-linux). `scripts/test-netns.sh try` makes the hosts
# and nothing else: it says whether that is possible here.
#
# Everything runs in a PID namespace and a mount namespace of its own, so that nothing is left, processes or
# hosts, however this script ends: the system ends both with their first process, and that with this one.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

first=burn-shard-a
second=burn-shard-b

outside() {
    if ((EUID != 0)); then
        echo "network namespaces need root: sudo -E env \"PATH=\$PATH\" scripts/test-netns.sh" >&2
        exit 1
    fi
    local tool
    for tool in ip unshare setpriv; do
        if ! command -v "$tool" >/dev/null; then
            echo "there is no $tool (Debian: apt-get install iproute2 util-linux)" >&2
            exit 1
        fi
    done
    if [[ ${1:-} != try ]]; then
        # With the network of this host, if something is to be fetched.
        cargo test -p burn-shard-comm --locked --test hosts --no-run
    fi
    # In the background, so that this shell hears signals meanwhile.
    setpriv --pdeathsig KILL -- \
        unshare --mount --pid --fork --kill-child=KILL --mount-proc -- \
        "$BASH" scripts/test-netns.sh inside "$@" &
    # shellcheck disable=SC2064 # the process of now
    trap "kill -KILL $! 2>/dev/null || true" EXIT
    trap 'exit 143' TERM
    trap 'exit 130' INT
    trap 'exit 129' HUP
    wait $!
}

inside() {
    # A place for names of hosts that nobody else sees.
    mkdir -p /run/netns
    mount -t tmpfs tmpfs /run/netns
    ip netns add "$first"
    ip netns add "$second"
    ip link add cable netns "$first" type veth peer name cable netns "$second"
    # From 198.18.0.0/15, which is for tests like this.
    local host name address
    for host in "$first 198.18.77.1" "$second 198.18.77.2"; do
        read -r name address <<<"$host"
        ip -n "$name" address add "$address/24" dev cable
        ip -n "$name" link set lo up
        ip -n "$name" link set cable up
        ip netns exec "$name" true
    done
    if [[ ${1:-} == try ]]; then
        return
    fi
    export BURN_SHARD_TEST_NETNS="$first $second" BURN_SHARD_TEST_ADDRESSES='198.18.77.1 198.18.77.2'
    cargo test -p burn-shard-comm --locked --test hosts -- --ignored "$@"
}

if [[ ${1:-} == inside ]]; then
    inside "${@:2}"
else
    outside "$@"
fi
