#!/usr/bin/env bash
# `promtool check metrics` on a server's page: promtool.sh URL DIRECTORY
#
# promtool is taken from PATH, or else unpacked from Debian's package into DIRECTORY. Unpacking starts no service.
set -euo pipefail
url=$1 directory=$2

promtool=$(command -v promtool || true)
if [[ -z $promtool ]]; then
    promtool=$directory/usr/bin/promtool
    if [[ ! -x $promtool ]]; then
        mkdir -p "$directory"
        cd "$directory"
        apt-get download prometheus >/dev/null 2>&1 || { apt-get update -qq >/dev/null && apt-get download -qq prometheus; }
        dpkg-deb --extract prometheus_*.deb .
        rm prometheus_*.deb
        cd - >/dev/null
    fi
fi

# The text format, which promtool reads.
page=$(curl --noproxy '*' --silent --show-error --fail --header 'Accept: text/plain;version=0.0.4' "$url/metrics")
said=$(printf '%s\n' "$page" | "$promtool" check metrics 2>&1) || { printf '%s\n' "$said"; exit 1; }
[[ -z $said ]] || { printf 'promtool says: %s\n' "$said"; exit 1; }
printf 'ok %s lines\nall good\n' "$(printf '%s\n' "$page" | wc -l)"
