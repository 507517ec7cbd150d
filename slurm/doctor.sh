#!/bin/bash
# Look at the nodes as a training job would find them: every rank checks what it sees, before hours are spent.
#
#   sbatch --nodes=2 slurm/doctor.sh [RECIPE] [key=value …]
#SBATCH --job-name=wherry-doctor
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=0:15:00
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/doctor.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh
# shellcheck source=slurm/multinode.sh
source slurm/multinode.sh

begin doctor "$@"
rendezvous
step_shape "$(tasks_per_node)"
attempt srun "${step[@]}" "${container[@]}" doctor "${arguments[@]}"
exit "${code}"
