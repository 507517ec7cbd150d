#!/bin/bash
# A mode that is no work for a job, in the image, on this machine: status, report, doctor, version.
#
#   slurm/here.sh status --run NAME [SITE=name]
set -euo pipefail
# shellcheck source=slurm/common.sh
source slurm/common.sh

# Slurm's own words on the jobs of this run: the image has no squeue.
queue() {
  local -r file=${WHERRY_RUNS}/${run}/logs/jobs.txt
  local jobs
  jobs=$(awk '{ print $2 }' "${file}" 2>/dev/null | sort -nu | paste -sd,) || return 0
  if [[ -z ${jobs} ]] || ! type -P squeue >/dev/null; then return 0; fi
  timeout 20 squeue --noheader --states=all --jobs="${jobs}" --format='%A|%T %r, ran %M of %l, on %R' 2>/dev/null |
    sed 's/ None,/,/' || true
}

mode=$1
shift
split_words "$@"
settings
load_modules
require_recipe
require_image
make_container
if [[ ${mode} == status ]]; then
  WHERRY_QUEUE=$(queue)
  export WHERRY_QUEUE
fi
exec "${container[@]}" "${mode}" "${arguments[@]}"
