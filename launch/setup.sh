#!/usr/bin/env bash
# Creates .venv with pinned versions of everything. Usage: bash launch/setup.sh [EXTRA,…]   (extras: quickstart, dev)
# A second call with the same versions does nothing. PYTHON selects the interpreter (default: python3, 3.10 or later).
set -euo pipefail
cd "$(dirname "$0")/.."

extras="${1:-quickstart}"
python="${PYTHON:-python3}"

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "error: $python is $("$python" -V 2>&1); Python 3.10 or later is required (set PYTHON)" >&2
    exit 1
}

stamp=".venv/installed-${extras//,/-}"
wanted="$(cat pyproject.toml constraints.txt | sha256sum) $("$python" -V)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "setup: .venv is complete, nothing to install"
    exit 0
fi

if [ ! -x .venv/bin/python ]; then
    echo "setup: creating .venv with $("$python" -V)"
    "$python" -m venv .venv || {
        echo "error: $python cannot create a virtual environment (on Debian and Ubuntu: apt-get install python3-venv)" >&2
        exit 1
    }
fi

# An installed torch with CUDA is kept: .venv imports it, and its version is not pinned.
constraints="$PWD/constraints.txt"
cuda_torch="$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1] if torch.version.cuda else "")' 2>/dev/null || true)"
if [ -n "$cuda_torch" ] && [[ "$cuda_torch" != "$PWD/.venv/"* ]]; then
    echo "setup: using the torch with CUDA in $cuda_torch"
    site_packages="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    echo "$cuda_torch" > "$site_packages/cuda_torch.pth"
    constraints=".venv/constraints.txt"
    grep -v -E '^(torch|triton|numpy|nvidia-|cuda-)' constraints.txt > "$constraints"
fi

echo "setup: installing pinned versions (a few minutes the first time)"
export PIP_DISABLE_PIP_VERSION_CHECK=1 DS_BUILD_OPS=0
if [ -z "$cuda_torch" ]; then
    .venv/bin/pip install --quiet --quiet --constraint "$constraints" torch==2.13.0
fi
.venv/bin/pip install --quiet --quiet --constraint "$constraints" --editable ".[$extras]"
if [[ ",$extras," == *,dev,* ]]; then
    # The tests use only its reader and writer of shards, as a reference, which need none of its dependencies.
    .venv/bin/pip install --quiet --quiet --no-deps megatron-core==0.16.1
fi
echo "$wanted" > "$stamp"
echo "setup: done"
