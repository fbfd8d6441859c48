#!/usr/bin/env bash
# Budgets from too small to plenty: each served in a cage of its own (plan + 3 %) under load, or refused with the shortfall.
#
#   tools/load_line.sh [--seconds N] [--clients N] [--prompt-tokens N] [--output-tokens N] [BUDGET…]
#
# Prints a table in Markdown. Fails if a server is killed, if a verdict is bad, or if a refusal does not say what is
# missing. PLIMSOLL names the binary (target/release/plimsoll).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export PLIMSOLL=${PLIMSOLL:-$here/../target/release/plimsoll}

load=(--seconds 30)
while [[ ${1:-} == --* ]]; do
    case $1 in
        --seconds | --clients | --prompt-tokens | --output-tokens) load+=("$1" "$2"); shift 2 ;;
        *) printf 'no such option: %s\n' "$1" >&2; exit 2 ;;
    esac
done
budgets=("$@")
[[ $# -gt 0 ]] || budgets=(200MiB 470MiB 485MiB 487MiB 491MiB 501MiB 516MiB 560MiB 700MiB 900MiB 1200MiB 2000MiB)

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0
mib() { awk -v bytes="$1" 'BEGIN { printf "%.1f", bytes / 1048576 }'; }

echo '| budget | planned MiB | limit MiB | cage peak MiB | killed | answers | verdict |'
echo '| --- | --- | --- | --- | --- | --- | --- |'
for budget in "${budgets[@]}"; do
    code=0
    RUST_BACKTRACE=0 "$PLIMSOLL" plan --memory-budget "$budget" --json >"$scratch/plan" 2>"$scratch/error" || code=$?
    if [[ $code -ne 0 ]]; then
        # The server itself must refuse in the same words, before it has loaded anything.
        code=0
        RUST_BACKTRACE=0 "$PLIMSOLL" serve --port 0 --memory-budget "$budget" >/dev/null 2>"$scratch/served" || code=$?
        said=$(grep -o '[0-9.]* [KMGT]*i*B ([0-9]* bytes) short' "$scratch/served" || true)
        largest=$(grep -o 'largest component: [a-z_]*' "$scratch/served" || true)
        tries=$(grep -c 'Try --' "$scratch/served" || true)
        if [[ $code -ne 1 || -z $said || $said == '0 B ('* || -z $largest || $tries -ne 1 ]]; then failed=1; said="BAD REFUSAL: $said"; fi
        printf '| %s | | | | | | refused, exit code %s: %s; %s |\n' "$budget" "$code" "$said" "$largest"
        continue
    fi
    "$here/soak_cgroup.sh" --budget "$budget" "${load[@]}" --json "$scratch/json" \
        >"$scratch/said" 2>&1 || code=$?
    read -r limit peak kills < <(sed -n 's/^limit \([0-9]*\) peak \([0-9]*\) oom_kills \([0-9]*\)$/\1 \2 \3/p' "$scratch/said") || true
    planned=$(sed -n 's/^  "total": \([0-9]*\),*$/\1/p' "$scratch/plan")
    answers=$(sed -n 's/^.*every answer is right or an announced refusal: \(.*\) in .*$/\1/p' "$scratch/said")
    printf '| %s | %s | %s | %s | %s | %s | %s |\n' "$budget" "$(mib "$planned")" "$(mib "${limit:-0}")" \
        "$(mib "${peak:-0}")" "${kills:-?}" "$answers" "$(grep -xE 'PASS|FAIL' "$scratch/said" || echo 'NO VERDICT')"
    if [[ $code -ne 0 ]]; then
        failed=1
        grep -v '^kept' "$scratch/said" >&2
    fi
done
exit "$failed"
