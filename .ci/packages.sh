#!/usr/bin/env bash
# Debian packages that some tests need: a SLURM of one machine, and two hosts in network namespaces with an sshd each.
# Where they cannot be installed, nothing fails here, and those tests are skipped with their reason.
set -uo pipefail

packages=(slurm-wlm munge openssh-server pdsh iproute2)

if dpkg --status "${packages[@]}" > /dev/null 2>&1; then
    exit 0
elif [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "packages: ${packages[*]} not installed, since that needs root and apt-get; their tests will be skipped"
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet --quiet --no-install-recommends "${packages[@]}")
if "${install[@]}" > /dev/null 2>&1 || { apt-get update > /dev/null 2>&1 && "${install[@]}" > /dev/null 2>&1; }; then
    echo "packages: installed ${packages[*]}"
else
    echo "packages: ${packages[*]} could not be installed; their tests will be skipped"
fi
exit 0
