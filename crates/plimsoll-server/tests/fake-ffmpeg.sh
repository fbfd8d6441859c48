#!/bin/sh
# Stands for ffmpeg: every file is a video of four frames, half a second each, with a second and a half of silence.
# A file that says so behind the first eight bytes of an MP4 has no audio track.
[ "$2" != -version ] || { echo "ffmpeg version 0-fake"; exit 0; }
says=$(tail -c +9)
case "$*" in
*framecrc*)
    printf '#tb 0: 1/2\n#dimensions 0: 16x16\n'
    for frame in 0 1 2 3; do echo "0, $frame, $frame, 1, 9, 0x0"; done ;;
*image2pipe*) printf 'P6\n16 16\n255\n'; head -c 768 /dev/zero ;;
*rawvideo*) head -c 3072 /dev/zero ;;
*wav*)
    [ "$says" != silent ] || { printf '%s\n' "Stream map '0:a:0' matches no streams." "Failed to set value '0:a:0' for option 'map'" \
        'Error parsing options for output file -.' 'Error opening output files: Invalid argument' >&2; exit 1; }
    printf 'RIFF\244\273\0\0WAVEfmt \20\0\0\0\1\0\1\0\200\76\0\0\0\175\0\0\2\0\20\0data\200\273\0\0'
    head -c 48000 /dev/zero ;;
esac
