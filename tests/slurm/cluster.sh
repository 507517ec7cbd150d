#!/usr/bin/env bash
# A real Slurm cluster on this machine for the tests: root, Debian's packages, no systemd, fake GPUs.
#
#   cluster.sh start            install what is missing, start, wait until every node is idle
#   cluster.sh as-user CMD…     run CMD on the login node, as an ordinary user
#   cluster.sh power-off NODE   take its cable out, where it has one, and kill everything on it at once
#   cluster.sh power-on NODE
#   cluster.sh stop             end what start has started, and remove it
#
# Each node is a set of namespaces: host name, mounts and process tree of its own, and its network with NET=netns.
# Killing its first process is a real power cut.
set -euo pipefail

: "${CLUSTER:?a folder that start makes and stop removes}"
: "${NODES:=3}" "${GPUS:=8}" "${CPUS:=64}"
: "${PORT:=17000}" "${FIRST_JOB:=1}" # those of another cluster on this machine must differ
: "${NET:=loop}"                     # loop: node i is 127.0.1.i; netns: 10.77.0.i on an interface of its own
: "${INTERFACE:=eth0}"               # its name, with NET=netns
: "${CONSTRAINED:=no}"               # yes: GPUs that a step was not given cannot be opened (cgroup v1)
: "${USER_NAME:=wherry-ci}"
readonly login=${CLUSTER##*/}-login
export SLURM_CONF=${CLUSTER}/slurm.conf

address() { if [[ ${NET} == netns ]]; then echo "10.77.0.$1"; else echo "127.0.1.$1"; fi; }

# enter WHERE COMMAND…: in the network of a node, or of the login node.
enter() {
  local -r name=${CLUSTER##*/}-$1
  shift
  if [[ ${NET} == netns ]]; then exec nsenter "--net=/run/netns/${name}" "$@"; else exec "$@"; fi
}

install_packages() {
  local -r packages=(slurmctld slurmd slurm-client munge iproute2)
  dpkg-query -W "${packages[@]}" >/dev/null 2>&1 && return 0
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

configure() {
  local i
  # Device nodes: with plain files Slurm counts the GPUs, but never sets CUDA_VISIBLE_DEVICES.
  for ((i = 0; i < GPUS; i++)); do mknod -m 666 "${CLUSTER}/dev/gpu${i}" b 7 "${i}"; done
  mknod -m 666 "${CLUSTER}/dev/fuse" c 10 229 # some machines have theirs 0600
  : >"${CLUSTER}/gres.conf"
  ((GPUS == 0)) || echo "Name=gpu File=${CLUSTER}/dev/gpu[0-$((GPUS - 1))]" >"${CLUSTER}/gres.conf"
  {
    echo "127.0.0.1 localhost"
    for ((i = 1; i <= NODES; i++)); do echo "$(address "${i}") n${i}"; done
  } >"${CLUSTER}/hosts"
  local track=linuxproc task=none
  if [[ ${CONSTRAINED} == yes ]]; then track=cgroup task=cgroup; fi
  printf '%s\n' CgroupPlugin=cgroup/v1 ConstrainDevices=yes >"${CLUSTER}/cgroup.conf"
  # Jobs of the partition "urgent" preempt others, after a grace period. cred_expire: a requeued job starts again after seconds instead of two minutes. config_overrides: two cores pose as 64.
  cat >"${SLURM_CONF}" <<CONF
ClusterName=${CLUSTER##*/}
SlurmctldHost=$(hostname -s)($(address 254))
SlurmctldPort=${PORT}
FirstJobId=${FIRST_JOB}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=${CLUSTER}/munge/socket,cred_expire=5
StateSaveLocation=${CLUSTER}/state
SlurmdSpoolDir=${CLUSTER}/spool/%n
SlurmctldPidFile=${CLUSTER}/slurmctld.pid
SlurmdPidFile=${CLUSTER}/spool/%n.pid
SlurmctldLogFile=${CLUSTER}/log/slurmctld.log
SlurmdLogFile=${CLUSTER}/log/%n.log
ProctrackType=proctrack/${track}
TaskPlugin=task/${task}
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MinJobAge=3600
SchedulerParameters=sched_min_interval=100000,bf_interval=1
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2
CONF
  for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=n${i} NodeAddr=$(address "${i}") Port=$((PORT + i)) CPUs=${CPUS} RealMemory=64000 Gres=gpu:${GPUS}"
  done >>"${SLURM_CONF}"
}

# A bridge in the login node's namespace, and a cable from there to each node.
network() {
  local i node
  ip netns add "${login}"
  ip -n "${login}" link set lo up
  ip -n "${login}" link add br0 type bridge
  ip -n "${login}" addr add 10.77.0.254/24 dev br0
  ip -n "${login}" link set br0 up
  for ((i = 1; i <= NODES; i++)); do
    node=${CLUSTER##*/}-n${i}
    ip netns add "${node}"
    ip -n "${node}" link set lo up
    ip -n "${node}" link add "${INTERFACE}" type veth peer name "veth${i}" netns "${login}"
    ip -n "${node}" addr add "10.77.0.${i}/24" dev "${INTERFACE}"
    ip -n "${node}" link set "${INTERFACE}" up
    ip -n "${login}" link set "veth${i}" master br0 up
  done
}

# Mounts that nodes and the login node have in common: host names, a /dev/fuse for everyone, and a python under a
# closed /root made reachable for the ordinary user.
cat_mounts() {
  cat <<'SH'
mount --bind "${CLUSTER}/hosts" /etc/hosts
mount --bind "${CLUSTER}/dev/fuse" /dev/fuse
if [[ -d ${CLUSTER}/root ]]; then
  mount --bind /root/.pyenv "${CLUSTER}/root/.pyenv"
  mount --rbind "${CLUSTER}/root" /root
fi
SH
}

power_on() {
  export CLUSTER
  if [[ ${NET} == netns ]]; then ip -n "${login}" link set "veth${1#n}" up; fi
  # shellcheck disable=SC2016 # $1 is the inner shell's
  (enter "$1" unshare --uts --mount --pid --fork --kill-child --mount-proc \
    bash -c "set -e; $(cat_mounts)"'; hostname "$1"; slurmd -D -N "$1" & wait' bash "$1") \
    >"${CLUSTER}/log/$1.out" 2>&1 </dev/null &
  echo $! >"${CLUSTER}/$1.pid"
  disown
}

as_user() {
  export CLUSTER
  # shellcheck disable=SC2016
  enter login unshare --mount --propagation slave \
    bash -c "set -e; $(cat_mounts)"'; exec runuser -u "$0" -- "$@"' "${USER_NAME}" \
    env -i "HOME=${CLUSTER}/home" "USER=${USER_NAME}" LANG=C.UTF-8 "SLURM_CONF=${SLURM_CONF}" \
    PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# Without the cable no connection is closed politely: the others only see that nothing comes any more.
power_off() {
  if [[ ${NET} == netns ]]; then ip -n "${login}" link set "veth${1#n}" down; fi
  end "${CLUSTER}/$1.pid" KILL
}

# end PIDFILE [SIGNAL]: also a zombie counts as ended, as the first process may reap slowly.
end() {
  local pid state
  pid=$(cat "$1" 2>/dev/null) || return 0
  kill "-${2:-TERM}" "${pid}" 2>/dev/null || true
  for _ in {1..100}; do
    state=$(cut -d' ' -f3 "/proc/${pid}/stat" 2>/dev/null) || break
    [[ ${state} != Z ]] || break
    sleep 0.1
  done
  rm -f "$1"
}

idle() { (enter login timeout 5 sinfo -h -N -t idle -o %N 2>/dev/null) | sort -u | wc -l; }

start() {
  local i
  mkdir -p "${CLUSTER}"/{state,spool,log,dev,munge,home}
  install_packages
  id "${USER_NAME}" >/dev/null 2>&1 || useradd --no-create-home --shell /bin/bash "${USER_NAME}"
  chown "${USER_NAME}:" "${CLUSTER}/home"
  if [[ -d /root/.pyenv && $(stat -c %a /root) == *0 ]]; then mkdir -p "${CLUSTER}/root/.pyenv"; fi
  configure
  (umask 077 && head -c 128 /dev/urandom >"${CLUSTER}/munge/key")
  munged --key-file="${CLUSTER}/munge/key" --socket="${CLUSTER}/munge/socket" --pid-file="${CLUSTER}/munge/pid" \
    --log-file="${CLUSTER}/log/munged.log" --seed-file="${CLUSTER}/munge/seed"
  if [[ ${NET} == netns ]]; then network; fi
  (enter login slurmctld)
  for ((i = 1; i <= NODES; i++)); do power_on "n${i}"; done
  for _ in {1..300}; do
    [[ $(idle) != "${NODES}" ]] || return 0
    sleep 0.1
  done
  echo "not all nodes are idle after 30 s; logs: ${CLUSTER}/log" >&2
  exit 1
}

stop() {
  local file
  end "${CLUSTER}/slurmctld.pid"
  for file in "${CLUSTER}"/n[0-9]*.pid; do end "${file}" KILL; done
  end "${CLUSTER}/munge/pid"
  for file in /run/netns/"${CLUSTER##*/}"-*; do [[ ! -e ${file} ]] || ip netns del "${file##*/}"; done
  if [[ ${CONSTRAINED} == yes ]]; then
    find /sys/fs/cgroup -depth -type d -path '*/slurm_n[0-9]*' -exec rmdir {} + 2>/dev/null || true
  fi
  rm -rf "${CLUSTER}"
}

case ${1:-} in
  start | stop) "$1" ;;
  as-user) shift && as_user "$@" ;;
  power-off) power_off "$2" ;;
  power-on) power_on "$2" ;;
  *) sed -n '2,/^set /{/^#/p}' "$0" >&2 && exit 2 ;;
esac
