#!/usr/bin/env bash
# Setup, then tests. Without arguments it runs all that are not marked as slow, two at a time; with --all also those;
# else those that the pytest arguments choose.
# Usage: bash launch/test.sh [--all] [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh quickstart,dev
source .venv/bin/activate
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
in_parallel=(-n 2 --dist worksteal)
if [ $# -eq 0 ]; then
    set -- "${in_parallel[@]}" -m "not slow"
elif [ "$1" = --all ]; then
    shift
    set -- "${in_parallel[@]}" "$@"
fi
exec python -m pytest "$@"
