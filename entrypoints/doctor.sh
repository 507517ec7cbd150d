#!/usr/bin/env bash
# wherry doctor, on the ranks that training would have: they are launched by the same script.
set -euo pipefail

WHERRY_LAUNCH=doctor exec "$(dirname "${BASH_SOURCE[0]}")/train.sh" "$@"
