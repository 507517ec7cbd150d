#!/bin/bash
# Look at this cluster from its login node, and write slurm/sites/NAME.env: what was found, commented, and values that
# work as they are. A short job asks one node what only a node can say; without an answer within a minute that is left out.
#
#   slurm/site.sh NAME
set -euo pipefail
# shellcheck source=slurm/common.sh
source slurm/common.sh

errors=$(mktemp) candidates=''

clean_up() {
  local dir
  for dir in ${candidates}; do rm -f "${dir}/.wherry-looks"; done
  rm -f "${errors}"
}

# ---- what sinfo says: "partition default max-time nodes cpus memory(MB) gres", a line each ---------------------------

partitions() { timeout 20 sinfo --noheader --format='%R %P %l %D %c %m %G' | sort -u; }

# gpus_of GRES: "gpu:h100:4(S:0-1),nvme:1" is 4
gpus_of() {
  if [[ $1 =~ gpu:([a-z0-9_.-]+:)?([0-9]+) ]]; then echo "${BASH_REMATCH[2]}"; else echo 0; fi
}

# Sets partition, gpus, limit, cpu_partition: the default partition if it has GPUs, else the one with most.
choose() {
  local name shown time gres here best=-1
  while read -r name shown time _ _ _ gres; do
    here=$(gpus_of "${gres}")
    if ((here == 0)) && [[ -z ${cpu_partition} || ${shown} == *'*' ]]; then cpu_partition=${name}; fi
    if [[ ${shown} == *'*' ]] && ((here > 0)); then here=$((here + 1000)); fi
    if ((here > best)); then
      best=${here} partition=${name} gpus=$((here % 1000)) limit=${time}
    fi
  done <<<"$1"
}

