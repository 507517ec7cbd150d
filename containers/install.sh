#!/usr/bin/env bash
# The only list of install steps: development (.venv) and both images call it.
#
#   containers/install.sh PREFIX [--vllm auto|cuda|cpu] [--editable] [--lint]
#
# PREFIX becomes the environment of prepare, train, merge and serve; PREFIX/eval the one of eval (inspect-ai needs
# another openai than vLLM); PREFIX/lint, if asked for, that of `make lint`. Safe to run again: what is there is kept.
# --vllm auto takes the CUDA build where a GPU is visible, otherwise the CPU build of the same version.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly here project=${here%/*} locks=$here/requirements
readonly platform=x86_64-manylinux_2_31 # with an older tag the resolver silently takes vLLM's source

say() { printf '[install] %s\n' "$*" >&2; }
die() {
  printf 'error: %s\nwhere: %s\nfix:   %s\n' "$1" "$2" "$3" >&2
  exit 2
}

# libnuma1: vLLM's CPU build; gcc, g++, python3-dev: Triton, Inductor and DeepSpeed compile at run time.
system_packages() {
  local -r wanted=(ca-certificates g++ gcc libnuma1 python3-dev python3-venv)
  local missing=() name
  command -v dpkg-query >/dev/null || return 0
  for name in "${wanted[@]}"; do
    [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "${name}" 2>/dev/null) == ii* ]] || missing+=("${name}")
  done
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    say "not installed, and only root can: ${missing[*]} (apt-get install ${missing[*]})"
    return 0
  fi
  say "apt: ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# The lock without vLLM: its CPU build is another distribution, installed in its place.
without_vllm() { awk '/^[^ ]/ { skip = /^vllm==/ } !skip' "$1"; }

# environment DIR LOCK…: make DIR hold exactly what the locks say.
environment() {
  local -r dir=$1
  shift
  [[ -x ${dir}/bin/python ]] || "${uv[@]}" venv --quiet --python "${python}" "${dir}"
  "${uv[@]}" pip sync --quiet --python "${dir}/bin/python" --python-platform "${platform}" --require-hashes \
    --build-constraints "${locks}/cuda.lock" "$@"
}

main() {
  local prefix='' vllm=auto editable=() lint=0
  while (($#)); do
    case $1 in
      --vllm) vllm=${2:-} && shift ;;
      --editable) editable=(--editable) ;;
      --lint) lint=1 ;;
      -*) die "unknown option $1" "containers/install.sh" "read its first lines" ;;
      *) prefix=$1 ;;
    esac
    shift
  done
  [[ -n ${prefix} ]] || die "no PREFIX given" "containers/install.sh" "containers/install.sh .venv --editable"
  [[ ${vllm} =~ ^(auto|cuda|cpu)$ ]] || die "--vllm ${vllm}" "containers/install.sh" "use auto, cuda or cpu"
  if [[ ${vllm} == auto ]]; then
    if [[ -e /dev/nvidiactl ]]; then vllm=cuda; else vllm=cpu; fi
  fi
  [[ $(uname -m) == x86_64 ]] || die "this machine is $(uname -m)" "containers/requirements/*.lock" "use an x86-64 machine"

  system_packages
  python=$(command -v python3.11) ||
    die "no python3.11" "PATH" "install Python 3.11: the locks hold its wheels"
  mkdir -p "${prefix}"
  prefix=$(cd "${prefix}" && pwd)

  local -r started=${SECONDS} boot=${prefix}.bootstrap
  [[ -x ${boot}/bin/pip ]] || "${python}" -m venv "${boot}"
  "${boot}/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "${locks}/bootstrap.lock"
  uv=("${boot}/bin/uv")

  say "main environment (vLLM for ${vllm}): ${prefix}"
  local lock=${locks}/cuda.lock
  if [[ ${vllm} == cpu ]]; then
    mkdir -p "${boot}/locks"
    lock=${boot}/locks/cpu.txt
    { without_vllm "${locks}/cuda.lock" && cat "${locks}/cpu.lock"; } >"${lock}"
  fi
  environment "${prefix}" "${lock}"
  "${uv[@]}" pip install --quiet --python "${prefix}/bin/python" --no-deps --no-build-isolation "${editable[@]}" "${project}"

  say "eval environment: ${prefix}/eval"
  environment "${prefix}/eval" "${locks}/eval.lock"
  if ((lint)); then
    say "lint environment: ${prefix}/lint"
    environment "${prefix}/lint" "${locks}/lint.lock"
  fi
  say "done in $((SECONDS - started)) s"
}

main "$@"
