#!/bin/sh
# Tests the NEON kernels on a machine of another kind, by emulating a 64-bit ARM processor: that their bits are those of the
# portable code. Speed is not measured. On 64-bit ARM itself plain `cargo test -p plimsoll-kernels` does the same.
#
#   rustup target add aarch64-unknown-linux-gnu
#   apt-get install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
#   tools/check_neon.sh [arguments for cargo test]
set -eu
cd "$(dirname "$0")/.."

export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
exec cargo test --target aarch64-unknown-linux-gnu -p plimsoll-kernels "$@"
