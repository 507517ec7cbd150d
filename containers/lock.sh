#!/usr/bin/env bash
# Resolve containers/requirements/*.in again. What is locked stays where it still fits.
#
#   containers/lock.sh [--upgrade]        needs containers/install.sh to have run: it brings the resolver
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/requirements"

for name in bootstrap lint eval cuda cpu demo; do
  options=()
  # Two packages alone: what they need is in cuda.lock, or is nothing.
  [[ ${name} != cpu && ${name} != demo ]] || options+=(--no-deps)
  # The platform tag must be this new: with an older one the resolver silently takes vLLM's source.
  ../../.venv.bootstrap/bin/uv pip compile --quiet --generate-hashes --no-emit-index-url "$@" "${options[@]}" \
    --python-version 3.11 --python-platform x86_64-manylinux_2_31 --custom-compile-command 'make lock' \
    "${name}.in" -o "${name}.lock"
done