# minutes_of TIME: [D-]H:M:S as Slurm writes it, "infinite" is 0
minutes_of() {
  [[ $1 =~ ^(([0-9]+)-)?(([0-9]+):)?([0-9]+):([0-9]+)$ ]] || return 0
  echo $((10#${BASH_REMATCH[2]:-0} * 1440 + 10#${BASH_REMATCH[4]:-0} * 60 + 10#${BASH_REMATCH[5]}))
}

# ---- what a node says ------------------------------------------------------------------------------------------------

# Runs on the node, without anything of this file. $1: folders to look for.
# shellcheck disable=SC2016 # the node's shell
readonly look='
(ip -o -4 addr show || sed "1,2d; s/:.*//" /proc/net/dev) 2>/dev/null | awk "\$2 != \"lo\" && \$1 != \"lo\" { print \"interface\", (NF > 1 ? \$2 \" \" \$4 : \$1) }"
for i in /sys/class/infiniband/*; do [ ! -e "$i" ] || echo "infiniband ${i##*/}"; done
echo "apptainer $(type -P apptainer || type -P singularity || echo "is not on the path") $( (apptainer --version || singularity --version) 2>/dev/null)"
[ ! -e /proc/driver/nvidia/version ] || echo "driver $(sed -n "s/^NVRM .* Kernel Module *\(for x86_64 *\)\?\([0-9.]*\).*/\2/p" /proc/driver/nvidia/version)"
for d in $1; do
  [ ! -e "$d/.wherry-looks" ] || echo "shared $d $(df -P -BG "$d" | awk "NR == 2 { print \$4 }")"
done
for d in "$SLURM_TMPDIR" /local /scratch /tmp; do
  [ ! -w "$d" ] || echo "local $d $(df -P -BG "$d" | awk "NR == 2 { print \$4 }")"
done'

# ask_node FOLDERS
ask_node() {
  timeout 90 srun --partition="${partition}" --nodes=1 --ntasks=1 --time=2 --immediate=60 --mpi=none \
    bash -c "${look}" bash "$1" 2>"${errors}"
}

# Folders that may be a shared scratch: the site's own variables first.
scratch_candidates() {
  local dir
  for dir in "${SCRATCH:-}" "${WORK:-}" "${PROJECT:-}" {/scratch,/work,/lustre,/gpfs,/data,/mnt}/"${USER:-$(id -un)}" "${PWD}"; do
    if [[ -n ${dir} && -d ${dir} && -w ${dir} ]]; then echo "${dir}"; fi
  done | awk '!seen[$0]++'
}

# ---- the profile -----------------------------------------------------------------------------------------------------

# shellcheck disable=SC2016 # $USER is written as it is
profile() {
  local shown time count cores mb gres line shared=''
  cat <<TEXT
# Site ${site}: written by 'make site NAME=${site}' on $(date +%F), from $(uname -n). Yours to edit.
# Lines are NAME=value, or mode.NAME=value for one mode; nothing is executed (docs/sites.md).

# Partitions (longest job, nodes, CPUs, memory in MB, generic resources):
TEXT
  while read -r _ shown time count cores mb gres; do
    echo "#   ${shown}: ${time}, ${count} x (${cores} CPUs, ${mb} MB, ${gres})"
  done <<<"${found}"
  echo "SBATCH_PARTITION=${partition}"
  if [[ -n ${cpu_partition} ]]; then echo "merge.SBATCH_PARTITION=${cpu_partition}"; fi
  if ((gpus > 0)); then
    echo
    echo "# GPUs of a node: all for training, at most 4 for a server."
    echo "SBATCH_GPUS_PER_NODE=${gpus}"
    if ((gpus > 4)); then printf '%s\n' serve.SBATCH_GPUS_PER_NODE=4 eval.SBATCH_GPUS_PER_NODE=4; fi
  else
    printf '\n# No partition has GPUs: everything runs on the CPU.\nSBATCH_GPUS_PER_NODE=0\nWHERRY_DEVICE=cpu\n'
  fi
  if ((minutes > 0 && minutes < 720)); then
    printf '\n# The longest job is %s; training stops before, saves, and goes on in the next.\nSBATCH_TIMELIMIT=%s\n' \
      "${limit}" "${limit}"
  fi
  printf '\n# Who pays, where the site wants to know:\n#SBATCH_ACCOUNT=\n#SBATCH_QOS=\n'

  echo
  if [[ -z ${said} ]]; then
    echo "# No node answered within a minute, so what follows was seen on $(uname -n): $(tr '\n' ' ' <"${errors}")"
    said=$(bash -c "${look}" bash "${candidates}")
  else
    echo "# Seen on a node of ${partition}:"
  fi
  while read -r line; do echo "#   ${line}"; done <<<"${said}"

  printf '\n# The interface is derived from the route to the first node. To insist on one (NCCL wants = before the exact name):\n'
  printf '#NCCL_SOCKET_IFNAME==ib0\n#GLOO_SOCKET_IFNAME=ib0\n'

  printf '\n# apptainer: on the path of the nodes, by a module, or by its own path.\n'
  if [[ ${said} =~ apptainer\ (/[^ ]*) ]]; then
    echo "WHERRY_APPTAINER=${BASH_REMATCH[1]}"
  else
    printf '#WHERRY_MODULES=apptainer\n#WHERRY_APPTAINER=/opt/apptainer/bin/apptainer\n'
  fi

  printf '\n# Runs: on a file system that all nodes see (checked: a file made here was there).\n'
  shared=$(awk '$1 == "shared" { print $2; exit }' <<<"${said}")
  if [[ -n ${shared} && ${shared} != "${PWD}" ]]; then
    echo "WHERRY_RUNS=${shared}/wherry-runs"
    echo "HF_HOME=${shared}/huggingface"
  else
    printf '#WHERRY_RUNS=/scratch/$USER/wherry-runs\n#HF_HOME=/scratch/$USER/huggingface\n'
  fi
  printf '# Where models lie outside of the project and of WHERRY_RUNS:\n#APPTAINER_BIND=/models\n'
}

main() {
  local partition='' cpu_partition='' gpus=0 limit='' minutes found said part dir
  site=${1:-}
  [[ ${site} =~ ^[A-Za-z0-9._-]+$ ]] || die 2 "site name '${site}'" "make site NAME=…" "letters, digits, '.', '_' and '-'"
  [[ ! -e slurm/sites/${site}.env ]] ||
    die 2 "there is a profile of that name" "slurm/sites/${site}.env" "take another name, or move it away: it may hold your edits"
  type -P sinfo >/dev/null || die 3 "no sinfo on $(uname -n)" "PATH" "run it on the cluster's login node"
  found=$(partitions) && [[ -n ${found} ]] || die 3 "sinfo lists no partition" "$(uname -n)" "see what sinfo says"
  choose "${found}"
  minutes=$(minutes_of "${limit}")
  candidates=$(scratch_candidates | paste -sd' ')
  trap clean_up EXIT
  for dir in ${candidates}; do : >"${dir}/.wherry-looks"; done
  say "asking a node of ${partition} (a job of seconds)"
  said=$(ask_node "${candidates}") || said=''
  mkdir -p slurm/sites
  part=slurm/sites/.${site}.$$.part
  profile >"${part}"
  mv "${part}" "slurm/sites/${site}.env"
  mode=train
  load_site "${site}"
  say "slurm/sites/${site}.env: read it, then: make train SITE=${site} RECIPE=recipes/demo.yaml"
}

main "$@"
