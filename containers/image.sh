#!/usr/bin/env bash
# Builds the images, with what this machine has, and says with what.
#
#   containers/image.sh image    docker or podman: wherry:latest, and build/wherry.sif of it where apptainer is;
#                                apptainer alone: build/wherry.sif from Apptainer.def, as an ordinary user
#   containers/image.sh sif      build/wherry.sif from Apptainer.def
#   containers/image.sh smoke    docker or podman: wherry:smoke (vLLM's CPU build), proved in a locked-down container
#
# Variables:
#   ENGINE            docker or podman; otherwise the first one that answers
#   OUT               where SIFs and SBOMs are put (build)
#   BASE_IMAGE        another base: a reference, or docker-archive:FILE for a SIF
#   REVISION          the commit to write into the image (git describe)
#   BUILD_OPTIONS     more options of the engine's build, such as "--network host"
#   VLLM              cuda (the default) or cpu: vLLM's build in a SIF from Apptainer.def
#   MKSQUASHFS_ARGS   "-comp lz4" builds a SIF fast, "-comp zstd" a small one; the default, gzip, is read everywhere
#   APPTAINER_TMPDIR  where a SIF is put together: local, and 30 GB
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here project=${here%/*}
readonly image_gb=32 sif_gb=22 archive_gb=12 # layers and package cache; root file system and SIF; docker's archive

say() { printf '[image] %s\n' "$*" >&2; }
die() {
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "$1" "$2" "$3" >&2
  exit 3
}

# free_gb DIR: what is free there, or at its nearest parent that exists.
free_gb() {
  local dir=$1
  while [[ ! -d ${dir} ]]; do dir=$(dirname "${dir}"); done
  df --output=avail -B 1000000000 "${dir}" | awk 'NR == 2 { print $1 }'
}

# need_space DIR GB SETTING: refuse before the first byte rather than with ENOSPC after an hour.
need_space() {
  local free
  free=$(free_gb "$1")
  ((free >= $2)) || die "the build needs $2 GB and ${free} GB are free" "$1" "free some space there, or set $3"
}

has() { command -v "$1" >/dev/null; }

# The first engine that answers: docker may be installed without its daemon, or without the right to use it.
find_engine() {
  local name
  for name in ${ENGINE:-docker podman}; do
    if has "${name}" && "${name}" info >/dev/null 2>&1; then
      engine=${name}
      return 0
    fi
  done
  return 1
}

engine_root() {
  case ${engine} in
    docker) docker info --format '{{.DockerRootDir}}' ;;
    podman) podman info --format '{{.Store.GraphRoot}}' ;;
  esac
}

# What both recipes are told about this checkout.
build_args() {
  local version revision
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' "${project}/pyproject.toml")
  revision=${REVISION:-$(git -C "${project}" describe --always --dirty --abbrev=40 2>/dev/null)} || revision=unknown
  arguments=(--build-arg "VERSION=${version}" --build-arg "REVISION=${revision}")
}

# build TARGET TAG
build() {
  local options=()
  read -ra options <<<"${BUILD_OPTIONS:-}"
  [[ -z ${BASE_IMAGE:-} ]] || options+=(--build-arg "BASE_IMAGE=${BASE_IMAGE}")
  need_space "$(engine_root)" "${image_gb}" "another storage folder for ${engine}"
  build_args
  say "${engine} builds $2 (target $1)"
  # An OCI-format image of podman would lose HEALTHCHECK.
  BUILDAH_FORMAT=docker "${engine}" build --target "$1" --tag "$2" "${arguments[@]}" "${options[@]}" "${project}"
}

# Sets APPTAINER_TMPDIR and APPTAINER_CACHEDIR, which else are /tmp and $HOME: too small, or NFS, where fakeroot fails.
roomy_place() {
  local -r gb=$1
  local dir
  if [[ -n ${APPTAINER_TMPDIR:-} ]]; then
    need_space "${APPTAINER_TMPDIR}" "${gb}" APPTAINER_TMPDIR
  else
    for dir in "${SLURM_TMPDIR:-}" "${TMPDIR:-}" /tmp /var/tmp "${out}"; do
      if [[ -d ${dir} && -w ${dir} ]] && (($(free_gb "${dir}") >= gb)); then
        APPTAINER_TMPDIR=${dir}/wherry-build-${EUID}
        trap 'rm -rf "${APPTAINER_TMPDIR}"' EXIT # a place of our own: with the archive and apptainer's cache
        break
      fi
    done
    [[ -n ${APPTAINER_TMPDIR:-} ]] ||
      die "the build needs ${gb} GB on one file system" "\$SLURM_TMPDIR, \$TMPDIR, /tmp, /var/tmp, ${out}" \
        "set APPTAINER_TMPDIR to a local folder with that much"
  fi
  need_space "${out}" 8 OUT
  export APPTAINER_TMPDIR APPTAINER_CACHEDIR=${APPTAINER_CACHEDIR:-${APPTAINER_TMPDIR}/cache}
  mkdir -p "${APPTAINER_TMPDIR}" "${APPTAINER_CACHEDIR}"
  say "apptainer works in ${APPTAINER_TMPDIR}"
}

# build_sif FROM [option…]: under a temporary name, so that a SIF that is there is whole.
build_sif() {
  local -r part=${out}/.wherry.$$.sif
  local -r from=$1
  shift
  local -r squash=(${MKSQUASHFS_ARGS:+--mksquashfs-args "${MKSQUASHFS_ARGS}"})
  (cd "${project}" && apptainer build --force "${squash[@]}" "$@" "${part}" "${from}") || {
    rm -f "${part}" "${APPTAINER_TMPDIR}/image.tar"
    die "apptainer build failed" "${from}" "its message is above; a user without a range in /etc/subuid needs fakeroot"
  }
  mv -f "${part}" "${out}/wherry.sif"
}

sif_from_recipe() {
  local base=()
  case ${BASE_IMAGE:-} in
    '') ;;
    *-archive:*) base=(--build-arg "BOOTSTRAP=${BASE_IMAGE%%:*}" --build-arg "BASE_IMAGE=${BASE_IMAGE#*:}") ;;
    *) base=(--build-arg "BASE_IMAGE=${BASE_IMAGE}") ;;
  esac
  roomy_place "${sif_gb}"
  build_args
  say "apptainer builds ${out}/wherry.sif from Apptainer.def"
  build_sif Apptainer.def "${arguments[@]}" --build-arg "VLLM=${VLLM:-cuda}" "${base[@]}"
}

sif_from_image() {
  roomy_place $((sif_gb + 2 * archive_gb))
  local -r archive=${APPTAINER_TMPDIR}/image.tar
  say "apptainer builds ${out}/wherry.sif from $1"
  rm -f "${archive}" # podman refuses an archive that is there
  "${engine}" save --output "${archive}" "$1"
  build_sif "docker-archive:${archive}"
  rm -f "${archive}"
}

# in_image TAG COMMAND…: locked down as far as it goes, so that what works here works anywhere.
in_image() {
  local -r tag=$1
  shift
  local gpus=()
  if [[ -e /dev/nvidiactl ]]; then
    case ${engine} in
      docker) gpus=(--gpus all) ;;
      podman) gpus=(--device nvidia.com/gpu=all) ;;
    esac
  fi
  "${engine}" run --rm --no-healthcheck "${gpus[@]}" --network none --read-only --tmpfs /tmp --user 12345:12345 \
    --cap-drop all "${tag}" "$@"
}

report_image() {
  "${engine}" image inspect --format "$1: {{.Size}} bytes, {{.Id}}" "$1"
  in_image "$1" version
  "${engine}" run --rm --no-healthcheck --network none --entrypoint cat "$1" /opt/wherry/sbom.cdx.json \
    >"${out}/${1//[:\/]/-}.sbom.cdx.json"
  say "SBOM: ${out}/${1//[:\/]/-}.sbom.cdx.json"
}

report_sif() {
  local -r sif=${out}/wherry.sif
  printf '%s: %s bytes\n' "${sif}" "$(stat -c %s "${sif}")"
  apptainer run --cleanenv "${sif}" version
  apptainer exec --cleanenv "${sif}" cat /opt/wherry/sbom.cdx.json >"${out}/wherry-sif.sbom.cdx.json"
  say "SBOM: ${out}/wherry-sif.sbom.cdx.json"
}

main() {
  local engine='' arguments=() out=${OUT:-${project}/build}
  [[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m)" "containers/requirements/*.lock" \
    "build on an x86-64 machine: the lock holds its wheels"
  mkdir -p "${out}"
  out=$(cd "${out}" && pwd)
  case ${1:-} in
    image)
      if find_engine; then
        build cuda wherry:latest
        report_image wherry:latest
        if has apptainer; then
          sif_from_image wherry:latest
          report_sif
        else
          say "no apptainer here: no SIF"
        fi
      elif has apptainer; then
        say "neither docker nor podman answers: apptainer alone"
        sif_from_recipe
        report_sif
      else
        die "neither docker nor podman answers, and there is no apptainer" "PATH" \
          "start docker, or install podman or apptainer (a cluster: module load apptainer)"
      fi
      ;;
    sif)
      has apptainer || die "no apptainer" "PATH" "install it (a cluster: module load apptainer)"
      sif_from_recipe
      report_sif
      ;;
    smoke)
      find_engine || die "neither docker nor podman answers" "PATH" "start docker or install podman"
      build smoke wherry:smoke
      in_image wherry:smoke python /opt/wherry-src/containers/verify.py cpu
      report_image wherry:smoke
      ;;
    *)
      sed -n '2,/^set /{/^#/p}' "$0" >&2
      exit 2
      ;;
  esac
}

main "$@"
