#!/bin/sh
#SBATCH --job-name=batchgen
#SBATCH --array=0-7
#SBATCH --cpus-per-task=16
#SBATCH --mem=48G
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@60
# A Slurm array whose tasks are workers on one output. Options are those of `batchgen run`; --output lies in a directory that all nodes mount.
#     sbatch recipes/many_workers/slurm.sh --model M --input IN --output OUT
# A task that runs out of time or is preempted is asked to stop, saves its rows and is queued again (exit codes 3 and 130).
set -u
threads=${SLURM_CPUS_PER_TASK:-$(nproc)}
BATCHGEN_NUM_THREADS=$threads OMP_NUM_THREADS=$threads ${BATCHGEN:-batchgen} run --share \
    --cpu-memory "$((${SLURM_MEM_PER_NODE:-48000} * 9 / 10))MiB" --progress plain "$@" &
worker=$!
# Slurm signals this shell alone, which would wait for its worker first: it passes the signal on, and waits for what the worker ends with.
trap 'kill -TERM $worker 2>/dev/null' TERM INT
while :; do
    wait $worker
    code=$?
    kill -0 $worker 2>/dev/null || break
done
case $code in
3 | 130) scontrol requeue "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}" ;;
esac
exit $code
