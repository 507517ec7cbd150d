# shellcheck shell=bash
# Sourced by every script of this folder, in the project's root. The only place that knows how the container is called,
# what is bound into it, and what its environment is.
#
#   begin MODE "$@"     settings with their origins, image, recipe; then `container`, `arguments`, `run` are there
#   say, die            one line, and the three lines of an error

# shellcheck disable=SC2034 # container, arguments: for the scripts that source this
container=() arguments=() step=()
signals='' code=0
mode='' run='' recipe=''

say() { printf '[wherry] %s\n' "$*" >&2; }

# die CODE WHAT WHERE FIX: 2 usage or recipe, 3 refused before the work (docs/errors.md).
die() {
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "$2" "$3" "$4" >&2
  exit "$1"
}

# shellcheck source=slurm/settings.sh
source slurm/settings.sh

# ---- what is asked for -----------------------------------------------------------------------------------------------

# Sort the words: NAME=value in capitals is a setting of this job, all others are the mode's own.
split_words() {
  local word previous='' given=''
  for word in "$@"; do
    if take_setting "${word}"; then continue; fi
    arguments+=("${word}")
    case ${previous},${word} in
      --run,* | *,--run=*) run=${word#--run=} ;;
      --recipe,* | *,--recipe=*) recipe=${word#--recipe=} ;;
      --model,* | --port,* | --timeout,* | --steps,* | --gpus,* | --explain,* | --recompute-layers,* | --svg,* | --script,* | --sbatch,* | *,-* | *,*=* | *,*.sh) ;;
      *)
        [[ -z ${given} ]] || die 2 "two recipes: ${given} and ${word}" "command line" "give one"
        given=${word} recipe=${word}
        ;;
    esac
    previous=${word}
  done
  if [[ -z ${recipe}${run} ]]; then
    recipe=recipes/demo.yaml
    arguments=("${recipe}" "${arguments[@]}")
  fi
}

# require_recipe [SBATCH OPTIONS]: a job that waits for another may name a run that is not there yet.
require_recipe() {
  local name
  local -r known=$(shopt -s nullglob && set -- recipes/*.yaml && printf '%s ' "$@")
  [[ -z ${recipe} || -f ${recipe} ]] ||
    die 2 "no recipe ${recipe}" "${PWD}" "one of: ${known}"
  name=${recipe##*/}
  run=${run:-${name%.*}}
  [[ -n ${recipe} || ${1:-} == *--dependency=* || -f ${WHERRY_RUNS}/${run}/recipe.yaml ]] ||
    die 2 "no run '${run}'" "${WHERRY_RUNS}/${run}" "name a recipe to start it: ${known}"
}

require_image() {
  type -P "${WHERRY_APPTAINER}" >/dev/null ||
    die 3 "no ${WHERRY_APPTAINER} on $(uname -n)" "PATH" \
      "name its module in the site profile (WHERRY_MODULES=apptainer), or set WHERRY_APPTAINER to its path"
  # shellcheck disable=SC2153 # not a misspelling of WHERRY_SITE
  [[ -r ${WHERRY_SIF} ]] ||
    die 3 "no image ${WHERRY_SIF}" "${PWD}" "build it with 'make sif', copy it there, or set WHERRY_SIF to where it is"
}

# `module` is a shell function that a login shell has exported; its own code does not bear `set -u`.
load_modules() {
  [[ -n ${WHERRY_MODULES:-} ]] || return 0
  local names=()
  read -ra names <<<"${WHERRY_MODULES}"
  type module >/dev/null 2>&1 ||
    die 3 "there is no 'module' command for WHERRY_MODULES=${WHERRY_MODULES}" "$(uname -n)" \
      "submit from a login shell, or take WHERRY_MODULES out of the profile"
  set +u
  module load "${names[@]}" || die 3 "module load ${WHERRY_MODULES} failed" "$(uname -n)" "module avail lists the names"
  set -u
}

# ---- the container ---------------------------------------------------------------------------------------------------

# The container sees the caller's environment (SLURM_*, NCCL_*, HF_TOKEN): --cleanenv would take the ranks away. What
# the host's modules leave there, and what would mix the host's software into the image's, goes before.
clean_environment() {
  unset PYTHONPATH PYTHONHOME PYTHONSTARTUP VIRTUAL_ENV BASH_ENV LD_PRELOAD CC CXX CFLAGS LDFLAGS CUDA_HOME CUDA_PATH
  unset "${!CONDA_@}" "${!PMI@}" "${!OMPI_@}"
}

