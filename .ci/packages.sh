#!/usr/bin/env bash
# Debian packages that some tests need: a SLURM of one machine, and two hosts in network namespaces with an sshd each.
# Where they cannot be installed, those tests are skipped with their reason; with CI=true this script and the tests fail.
set -uo pipefail

packages=(slurm-wlm munge openssh-server pdsh iproute2)

missing() {
    if [ "${CI:-}" = true ]; then
        echo "error: packages: ${packages[*]} $1; with CI=true their tests must run" >&2
        exit 1
    fi
    echo "packages: ${packages[*]} $1; their tests will be skipped"
    exit 0
}

if dpkg --status "${packages[@]}" > /dev/null 2>&1; then
    exit 0
elif [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    missing "not installed, since that needs root and apt-get"
fi
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --quiet --quiet --no-install-recommends "${packages[@]}")
if "${install[@]}" > /dev/null 2>&1 || { apt-get update > /dev/null 2>&1 && "${install[@]}" > /dev/null 2>&1; }; then
    echo "packages: installed ${packages[*]}"
else
    missing "could not be installed"
fi
