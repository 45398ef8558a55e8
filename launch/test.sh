#!/usr/bin/env bash
# Set-up, then all tests. Usage: bash launch/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
bash launch/setup.sh quickstart,dev
source .venv/bin/activate
exec python -m pytest "$@"
