#!/bin/sh
# smg in front of Plimsoll servers: sh smg.sh PORT URL URL ... [-- its own flags, which come last and win]
set -eu
port=$1
shift
for argument in "$@"; do
  shift
  [ "$argument" = -- ] || set -- "$@" "$argument"
done
# --worker-urls takes all that follow up to the next flag.
exec smg launch --host "${HOST:-127.0.0.1}" --port "$port" \
  --prometheus-host 127.0.0.1 --prometheus-port "${METRICS_PORT:-29000}" \
  --policy cache_aware --health-check-endpoint /ready --health-check-interval-secs 1 --health-check-timeout-secs 2 \
  --health-failure-threshold 2 --health-success-threshold 1 --cb-timeout-duration-secs 2 \
  --no-remove-unhealthy-workers --disable-tokenizer-autoload \
  --worker-urls "$@"
