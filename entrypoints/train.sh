#!/usr/bin/env bash
# wherry train, offline. Outside Slurm: one process. In a step of Slurm, by the step's shape:
#   one task a node        torchrun, with one worker for each visible GPU
#   several tasks a node   each task is a rank, and takes the GPU of its local rank
# The only place where ranks are derived. Every SLURM_* here is the task's own: in the batch shell they say other things.
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
readonly mode=${WHERRY_LAUNCH:-train} # or doctor, which looks at the same ranks
# shellcheck source=entrypoints/environment.sh
source "${self%/*}/environment.sh"
offline
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# recorded NAME COMMAND…: run it, and leave its exit code in a file: srun and torchrun give back others (143, 1).
recorded() {
  local -r name=$1
  local code=0
  shift
  [[ -n ${WHERRY_EXITS:-} ]] || exec "$@"
  trap 'touch "${WHERRY_EXITS}/sigterm"' TERM # Slurm tells every process of a step; this one waits for the rank to save
  "$@" || code=$?
  echo "${code}" >"${WHERRY_EXITS}/${name}"
  exit "${code}"
}

# How many tasks this step has on this node, from "8(x2),4".
tasks_here() {
  local part counts=()
  for part in ${SLURM_STEP_TASKS_PER_NODE//,/ }; do
    [[ ${part} =~ ^([0-9]+)(\(x([0-9]+)\))?$ ]]
    for ((i = 0; i < ${BASH_REMATCH[3]:-1}; i++)); do counts+=("${BASH_REMATCH[1]}"); done
  done
  echo "${counts[${SLURM_NODEID}]}"
}

# The interface through which this node reaches MASTER_ADDR (longest prefix in /proc/net/route, whose numbers are in
# the machine's byte order, so a longer mask is a larger number). NCCL and Gloo would else take the first that they find.
interface_to_master() {
  local address a b c d wanted name to mask best=-1 found=''
  address=$(getent ahostsv4 "${MASTER_ADDR}" | awk 'NR == 1 { print $1 }') || return 0
  IFS=. read -r a b c d <<<"${address}"
  [[ -n ${d} ]] || return 0
  if ((a == 127)); then
    echo lo
    return 0
  fi
  wanted=$((d << 24 | c << 16 | b << 8 | a))
  while read -r name to _ _ _ _ _ mask _; do
    [[ ${name} != Iface ]] || continue
    if (((wanted & 16#${mask}) == 16#${to} && 16#${mask} > best)); then best=$((16#${mask})) found=${name}; fi
  done </proc/net/route
  echo "${found}"
}

network() {
  local name
  name=$(interface_to_master)
  [[ -n ${name} ]] || return 0
  export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-=${name}} # '=': exactly this one, not all that begin like it
  export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-${name}}
}

# One task on this node: a worker for each GPU that it sees.
with_torchrun() {
  local workers
  workers=${WHERRY_NPROC_PER_NODE:-}
  if [[ -z ${workers} && ${WHERRY_DEVICE:-} != cpu ]]; then
    workers=$("${python}" -c 'from wherry.ranks import visible_gpus; print(visible_gpus())')
  fi
  if [[ ${workers:-0} == 0 ]]; then workers=1; fi
  if ((workers * SLURM_STEP_NUM_NODES == 1)); then recorded rank-0 "${wherry[@]}" "${mode}" "$@"; fi
  # Torchrun takes seconds to start and says only that a worker failed; a wrong binding is found here.
  [[ ${mode} == doctor ]] || (recorded "node-${SLURM_NODEID}" env "RANK=$((SLURM_NODEID * workers))" LOCAL_RANK=0 "LOCAL_WORLD_SIZE=${workers}" \
    "WORLD_SIZE=$((SLURM_STEP_NUM_NODES * workers))" "${python}" -m wherry.ranks)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_PER_TASK:-1} >= workers ? SLURM_CPUS_PER_TASK / workers : 1))}
  exec "${python}" -m wherry.launch --nnodes "${SLURM_STEP_NUM_NODES}" --node-rank "${SLURM_NODEID}" \
    --nproc-per-node "${workers}" --master-addr "${MASTER_ADDR}" --master-port "${MASTER_PORT}" \
    --no-python -- "${self}" "$@" # "--": torchrun would take --run for an abbreviation of an option of its own
}

main() {
  if [[ -n ${RANK:-} || -z ${SLURM_STEP_NUM_TASKS:-} || -z ${MASTER_ADDR:-} ]]; then # torchrun's worker, or no step
    recorded "rank-${RANK:-0}" "${wherry[@]}" "${mode}" "$@"
  fi
  network
  if (($(tasks_here) == 1)); then with_torchrun "$@"; fi
  LOCAL_WORLD_SIZE=$(tasks_here)
  export RANK=${SLURM_PROCID} LOCAL_RANK=${SLURM_LOCALID} WORLD_SIZE=${SLURM_STEP_NUM_TASKS} LOCAL_WORLD_SIZE
  recorded "rank-${RANK}" "${wherry[@]}" "${mode}" "$@"
}

main "$@"
