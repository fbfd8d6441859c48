#!/bin/sh
# Prints a systemd drop-in that gives a server the memory its plan takes, and 3 % for the kernel's own accounting of it.
#
#   deploy/memory-max.sh MODEL [flags of `plimsoll plan`] > /etc/systemd/system/plimsoll.service.d/memory.conf
#
# PLIMSOLL names the binary. Give the same flags (or --config) as to `serve`: the plan is the same function.
set -eu
plan=$("${PLIMSOLL:-plimsoll}" plan "$@" --json)
total=$(printf '%s\n' "$plan" | sed -n 's/^  "total": \([0-9][0-9]*\),*$/\1/p')
if [ -z "$total" ]; then
    echo "memory-max.sh: the plan names no total" >&2
    exit 1
fi
printf '# The plan takes %s bytes.\n[Service]\nMemoryMax=%s\n' "$total" "$((total + total * 3 / 100))"
