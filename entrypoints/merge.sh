#!/usr/bin/env bash
# wherry merge, offline, on the CPU alone: a GPU that is visible stays untouched.
set -euo pipefail

# shellcheck source=entrypoints/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
offline
export CUDA_VISIBLE_DEVICES=
exec "${wherry[@]}" merge "$@"
