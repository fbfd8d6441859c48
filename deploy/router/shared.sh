# What both gateways are told; smg.sh and vllm-router.sh read this with their own arguments: PORT URL URL ... [-- flags].
set -eu
port=$1
shift
for argument in "$@"; do
  shift
  [ "$argument" = -- ] || set -- "$@" "$argument"
done
# --worker-urls takes all that follow up to the next flag.
set -- --host "${HOST:-127.0.0.1}" --port "$port" \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" \
  --policy cache_aware --health-check-endpoint /ready --health-check-interval-secs 1 --health-check-timeout-secs 2 \
  --health-failure-threshold 2 --health-success-threshold 1 --cb-timeout-duration-secs 2 \
  --worker-urls "$@"
