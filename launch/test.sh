#!/usr/bin/env bash
# Set-up, then tests: all of them, two files at a time, or those that the pytest arguments choose.
# Usage: bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh quickstart,dev
source .venv/bin/activate
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ $# -eq 0 ]; then
    set -- -n 2 --dist loadfile
fi
exec python -m pytest "$@"
