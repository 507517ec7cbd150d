# shellcheck shell=bash disable=SC2154 # mode, run, signals, code: of common.sh
# Sourced by train.sh after common.sh: ranks over several nodes, stopped, requeued and told apart by their exit codes.
#
# What a task sees is not visible from here: in the batch shell SLURM_PROCID is 0 and all GPUs are there, whatever the
# tasks get. So ranks are derived, and devices checked, inside the task (entrypoints/train.sh).

exits='' stop_file=''

# MASTER_ADDR is the first node, where this script runs. MASTER_PORT follows from the job id, so that two jobs on a node
# differ, and lies below the range from which the kernel gives ports to anyone.
rendezvous() {
  local hosts floor port hex first low=10000 taken
  mapfile -t hosts < <(scontrol show hostnames "${SLURM_JOB_NODELIST}")
  if [[ ! -v MASTER_ADDR ]]; then origin[MASTER_ADDR]='first node of the job'; fi
  export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}
  read -r floor _ </proc/sys/net/ipv4/ip_local_port_range
  if ((floor <= low + 1000)); then low=1024; fi
  if ((floor <= low + 100)); then floor=32768; fi # no room below it: some sites give out everything above 1024
  first=$((low + SLURM_JOB_ID % (floor - low)))
  taken=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | awk '{ split($2, part, ":"); print part[2] }')
  for ((port = first; port < first + 200; port++)); do
    printf -v hex '%04X' $((low + (port - low) % (floor - low)))
    if [[ $'\n'${taken}$'\n' != *$'\n'${hex}$'\n'* ]]; then break; fi
  done
  export MASTER_PORT=$((16#${hex}))
  say "MASTER_ADDR              ${MASTER_ADDR} (${origin[MASTER_ADDR]:-environment})"
  say "MASTER_PORT              ${MASTER_PORT} (job id, below ${floor}, free here)"
}

# One, or what sbatch --ntasks-per-node asked for: then every task is a rank.
tasks_per_node() {
  if [[ ${SLURM_NTASKS_PER_NODE:-1} =~ ^[0-9]+ ]]; then echo "${BASH_REMATCH[0]}"; else echo 1; fi
}

# ---- stop ------------------------------------------------------------------------------------------------------------

# A signal would have to find its way through srun, apptainer and torchrun to every rank; a file on the shared file
# system is seen by all of them, and they agree on the step.
stop_by_file() {
  stop_file=$1
  mkdir -p "$(dirname "${stop_file}")"
  rm -f "${stop_file}" # of an attempt that did not live to see it
  trap 'ask_to_stop "SIGUSR1: the time limit is near"' USR1
  trap 'ask_to_stop "SIGTERM: cancelled or preempted"' TERM
}

ask_to_stop() {
  signals+="$1 "
  touch "${stop_file}"
  say "$(date +%T) $1: asked training to save and stop (${stop_file})"
}

# attempt COMMAND…: run it with its own log, and find out how it really ended.
attempt() {
  local -r number=$((${SLURM_RESTART_COUNT:-0} + 1)) folder=${WHERRY_RUNS}/${run}/logs
  exits=${folder}/${mode}-${SLURM_JOB_ID}-${number}.exits
  rm -rf "${exits}"
  mkdir -p "${exits}"
  export WHERRY_EXITS=${PWD}/${exits}
  [[ ${exits} != /* ]] || WHERRY_EXITS=${exits}
  "$@" > >(exec tee -a "${folder}/${mode}-${SLURM_JOB_ID}-${number}.log") 2>&1 &
  wait_for $!
  true_code
}

# srun --kill-on-bad-exit returns 143 and torchrun 1: the ranks' own codes are in files. What a user can act on comes
# first; a rank that lost its peers ends with another code than the one that was wrong.
true_code() {
  local wanted found
  if ((code == 0)); then return 0; fi
  found=" $(cat "${exits}"/* 2>/dev/null | sort -un | tr '\n' ' ') "
  for wanted in 2 3 4 5 6 75; do
    if [[ ${found} == *" ${wanted} "* ]]; then
      code=${wanted}
      return 0
    fi
  done
}

# The job's last state tells the truth: COMPLETED, FAILED with the code, CANCELLED, or back in the queue.
conclude() {
  case ${code} in
    0) say "$(date +%T) ${mode} is done" ;;
    75)
      # A SIGTERM at the ranks alone is Slurm's as well: it may reach a restarted job late, from before a node's failure.
      if [[ -n ${signals} || -e ${exits}/sigterm ]]; then
        queue_again
      else
        say "stopped and saved, as asked: the same sbatch goes on"
      fi
      ;;
    *) say "$(date +%T) ${mode} ended with exit code ${code}; the message is above" ;;
  esac
  exit "${code}"
}

# Slurm asked for the end, not the user: go on later.
queue_again() {
  local -r restarts=${SLURM_RESTART_COUNT:-0}
  local shown
  shown=$(scontrol -o show job "${SLURM_JOB_ID}") || shown=''
  if [[ ${shown} != *" JobState=RUNNING "* ]]; then # a job that Slurm is ending already would come back from the dead
    say "stopped and saved; the job is cancelled or out of time: the same sbatch goes on"
  elif ((restarts >= WHERRY_MAX_RESTARTS)); then
    say "stopped and saved; this was restart ${restarts} of WHERRY_MAX_RESTARTS=${WHERRY_MAX_RESTARTS}: the same sbatch goes on"
  elif scontrol requeue "${SLURM_JOB_ID}"; then
    say "stopped and saved; queued again (restart $((restarts + 1)) of at most ${WHERRY_MAX_RESTARTS})"
    trap '' TERM
    sleep 60 # Slurm ends this script; an exit of its own would be taken for the job's
  else
    say "stopped and saved, but this cluster does not let a job queue itself again: the same sbatch goes on"
  fi
}
