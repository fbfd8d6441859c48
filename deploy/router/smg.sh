#!/bin/sh
# smg in front of Plimsoll servers: sh smg.sh PORT URL URL ... [-- its own flags, which come last and win]
. "$(dirname "$0")/shared.sh"
exec smg launch --no-remove-unhealthy-workers --disable-tokenizer-autoload "$@"
