#!/usr/bin/env bash
# Installs what stands for a GPU in tests: Mesa's lavapipe, a Vulkan driver that computes on the host's cores.
# Debian and Ubuntu, as root. Elsewhere install a Vulkan driver by hand.
#
#   tests/gpu/install.sh
set -euo pipefail

shopt -s nullglob
drivers=(/usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json)
if [[ ${#drivers[@]} -eq 0 ]] || ! ldconfig -p | grep -q 'libvulkan\.so\.1'; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
        mesa-vulkan-drivers libvulkan1 >/dev/null
fi
