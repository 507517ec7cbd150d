#!/bin/bash
# Score the base or the merged model: server and client in one job. The client starts when the server is ready, and
# ends with exit code 5 when the server dies.
#
#   sbatch slurm/eval.sh --run NAME
#SBATCH --job-name=wherry-eval
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=12:00:00
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/eval.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh

begin eval "$@"
require_one_node
step_shape
exec srun "${step[@]}" "${container[@]}" eval "${arguments[@]}"
