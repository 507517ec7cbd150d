# shellcheck shell=bash
# Sourced by common.sh: what a site, the environment and the command line say, in one place, with origins.
#
# A setting comes from, in this order: the command line (NAME=value in capitals), the environment, the site profile
# slurm/sites/$SITE.env, the default. The job prints each with its origin. Nothing of a profile is ever executed.

readonly modes=(doctor prepare train merge serve eval)

# Names that a profile or a command line may set. Of sbatch's own variables those that make sense for a site: it would
# pass over a misspelt one in silence. SBATCH_GPUS_PER_TASK and SBATCH_GPU_BIND are left out on purpose: they leave a
# task with one GPU. sbatch has none for the number of nodes.
readonly sbatch_names='ACCOUNT|CLUSTERS|CONSTRAINT|CPUS_PER_GPU|ERROR|EXCLUSIVE|GPUS_PER_NODE|GRES|HINT|JOB_NAME|MEM_PER_CPU|MEM_PER_GPU|MEM_PER_NODE|NETWORK|NO_REQUEUE|OUTPUT|PARTITION|QOS|REQUEUE|RESERVATION|REQ_SWITCH|SIGNAL|THREADS_PER_CORE|TIMELIMIT|WAIT4SWITCH|WCKEY'
readonly wherry_names='APPTAINER|CACHE|DEVICE|MAX_RESTARTS|MODULES|NPROC_PER_NODE|PREFIX|PREPARE|RUNS|SIF|SRUN_ARGS'
readonly setting_pattern="^(SBATCH_(${sbatch_names})|WHERRY_(${wherry_names})|(APPTAINER|APPTAINERENV|NCCL|GLOO|UCX|FI)_[A-Z0-9_]+|HF_HOME|OMP_NUM_THREADS|MASTER_ADDR|TMPDIR|SITE)$"
# Profiles are shared, and every value is printed.
readonly secret_pattern='TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY'

declare -A site_value=() site_line=() cli_value=() origin=()
site=''

# ---- the command line ------------------------------------------------------------------------------------------------

# take_setting WORD: true for NAME=value with a name in capitals, which is kept.
take_setting() {
  [[ $1 =~ ^([A-Z][A-Z0-9_]*)=(.*)$ ]] || return 1
  local -r name=${BASH_REMATCH[1]} value=${BASH_REMATCH[2]}
  check_name "${name}" "command line"
  cli_value[${name}]=${value}
}

# check_name NAME WHERE
check_name() {
  [[ $1 =~ ${setting_pattern} ]] ||
    die 2 "no setting ${1}" "$2" "docs/sites.md lists them; a recipe's keys are in small letters: train.args.max_steps=10"
  [[ ! $1 =~ ${secret_pattern} ]] ||
    die 2 "${1} looks like a secret, and this place is not" "$2" "set it in your own environment"
}

# ---- the site --------------------------------------------------------------------------------------------------------

profiles() { (cd slurm/sites && shopt -s nullglob && set -- *.env && printf '%s ' "${@%.env}"); }

