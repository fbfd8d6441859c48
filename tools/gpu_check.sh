#!/usr/bin/env bash
# Checks and measures this machine's GPU, and prints a report in Markdown. It takes about six minutes with what is built before.
#
#   tools/gpu_check.sh [MODEL] [--allow-software]
#
# MODEL is what `plimsoll serve` takes (default: smollm2). Products and steps of a model given by its path are measured, too.
# With --allow-software, lavapipe may stand for a GPU. Such a report shows that the script works, and nothing about speed.
# PLIMSOLL names another program than target/release/plimsoll. PROFILE=dev uses builds without --release.
# Build first:
#   cargo build --release -p plimsoll --features gpu
#   cargo build --release -p plimsoll-gpu --features wgpu --example measure
#   cargo test --release -p plimsoll-gpu --features wgpu --no-run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

software=()
model=smollm2
for arg in "$@"; do
    case "$arg" in
        --allow-software) software=(--allow-software) ;;
        -*) echo "unknown option '$arg': use --allow-software" >&2 && exit 2 ;;
        *) model=$arg ;;
    esac
done
profile=${PROFILE:-release}
folder=$([[ "$profile" == dev ]] && echo debug || echo "$profile")
target=${CARGO_TARGET_DIR:-target}
program=${PLIMSOLL:-$target/$folder/plimsoll}
device=(--device gpu)
if [[ ${#software[@]} -gt 0 ]]; then
    # The self-test of a usual pool takes software many minutes.
    device+=(--allow-software-gpu --max-total-token-num 512 --max-req-total-len 256 --batch-max-tokens 32)
    device+=(--running-max-req-size 2 --graph-max-batch-size 2)
fi
port=${PORT:-8917}
work=$(mktemp -d)
server=
finish() {
    if [[ -n "$server" ]]; then kill "$server" 2>/dev/null || true; fi
    rm -rf "$work"
}
trap finish EXIT
failed=0

section() {
    printf '\n## %s\n\n' "$1"
}

# Runs a command, prints what it says as code, and notes its failure.
shown() {
    local code=0
    "$@" >"$work/said" 2>&1 || code=$?
    printf '```\n'
    # A last line without its end gets one.
    sed '$a\' "$work/said"
    printf '```\n'
    if [[ $code -ne 0 ]]; then
        echo "**failed: $1 ended with $code**"
        failed=1
    fi
}

tests() {
    # The tests take any adapter, a GPU before software.
    local code=0
    cargo test --profile "$profile" -q -p plimsoll-gpu --features wgpu --test operations --test models -- \
        --ignored --nocapture >"$work/tests" 2>&1 || code=$?
    # Some lines begin with the progress dots of `-q`.
    sed 's/^\.*//' "$work/tests" | grep -E '^test result|FAILED|panicked|largest difference|^error' || true
    return $code
}

answer() {
    curl -sS --max-time 120 "http://127.0.0.1:$port/v1/completions" -H 'content-type: application/json' \
        -d '{"prompt": "The sea is", "max_tokens": 8, "temperature": 0}'
}

serve() {
    "$program" serve "$model" "${device[@]}" --port "$port" >"$work/server" 2>&1 &
    server=$!
    for _ in $(seq 600); do
        if curl -sf --max-time 2 "http://127.0.0.1:$port/health" >/dev/null; then return 0; fi
        if ! kill -0 "$server" 2>/dev/null; then break; fi
        sleep 0.5
    done
    tail -20 "$work/server"
    return 1
}

# A start with less than the weights need is refused before it takes anything.
over_budget() {
    local code=0
    "$program" serve "$model" "${device[@]}" --port "$port" --memory-budget 64MiB >"$work/over" 2>&1 || code=$?
    tail -3 "$work/over"
    [[ $code -ne 0 ]] && grep -q 'does not fit' "$work/over"
}

echo "# GPU report, $(git rev-parse --short HEAD 2>/dev/null || echo 'no commit')"

section 'Operations against the CPU, and the same bits alone and in company'
shown tests

section 'Measured'
path=
if [[ -e "$model" ]]; then path=$model; fi
cargo run --profile "$profile" -q -p plimsoll-gpu --features wgpu --example measure -- \
    ${path:+"$path"} "${software[@]}" || failed=1

section "$model served"
if serve; then
    shown answer
    if [[ ${#software[@]} -gt 0 ]]; then
        shown "$program" bench --url "http://127.0.0.1:$port" --requests 2 --concurrency 1 --prompt-tokens 16 --output-tokens 8
    else
        shown "$program" bench --url "http://127.0.0.1:$port"
    fi
    shown curl -sS "http://127.0.0.1:$port/v1/memory"
    kill "$server" && wait "$server" 2>/dev/null || true
    server=
else
    echo '**failed: the server did not start**'
    failed=1
fi

section 'A start over budget'
shown over_budget
exit $failed
