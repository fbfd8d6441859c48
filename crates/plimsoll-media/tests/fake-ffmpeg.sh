#!/bin/sh
# Stands for ffmpeg in tests of its limits. What it does, the input says behind the first eight bytes of an MP4.
[ "$2" != -version ] || { echo "ffmpeg version 0-fake"; exit 0; }
case $(tail -c +9) in
sleeps) exec sleep 60 ;;
floods) exec cat /dev/zero ;;
# tail keeps a line that does not end.
grows) head -c 400000000 /dev/zero | tail -n 1 | wc -c; [ "$(head -c 400000000 /dev/zero | tail -n 1 | wc -c)" -gt 0 ] ;;
talks) while :; do echo "words without end" >&2 || exit 1; done ;;
silent) printf "Stream map '0:a:0' matches no streams.\\nTo ignore this, add a trailing '?' to the map.\\n" >&2; exit 1 ;;
fails) echo "moov atom not found" >&2; exit 1 ;;
esac
