#!/bin/bash
# Fetch and check model and data. It needs the network, which compute nodes often lack: run it on the login node, or as
# a job where they have it.
#
#   slurm/prepare.sh RECIPE [key=value …]        sbatch slurm/prepare.sh RECIPE [key=value …]
#SBATCH --job-name=wherry-prepare
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=4:00:00
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/prepare.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh

begin prepare "$@"
exec "${container[@]}" prepare "${arguments[@]}"
