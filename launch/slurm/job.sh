#!/usr/bin/env bash
#SBATCH --job-name={{job_name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{ranks_per_node}}
#SBATCH --time={{time}}
# All starts of the job append to one file.
#SBATCH --output={{output}}
#SBATCH --open-mode=append
# After a node failure SLURM restarts the job, and the run resumes from its last checkpoint.
#SBATCH --requeue
# Sent to every task (not to this script) before the time limit: the ranks save a checkpoint and exit with 75.
#SBATCH --signal=USR1@{{stop_seconds}}
{{directives}}
set -uo pipefail
project={{project}}
run={{run}}
arguments=({{arguments}})
cd {{folder}} || exit 1
export PYTHONPATH="$project${PYTHONPATH:+:$PYTHONPATH}"
{{environment}}
# Rank 0 listens on the first node, at its address in SLURM, on a port that depends on the job's number.
first_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
MASTER_ADDR="$(scontrol --oneliner show node "$first_node" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')"
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
# Every rank writes its outcome to this folder.
STEADYHEAD_RANKS="$run-ranks-$SLURM_JOB_ID"
rm -rf "$STEADYHEAD_RANKS"
mkdir "$STEADYHEAD_RANKS" || exit 1
trap 'rm -rf "$STEADYHEAD_RANKS"' EXIT
export MASTER_ADDR MASTER_PORT STEADYHEAD_RANKS

newest_checkpoint() {
    find "$run/checkpoints" -maxdepth 1 -name 'step_*' ! -name '*.*' 2> /dev/null | sort | tail -n 1
}

before="$(newest_checkpoint)"
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST, from ${before:-the beginning}"
start=(srun --kill-on-bad-exit=1{{srun_options}} {{python}})
"${start[@]}" -m launch.preflight "${arguments[@]}" || exit
"${start[@]}" "$project/train.py" "${arguments[@]}"
code=$?

# srun kills the other tasks once one has exited with 75, and may then return the code of that signal. A rank that
# reports 75 was stopped on request.
if [ "$code" -ne 0 ] && grep -qs '"code": 75' "$STEADYHEAD_RANKS"/*.outcome; then
    code=75
fi

if [ "$code" -eq 0 ] && [ ! -f "$run/DONE" ]; then
    echo "error: srun ended with 0, but there is no $run/DONE" >&2
    exit 1
elif [ "$code" -ne 75 ]; then
    exit "$code"
elif [ "$(newest_checkpoint)" = "$before" ]; then
    echo "error: stopped before a checkpoint was saved; not requeued, since the next start would stop there as well" >&2
    exit 75
fi
echo "job $SLURM_JOB_ID: stopped after a checkpoint; it is requeued"
if scontrol requeue "$SLURM_JOB_ID"; then
    sleep 600 # until SLURM ends this script
fi
echo "error: the job could not be requeued; submit it again to continue" >&2
exit 75
