#!/usr/bin/env bash
# Puts one package of scripts/wheels.txt into the cache, from PyPI, and prints its folder. A file whose hash is not
# in the list is refused: nothing native runs here that was not looked at when it was listed.
#
#   "$(scripts/wheel.sh typos)/bin/typos"
set -Eeuo pipefail

package=$1
line=$(grep "^$package==" "$(dirname "$0")/wheels.txt")
version=${line#*==}
version=${version%% *}
folder="${BURN_SHARD_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/burn-shard}/$package-$version"

if [[ ! -e $folder/.complete ]]; then
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch" "$folder.$$"' EXIT
    printf '%s\n' "$line" >"$scratch/requirements.txt"
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --timeout 30 --retries 3 \
        --no-deps --only-binary :all: --require-hashes --requirement "$scratch/requirements.txt" \
        --target "$folder.$$" >&2
    touch "$folder.$$/.complete"
    # In one step, so that an install that was interrupted is not taken for a whole one.
    rm -rf "$folder"
    mv "$folder.$$" "$folder"
fi
printf '%s\n' "$folder"
