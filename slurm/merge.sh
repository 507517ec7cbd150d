#!/bin/bash
# Put the adapter into the base weights, on the CPU: a node without GPUs will do.
#
#   sbatch slurm/merge.sh --run NAME
#SBATCH --job-name=wherry-merge
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=4:00:00
#SBATCH --requeue
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/merge.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh

begin merge "$@"
require_one_node
step_shape
exec srun "${step[@]}" "${container[@]}" merge "${arguments[@]}"
