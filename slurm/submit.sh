#!/bin/bash
# Submit a mode with a site's values: what `make train SITE=…` does.
#
#   slurm/submit.sh [SBATCH OPTION…] MODE [RECIPE] [key=value …] [--run NAME] [SITE=name] [NAME=value …]
#
# Options of sbatch win over the environment, the environment over the profile, the profile over #SBATCH lines. What
# would be refused in the job is refused here, before it queues. Prints the job's id.
set -euo pipefail
# shellcheck source=slurm/common.sh
source slurm/common.sh

main() {
  local options=() words=() id
  while [[ ${1:-} == -* ]]; do
    options+=("$1")
    shift
  done
  mode=${1:-}
  [[ -f slurm/${mode}.sh && " ${modes[*]} " == *" ${mode} "* ]] ||
    die 2 "no mode '${mode}'" "command line" "slurm/submit.sh [--sbatch-option=value …] MODE …, one of: ${modes[*]}"
  shift
  words=("$@")
  split_words "$@"
  settings
  load_modules
  require_recipe "${options[*]}"
  require_image
  print_settings '^SBATCH_'
  id=$(
    leave_to_the_job SBATCH_ # for sbatch itself
    exec sbatch --parsable "${options[@]}" "slurm/${mode}.sh" "${words[@]}"
  )
  id=${id%%;*} # "id;cluster" where there are several
  note_job "${id}"
  say "${mode} of run '${run}' is job ${id}"
  echo "${id}"
}

main "$@"
