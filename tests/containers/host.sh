#!/usr/bin/env bash
# What the container tests need of the machine, as root, on Debian bookworm. No image registry is asked.
#
#   host.sh engines        podman (with buildah inside) and runc, kept apart from the machine's own storage
#   host.sh base           localhost/debian:bookworm-slim, made of Debian's packages, and its archive base.tar
#   host.sh apptainer      Debian sid's apptainer, beside the system
#   host.sh as-user CMD…   run CMD as an ordinary user who can build and run SIFs
#   host.sh clean [but-sif]  end what runs and delete everything, or all but the SIF of Apptainer.def and apptainer
#
# All of it lies in $WHERRY_CI. The stand-in base carries this machine's certificates: it and its children are for
# tests alone, never for publication.
set -euo pipefail

: "${WHERRY_CI:?the folder for everything that the tests make}"
readonly user=wherry-images home=${WHERRY_CI}/home prefix=${WHERRY_CI}/apptainer
export CONTAINERS_CONF=${WHERRY_CI}/containers.conf CONTAINERS_STORAGE_CONF=${WHERRY_CI}/storage.conf

apt_install() {
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

engines() {
  mkdir -p "${WHERRY_CI}"/{tmp,home}
  local -r packages=(podman buildah runc mmdebstrap netavark aardvark-dns iptables fuse-overlayfs uidmap)
  dpkg-query -W "${packages[@]}" >/dev/null 2>&1 || apt_install "${packages[@]}"
  # runc: bookworm's crun refuses a cgroup v1 tree with a v2 mount beside it. default_ulimits: without
  # CAP_SYS_RESOURCE podman's own (1048576) cannot be set.
  cat >"${CONTAINERS_CONF}" <<CONF
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=$(ulimit -Hn):$(ulimit -Hn)", "nproc=32768:32768"]
CONF
  cat >"${CONTAINERS_STORAGE_CONF}" <<CONF
[storage]
driver = "overlay"
graphroot = "${WHERRY_CI}/storage"
runroot = "${WHERRY_CI}/run"
CONF
}

base() {
  local -r tag=localhost/debian:bookworm-slim
  # shellcheck disable=SC2016 # $1 is mmdebstrap's
  local -r certificates='mkdir -p "$1/usr/local/share/ca-certificates"
    cp /usr/local/share/ca-certificates/*.crt "$1/usr/local/share/ca-certificates/" 2>/dev/null || true
    chroot "$1" update-ca-certificates >/dev/null 2>&1'
  # shellcheck disable=SC2016
  mmdebstrap --quiet --variant=minbase --mode=root --include=ca-certificates \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook="${certificates}" --customize-hook='rm -f "$1/etc/resolv.conf" "$1/etc/hostname"' \
    bookworm "${WHERRY_CI}/tmp/base.tar" /etc/apt/sources.list.d/debian.sources
  podman import --quiet --change 'CMD ["/bin/bash"]' "${WHERRY_CI}/tmp/base.tar" "${tag}" >/dev/null
  rm -f "${WHERRY_CI}/tmp/base.tar" "${WHERRY_CI}/base.tar" # podman refuses an archive that is there
  podman save --quiet --format docker-archive --output "${WHERRY_CI}/base.tar" "${tag}" >/dev/null
  chmod a+r "${WHERRY_CI}/base.tar"
}

# The .debs are fetched by apt, signatures checked, through a private configuration, and unpacked beside the system;
# the two programs are pointed at sid's libc.
apptainer() {
  local -r packages=(patchelf squashfs-tools squashfuse fuse-overlayfs fuse2fs uidmap ca-certificates)
  dpkg-query -W "${packages[@]}" >/dev/null 2>&1 || apt_install "${packages[@]}"
  local mirror apt file
  # shellcheck disable=SC2016 # apt's own variable
  mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Codename: bookworm' | head -n 1)
  apt=$(mktemp -d "${WHERRY_CI}/tmp/sid.XXXX")
  mkdir -p "${apt}"/{lists/partial,cache/archives/partial,deb} "${prefix}/lib-sid"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${mirror} sid main" >"${apt}/sources.list"
  local -r get=(apt-get -qq -o Dir::Etc::sourcelist="${apt}/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o Dir::Etc::preferencesparts=/dev/null -o Dir::State::lists="${apt}/lists" -o Dir::State::status=/dev/null
    -o Dir::Cache="${apt}/cache" -o APT::Sandbox::User=root)
  "${get[@]}" update
  (cd "${apt}/deb" && "${get[@]}" download apptainer libc6 libseccomp2 libsqlite3-0)
  for file in "${apt}"/deb/*.deb; do
    case ${file} in
      */apptainer_*) dpkg-deb -x "${file}" "${apt}/x" ;;
      *) dpkg-deb -x "${file}" "${apt}/libs" ;;
    esac
  done
  cp -a "${apt}"/x/{usr/bin,usr/lib,etc,var} "${prefix}/"
  # apptainer is relocatable, but its starter counts four folders up and lands in lib/ because of the multiarch folder.
  ln -sfn ../etc "${prefix}/lib/etc"
  ln -sfn ../var "${prefix}/lib/var"
  find "${apt}/libs" \( -name 'ld-linux-x86-64.so.2' -o -name 'lib*.so.[0-9]' \) -not -path '*/gconv/*' \
    -exec cp -L -n {} "${prefix}/lib-sid/" \;
  for file in "${prefix}/bin/apptainer" "${prefix}"/lib/*/apptainer/bin/starter; do
    patchelf --set-interpreter "${prefix}/lib-sid/ld-linux-x86-64.so.2" --force-rpath --set-rpath "${prefix}/lib-sid" \
      "${file}"
  done
  ln -sf apptainer "${prefix}/bin/singularity"
  rm -rf "${apt}"
  id "${user}" >/dev/null 2>&1 || useradd --no-create-home --home-dir "${home}" --shell /bin/bash "${user}"
  grep -q "^${user}:" /etc/subuid || usermod --add-subuids 300000-365535 --add-subgids 300000-365535 "${user}"
  chown "${user}:" "${home}"
  [[ -c ${WHERRY_CI}/fuse ]] || mknod -m 666 "${WHERRY_CI}/fuse" c 10 229
  "${prefix}/bin/apptainer" --version
}

# In a mount namespace of its own with a /dev/fuse that everyone may open (some machines have it 0600). The variables
# are those of a fresh login, and the ones named in $KEEP.
as_user() {
  local name keep=()
  for name in ${KEEP:-}; do keep+=("${name}=${!name}"); done
  # shellcheck disable=SC2016 # the inner shell's
  unshare --mount --propagation slave sh -c 'mount --bind "$1" /dev/fuse; shift; exec "$@"' sh "${WHERRY_CI}/fuse" \
    runuser -u "${user}" -- env -i HOME="${home}" USER="${user}" LANG=C.UTF-8 "${keep[@]}" \
    PATH="${prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin" "$@"
}

clean() {
  # podman 4.3 may fail after all its work is done, so what counts are the last lines.
  [[ ! -f ${CONTAINERS_STORAGE_CONF} ]] || podman system reset --force >/dev/null 2>&1 || true
  if [[ ${1:-} == but-sif && -f ${home}/of-recipe.sif ]]; then
    find "${WHERRY_CI}" -mindepth 1 -maxdepth 1 ! -name apptainer ! -name home ! -name fuse -exec rm -rf {} +
    find "${home}" -mindepth 1 -maxdepth 1 ! -name 'of-recipe.*' -exec rm -rf {} +
    return 0
  fi
  ! id "${user}" >/dev/null 2>&1 || userdel "${user}" 2>/dev/null || true
  rm -rf "${WHERRY_CI}"
}

case ${1:-} in
  engines | base | apptainer | clean) "$@" ;;
  as-user) shift && as_user "$@" ;;
  *) sed -n '2,/^set /p' "$0" >&2 && exit 2 ;;
esac
