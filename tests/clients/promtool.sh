#!/usr/bin/env bash
# `promtool check metrics` on a server's page: promtool.sh URL
set -euo pipefail
url=$1

command -v promtool >/dev/null || { echo 'promtool is not on PATH: tests/clients/install.sh brings it'; exit 1; }
# The text format, which promtool reads.
page=$(curl --noproxy '*' --silent --show-error --fail --header 'Accept: text/plain;version=0.0.4' "$url/metrics")
said=$(printf '%s\n' "$page" | promtool check metrics 2>&1) || { printf '%s\n' "$said"; exit 1; }
[[ -z $said ]] || { printf 'promtool says: %s\n' "$said"; exit 1; }
printf 'ok %s lines\nall good\n' "$(printf '%s\n' "$page" | wc -l)"
