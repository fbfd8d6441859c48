#!/usr/bin/env bash
# A hard memory limit around processes: a memory cgroup of their own, without swap, below the cgroup of the caller.
#
#   cage.sh open NAME BYTES     makes the cage and prints its directory; exit code 3 when this machine has none to give
#   cage.sh limit CAGE BYTES    moves the limit
#   cage.sh run CAGE COMMAND…   becomes COMMAND inside the cage (same process id)
#   cage.sh report CAGE         prints limit, peak, what the peak was made of, and how often the kernel killed
#   cage.sh close CAGE          ends whoever is still inside and removes the cage
#
# Version 1 is used where the memory controller lives there, version 2 otherwise. In version 2 a cgroup with processes
# cannot have children with limits, so the cage is made below the nearest ancestor that can.
set -euo pipefail

die() { printf 'cage: %s\n' "$*" >&2; exit 3; }

v1_parent() {
    local mount path
    mount=$(awk '/ - cgroup / && /[ ,]memory(,|$)/ { print $5 }' /proc/self/mountinfo | head -n 1)
    path=$(awk -F: '$2 ~ /(^|,)memory(,|$)/ { print $3 }' /proc/self/cgroup)
    [[ -n $mount && -n $path ]] || return 1
    # Inside a container the path may not be visible below the mount.
    if [[ -d $mount$path ]]; then printf '%s\n' "${mount}${path%/}"; else printf '%s\n' "$mount"; fi
}

v2_parent() {
    local mount path
    mount=$(awk '/ - cgroup2 / { print $5 }' /proc/self/mountinfo | head -n 1)
    path=$(awk -F: '$1 == 0 { print $3 }' /proc/self/cgroup)
    [[ -n $mount ]] || return 1
    while :; do
        if grep -qw memory "$mount$path/cgroup.subtree_control" 2>/dev/null; then
            printf '%s\n' "${mount}${path%/}"
            return
        fi
        [[ $path != / && -n $path ]] || return 1
        path=${path%/*}
    done
}

open() {
    local name=$1 bytes=$2 parent
    parent=$(v1_parent) || parent=$(v2_parent) || die "no memory cgroup is mounted here"
    local cage="$parent/plimsoll-$name-$$"
    mkdir "$cage" 2>/dev/null || die "$parent cannot be written (root is needed)"
    # Swap is shut before memory is limited, and in version 1 both must be set in this order.
    if ! limit "$cage" "$bytes"; then
        rmdir "$cage"
        die "$cage takes no limit"
    fi
    printf '%s\n' "$cage"
}

limit() {
    local cage=$1 bytes=$2
    if [[ -e $cage/memory.max ]]; then
        [[ ! -e $cage/memory.swap.max ]] || echo 0 >"$cage/memory.swap.max"
        echo "$bytes" >"$cage/memory.max"
        return
    fi
    [[ -e $cage/memory.limit_in_bytes ]] || return 1
    # Memory and memory with swap: the second may never be less than the first, so one that grows is opened first.
    [[ ! -e $cage/memory.memsw.limit_in_bytes ]] || echo -1 >"$cage/memory.memsw.limit_in_bytes"
    echo "$bytes" >"$cage/memory.limit_in_bytes"
    [[ ! -e $cage/memory.memsw.limit_in_bytes ]] || echo "$bytes" >"$cage/memory.memsw.limit_in_bytes"
}

report() {
    local cage=$1 at kills peak bytes
    at() { awk -v key="$2" '$1 == key { print $2 }' "$cage/$1"; }
    if [[ -e $cage/memory.max ]]; then
        bytes=$(<"$cage/memory.max")
        peak=$(cat "$cage/memory.peak" 2>/dev/null || echo unknown)
        kills=$(at memory.events oom_kill)
    else
        bytes=$(<"$cage/memory.limit_in_bytes")
        peak=$(<"$cage/memory.max_usage_in_bytes")
        kills=$(at memory.oom_control oom_kill)
    fi
    printf 'limit %s peak %s oom_kills %s\n' "$bytes" "$peak" "$kills"
}

close() {
    local cage=$1 pid
    [[ -d $cage ]] || return 0
    for _ in $(seq 50); do
        while read -r pid; do kill -KILL "$pid" 2>/dev/null || true; done <"$cage/cgroup.procs"
        # The kernel lets go of the directory a moment after the last process has gone.
        if rmdir "$cage" 2>/dev/null; then return 0; fi
        sleep 0.1
    done
    die "$cage does not empty"
}

[[ $# -ge 2 ]] || die "usage: cage.sh open NAME BYTES | limit CAGE BYTES | run CAGE COMMAND… | report CAGE | close CAGE"
command=$1
shift
case $command in
    open) open "$@" ;;
    limit) limit "$@" ;;
    run)
        cage=$1
        shift
        echo $$ >"$cage/cgroup.procs"
        exec "$@"
        ;;
    report) report "$@" ;;
    close) close "$@" ;;
    *) die "no such command: $command" ;;
esac
