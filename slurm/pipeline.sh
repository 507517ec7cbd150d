#!/bin/bash
# The whole chain: prepare here and now (it needs the network), then train, merge and eval as jobs, each after the one
# before it has ended well. One run directory; a mode that is complete ends at once, so the same command goes on.
#
#   slurm/pipeline.sh [SBATCH OPTION…] RECIPE [key=value …] [--run NAME] [SITE=name] [NAME=value …]
#
# The options are those of the training job. A job whose predecessor has failed is cancelled, not left in the queue.
# WHERRY_PREPARE=job: prepare is the first job, where compute nodes reach the network or need none.
set -euo pipefail
# shellcheck source=slurm/common.sh
source slurm/common.sh

# submit MODE WORD…: after the job `id` where there is one.
submit() {
  local -r after=(${id:+"--dependency=afterok:${id}" --kill-on-invalid-dep=yes})
  id=$(
    leave_to_the_job ''
    exec slurm/submit.sh "${after[@]}" "$@"
  )
}

main() {
  local options=() settings_given=() word id=''
  while [[ ${1:-} == -* && $1 != --run* && $1 != --recipe* ]]; do
    options+=("$1")
    shift
  done
  for word in "$@"; do
    if [[ ${word} =~ ^[A-Z][A-Z0-9_]*= ]]; then settings_given+=("${word}"); fi
  done
  mode=prepare
  split_words "$@"
  settings
  require_recipe
  case ${WHERRY_PREPARE:-here} in
    here) (leave_to_the_job '' && exec slurm/prepare.sh "$@") ;;
    job) submit prepare "$@" ;;
    *) die 2 "WHERRY_PREPARE=${WHERRY_PREPARE}" "${origin[WHERRY_PREPARE]}" "here, or job" ;;
  esac
  submit "${options[@]}" train "$@"
  submit merge --run "${run}" "${settings_given[@]}"
  submit eval --run "${run}" "${settings_given[@]}"
  say "squeue --me shows the jobs, make status RUN=${run} where the run stands"
}

main "$@"
