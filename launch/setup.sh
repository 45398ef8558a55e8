#!/usr/bin/env bash
# Makes .venv with pinned versions of everything. Usage: bash launch/setup.sh [EXTRA,…]   (extras: quickstart, dev)
# A second call with the same versions does nothing. PYTHON chooses the interpreter (default: python3, 3.10 or later).
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:-quickstart}"
python="${PYTHON:-python3}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $python is $("$python" -V 2>&1); Python 3.10 or later is needed (set PYTHON)" >&2
    exit 1
}

stamp=".venv/installed-${extras//,/-}"
wanted="$(cat pyproject.toml constraints.txt | sha256sum) $("$python" -V)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "set-up: .venv is complete, nothing to install"
    exit 0
fi

if [ ! -x .venv/bin/python ]; then
    echo "set-up: making .venv with $("$python" -V)"
    "$python" -m venv .venv || {
        echo "error: $python cannot make a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)" >&2
        exit 1
    }
fi

# A torch with CUDA that this machine already uses is kept: .venv sees it, and its version is not pinned.
constraints="$PWD/constraints.txt"
cuda_torch="$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] if torch.version.cuda else "")' 2>/dev/null || true)"
if [ -n "$cuda_torch" ] && [[ "$cuda_torch" != "$PWD/.venv/"* ]]; then
    echo "set-up: using the torch with CUDA in $cuda_torch"
    site_packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$cuda_torch" > "$site_packages/cuda_torch.pth"
    constraints=".venv/constraints.txt"
    grep -v -E '^(torch|triton|numpy|nvidia-|cuda-)' constraints.txt > "$constraints"
fi

echo "set-up: installing pinned versions (a few minutes the first time)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0
if [ -z "$cuda_torch" ]; then
    .venv/bin/pip install --quiet --quiet --constraint "$constraints" torch==2.13.0
fi
.venv/bin/pip install --quiet --quiet --constraint "$constraints" --editable ".[$extras]"
if [[ ",$extras," == *,dev,* ]]; then
    # Only its reader and writer of shards are used, as the peer to check against; its dependencies are not needed.
    .venv/bin/pip install --quiet --quiet --no-deps megatron-core==0.16.1
fi
echo "$wanted" > "$stamp"
echo "set-up: done"
