# shellcheck shell=bash
# Sourced by every entrypoint: what must be set before Python starts. Fills only what is unset, so that a site's
# profile or a user's own setting wins. Defines the array `wherry`.

# A user's ~/.local and working directory must not shadow the image's packages.
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PYTHONUNBUFFERED=${PYTHONUNBUFFERED:-1}

# Compile caches: one writable place per user and node, never a home on NFS (stale handles, races between nodes).
: "${WHERRY_CACHE:=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/wherry-cache-${EUID}}"
export WHERRY_CACHE
if [[ ! -w ${HOME:-/nonexistent} ]]; then export HOME=${WHERRY_CACHE}/home; fi
: "${XDG_CACHE_HOME:=${WHERRY_CACHE}/xdg}" "${XDG_CONFIG_HOME:=${WHERRY_CACHE}/config}"
: "${TRITON_CACHE_DIR:=${WHERRY_CACHE}/triton}" "${TORCHINDUCTOR_CACHE_DIR:=${WHERRY_CACHE}/inductor}"
: "${TORCH_EXTENSIONS_DIR:=${WHERRY_CACHE}/torch_extensions}" "${VLLM_CACHE_ROOT:=${WHERRY_CACHE}/vllm}"
: "${NUMBA_CACHE_DIR:=${WHERRY_CACHE}/numba}" "${MPLCONFIGDIR:=${WHERRY_CACHE}/matplotlib}"
: "${FLASHINFER_WORKSPACE_BASE:=${WHERRY_CACHE}/flashinfer}"
export XDG_CACHE_HOME XDG_CONFIG_HOME TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR VLLM_CACHE_ROOT
export NUMBA_CACHE_DIR MPLCONFIGDIR FLASHINFER_WORKSPACE_BASE
if ! (umask 077 && mkdir -p "${HOME}" "${WHERRY_CACHE}" 2>/dev/null); then
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "no place to write caches to" "WHERRY_CACHE=${WHERRY_CACHE}" \
    "mount one (docker run --tmpfs /tmp), or set WHERRY_CACHE or TMPDIR to a local folder" >&2
  exit 3
fi

# NCCL keeps its last collectives, which a hanging training writes down (train/hang).
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}

export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-true} HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1

# The environment that install.sh made: the image's, else the checkout's, else whatever python3 is first.
entrypoints=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=python3
for prefix in "${WHERRY_PREFIX:-/opt/wherry}" "${entrypoints%/*}/.venv"; do
  if [[ -x ${prefix}/bin/python ]]; then
    python=${prefix}/bin/python
    break
  fi
done
# shellcheck disable=SC2034 # used by what sources this
wherry=("${python}" -m wherry)

# A GPU that cannot be used is said here, by its cause; torch would only say that it found none.
warn_of_driver() {
  local -r minimum=525.60.13 # CUDA 12's minor version compatibility; the images' labels say the same
  [[ -n $1 && $(printf '%s\n' "${minimum}" "$1" | sort -V | head -n 1) != "${minimum}" ]] || return 0
  echo "warning: the driver is $1, CUDA 12.8 needs ${minimum}: ask for a newer one, or for other nodes" >&2
}
if [[ -e /dev/nvidiactl ]]; then
  warn_of_driver "$(sed -n 's/^NVRM .* Kernel Module *\(for x86_64 *\)\?\([0-9.]*\).*/\2/p' \
    /proc/driver/nvidia/version 2>/dev/null)"
  if [[ -n ${APPTAINER_CONTAINER:-} ]] && ! compgen -G '/.singularity.d/libs/libcuda.so*' >/dev/null; then
    echo "warning: this machine has a GPU and the container was started without --nv: nothing in it can use the GPU" >&2
  fi
fi

# An image that is not of this checkout runs other code than one reads. Without git, which the image has not.
checkout_commit() {
  local head=''
  read -r head 2>/dev/null <.git/HEAD || return 0
  if [[ ${head} == "ref: "* ]]; then
    local -r ref=${head#ref: }
    head=$(cat ".git/${ref}" 2>/dev/null || awk -v ref="${ref}" '$2 == ref { print $1 }' .git/packed-refs 2>/dev/null) || true
  fi
  printf '%s' "${head}"
}
warn_of_another_commit() {
  local -r image=${WHERRY_REVISION%-dirty}
  local here
  [[ ${image} =~ ^[0-9a-f]{40}$ && -d .git && -d src/wherry ]] || return 0
  here=$(checkout_commit)
  [[ -z ${here} || ${here} == "${image}" ]] ||
    echo "warning: the image was built from ${image:0:12}, this checkout is at ${here:0:12}: make image builds it anew" >&2
}
[[ -z ${WHERRY_REVISION:-} ]] || warn_of_another_commit

# Only prepare may use the network; what it staged is all that the others need.
offline() { export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=${WANDB_MODE:-offline}; }
