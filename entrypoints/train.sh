#!/usr/bin/env bash
# wherry train, offline. One process: a machine with several GPUs is used through slurm/train.sh.
set -euo pipefail

# shellcheck source=entrypoints/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
offline
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
exec "${wherry[@]}" train "$@"
