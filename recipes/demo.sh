#!/usr/bin/env bash
# The demo, one mode after the other: each does nothing where it is complete, so that a killed demo goes on.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() {
  printf '\n== wherry %s\n' "$*" >&2
  entrypoints/entrypoint.sh "$@"
}

step prepare recipes/demo.yaml
step eval recipes/demo.yaml --model base
step train recipes/demo.yaml
step merge recipes/demo.yaml
step eval recipes/demo.yaml --model merged
step report recipes/demo.yaml
