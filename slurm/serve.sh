#!/bin/bash
# Run vLLM behind the readiness gate until the time limit or scancel. runs/NAME/serve/state.json says where it stands;
# `wherry wait --run NAME` waits for it.
#
#   sbatch slurm/serve.sh --run NAME
#SBATCH --job-name=wherry-serve
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=32G
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
set -euo pipefail
# sbatch runs a copy of this file from its spool folder: the project is where it was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -r slurm/common.sh ]]; then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "submitted from a folder that is not the project's root" "${PWD}" \
    "cd to the folder that holds slurm/, then: sbatch slurm/serve.sh" >&2
  exit 3
fi
# shellcheck source=slurm/common.sh
source slurm/common.sh

# To the supervisor alone, on this node: were vLLM's processes told as well, running requests would be lost. A state of
# another job is not ours.
# shellcheck disable=SC2329 # called by the traps
drain() {
  local -r state=${WHERRY_RUNS}/${run}/serve/state.json
  signals+="$1 "
  say "$(date +%T) $1: the server answers what is running and ends"
  if grep -qs "\"job\": \"${SLURM_JOB_ID}\"" "${state}"; then
    kill -TERM "$(sed -n 's/.*"supervisor_pid": *\([0-9]*\).*/\1/p' "${state}")" 2>/dev/null || true
  else
    kill -TERM "${server}" # srun passes it on; nothing is served yet
  fi
}

begin serve "$@"
require_one_node
step_shape
srun "${step[@]}" "${container[@]}" serve "${arguments[@]}" &
server=$!
trap 'drain "SIGUSR1, the time limit is near"' USR1
trap 'drain SIGTERM' TERM
wait_for "${server}"
exit "${code}"
