#!/usr/bin/env bash
# Installs what the external tests need and this machine lacks: Node.js, npm, Chromium, curl, pip, ffmpeg, unpacked promtool,
# cargo-deb.
# Debian and Ubuntu, as root. Elsewhere install them by hand; a test that misses one names it.
#
#   tests/clients/install.sh [DIRECTORY]     # promtool and cargo-deb go into DIRECTORY (target/tools); put its usr/bin on PATH
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tools=${1:-target/tools}

missing=()
need() { # need PACKAGE COMMAND…: the package, unless one of the commands is there
    local package=$1 command
    shift
    for command in "$@"; do
        if command -v "$command" >/dev/null; then return; fi
    done
    missing+=("$package")
}
need nodejs node
need npm npm
need curl curl
need python3-pip pip3 pip
need ffmpeg ffmpeg
if [[ -z ${CHROMIUM:-} ]]; then
    need chromium chromium chromium-browser google-chrome-stable google-chrome
    [[ ${missing[*]-} != *chromium* ]] || missing+=(fonts-dejavu-core)
fi

updated=
update() { [[ -n $updated ]] || { apt-get update -qq && updated=1; }; }
if [[ ${#missing[@]} -gt 0 ]]; then
    update
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

# The package would start a service; unpacking it starts nothing.
if ! command -v promtool >/dev/null && [[ ! -x $tools/usr/bin/promtool ]]; then
    update
    mkdir -p "$tools"
    (cd "$tools" && apt-get download -qq prometheus && dpkg-deb --extract prometheus_*.deb . && rm prometheus_*.deb)
fi
# Of PyPI there is an old release only. Without optimization it builds in half the time.
if ! command -v cargo-deb >/dev/null && [[ ! -x $tools/usr/bin/cargo-deb ]]; then
    cargo install --quiet --locked --debug cargo-deb --version '^3' --root "$tools/usr"
fi
printf 'the programs of the external tests are there\n'
