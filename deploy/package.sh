#!/usr/bin/env bash
# Builds the packages of a release for this machine: an archive, a wheel and, on Debian, a .deb, each with its SHA-256.
#
#   deploy/package.sh TARGET DIRECTORY      # TARGET: this machine's triple, as `rustc -vV` prints it
#
# PROFILE (release) is the profile of the build, FEATURES are its features; tests use dev, and the features that their crates are
# built with. MATURIN and CARGO_DEB name the tools. Tools that are not named are installed: maturin with pip, cargo-deb with cargo.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
target=${1:?the target triple}
out=${2:?a directory for the packages}
profile=${PROFILE:-release}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
here=$(rustc -vV | sed -n 's/^host: //p')
if [[ $target != "$here" ]]; then
    printf 'package.sh: the target is %s, this machine is %s; build on a machine of the target\n' "$target" "$here" >&2
    exit 2
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
built=${CARGO_TARGET_DIR:-target}/$([[ $profile == dev ]] && echo debug || echo "$profile")

features=${FEATURES:+--features=$FEATURES}
cargo build --locked --profile "$profile" --package plimsoll $features
[[ $("$built/plimsoll" --version) == "plimsoll $version"* ]] || { echo "package.sh: the program does not start" >&2; exit 1; }

# The archive: the program, its licence, its units.
name=plimsoll-$version-$target
rm -rf "${out:?}/$name"
mkdir "$out/$name"
cp -R "$built/plimsoll" LICENSE README.md deploy/plimsoll.service deploy/plimsoll.socket deploy/plimsoll.toml deploy/memory-max.sh deploy/launchd "$out/$name/"
tar -C "$out" -czf "$out/$name.tar.gz" "$name"
rm -rf "${out:?}/$name"

maturin=${MATURIN:-}
if [[ -z $maturin ]]; then
    python3 -m venv "$built/maturin" && "$built/maturin/bin/pip" install -q 'maturin>=1.9,<2'
    maturin=$built/maturin/bin/maturin
fi
$maturin build --profile "$profile" $features --out "$out"

if command -v dpkg-deb >/dev/null; then
    deb=${CARGO_DEB:-}
    if [[ -z $deb ]]; then
        cargo install --quiet --locked cargo-deb --version '^3' --root "$built/cargo-deb"
        deb=$built/cargo-deb/bin/cargo-deb
    fi
    $deb --no-build --package plimsoll --profile "$profile" --output "$out/"
fi

cd "$out"
for file in plimsoll[-_]"$version"*; do
    case $file in
    *.sha256) ;;
    *) { sha256sum "$file" 2>/dev/null || shasum -a 256 "$file"; } >"$file.sha256" ;;
    esac
done
ls -l
