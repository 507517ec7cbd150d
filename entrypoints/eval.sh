#!/usr/bin/env bash
# wherry eval, offline: starts the server behind its gate, asks it, and ends it.
set -euo pipefail

# shellcheck source=entrypoints/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
offline
ulimit -Sn "$(ulimit -Hn)" # the server holds a descriptor for every open request
exec "${wherry[@]}" eval "$@"