make_container() {
  local gpu=() binds=("${PWD}") dir id
  if [[ ${mode} =~ ^(doctor|train|serve|eval)$ ]]; then gpu=(--nv); fi
  for dir in "${WHERRY_RUNS}" ${HF_HOME:+"${HF_HOME}"}; do
    mkdir -p "${dir}" || die 3 "cannot make ${dir}" "$(uname -n)" "set WHERRY_RUNS and HF_HOME to folders of your own"
    binds+=("$(realpath "${dir}")")
  done
  # Local to a node, and made there by the site: what is not there cannot be bound.
  for dir in "${TMPDIR:-}" "${SLURM_TMPDIR:-}" "${WHERRY_CACHE:-}"; do
    if [[ -d ${dir} ]]; then binds+=("${dir}"); fi
  done
  # For the manifest: which image. A SIF's id stands in its header (github.com/apptainer/sif: Header.ID).
  id=$(od -An -tx1 -j48 -N16 "${WHERRY_SIF}" 2>/dev/null | tr -d ' \n') || id=unknown
  WHERRY_IMAGE="$(realpath "${WHERRY_SIF}") ${id}"
  export WHERRY_IMAGE
  # shellcheck disable=SC2034
  container=("${WHERRY_APPTAINER}" exec "${gpu[@]}" "${binds[@]/#/--bind=}" "--pwd=${PWD}" "${WHERRY_SIF}"
    /opt/wherry-src/entrypoints/entrypoint.sh)
}

# ---- the step --------------------------------------------------------------------------------------------------------

# The step asks for itself, in full: what sbatch was told (--gpus-per-task, --gpu-bind) would else be taken over by srun
# and leave each task with one GPU while local ranks run to 7 (`invalid device ordinal`).
# step_shape [TASKS_PER_NODE]
step_shape() {
  local -r nodes=${SLURM_JOB_NUM_NODES} per_node=${1:-1}
  local -r gpus=$(gpus_per_node)
  local name extra=()
  for name in SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU; do
    if [[ -n ${!name:-} ]]; then say_setting "${name}" "${!name}" "of the job; the step leaves it out"; fi
    unset "${name}"
  done
  # --cpus-per-task on srun itself: since Slurm 22.05 a step does not inherit it and would get one CPU.
  step=("--nodes=${nodes}" "--ntasks=$((nodes * per_node))" "--ntasks-per-node=${per_node}" --distribution=block
    "--cpus-per-task=$((SLURM_CPUS_ON_NODE >= per_node ? SLURM_CPUS_ON_NODE / per_node : 1))" --mpi=none
    --kill-on-bad-exit=1)
  if ((gpus > 0 && per_node > 1 && per_node != gpus)) && [[ ${WHERRY_DEVICE:-} != cpu ]]; then
    die 3 "${per_node} tasks a node and ${gpus} GPUs a node: several tasks a node are one for each GPU" "sbatch" \
      "--ntasks-per-node=1 (a worker for each GPU is started in it), or --ntasks-per-node=${gpus}"
  fi
  if ((gpus > 0)); then
    step+=("--gpus-per-node=${gpus}")
    if [[ ${WHERRY_DEVICE:-} != cpu ]]; then export WHERRY_GPUS_PER_NODE=${gpus}; fi
  else
    say "this job has no GPU: ${mode} runs on the CPU"
  fi
  if [[ ${WHERRY_DEVICE:-} == cpu ]]; then say "WHERRY_DEVICE=cpu: ${mode} runs on the CPU"; fi
  read -ra extra <<<"${WHERRY_SRUN_ARGS:-}"
  step+=("${extra[@]}")
  say "srun ${step[*]}"
}

# What was asked for ("h100:4"), else what is there: an exclusive node comes with all its GPUs.
gpus_per_node() {
  local asked_for=${SLURM_GPUS_PER_NODE:-0}
  asked_for=${asked_for##*:}
  if ((asked_for > 0)); then echo "${asked_for}"; else echo "${SLURM_GPUS_ON_NODE:-0}"; fi
}

# wait_for PID: its exit code into `code`, though a trap ends `wait` early. Every trap adds a word to `signals`.
wait_for() {
  local before
  while
    before=${signals} code=0
    wait "$1" || code=$?
    [[ ${signals} != "${before}" ]]
  do :; done
}

# The modes of one process.
require_one_node() {
  ((SLURM_JOB_NUM_NODES == 1)) || die 2 "${mode} runs on one node, this job has ${SLURM_JOB_NUM_NODES}" "sbatch" "--nodes=1"
}

# ---- begin -----------------------------------------------------------------------------------------------------------

# For wherry status: which jobs worked for this run. A line "MODE JOB" each.
note_job() {
  local -r file=${WHERRY_RUNS}/${run}/logs/jobs.txt
  mkdir -p "${file%/*}"
  grep -qsx "${mode} $1" "${file}" || echo "${mode} $1" >>"${file}"
}

begin() {
  mode=$1
  shift
  split_words "$@"
  settings
  load_modules
  require_recipe
  require_image
  clean_environment
  make_container
  if [[ -n ${SLURM_JOB_ID:-} ]]; then note_job "${SLURM_JOB_ID}"; fi
  say "$(date '+%F %T %z') ${mode} of run '${run}'${SLURM_JOB_ID:+, job ${SLURM_JOB_ID}, attempt $((${SLURM_RESTART_COUNT:-0} + 1)) on ${SLURM_JOB_NODELIST:-}}"
  print_settings
}
