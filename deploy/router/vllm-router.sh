#!/bin/sh
# vllm-router in front of Plimsoll servers: sh vllm-router.sh PORT URL URL ... [-- its own flags, which come last and win]
. "$(dirname "$0")/shared.sh"
exec vllm-router "$@"
