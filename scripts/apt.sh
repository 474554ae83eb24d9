#!/usr/bin/env bash
# Installs Debian packages for the other scripts, as root or with sudo; says which are missing where there
# is no apt.
set -Eeuo pipefail

if ! command -v apt-get >/dev/null; then
    echo "missing: $* (Debian's names; there is no apt-get here)" >&2
    exit 1
fi
apt=(apt-get -o DPkg::Lock::Timeout=600)
((EUID == 0)) || apt=(sudo "${apt[@]}")
"${apt[@]}" update
DEBIAN_FRONTEND=noninteractive "${apt[@]}" install -y --no-install-recommends "$@"
