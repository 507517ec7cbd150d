#!/usr/bin/env bash
# wherry serve, offline.
set -euo pipefail

# shellcheck source=entrypoints/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
offline
ulimit -Sn "$(ulimit -Hn)" # vLLM holds a descriptor for every open request
exec "${wherry[@]}" serve "$@"