# shellcheck disable=SC2154 # mode: of common.sh
# load_site NAME: read slurm/sites/NAME.env line by line. [mode.]NAME=value; $USER and $HOME are put in, nothing else.
load_site() {
  local -r file=slurm/sites/$1.env
  local line number=0 only name value
  [[ $1 =~ ^[A-Za-z0-9._-]+$ && -f ${file} ]] ||
    die 2 "no site profile '$1'" "${file}" "make site NAME=$1 writes one; there are: $(profiles)"
  while IFS= read -r line || [[ -n ${line} ]]; do
    number=$((number + 1))
    [[ ${line} =~ ^[[:space:]]*(#|$) ]] && continue
    [[ ${line} =~ ^(([a-z]+)\.)?([A-Z][A-Z0-9_]*)=(.*[^[:space:]])?[[:space:]]*$ ]] ||
      die 2 "not a line NAME=value: ${line%%=*}" "${file}:${number}" "no spaces around '=', no 'export', no commands"
    only=${BASH_REMATCH[2]} name=${BASH_REMATCH[3]} value=${BASH_REMATCH[4]}
    check_name "${name}" "${file}:${number}"
    [[ ${name} != SITE ]] || die 2 "a profile may not name a site" "${file}:${number}" "take the line out"
    [[ -z ${only} || " ${modes[*]} " == *" ${only} "* ]] ||
      die 2 "no mode '${only}'" "${file}:${number}" "one of: ${modes[*]}"
    value=${value//\$USER/${USER:-$(id -un)}}
    value=${value//\$HOME/${HOME:-}}
    [[ ${value} != *[\$\`\"\'#]* ]] ||
      die 2 "${name} is taken as it is written: no quotes, no commands, no comment, no variables but \$USER and \$HOME" \
        "${file}:${number}" "write the value itself"
    [[ -z ${only} || ${only} == "${mode}" ]] || continue
    # What a site asks for in general is not for the modes that need no GPU.
    [[ -z ${only} && ${mode} =~ ^(merge|prepare)$ && ${name} =~ ^SBATCH_(GPU|GRES|CPUS_PER_GPU|MEM_PER_GPU) ]] && continue
    # A line for one mode wins over the line for all, wherever it stands.
    [[ -z ${only} && ${site_line[${name}]:-} == *.${name} ]] && continue
    site_value[${name}]=${value} site_line[${name}]=${only:+${only}.}${name}
  done <"${file}"
}

# ---- all of them -----------------------------------------------------------------------------------------------------

# settle NAME [DEFAULT]: export NAME from the first place that has it, and note which. Unset everywhere: left unset.
settle() {
  if [[ -v cli_value[$1] ]]; then
    printf -v "$1" '%s' "${cli_value[$1]}"
    origin[$1]='command line'
  elif [[ -v $1 ]]; then
    origin[$1]=${origin[$1]:-environment}
  elif [[ -v site_value[$1] ]]; then
    printf -v "$1" '%s' "${site_value[$1]}"
    origin[$1]="site ${site}"
  elif (($# > 1)); then
    printf -v "$1" '%s' "$2"
    origin[$1]=default
  else
    return 0
  fi
  export "${1?}"
}

settings() {
  local name
  site=${cli_value[SITE]:-${WHERRY_SITE:-}}
  if [[ -n ${site} ]]; then
    load_site "${site}"
    export WHERRY_SITE=${site}
  fi
  settle WHERRY_RUNS runs
  settle WHERRY_SIF build/wherry.sif
  settle WHERRY_APPTAINER apptainer
  settle WHERRY_MAX_RESTARTS 5
  [[ ${WHERRY_MAX_RESTARTS} =~ ^[0-9]+$ ]] ||
    die 2 "WHERRY_MAX_RESTARTS=${WHERRY_MAX_RESTARTS} is no number" "${origin[WHERRY_MAX_RESTARTS]}" "give one, such as 5"
  for name in "${!site_value[@]}" "${!cli_value[@]}"; do
    if [[ ${name} == SBATCH_* && -n ${SLURM_JOB_ID:-} ]]; then
      note_of_job "${name}"
    elif [[ ${name} != SITE ]]; then
      settle "${name}"
    fi
  done
  for name in WHERRY_DEVICE WHERRY_NPROC_PER_NODE WHERRY_SRUN_ARGS HF_HOME NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    settle "${name}"
  done
}

# leave_to_the_job [PREFIX]: unset what was settled here, but for names with that prefix: the job finds the profile's
# values and the defaults by itself, and says where they come from.
leave_to_the_job() {
  local name
  for name in "${!origin[@]}"; do
    if [[ ${origin[${name}]} != environment && (-z ${1:-} || ${name} != "$1"*) ]]; then unset "${name}"; fi
  done
}

# note_of_job SBATCH_NAME: it was sbatch that read it, from the environment that submit.sh made, before there was a job.
note_of_job() {
  local -r value=${cli_value[$1]-${site_value[$1]-}}
  if [[ ${!1-} == "${value}" ]]; then
    origin[$1]="site ${site} or command line; an option of sbatch wins"
  else
    origin[$1]="not ${value} as asked: only make and slurm/submit.sh hand it to sbatch"
    printf -v "$1" '%s' "${!1-unset}"
  fi
}

# print_settings [PATTERN]: each value with its origin.
print_settings() {
  local name
  for name in $(printf '%s\n' "${!origin[@]}" | sort); do
    if [[ ${name} =~ ${1:-.} ]]; then say_setting "${name}" "${!name}" "${origin[${name}]}"; fi
  done
}

say_setting() { say "$(printf '%-24s %s (%s)' "$@")"; }
