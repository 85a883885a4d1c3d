#!/usr/bin/env bash
# Two machines of eight GPUs, one process for each GPU: the paper's 7B setting.
#   sbatch configs/launch/slurm.sh --config alfworld_qwen2.5_7b --mesh data=2,fsdp=8 data=$ALFWORLD_DATA run_dir=RUNS/NAME
# From the project's folder, with its virtual environment active; run_dir and cache_dir on a file system that all
# machines see. Twenty minutes before its time is over, training saves after the iteration, and the job queues itself again. A job
# that is requeued continues from its last checkpoint, and does nothing if the run has ended. With COMMAND=evaluate it evaluates
# instead.
#SBATCH --job-name=hgpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@1200
#SBATCH --output=slurm-%j.txt
set -euo pipefail

# jax reads from Slurm's variables which process this is, and gives it the GPU of its number.
command=${COMMAND:-train}
[ "$command" != train ] || set -- --resume auto "$@"
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8} # which srun no longer takes from sbatch
code=0
srun --kill-on-bad-exit=1 python -m hgpo_jax."$command" --distributed "$@" || code=$?
if [ "$command" = train ] && [ "$code" = 143 ]; then # ended by SIGTERM, and saved
  exec scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
