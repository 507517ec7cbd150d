#!/bin/bash
# Train on all GPUs of one or more nodes; stopped by its time limit it saves, goes back into the queue and goes on.
#
#   sbatch slurm/train.sh [RECIPE] [key=value …] [--run NAME]         from the project's root
#   sbatch --nodes=3 --time=4:00:00 slurm/train.sh recipes/llama-70b.yaml
#
# On a CPU: sbatch --gpus-per-node=0 slurm/train.sh RECIPE WHERRY_DEVICE=cpu WHERRY_NPROC_PER_NODE=2
#SBATCH --job-name=wherry-train
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/train.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh
# shellcheck source=slurm/multinode.sh
source slurm/multinode.sh

begin train "$@"
rendezvous
step_shape "$(tasks_per_node)"
stop_by_file "${WHERRY_RUNS}/${run}/train/stop-requested"
attempt srun "${step[@]}" "${container[@]}" train "${arguments[@]}"
conclude
