#!/usr/bin/env bash
# The hard check of the load line: a server inside a memory cgroup whose limit is its plan + 3 %, without swap, soaked.
#
#   tools/soak_cgroup.sh [--budget B] [--seconds N] [--clients N] [--mix M] [--prompt-tokens N] [--output-tokens N]
#                        [--schemas FILE] [--balloon] [--json FILE] [--] [serve flags…]
#
# PLIMSOLL names the binary (target/release/plimsoll). With --balloon the cage is larger by what a neighbour takes and
# gives back. The exit code is that of `plimsoll soak`; 1 as well if the kernel killed anybody.
#
# Where no cgroup can be made the limits are rlimits instead, and it is said so in capitals: RLIMIT_DATA counts address
# space, so that form is weaker, but the server must keep to it all the same.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
plimsoll=${PLIMSOLL:-$here/../target/release/plimsoll}

budget=520MiB seconds=600 clients=64 mix=all balloon= json= sizes=()
while [[ $# -gt 0 ]]; do
    case $1 in
        --budget) budget=$2; shift 2 ;;
        --seconds) seconds=$2; shift 2 ;;
        --clients) clients=$2; shift 2 ;;
        --mix) mix=$2; shift 2 ;;
        --prompt-tokens | --output-tokens | --schemas) sizes+=("$1" "$2"); shift 2 ;;
        --json) json=$2; shift 2 ;;
        --balloon) balloon=1; shift ;;
        --) shift; break ;;
        *) printf 'no such option: %s\n' "$1" >&2; exit 2 ;;
    esac
done

# Stacks are address space that RLIMIT_DATA counts whether they are touched or not: 2 MiB a thread.
readonly RLIMIT_EXTRA=$((64 << 20))
# What a neighbour may take at most.
readonly BALLOON_ROOM=$((256 << 20))

scratch=$(mktemp -d)
cage='' server=''
finish() {
    [[ -z $server ]] || kill "$server" 2>/dev/null || true
    [[ -z $cage ]] || "$here/cage.sh" close "$cage"
    [[ -z $server ]] || wait "$server" 2>/dev/null || true
    rm -rf "$scratch"
}
trap finish EXIT

planned=$("$plimsoll" plan --memory-budget "$budget" --json "$@" |
    sed -n 's/^  "total": \([0-9]*\),*$/\1/p')
limit=$((planned + planned * 3 / 100))
[[ -z $balloon ]] || limit=$((limit + BALLOON_ROOM))

serve=("$plimsoll" serve --port 0 --memory-budget "$budget" "$@")
if cage=$("$here/cage.sh" open soak "$limit"); then
    printf 'A hard limit of %s bytes around a plan of %s: cgroup %s\n' "$limit" "$planned" "${cage##*/}"
    start=("$here/cage.sh" run "$cage" "${serve[@]}")
else
    cage=
    printf '\n*** NO MEMORY CGROUP CAN BE MADE HERE. THE LIMIT IS RLIMIT_DATA INSTEAD, WHICH IS WEAKER. ***\n'
    printf '*** RUN THIS AS ROOT WITH A WRITABLE CGROUP FOR THE REAL CHECK.                          ***\n\n'
    if [[ -n $balloon ]]; then
        echo '*** AND NO BALLOON: IT NEEDS A CGROUP. ***'
        balloon=
    fi
    start=(prlimit "--data=$((limit + RLIMIT_EXTRA))" "${serve[@]}")
fi
touch "$scratch/out" "$scratch/log"
"${start[@]}" >"$scratch/out" 2>"$scratch/log" &
server=$!

url=
for _ in $(seq 1500); do
    url=$(sed -n 's|^ready in .* at \(http://[^ ]*\)/v1 .*|\1|p' "$scratch/out")
    [[ -z $url ]] || break
    kill -0 "$server" 2>/dev/null || { echo 'the server did not start:'; tail -n 20 "$scratch/log"; exit 1; }
    sleep 0.2
done
[[ -n $url ]] || { echo 'the server did not become ready'; exit 1; }
sed -n 1p "$scratch/out"

verdict=0
"$plimsoll" soak --url "$url" --pid "$server" --clients "$clients" --duration "$seconds" --mix "$mix" "${sizes[@]}" --patience 3600 \
    ${balloon:+--balloon} --health-ms "${HEALTH_MS:-5000}" ${json:+--json "$json"} || verdict=1
if [[ -n $cage ]]; then
    "$here/cage.sh" report "$cage"
    kill -0 "$server" 2>/dev/null || { echo 'the server is gone:'; tail -n 20 "$scratch/log"; verdict=1; }
fi
grep -E ' (WARN|ERROR) ' "$scratch/log" | cut -c 1-200 | sed 's/^[^ ]* *//' | sort | uniq -c | sort -rn | head -n 10 || true
exit "$verdict"
