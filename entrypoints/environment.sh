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
umask 077 && mkdir -p "${HOME}" "${WHERRY_CACHE}" && umask 022

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

# Only prepare may use the network; what it staged is all that the others need.
offline() { export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=${WANDB_MODE:-offline}; }
